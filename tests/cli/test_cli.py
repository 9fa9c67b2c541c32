"""The command as users see it: a separate process, its output, its files and its errors."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import regard
from time_limits import HANG_SECONDS

SLOW_TO_IMPORT = {"torch", "numpy", "rich", "jaxtyping"}


def run(
    *arguments: str, cwd: Path, python: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "-m", "regard", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONUTF8": "1", "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=HANG_SECONDS,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return the output of `regard demo --stages`, and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    done = run("demo", "--stages", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def row(printed: str, name: str) -> list[str]:
    """Return the cells of the first table row that starts with a name."""
    line = next(line.strip() for line in printed.splitlines() if line.strip().startswith(name))
    return re.split(r"\s{2,}", line.removeprefix(name).strip())


@pytest.mark.process
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("demo", "--help")])
def test_help_imports_nothing_heavy(arguments, tmp_path):
    done = run(*arguments, cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported  # the list of imported modules must not be empty
    assert imported.isdisjoint(SLOW_TO_IMPORT)


@pytest.mark.process
def test_help_names_every_command(tmp_path):
    printed = run("--help", cwd=tmp_path).stdout
    assert re.findall(r"^  (\w+)  ", printed.partition("Commands:")[2], re.MULTILINE) == [
        *("demo", "tasks", "train", "evaluate", "predict", "look", "studio", "bench"),
    ]


@pytest.mark.process
def test_the_version_is_the_package_s(tmp_path):
    assert run("--version", cwd=tmp_path).stdout == f"regard {regard.__version__}\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("demo", "--put", "x"), "No such option: --put"),
        (("dmeo",), "No such command 'dmeo'"),
        (("demo", "--out", "a-file"), "'a-file' is a file"),
        (("demo", "--stages", "--out", "a-file/inside"), "cannot write to a-file/inside: Not a directory"),
    ],
)
def test_a_mistake_is_named_without_a_traceback(arguments, complaint, tmp_path):
    (tmp_path / "a-file").write_text("")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_demo_scores_are_products_summed(demo):
    printed, _ = demo
    stage = printed.partition("Stage 1")[2]
    assert row(stage, "Tom") == ["[50, 0, 10]", "60"]
    assert row(stage, "chases") == ["[0, 5, 10]", "15"]
    assert row(stage, "Jerry") == ["[10, 5, 0]", "15"]


@pytest.mark.process
def test_demo_weights_are_softmax(demo):
    printed, _ = demo
    # The scores are 60, 15 and 15, so the small weights are about e^−45.
    assert row(printed, "softmax(scores / 1)") == ["1.000", "2.9e-20", "2.9e-20"]
    assert row(printed, "softmax(scores / √3)") == ["1.000", "5.2e-12", "5.2e-12"]  # the divided scores differ by 45/√3
    assert row(printed, "softmax(scores / 10)") == ["0.978", "0.011", "0.011"]  # the divided scores differ by 4.5
    assert row(printed, "softmax(scores / 30)") == ["0.691", "0.154", "0.154"]  # the divided scores differ by 1.5


@pytest.mark.process
def test_demo_context_by_hand_and_by_call_agree(demo):
    printed, _ = demo
    assert row(printed, "context")[-1] == "[5.000, 0.000, 1.000]"
    assert row(printed, "attended.output") == ["[5.000, 0.000, 1.000]"]
    assert row(printed, "attended.weights") == ["1.000, 5.2e-12, 5.2e-12"]


@pytest.mark.process
def test_demo_mechanisms(demo):
    printed, _ = demo
    assert row(printed, "ScaledDot()") == ["1.00", "0.00", "0.00", "1.00", "0", "0", "1.00", "0", "0"]
    # The cosines of the query with the three keys are 60/(15√26), 1/√2 and 1/√2. Multiplied by the scale 10, the first
    # score is 0.774 above the others.
    assert row(printed, "Cosine(scale=10)")[:6] == ["0.52", "0.24", "0.24", "0.85", "0.08", "0.08"]


@pytest.mark.process
def test_demo_gives_each_word_its_own_context(demo):
    printed, _ = demo
    frame = printed.partition("With and without attention")[2]
    assert row(frame, "汤姆")[1:] == ["[2.00, 0.67, 0.67]", "[5.00, 0.00, 1.00]", "Tom 1.00"]
    assert row(frame, "追逐")[1:] == ["[2.00, 0.67, 0.67]", "[0.27, 0.95, 1.00]", "chases 0.94"]
    assert row(frame, "杰瑞")[1:] == ["[2.00, 0.67, 0.67]", "[1.25, 0.92, 0.17]", "Jerry 0.83"]


@pytest.mark.process
def test_demo_writes_its_picture_and_page(demo):
    printed, folder = demo
    assert sorted(path.name for path in (folder / "demo").iterdir()) == ["tom-and-jerry.html", "tom-and-jerry.svg"]
    assert "wrote demo/tom-and-jerry.svg" in printed
    drawing = (folder / "demo/tom-and-jerry.svg").read_text(encoding="utf-8")
    tips = [title.text for title in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}title")]
    assert "追逐 → chases: 0.9444" in tips
    assert drawing in (folder / "demo/tom-and-jerry.html").read_text(encoding="utf-8")


@pytest.mark.process
def test_demo_prints_plain_text_where_there_is_no_terminal(demo):
    printed, _ = demo
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.process
def test_demo_survives_an_output_without_chinese(tmp_path):
    done = run("demo", "--stages", "--out", "elsewhere", cwd=tmp_path, PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "elsewhere/tom-and-jerry.svg").exists()
