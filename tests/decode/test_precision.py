"""A translator in other precisions: nearly the same answers, the exact model kept."""

import pytest
import torch
from torch import nn

from regard.models.quantized import QuantizedLinear, TensorQuantizedLinear
from regard.tasks.task import SettingError
from regard.tasks.translation.coding import Reading
from regard.tasks.translation.config import DecodeSettings, ModelSettings
from regard.tasks.translation.network import build
from regard.tasks.translation.translator import Translator


class Numbers:
    """Words are numbers."""

    def read(self, text: str) -> Reading:
        words = text.split()
        return Reading(list(words), tuple(words), [int(word) for word in words], tuple(words))

    def labels(self, numbers, source, weights) -> tuple[str, ...]:
        return tuple(map(str, numbers))

    def write(self, numbers, source, weights) -> str:
        return " ".join(map(str, numbers))


def translator(kind: str) -> Translator:
    torch.manual_seed(11)
    settings = ModelSettings(kind=kind, size=32, heads=4, layers=1, dropout=0.0)
    model = build(settings, (23, 19), shared=False).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
    return Translator(model, Numbers(), DecodeSettings(beam=3))


TEXTS = ["5 6 7", "", "8 9 10 11 12 13", "14", "15 16"]


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


def test_another_precision_is_refused(as_installed):
    with pytest.raises(SettingError, match="precision must be float32, bfloat16 or int8, got 'int4'"):
        translator("transformer").in_precision("int4")
