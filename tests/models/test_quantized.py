"""int8 copies of models: errors within rounding, no effect of other rows, and no change of the model itself."""

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from regard.decode.beam import beam
from regard.models import quantized
from regard.models.frame import EncoderDecoder
from regard.models.quantized import (
    PackedLinear,
    PreparedProjection,
    QuantizedLinear,
    TensorQuantizedLinear,
    pack,
    quantize,
)
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.recurrent.encoder import RecurrentEncoder
from regard.models.transformer.beams import why_not
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder
from regard.nn.attention import Attention
from regard.nn.multihead import MultiHeadAttention
from regard.nn.projection import HeadProjection

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


def transformer(**options) -> EncoderDecoder:
    torch.manual_seed(7)
    encoder = TransformerEncoder(23, 32, layers=2, heads=4)
    return EncoderDecoder(encoder, TransformerDecoder(19, 32, layers=2, heads=4, **options)).eval()


def by_hand(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, most: int) -> torch.Tensor:
    """Return the product of both operands rounded to integers and scaled back, one row and output at a time."""
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for i, row in enumerate(x):
        reach = row.abs().max()
        left = (row * (most / reach)).round().double() if reach > 0 else torch.zeros_like(row).double()
        for j, column in enumerate(weight):
            scale = column.abs().max() / 127
            right = (column / scale).round().double() if scale > 0 else torch.zeros_like(column).double()
            out[i, j] = (left * right).sum() * float(scale) * float(reach) / most
            out[i, j] += 0 if bias is None else float(bias[j])
    return out


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_linear_layer_is_products_of_whole_numbers(with_bias):
    x, weight = torch.randn(7, 29), torch.randn(13, 29) * torch.logspace(-3, 2, 13).unsqueeze(-1)
    x[2], weight[5] = 0.0, 0.0
    x[3] *= 1e4
    bias = torch.randn(13) if with_bias else None
    layer = QuantizedLinear(weight, bias)
    expected = by_hand(x, weight, bias, layer.most).float()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.weight, weight, rtol=0, atol=float(weight.abs().max()) / 254)


def test_the_error_is_that_of_the_rounding():
    layer, x = nn.Linear(61, 17), torch.randn(3, 5, 61)
    found, wanted = QuantizedLinear(layer.weight, layer.bias)(x), layer(x)
    assert found.shape == (3, 5, 17)
    error = (found - wanted).detach().abs().max() / wanted.detach().abs().max()
    assert 0 < error < 0.03


def test_one_scale_for_all_is_products_of_whole_numbers_too():
    x, weight, bias = torch.randn(3, 5, 61), torch.randn(17, 61), torch.randn(17)
    layer = TensorQuantizedLinear(weight, bias)
    exact = x.double() @ weight.double().T + bias
    error = (layer(x) - exact).abs().max() / exact.abs().max()
    assert 0 < error < 0.03
    torch.testing.assert_close(layer.weight, weight, rtol=0, atol=float(weight.abs().max()) / 254)
    assert layer(x[:0]).shape == (0, 5, 17)
    # In the expected result, inputs are rounded to 256 equally spaced numbers from their minimum to their maximum.
    low, high = float(x.min()), float(x.max())
    step = (high - low) / 255
    zero = round(-low / step)
    taken = ((x.double() / step).round() + zero).clamp(0, 255) - zero
    by_hand = (taken * step) @ layer.weight.double().T + bias
    torch.testing.assert_close(layer(x).double(), by_hand, rtol=0, atol=3 * step * float(weight.abs().max()))


def test_a_row_does_not_hang_on_its_neighbours():
    layer = QuantizedLinear(torch.randn(17, 61), torch.randn(17))
    x = torch.randn(11, 61) * torch.logspace(-3, 3, 11).unsqueeze(-1)
    together = layer(x)
    for i in range(11):
        assert torch.equal(layer(x[i : i + 1])[0], together[i])
    assert layer(x[:0]).shape == (0, 17)


@pytest.mark.parametrize(
    ("linear", "most"), [(QuantizedLinear, 0.1), (TensorQuantizedLinear, 0.1), (PackedLinear, 1e-5)]
)
@pytest.mark.parametrize("sizes", [(12, 12, 12), (12, 10, 10), (12, 10, 14)])
def test_projections_have_the_same_methods(sizes, linear, most):
    torch.manual_seed(5)
    source = HeadProjection(*sizes, 4, 2, 6, bias=True)
    nn.init.normal_(source.bias)
    made = PreparedProjection(source, linear)
    query, key, value = (torch.randn(3, n, size) for n, size in zip((5, 7, 7), sizes, strict=True))
    for found, wanted in zip(made.cross(query, key, value), source.cross(query, key, value), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=most)
    torch.testing.assert_close(made.queries(query), source.queries(query), rtol=0, atol=most)
    if sizes[1] == sizes[2]:
        for found, wanted in zip(made.memories(key, key), source.memories(key, key), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=most)
    if sizes[0] == sizes[1]:
        torch.testing.assert_close(made(query), source(query), rtol=0, atol=most)
    else:
        with pytest.raises(ValueError, match="a sequence that attends itself has one size"):
            made(query)


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_transformer_agrees_and_stays_untouched(tied, scales):
    model = transformer(tied=tied)
    model.train()
    before = copy.deepcopy(model.state_dict())
    small = quantize(model, scales=scales)
    kinds = {type(part) for part in small.modules()}
    assert nn.Linear not in kinds
    assert HeadProjection not in kinds
    assert not small.training
    assert not any(parameter.requires_grad for parameter in small.parameters())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], held) for name, held in before.items())
    model.eval()
    source, prefix, lengths = torch.randint(3, 23, (5, 7)), torch.randint(3, 19, (5, 6)), torch.tensor([7, 3, 5, 1, 2])
    with torch.no_grad():
        wanted = model.logits(model(source, prefix, lengths).states)
        found = small.logits(small(source, prefix, lengths).states)
    assert 0 < (found - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_batched_is_one_by_one_in_int8():
    small = quantize(transformer(), scales="row")
    assert why_not(small.decoder) is None
    source, lengths = torch.randint(3, 23, (5, 7)), torch.tensor([7, 3, 5, 1, 2])

    def search(rows: slice):
        state = small.start(source[rows, : int(lengths[rows].max())], lengths[rows], limit=9)
        start = torch.ones(state.mask.shape[0], dtype=torch.long)
        return beam(small.step, state, start=start, stop=2, limit=8, width=3, n_best=2)

    with torch.no_grad():
        together = search(slice(None))
        for i in range(5):
            [alone] = search(slice(i, i + 1))
            assert [one.tokens for one in alone] == [one.tokens for one in together[i]]
            assert [one.score for one in alone] == pytest.approx([one.score for one in together[i]], rel=1e-5)


def test_packed_weights_give_the_same():
    model = transformer()
    packed = pack(model)
    assert {PackedLinear, PreparedProjection} <= {type(part) for part in packed.modules()}
    source, prefix, lengths = torch.randint(3, 23, (5, 7)), torch.randint(3, 19, (5, 6)), torch.tensor([7, 3, 5, 1, 2])
    with torch.no_grad():
        wanted = model.logits(model(source, prefix, lengths).states)
        found = packed.logits(packed(source, prefix, lengths).states)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    layer = PackedLinear(torch.randn(17, 61), None)
    assert layer(torch.randn(0, 61)).shape == (0, 17)
    with pytest.raises(ValueError, match="packing starts from float32"):
        pack(transformer().double())


def test_a_recurrent_model_agrees():
    torch.manual_seed(3)
    encoder = RecurrentEncoder(23, 24)
    model = EncoderDecoder(encoder, RecurrentDecoder(19, 24, memory_size=48, attention=Attention(24, 48))).eval()
    small = quantize(model)
    source, prefix = torch.randint(3, 23, (5, 7)), torch.randint(3, 19, (5, 6))
    with torch.no_grad():
        wanted = model.logits(model(source, prefix).states)
        found = small.logits(small(source, prefix).states)
    assert 0 < (found - wanted).abs().max() < 0.1 * wanted.abs().max()


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
def test_no_weight_is_unpacked_in_a_step(order, monkeypatch):
    torch.manual_seed(3)
    decoder = RecurrentDecoder(19, 24, memory_size=48, attention=Attention(24, 48), order=order)
    small = quantize(EncoderDecoder(RecurrentEncoder(23, 24), decoder).eval())
    assert type(small.decoder.readout) is nn.Linear
    assert type(small.decoder.output) is not nn.Linear
    with torch.no_grad():
        state = small.start(torch.randint(3, 23, (5, 7)))

        def read(_):
            raise AssertionError("a rounded weight was read")

        for kind in (QuantizedLinear, TensorQuantizedLinear):
            monkeypatch.setattr(kind, "weight", property(read))
        for token in (3, 4):
            done = small.step(state, torch.full((5,), token))
            state = done.state
    assert done.logits.shape == (5, 19)


@pytest.mark.parametrize("make", [quantize, pack])
def test_a_model_without_anything_to_replace_is_refused(make):
    with pytest.raises(ValueError, match=r"and Linear holds none: put a single layer into nn\.Sequential"):
        make(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="inside a model, and GRU holds none"):
        make(nn.GRU(3, 3))


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match=re.escape("int8 starts from float32, the model has torch.float64")):
        quantize(nn.Linear(3, 3).double())
    with pytest.raises(ValueError, match="int8 is for the CPU, the model is on meta"):
        quantize(nn.Sequential(nn.Linear(3, 3, device="meta")))


def test_scales_that_cannot_be_are_named(monkeypatch, as_installed):
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="scales must be tensor, row or None, got 'column'"):
        quantize(model, scales="column")
    monkeypatch.setattr(quantized, "int8_engine", lambda: None)
    with pytest.raises(ValueError, match="scales by tensor need fbgemm"):
        quantize(model, scales="tensor")
    assert type(quantize(model)[0]) is QuantizedLinear


def test_a_copy_of_a_copy_and_torchs_engine():
    before = torch.backends.quantized.engine
    small = quantize(nn.Sequential(nn.Linear(7, 5)))
    assert torch.backends.quantized.engine == before
    x = torch.randn(3, 7)
    assert torch.equal(copy.deepcopy(small)(x), small(x))


def test_without_one_dnn_it_is_said(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="this build of torch has none"):
        quantize(nn.Sequential(nn.Linear(3, 3)))


def test_multi_head_attention_by_itself():
    layer = MultiHeadAttention(16, 4).eval()
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(quantize(nn.Sequential(layer))[0](x).output, layer(x).output, rtol=0, atol=0.1)


# Without VNNI instructions the processor adds two products of bytes in 16 bits.
_WITHOUT_VNNI = """
import torch
torch.cpu._is_vnni_supported = lambda: False
from regard.models.quantized import QuantizedLinear
for sign in (1.0, -1.0):
    weight, x = torch.ones(32, 64), sign * torch.ones(3, 64)
    print((QuantizedLinear(weight, None)(x) - x @ weight.T).abs().max().item())
"""


@pytest.mark.process
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_the_largest_products_do_not_overflow_without_vnni(instructions: str) -> None:
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_VNNI], env=environment, capture_output=True, text=True, check=True
    )
    assert all(float(error) < 1e-3 for error in done.stdout.split())
