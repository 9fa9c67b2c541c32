"""Translators in lower precisions return nearly the same answers, and leave the float32 model unchanged."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from regard.models.quantized import QuantizedLinear, TensorQuantizedLinear
from regard.tasks.task import SettingError
from regard.tasks.translation import predictor as module
from regard.tasks.translation.codec import Reading, Words
from regard.tasks.translation.config import ModelSettings, TranslationConfig, TranslationDecoding
from regard.tasks.translation.network import build
from regard.tasks.translation.predictor import Translator


class Numbers:
    """A codec in which words are numbers."""

    def read(self, text: str) -> Reading:
        words = text.split()
        return Reading(list(words), tuple(words), [int(word) for word in words], tuple(words))

    def labels(self, numbers, source, weights) -> tuple[str, ...]:
        return tuple(map(str, numbers))

    def source_words(self, numbers, labels) -> Words:
        return Words(tuple(labels), list(range(len(labels))))

    written_words = source_words

    def write(self, numbers, source, weights) -> str:
        return " ".join(map(str, numbers))


def translator(kind: str) -> Translator:
    torch.manual_seed(11)
    settings = ModelSettings(kind=kind, size=32, heads=4, layers=1, dropout=0.0)
    model = build(settings, (23, 19), shared=False).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
    return Translator(model, Numbers(), TranslationDecoding(beam=3))


TEXTS = ["5 6 7", "", "8 9 10 11 12 13", "14", "15 16"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_answers_are_nearly_the_same(kind, precision, as_installed):
    exact = translator(kind)
    other = exact.in_precision(precision)
    assert other.model is not exact.model
    found, wanted = other.translate(TEXTS), exact.translate(TEXTS)
    assert [one.source.words for one in found] == [one.source.words for one in wanted]
    assert sum(one.text == two.text for one, two in zip(found, wanted, strict=True)) >= 3
    for one, two in zip(found, wanted, strict=True):
        if one.weights is not None and one.text == two.text:
            assert one.score == pytest.approx(two.score, rel=0.1)
            assert one.weights.dtype == torch.float32
            torch.testing.assert_close(one.weights, two.weights, rtol=0, atol=0.1)


def test_the_exact_model_comes_back(as_installed):
    exact = translator("transformer")
    small = exact.in_precision("int8")
    assert any(isinstance(part, (QuantizedLinear, TensorQuantizedLinear)) for part in small.model.modules())
    assert small.exact is exact.model
    back = small.in_precision("float32")
    assert back.exact is exact.model
    assert [one.text for one in back.translate(TEXTS)] == [one.text for one in exact.translate(TEXTS)]
    assert next(small.in_precision("bfloat16").model.parameters()).dtype == torch.bfloat16
    assert next(exact.model.parameters()).dtype == torch.float32


class Saved:
    """A stand-in for a run, whose model has its initial weights."""

    path = None

    def __init__(self, precision: str = "float32") -> None:
        model = ModelSettings(kind="transformer", size=32, heads=4, layers=1, dropout=0.0)
        self.settings = TranslationConfig(model=model, decode=TranslationDecoding(beam=3, precision=precision))

    def config_as(self, kind: type[TranslationConfig]) -> TranslationConfig:
        return kind.model_validate(self.settings.model_dump(mode="json"))

    def reading(self, *names: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def load_model(self, model: nn.Module) -> None:
        """Load nothing, so that the model has its initial weights."""


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """Return a list of the calls of `quantize` and `pack`, by name and in order; the codec is replaced by `Numbers`."""
    calls: list[str] = []
    for name in ("quantize", "pack"):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda model, name=name, real=real: (calls.append(name), real(model))[1])
    coder = Numbers()
    coder.sizes, coder.shared = (23, 19), False
    monkeypatch.setattr(module, "load_coder", lambda path, words: coder)
    return calls


def test_nothing_is_made_ready_twice(made, as_installed):
    small = Translator.load(Saved("int8"))
    assert small.in_precision("int8") is small
    assert made == ["quantize"]
    packed = Translator.load(Saved("int8"), precision="float32")
    assert packed.in_precision("float32") is packed
    assert made == ["quantize", "pack"]
    assert Translator.load(Saved()).exact is None  # a translator in float32 uses the trained model, not a copy of it
    assert made == ["quantize", "pack"]


def test_where_there_is_nothing_to_make_ready_there_is_no_copy(made, as_installed):
    elsewhere = Translator.load(Saved(), device="meta")  # the meta device takes the place of a GPU in this test
    assert elsewhere.in_precision("float32") is elsewhere
    lower = elsewhere.in_precision("bfloat16")
    assert lower.device.type == "meta"
    assert lower.in_precision("float32").model is elsewhere.model
    assert made == []


def test_the_place_is_that_of_the_last_precision(made, monkeypatch, as_installed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    small = Translator.load(Saved("int8"))  # a translator in int8 never moves to the GPU
    assert (small.device.type, small.place) == ("cpu", torch.device("cuda"))
    moved = replace(small, place=torch.device("meta")).in_precision("float32")
    assert moved.device.type == "meta"
    assert made == ["quantize"]


@pytest.mark.parametrize(("own", "asked"), [("int8", None), ("float32", "int8")])
def test_a_device_that_cannot_be_is_named(own, asked, made, as_installed):
    with pytest.raises(SettingError, match="int8 is for the CPU, and the device is cuda"):
        Translator.load(Saved(own), device="cuda", precision=asked)
    assert Translator.load(Saved(own), device="cpu", precision=asked).device.type == "cpu"


def test_without_one_dnn_the_setting_is_named(monkeypatch, as_installed):
    exact = translator("transformer")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(SettingError, match="int8 cannot be: int8 needs oneDNN, and this build of torch has none"):
        exact.in_precision("int8")
    assert exact.in_precision("float32") is exact


def test_another_precision_is_refused(as_installed):
    with pytest.raises(SettingError, match="precision must be float32, bfloat16 or int8, got 'int4'"):
        translator("transformer").in_precision("int4")
