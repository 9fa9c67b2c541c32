"""The documents are correct: examples run, links are valid, and the output that they show is that of the commands."""

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.studio.app import create
from regard.studio.server import bind, server
from regard.studio.translation_api import open_run

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
HOW_TO = sorted((ROOT / "docs/how-to").glob("*.md"))
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]


PROGRAMS = [*HOW_TO, *(ROOT / "docs" / name for name in ("index.md", "start.md", "zh/index.md", "zh/start.md"))]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def named(documents: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", documents, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return the output of `regard demo --stages`, without trailing blanks, and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "regard", "demo", "--stages"],
        cwd=folder,
        env={**os.environ, "PYTHONUTF8": "1", "COLUMNS": "80"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines()), folder / "demo"


@pytest.mark.slow
@named([document for document in DOCUMENTS if blocks(document, "python") and document not in PROGRAMS])
def test_examples_run(document):
    """Runs the Python blocks of a document in order, as one doctest."""
    examples = "\n".join(blocks(document, "python"))
    test = doctest.DocTestParser().get_doctest(examples, {}, document.name, str(document), 0)
    assert test.examples
    complaints: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(optionflags=options).run(test, out=complaints.append)
    assert not complaints, "".join(complaints)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the sentiment task for four steps, and return the directory of the run."""
    folder = tmp_path_factory.mktemp("reviews") / "run"
    few = ("steps=4", "validate_every=2", "data.train=60", "data.valid=6", "data.test=6", "model.size=8", "embedding=8")
    arguments = ["train", "sentiment", "--preset", "tiny", "--out", str(folder)]
    # The installed library has no run-time shape checks, and neither has this run.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        done = CliRunner().invoke(app, [*arguments, *(word for setting in few for word in ("--set", setting))])
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def served(reviews: Path) -> Iterator[int]:
    """Start a studio that serves the sentiment run, and yield its port."""
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        running = server(create([open_run(reviews)], host="127.0.0.1", port=port))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.02)
        yield port
        running.should_exit = True
        thread.join()


@pytest.mark.slow
@named(PROGRAMS)
def test_a_page_of_code_runs_and_prints_what_it_shows(document, tmp_path, monkeypatch, request):
    """Runs the Python blocks of a page in order; a text block after a Python block must be its output."""
    text = document.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if "runs/reviews" in text:
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs/reviews").symlink_to(request.getfixturevalue("reviews"))
    if "127.0.0.1:7788" in text:
        text = text.replace("7788", str(request.getfixturevalue("served")))
    fences = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": document.stem}
    checker, options = doctest.OutputChecker(), doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    printed, run = "", 0
    for language, block in [*fences, ("", "")]:
        if language == "text" and run:
            assert checker.check_output(block, printed, options), f"shown:\n{block}\nprinted:\n{printed}"
            printed = ""
        elif language == "python":
            assert not printed, f"printed, and not shown:\n{printed}"
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block, str(document), "exec"), names)
            printed, run = output.getvalue(), run + 1
        else:
            assert not printed, f"printed, and not shown:\n{printed}"
    assert run, "a page of code has a block of Python"


@named(DOCUMENTS)
def test_links_lead_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


@pytest.mark.process
def test_the_stages_are_what_the_demo_prints(demo):
    printed, _ = demo
    [shown] = [block for block in blocks(ROOT / "docs/stages.md", "text") if block.startswith("Tom chases Jerry")]
    assert shown.strip() == printed, "paste the output of `regard demo --stages` into the document again"


@named(READMES)
def test_the_readme_shows_a_demo_that_did_well(document):
    """Checks BLEU and the alignment error rate in the README's example output; times vary too much to be checked."""
    [shown] = [block for block in blocks(document, "text") if block.startswith("English → Chinese")]
    figures = dict(re.findall(r"^  (BLEU|alignment error rate) +([\d.]+)", shown, re.MULTILINE))
    assert float(figures["BLEU"]) >= 95
    assert float(figures["alignment error rate"]) <= 10
    assert "汤姆追逐杰瑞" in shown


@pytest.mark.process
def test_the_picture_is_the_one_the_demo_draws(demo):
    _, folder = demo
    drawn = (folder / "tom-and-jerry.svg").read_text(encoding="utf-8")
    kept = (ROOT / "docs/images/tom-and-jerry.svg").read_text(encoding="utf-8")
    assert kept == drawn, "copy demo/tom-and-jerry.svg to docs/images/ again"


@named(READMES)
def test_the_file_tree_is_the_real_one(document):
    [tree] = [block for block in blocks(document, "text") if block.startswith("src/regard/")]
    folders: list[str] = []
    listed = set()
    for line in tree.splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[indent:] = [name]
        listed.add("".join(folders[: indent + 1]))
    assert [path for path in listed if not (ROOT / path).exists()] == [], "named, but not there"
    packages = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "src/regard").glob("*/__init__.py")}
    assert packages <= listed, "there, but not named"
