"""`regard predict`: what its records say, and what becomes of texts that cannot be translated."""

import json
import random
from pathlib import Path

import jaxtyping
import pytest
import torch
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.runs import as_record
from regard.data.bpe import Codes, train_bpe
from regard.tasks.translation.coding import PieceCoder
from regard.tasks.translation.translator import Translation

FEW = (
    *("--preset", "tiny", "--set", "steps=2", "--set", "validate_every=2", "--set", "data.valid=8"),
    *("--set", "data.test=8", "--set", "model.size=8", "--set", "embedding=8", "--set", "longer=0"),
)
NOUNS = ("Hund", "Katze", "Maus", "Vogel", "Fisch", "Pferd")


def regard(*arguments: object, stdin: bytes | None = None):
    """What the command did, with standard output and standard error apart."""
    jaxtyping.config.update("jaxtyping_disable", True)
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)
    jaxtyping.config.update("jaxtyping_disable", False)
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on files of one's own, German to Chinese, with learned positions."""
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
    """The most attended piece belongs to der, the most attended word is Hund, and the end mark is no word."""
    subwords = train_bpe(["der sieht 了"] * 4, size=300)
    coder = PieceCoder(Codes(subwords, subwords))
    source, numbers = coder.read("der Hund"), tuple(coder.target("看了 Hm"))
    labels = coder.labels(numbers, source, None)
    assert len(source.numbers) == 6
    assert len(numbers) == 3 + 1 + 3
    weights = torch.zeros(len(numbers), len(source.numbers) + 1)
    weights[:, 0], weights[:, 1:6], weights[:, 6] = 0.2, 0.1, 0.3
    weights[3] = torch.tensor([0.5, 0, 0, 0, 0.4, 0, 0.1])  # 了
    words = coder.source_words(source.numbers, source.labels), coder.written_words(numbers, labels)
    record = as_record(Translation(source, "看了 Hm", numbers, labels, weights, -1.0, (), *words))
    assert record["source_words"] == ("der", "Hund")
    assert record["target_words"] == ("看", "了", "Hm")
    assert record["alignment"] == [(0, 1), (1, 0), (1, 2)]
    assert record["piece_alignment"] == [(0, target) for target in range(len(numbers))]
    assert record["source_pieces"][-1] == "∎"
