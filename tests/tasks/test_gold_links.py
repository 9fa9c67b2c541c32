"""Tests of gold alignments in a file beside the test files, and of the alignment error rate of attention weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch

from regard.data.data_files import DataError
from regard.data.text.bpe import Codes, train_bpe
from regard.data.text.vocabulary import Vocabulary
from regard.models.memory import Memory
from regard.tasks.translation import scoring
from regard.tasks.translation.codec import PieceCoder, WordCoder
from regard.tasks.translation.config import DataSettings, ModelSettings, TranslationConfig, TranslationDecoding
from regard.tasks.translation.material import Example, examples_of
from regard.tasks.translation.network import build
from regard.tasks.translation.predictor import Translator

SOURCES = ("the cat sleeps", "a dog")
UNUSED = WordCoder(Vocabulary(()), Vocabulary(()))
TARGETS = ("le chat dort ici", "un chien")


def folder(tmp_path: Path, links: str) -> Path:
    for side, texts in (("en", SOURCES), ("fr", TARGETS)):
        for name in ("train", "test_2016"):
            (tmp_path / f"{name}.{side}").write_text("".join(f"{text}\n" for text in texts))
    (tmp_path / "test_2016.links").write_text(links)
    return tmp_path


def config(**data: object) -> TranslationConfig:
    return TranslationConfig(data=DataSettings(files=("train.en",), **data))


def read(path: Path, first: int = 1) -> list[Example]:
    return examples_of([path], config(source="en", target="fr", first_word=first), UNUSED)[0]


def test_links_beside_the_test_file_are_read(tmp_path: Path) -> None:
    first, second = read(folder(tmp_path, "1-1 2-2 3-3 3p4\n1-1 2-2\n"))
    assert first.links == {(0, 0), (1, 1), (2, 2)}
    assert first.possible == {(0, 0), (1, 1), (2, 2), (2, 3)}
    assert first.target == ("le", "chat", "dort", "ici")
    assert second.links == second.possible == {(0, 0), (1, 1)}


def test_words_may_be_counted_from_zero(tmp_path: Path) -> None:
    assert read(folder(tmp_path, "0-0 2-3\n1-1\n"), first=0)[0].links == {(0, 0), (2, 3)}


def test_links_named_by_their_languages_serve_both_directions(tmp_path: Path) -> None:
    (folder(tmp_path, "9-9\n9-9\n") / "test_2016.en-fr.links").write_text("1-1 3p4\n1-1 2-2\n")
    there, back = (
        examples_of([tmp_path], config(source=source, target=target), UNUSED)[0][0]
        for source, target in (("en", "fr"), ("fr", "en"))
    )
    assert (there.links, there.possible) == ({(0, 0)}, {(0, 0), (2, 3)})
    assert (back.links, back.possible) == ({(0, 0)}, {(0, 0), (3, 2)})
    assert back.target == ("the", "cat", "sleeps")


def test_without_links_the_examples_have_none(tmp_path: Path) -> None:
    (folder(tmp_path, "") / "test_2016.links").unlink()
    assert all(example.links == frozenset() for example in read(tmp_path))


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ("1-1\n", "1 lines of links for 2 pairs"),
        ("4-1\n1-1\n", "test_2016.links:1: a link 4-1, but the pair has 3 and 4 words"),
        ("1-1\n1-3\n", "test_2016.links:2: a link 1-3, but the pair has 2 and 2 words"),
        ("1-1\n0-1\n", "words are counted from 1, found '0-1'"),
        ("1-1\n1:1\n", "expected links such as 1-2 or 1p2, found '1:1'"),
    ],
)
def test_links_that_do_not_fit_are_told_with_file_and_line(tmp_path: Path, links: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(folder(tmp_path, links))


def rates(monkeypatch: pytest.MonkeyPatch, *layers: str) -> dict:
    """Return the alignment error rate of layers that attend to source word j for target word j.

    A layer "predicted" attends so at the step that predicts word j, a layer "read" at the next, whose input is word j.
    """

    def weights(_: Translator, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[torch.Tensor]:
        columns, rows = len(pairs[0][0]) + 1, len(pairs[0][1]) + 1
        pointed = {"predicted": range(rows), "read": [0, *range(rows - 1)]}
        return [torch.nn.functional.one_hot(torch.tensor(pointed[one]), columns)[None, None].float() for one in layers]

    monkeypatch.setattr(scoring, "layer_weights", weights)
    return judged()


def judged(kind: Literal["recurrent", "transformer"] = "recurrent", *, posterior: bool = False) -> dict:
    """Return the alignment figures of one sentence pair in which target word j translates source word j."""
    coder = WordCoder(Vocabulary.build([("a", "b", "c")]), Vocabulary.build([("x", "y", "z")]))
    model = build(ModelSettings(size=8, kind=kind), coder.sizes, shared=False)
    example = Example(("a", "b", "c"), "xyz", ("x", "y", "z"), frozenset({(0, 0), (1, 1), (2, 2)}))
    translator = Translator(model, coder, TranslationDecoding(posterior=posterior))
    return scoring.alignment(translator, [example], [coder.read_words(example.source)])


def test_a_word_is_told_from_the_step_that_predicts_it_or_from_the_one_that_reads_it(monkeypatch) -> None:
    found = rates(monkeypatch, "predicted", "read")
    assert found["aer"] == 0.0
    assert found["by_layer"]["predicted"][0] == 0.0
    assert found["by_layer"]["read"][1] == 0.0
    # Layer 1 attends at the next step; evaluated at the predicting step, it points one word too early except for the
    # first word: one of three links is right.
    assert found["by_layer"]["predicted"][1] == pytest.approx(2 / 3, abs=1e-4)
    assert rates(monkeypatch, "read")["when"] == "read"
    assert rates(monkeypatch, "predicted") == {"aer": 0.0, "when": "predicted"}


@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
def test_weights_are_corrected_once_the_word_is_known(monkeypatch, kind) -> None:
    assert "aer_posterior" not in judged(kind)

    def likely(decoder: object, memory: Memory, prefix: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert (memory.keys.shape[:2], prefix.shape, target.shape) == ((1, 4), (1, 4), (1, 4))
        # The likelihood of target word j is large only for source position j, independent of the network.
        return torch.full((4, 4), -1e4).fill_diagonal_(0.0)[None]

    monkeypatch.setattr(scoring, "log_likelihood", likely)
    assert judged(kind, posterior=True)["aer_posterior"] == 0.0


def test_heads_are_judged_one_by_one_too(monkeypatch) -> None:
    first, second = torch.eye(4), torch.eye(4)[[1, 0, 2, 3]]  # `second` has the weights of the first two words swapped
    monkeypatch.setattr(scoring, "layer_weights", lambda *_: [torch.stack((second, first))[None]])
    found = judged()
    assert found["best_head"] == {"aer": 0.0, "layer": 0, "head": 1, "when": "predicted"}
    monkeypatch.setattr(scoring, "layer_weights", lambda *_: [torch.stack((second, second))[None]])
    # At the predicting step one of three links is right: the error rate is 2/3. At the next step one of two links is
    # right: 1 − 2/5. The smaller rate is reported.
    assert judged()["aer"] == judged()["best_head"]["aer"] == 0.6


def test_without_attention_there_is_no_rate(monkeypatch) -> None:
    assert rates(monkeypatch) == {}


def test_pieces_of_words_share_their_link() -> None:
    pieces = train_bpe(["un chien"] * 3, size=262)
    numbers, owners = PieceCoder(Codes(pieces, pieces)).target_words(("un", "chien"))
    assert len(numbers) == len(owners) > 2
    assert set(owners) == {0, 1}
