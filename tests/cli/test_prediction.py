"""`regard predict`: the contents of its records, and inputs that cannot be translated."""

import io
import json
import random
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch
from typer.testing import CliRunner

import forked
from regard.cli import app
from regard.cli.input_lines import read_lines
from regard.data.text.bpe import Codes, train_bpe
from regard.data.text.vocabulary import Vocabulary
from regard.tasks.translation.codec import PieceCoder
from regard.tasks.translation.predictor import Translation, Translator
from regard.train.run_directory import Run

pytestmark = pytest.mark.slow  # the tests are slow because their fixtures train models


FEW = (
    *("--preset", "tiny", "--set", "steps=2", "--set", "validate_every=2", "--set", "data.valid=8"),
    *("--set", "data.test=8", "--set", "model.size=8", "--set", "longer=0"),
)
NOUNS = ("Hund", "Katze", "Maus", "Vogel", "Fisch", "Pferd")


def regard(*arguments: object, stdin: bytes | None = None):
    """Run the command, with standard output and standard error separate."""
    jaxtyping.config.update("jaxtyping_disable", True)
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)
    jaxtyping.config.update("jaxtyping_disable", False)
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on the user's own files, German to Chinese, with learned position embeddings."""
    folder, draw = tmp_path_factory.mktemp("own"), random.Random(3)
    pairs = [(draw.choice(NOUNS), draw.randrange(10**6), draw.choice("追逐看见")) for _ in range(90)]
    lines = [f"der {noun} sieht {number} Bäume" for noun, number, _ in pairs]
    (folder / "a.de").write_text("\n".join(lines), encoding="utf-8")
    (folder / "a.zh").write_text("\n".join(f"{letter * 2}了 {n}" for _, n, letter in pairs), encoding="utf-8")
    data = ("--data", folder / "a.de", "--data", folder / "a.zh", "--set", "vocabulary=270")
    model = ("--set", "model=transformer", "--set", "positions=learned", "--set", "heads=2")
    done = regard("train", "translation", *FEW, *data, *model, "--out", folder / "run")
    assert done.exit_code == 0, done.output
    return folder / "run"


def test_alignments_are_of_words_and_of_pieces(run):
    done = regard("predict", run, "der Vogelhund sieht Bäume", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["source_words"] == found["source"].split() == ["der", "Vogelhund", "sieht", "Bäume"]
    assert len(found["source_pieces"]) > 5
    assert "".join(found["target_words"]) == "".join(found["translation"].split())
    for name, count in (("alignment", "words"), ("piece_alignment", "pieces")):
        places = [range(len(found[f"{side}_{count}"])) for side in ("source", "target")]
        assert found[name]
        assert all(source in places[0] and target in places[1] for source, target in found[name])


def test_pieces_of_a_word_attend_together():
    """The sub-word "der" has the largest weight, but the sub-words of "Hund" have the largest sum; the end token is not
    a word."""
    subwords = train_bpe(["der sieht 了"] * 4, size=300)
    coder = PieceCoder(Codes(subwords, subwords))
    source, numbers = coder.read("der Hund"), tuple(coder.target("看了 Hm"))
    labels = coder.labels(numbers, source, None)
    assert len(source.numbers) == 6
    assert len(numbers) == 3 + 1 + 3
    weights = torch.zeros(len(numbers), len(source.numbers) + 1)
    weights[:, 0], weights[:, 1:6], weights[:, 6] = 0.2, 0.1, 0.3
    weights[3] = torch.tensor([0.5, 0, 0, 0, 0.4, 0, 0.1])  # weights of the target token 了
    words = coder.source_words(source.numbers, source.labels), coder.written_words(numbers, labels)
    record = Translation(source, "看了 Hm", numbers, labels, weights, -1.0, (), *words).record()
    assert record["source_words"] == ("der", "Hund")
    assert record["target_words"] == ("看", "了", "Hm")
    assert record["alignment"] == [(0, 1), (1, 0), (1, 2)]
    assert record["piece_alignment"] == [(0, target) for target in range(len(numbers))]
    assert record["source_pieces"][-1] == "∎"


BAD = {
    "not UTF-8": (b"der \xff Hund", "not UTF-8: byte 0xff at byte 5"),
    "a surrogate": (b"\xed\xa0\x80", "not UTF-8: byte 0xed at byte 1"),
    "UTF-16": ("der".encode("utf-16"), "not UTF-8: byte 0xff at byte 1"),
    "too many tokens": (b"Hund " * 40, "tokens, at most 30"),
    "too many characters": (b"x" * (64 * 30 + 1), "more than 1,920 characters"),
    "far too many characters": (b"x" * 10**6, "more than 1,920 characters"),
    "far too many blanks": (b" " * 10**6, "more than 1,920 characters"),
}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("bad", BAD)
def test_a_line_that_cannot_be_translated_leaves_its_neighbours_alone(run, bad, as_json):
    line, complaint = BAD[bad]
    options = ("--longest", 30, *(("--json",) if as_json else ()))
    good = [b"der Hund", b"die Katze sieht"]
    done = regard("predict", run, *options, stdin=b"\n".join((good[0], line, b"", good[1])))
    alone = regard("predict", run, *options, stdin=b"\n".join((good[0], good[1])))
    assert (done.exit_code, alone.exit_code) == (1, 0)
    first, failed, empty, second = done.stdout.split("\n")[:-1]
    assert [first, second] == alone.stdout.split("\n")[:-1]
    assert done.stderr.startswith("regard: line 2: ")
    assert done.stderr.endswith(f"{complaint}: not answered\n")
    if as_json:
        assert json.loads(failed)["error"].endswith(complaint)
        assert json.loads(empty)["translation"] == ""
    else:
        assert failed == empty == ""


@pytest.mark.parametrize("text", ["", "  ", "\u3000", "a\0b", "\ufeffder", "der Hund\r", "a\rb\u2028c"])
def test_odd_lines_are_one_line_each(run, text):
    done = regard("predict", run, stdin=f"{text}\nder Hund\n{text}\n".encode())
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("\n") == 3
    assert done.stderr == ""


def test_arguments_that_cannot_be_translated(run):
    done = regard("predict", run, "der Hund", "Hund " * 40, "a\udcffb", "--longest", 30)
    assert done.exit_code == 1
    assert done.stdout.count("\n") == 3
    assert done.stdout.endswith("\n\n\n")
    first, second = done.stderr.splitlines()
    assert first.startswith("regard: input 1: ")
    assert second == "regard: input 2: not UTF-8: not answered"


def test_a_text_that_fills_the_positions_of_the_model_is_translated(run):
    """The model has 1,024 learned positions, so the translation cannot have more than 1,024 tokens either."""
    line = b"\xc3\xa4" * 500  # 500 letters that the tokenizer splits into two tokens each
    done = regard("predict", run, "--longest", 10**6, stdin=line + b"\n" + line * 2 + b"\n")
    assert done.exit_code == 1
    assert done.stderr == "regard: line 2: 2,000 tokens, at most 1,024: not answered\n"
    assert done.stdout.count("\n") == 2


class Endless:
    """A stream with one line of zeros that is too long for memory, and a second, short line."""

    def __init__(self, length: int) -> None:
        self.left, self.after = length, io.BytesIO(b"\nlast\n")

    def readline(self, size: int, /) -> bytes:
        assert 0 < size < 10**6, "a line is read in parts"
        part = b"0" * min(size, self.left)
        self.left -= len(part)
        return part + self.after.readline(size - len(part)) if len(part) < size else part


def test_a_line_without_end_is_read_in_parts():
    lines = list(read_lines(Endless(50_000_000), characters=100))
    assert [(line.place, line.text, line.fault) for line in lines] == [
        ("line 1", "", "more than 100 characters"),
        ("line 2", "last", ""),
    ]


@pytest.mark.parametrize(("width", "tokens", "most"), [(1, None, 1000), (64, None, 1000), (256, None, 250), (5, 7, 7)])
def test_many_hypotheses_leave_room_for_shorter_texts(run, width, tokens, most):
    translator = Translator.load(Run.open(run))
    assert translator.longest(width=width, tokens=tokens) == most


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the built-in data whose target words were edited to contain patterns of file names and line breaks."""
    folder = tmp_path_factory.mktemp("odd")
    done = regard("train", "translation", *FEW, "--set", "data.train=60", "--out", folder / "run")
    assert done.exit_code == 0, done.output
    words = Vocabulary.load(folder / "run/tokenizer.target.json").words
    Vocabulary(tuple(f"[{word}]*\n" for word in words)).save(folder / "run/tokenizer.target.json")
    (folder / "run/manifest.json").unlink()  # the checksums in the manifest would reveal that the tokenizer was edited
    return folder / "run"


def test_line_breaks_in_translations_do_not_shift_lines(odd):
    done = regard("predict", odd, "Tom chases Jerry", "Tom sleeps")
    assert done.exit_code == 0, done.stderr
    assert "[" in done.stdout
    assert done.stdout.count("\n") == 2


def test_a_page_of_translations_that_look_like_patterns(odd, tmp_path):
    done = regard("predict", odd, "Tom chases Jerry", "Tom sleeps", "--look", tmp_path / "page.html")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


LIMITED = """
import resource
from regard.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
main()
"""


@pytest.mark.process
@pytest.mark.parametrize("before", [None, "an earlier page"])
def test_a_page_that_cannot_be_written_leaves_nothing_or_what_was_there(run, tmp_path, before):
    page = tmp_path / "pages" / "page.html"
    if before:
        page.parent.mkdir()
        page.write_text(before)
    done = forked.run([sys.executable, "-c", LIMITED, "predict", run, "der Hund", "--look", page])
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert [path.read_text() for path in page.parent.iterdir()] == ([before] if before else [])


@pytest.mark.process
def test_a_page_through_a_link_and_a_pipe(run, tmp_path):
    (tmp_path / "page.html").symlink_to(tmp_path / "real.html")
    assert regard("predict", run, "der Hund", "--look", tmp_path / "page.html").exit_code == 0
    assert (tmp_path / "page.html").is_symlink()
    assert (tmp_path / "real.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    command = [sys.executable, "-m", "regard", "predict", str(run), "der Hund", "--look", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "<!doctype html>" in done.stdout
