"""What the documents say is true: their examples run, their links lead somewhere, their output is the real one."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def named(documents: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", documents, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What `regard demo --stages` prints, without blanks at the ends of lines, and the folder it wrote to."""
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


@named([document for document in DOCUMENTS if blocks(document, "python")])
def test_examples_run(document):
    """The blocks of a document run one after another, as a reader would type them."""
    examples = "\n".join(blocks(document, "python"))
    test = doctest.DocTestParser().get_doctest(examples, {}, document.name, str(document), 0)
    assert test.examples
    complaints: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(optionflags=options).run(test, out=complaints.append)
    assert not complaints, "".join(complaints)


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
    """The block is from the output of a real run; times differ from machine to machine, these figures must not."""
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
