"""Tests of records with 24 bits per number: the saved memory, the bound of the error, and the note that states it."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from watching import seen

from regard.core.attention import attention
from regard.core.scores import Additive, ScaledDot
from regard.look.compact_floats import ROUNDING, Exact, Short, shorter, worst_score
from regard.look.watch import watch

B, H, G, Q, K, D = 2, 6, 3, 37, 41, 8


def tensors(spread=1.0, key_heads=G):
    return (
        torch.randn(B, H, Q, D) * spread,
        torch.randn(B, key_heads, K, D) * spread,
        torch.randn(B, key_heads, K, D),
    )


def every(tensor):
    return tensor


def test_a_number_is_rounded_to_the_nearest_of_its_16_digits():
    numbers = torch.cat(
        [torch.randn(4000) * 10.0**power for power in (-30, -3, 0, 3, 30)]
        + [torch.tensor([0.0, -0.0, 1.0, -2.5, 1.99999999, 2.0**-126])]
    )
    found = Short(numbers[None, None, None]).take(every)[0, 0, 0]
    assert bool(((found - numbers).double().abs() <= ROUNDING * numbers.double().abs()).all())
    # More than 30 % of the errors exceed a quarter of the bound, so the bound is not loose.
    assert float(((found - numbers).abs() > ROUNDING / 4 * numbers.abs()).float().mean()) > 0.3
    # Numbers with at most 15 binary digits after the first one are stored exactly.
    short = torch.tensor([1.0, -3.0, 0.15625, 2.0**-126, -(2.0**100), 0.0])
    assert torch.equal(Short(short[None, None, None]).take(every)[0, 0, 0], short)


def test_what_is_no_number_stays_what_it_is():
    given = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    found = Short(given[None, None, None]).take(every)[0, 0, 0]
    assert found[:2].tolist() == [math.inf, -math.inf]
    assert math.isnan(found[2])


def test_a_part_is_that_part_of_the_whole():
    tensor = torch.randn(2, 3, 5, 7).transpose(1, 2)
    short = Short(tensor)
    assert short.shape == tensor.shape
    rows = torch.tensor([2, 0])
    found = short.take(lambda part: part[1, 2:4].index_select(-2, rows))
    assert torch.equal(found, short.take(every)[1, 2:4][:, rows])
    assert sum(part.nbytes for part in short.holds()) == tensor.numel() * 3


def products():
    yield "plain", lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True)
    yield "causal", lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True, is_causal=True)
    mask = torch.rand(B, 1, Q, K) > 0.3
    yield "mask", lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True, attn_mask=mask)
    added = torch.randn(1, H, Q, K)
    yield "added", lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True, attn_mask=added)
    yield "ours", lambda *t: attention(*t, score=ScaledDot(0.3, softcap=5.0)).output
    yield "additive", lambda *t: attention(*t, score=Additive(torch.ones(D))).output
    yield "flex", lambda *t: flex_attention(*t, enable_gqa=True, score_mod=lambda s, b, h, i, j: s - (i - j).abs() / 9)


@pytest.mark.parametrize(("name", "function"), list(products()), ids=[name for name, _ in products()])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_weights_are_those_of_all_bits_within_what_the_note_says(as_installed, name, function, spread):
    given = tensors(spread)
    [whole], [short] = seen(function, *given), seen(function, *given, exact=0)
    assert whole.note is None
    assert "queries and keys are kept in 24 bits a number" in short.note
    assert short.nbytes < whole.nbytes
    said = re.search(r"no score is off by more than (\S+)", short.note)
    if name in ("additive", "flex"):
        assert said is None
        assert "2⁻¹⁶" in short.note
    # If the error of every score is at most e, each weight changes at most by the factor exp(2 e).
    error = 2 * float(said[1]) if said else 1e-3
    for item in range(B):
        found, expected = short.weights(batch=item), whole.weights(batch=item)
        assert not torch.equal(found, expected)
        assert bool(((found - expected).abs() <= expected * math.expm1(error) + 1e-7).all())
        assert short.check(batch=item) < 1e-3
        torch.testing.assert_close(found.sum(-1), torch.ones(H, Q))
    for head in range(H):
        torch.testing.assert_close(short.weights(head=head, queries=[5, 3]), short.weights()[head, [5, 3]])


def test_no_score_is_off_by_more_than_is_said():
    for scale, spread in ((1.0, 0.01), (0.125, 3.0), (-2.0, 30.0)):
        query, key = (torch.randn(1, 2, 200, 16) * spread for _ in range(2))
        short = [Short(tensor).take(every).double() for tensor in (query, key)]
        off = scale * (short[0] @ short[1].mT - query.double() @ key.double().mT)
        bound = worst_score(query, key, scale)
        assert float(off.abs().max()) <= bound
        assert bound < 100 * float(off.abs().max())


def test_a_call_that_is_small_enough_is_kept_to_the_last_bit():
    given = tensors()
    size = given[0].nbytes + given[1].nbytes
    [whole] = seen(lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True), *given, exact=size)
    [short] = seen(lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True), *given, exact=size - 1)
    assert whole.note is None
    numbers = size // 4
    assert whole.nbytes - short.nbytes == numbers
    assert f"{3 * numbers / 2**20:.3g} MiB instead of {size / 2**20:.3g}" in short.note


def test_what_was_kept_in_fewer_bits_may_be_changed_by_its_owner():
    query, key, value = tensors(key_heads=H)
    [record] = seen(F.scaled_dot_product_attention, query, key, value, exact=0)
    before = record.weights()
    query.zero_()
    key.zero_()
    assert torch.equal(record.weights(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_stay_as_they_are(dtype):
    given = [tensor.to(dtype) for tensor in tensors(key_heads=H)]
    [record] = seen(F.scaled_dot_product_attention, *given, exact=0)
    assert record.note is None


def test_a_score_of_ones_own_keeps_all_its_bits():
    def far(query, key):
        return -torch.cdist(query, key)

    [record] = seen(lambda *t: attention(*t, score=far).output, *tensors(key_heads=H), exact=0)
    assert record.note is None


def test_queries_that_are_their_own_keys_are_kept_once():
    x = torch.randn(1, 2, 5, 4)
    found = shorter(Exact(x), Exact(x), 1.0)
    assert found.query is found.key
    # Keys that share no tensor storage with the queries are encoded separately from the queries.
    assert shorter(Exact(x), Exact(x.transpose(1, 2).contiguous().transpose(1, 2)[..., :4]), 1.0) is not None
    assert shorter(Exact(x), Exact(x.flip(-1).flip(-1)), None).key is not found.key


def test_notes_are_put_together():
    [record] = seen(lambda *t: F.scaled_dot_product_attention(*t, dropout_p=0.5), *tensors(key_heads=H), exact=0)
    assert record.note.startswith("dropout was active")
    assert "24 bits" in record.note


def test_a_bad_bound_is_refused():
    with (
        pytest.raises(ValueError, match="exact is a number of bytes, 0 or more, got -1"),
        watch(nn.Linear(1, 1), exact=-1),
    ):
        pass
