"""Keys that no query may attend are computed from the mask, so that NaN in these keys has no effect on a kernel."""

import math
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import forked
import regard
from regard.core.backends import sdpa
from regard.core.clauses import clauses
from regard.core.masks import Band
from regard.core.nonfinite import seen_by_any, seen_keys
from regard.core.problem import build

QUERIES, KEYS = 5, 11
IDS = (
    torch.tensor([[3, 1, 1, 7, 3], [2, 2, 2, 2, 2]]),
    torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3], [2, 3] * 5 + [2]]),
)
MASKS = {
    "causal": regard.causal(),
    "causal, shifted": regard.causal(3),
    "ahead": regard.window(1, 2, offset=4),
    "lengths": regard.padding([4, 0]),
    "two windows apart": regard.window(1, 0) & regard.window(0, 1, offset=4),
    "segments": regard.segments(*IDS),
    "one row of ids for all": regard.segments(torch.tensor([1, 1, 2, 3, 3]), IDS[1]),
    "dense": torch.arange(2 * QUERIES * KEYS).reshape(2, 1, QUERIES, KEYS) % 17 == 3,
}


@pytest.mark.parametrize("name", MASKS)
def test_seen_keys_are_those_some_query_may_attend(name: str) -> None:
    shape = (2, 3, QUERIES, KEYS)
    mask = MASKS[name] if isinstance(MASKS[name], regard.Mask) else regard.dense(MASKS[name])
    mask = mask.aligned(shape)
    allowed = mask.allowed(range(QUERIES), range(KEYS), torch.device("cpu")).expand(shape)
    seen = seen_keys(clauses(mask, QUERIES, KEYS), QUERIES, KEYS, torch.device("cpu"))
    assert torch.equal(seen.expand(2, 3, KEYS), allowed.any(-2))


@pytest.mark.parametrize("name", [*MASKS, "both", "either", "not"])
def test_a_mask_says_how_many_matrices_it_is(name: str) -> None:
    mask = {
        "both": regard.causal() & regard.segments(*IDS),
        "either": regard.padding([4, 0]) | torch.ones(3, 1, KEYS, dtype=torch.bool),
        "not": ~regard.padding([4, 0]),
    }.get(name, MASKS.get(name))
    mask = (mask if isinstance(mask, regard.Mask) else regard.dense(mask)).aligned((2, 3, QUERIES, KEYS))
    assert mask.lead() == mask.allowed(range(QUERIES), range(KEYS), torch.device("cpu")).shape[:-2]


@pytest.mark.parametrize(
    "bias", [regard.alibi([0.1, 0.2, 0.3]), regard.relative(torch.zeros(5)), regard.relative(torch.zeros(3, 5))]
)
def test_a_bias_says_how_many_matrices_it_is(bias: regard.Bias) -> None:
    bias = bias.aligned((2, 3, QUERIES, KEYS))
    assert bias.lead() == bias.values(range(QUERIES), range(KEYS), torch.float32).shape[:-2]


def test_no_mask_of_keys_no_list_of_them() -> None:
    assert seen_keys(clauses(regard.causal(6), QUERIES, KEYS), QUERIES, KEYS, torch.device("cpu")) is None
    assert seen_keys(clauses(None, QUERIES, KEYS), QUERIES, KEYS, torch.device("cpu")) is None


@st.composite
def ids_and_band(draw: st.DrawFn) -> tuple[Tensor, Tensor, int | None, int | None]:
    """Sample segment ids of queries and keys in any order, and both bounds of a band."""
    queries, keys = (
        torch.tensor(draw(st.lists(st.lists(st.integers(-3, 3), min_size=n, max_size=n), min_size=2, max_size=2)))
        for n in (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    )
    bound = st.none() | st.integers(-9, 9)
    return queries, keys, draw(bound), draw(bound)


@given(ids_and_band())
def test_a_key_of_a_packed_sequence_is_seen_where_a_query_of_its_segment_is_near(drawn: tuple) -> None:
    query_ids, key_ids, low, high = drawn
    mask = regard.segments(query_ids, key_ids) & Band(low, high)
    queries, keys = query_ids.shape[-1], key_ids.shape[-1]
    found = clauses(mask.aligned((2, 1, queries, keys)), queries, keys)
    assert found.separate
    seen = seen_keys(found, queries, keys, torch.device("cpu")).expand(2, 1, keys)
    for b in range(2):
        for j in range(keys):
            near = [
                i
                for i in range(queries)
                if query_ids[b, i] == key_ids[b, j]
                and (low is None or j - i >= low)
                and (high is None or j - i <= high)
            ]
            assert bool(seen[b, 0, j]) == bool(near)


def test_packed_self_attention_looks_for_nothing() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]])
    mask = (regard.segments(ids, ids) & regard.causal()).aligned((2, 3, QUERIES, QUERIES))
    assert seen_keys(clauses(mask, QUERIES, QUERIES), QUERIES, QUERIES, torch.device("cpu")) is None
    ahead = (regard.segments(ids, ids) & regard.causal(-2)).aligned((2, 3, QUERIES, QUERIES))
    seen = seen_keys(clauses(ahead, QUERIES, QUERIES), QUERIES, QUERIES, torch.device("cpu"))
    assert seen[:, 0].tolist() == [[False, False, True, False, False], [False, False, True, False, False]]


CHECKED = torch.arange(QUERIES)[:, None] % 2 == torch.arange(KEYS) % 2
TOGETHER = {  # keys that no mask alone hides from all queries, but several masks together or a bias of −inf do
    "two dense": (CHECKED & (torch.arange(QUERIES)[:, None] != 2)) & regard.dense(torch.arange(KEYS) != 3)
    & regard.dense(torch.arange(QUERIES)[:, None] < torch.arange(KEYS)),
    "dense in a band": CHECKED & regard.window(0, 0, offset=3),
    "dense in a padded band": CHECKED & regard.causal(3) & regard.padding([4, 9]),
    "segments and dense": regard.segments(*IDS) & CHECKED,
    "two segments": regard.segments(*IDS) & regard.segments(torch.arange(QUERIES), torch.arange(KEYS) % 2 * 4),
    "or": regard.window(0, 0, offset=2) | (regard.padding([1, 3]) & regard.causal()),
    "not": ~regard.causal(4) & ~regard.padding([6, 7]),
    "bias": torch.zeros(QUERIES, KEYS).masked_fill(torch.arange(KEYS) % 3 == 1, -math.inf),
    "bias of a head": torch.arange(3.0)[:, None, None].expand(3, QUERIES, KEYS).masked_fill(
        (torch.arange(3)[:, None, None] == 1) & (torch.arange(KEYS) > 4), -math.inf),
    "bias and mask": torch.zeros(QUERIES, KEYS).masked_fill(CHECKED, -math.inf),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_keys_closed_by_several_rules_together_are_found_too(name: str) -> None:
    query, key, value = torch.randn(2, 3, QUERIES, 7), torch.randn(2, 3, KEYS, 7), torch.randn(2, 3, KEYS, 7)
    thing = TOGETHER[name]
    bias = thing if isinstance(thing, Tensor) else None
    mask = regard.causal(2) if name == "bias and mask" else thing if bias is None else None
    problem = build(query, key, value, regard.ScaledDot(), regard.Softmax(), mask, bias, 0.0, None, None)
    open_ = torch.ones(2, 3, QUERIES, KEYS, dtype=torch.bool)
    if mask is not None:
        open_ &= mask.aligned(open_.shape).allowed(range(QUERIES), range(KEYS), torch.device("cpu"))
    if bias is not None:
        open_ &= bias != -math.inf
    seen = open_.any(-2)
    assert not seen.all()
    assert torch.equal(seen_by_any(problem).expand(2, 3, KEYS), seen)


COMPILED = """
import math, torch, regard
query, key, value = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 7)
i, j = torch.arange(5)[:, None], torch.arange(11)
closed = (j > 8) | (j == 5)
calls = {
    "padding": {"mask": regard.padding(torch.tensor([4, 9]))},
    "or": {"mask": regard.dense(~closed & (j < 3)) | (regard.dense(~closed) & regard.causal(2))},
    "together": {"mask": regard.dense((j != 5) | (i < 1)) & regard.window(3, 1, offset=3)},
    "bias": {"bias": torch.zeros(5, 11).masked_fill(closed, -math.inf)},
}
for name, settings in calls.items():
    attend = lambda *tensors: regard.attention(*tensors, **settings).output
    clean = attend(query, key, value)
    spoilt_key, spoilt_value = key.clone(), value.clone()
    if name == "padding":
        spoilt_key[0, :, 4:], spoilt_value[1, :, 9:] = torch.nan, torch.inf
    else:
        spoilt_key[0, :, 9:], spoilt_value[1, :, 9:] = torch.nan, torch.inf
        spoilt_value[:, :, 5] = torch.nan
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, spoilt_key, spoilt_value), clean, msg=lambda text: name + ": " + text)
"""


@pytest.mark.process
def test_compiled_attention_is_clean_of_closed_keys_too() -> None:
    """Runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests."""
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed_as", [torch.finfo(torch.float64).min, -math.inf])
@pytest.mark.parametrize("how", ["dense", "lengths and dense", "shifted", "window", "window, all rows see"])
def test_what_a_kernel_makes_of_an_empty_row_does_not_change_the_meaning(
    monkeypatch: pytest.MonkeyPatch, how: str, closed_as: float
) -> None:
    """cuDNN replaces masked scores by the lowest number, so that an empty row returns the mean of all values; other
    kernels might return NaN."""
    query, key, value = (torch.randn(2, 3, 600, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    closed = torch.ones(600, 600, dtype=torch.bool).tril(-2)
    closed[40] = False
    mask = {
        "dense": regard.dense(closed),
        "lengths and dense": regard.padding([0, 500]) & regard.dense(torch.ones(600, 600, dtype=torch.bool).tril()),
        "shifted": regard.causal(-3),
        "window": regard.window(4, 0, offset=-2),
        # All queries attend to some key; only the padding rows of the last block of the band attend none.
        "window, all rows see": regard.window(4, 0),
    }[how]
    calls = []

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, *_: object, scale: float, **__: object
    ) -> Tensor:
        calls.append(attn_mask.shape)
        scores = query @ key.mT * scale
        return torch.softmax(torch.where(attn_mask, scores, closed_as), -1) @ value

    def learn(backend: str) -> list[Tensor]:
        output = regard.attention(query, key, value, mask=mask, backend=backend).output
        return [
            output,
            *torch.autograd.grad(output, (query, key, value), torch.cos(torch.arange(4.0)).expand_as(output)),
        ]

    true = learn("reference")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    # Disables the split of calls by sequence, which is not used on CUDA.
    monkeypatch.setattr(sdpa, "_sequences", lambda problem, found: None)
    spoilt = learn("sdpa")
    monkeypatch.setattr(sdpa, "_wants_full_rows", lambda device: True)
    found = learn("sdpa")
    assert calls
    if how != "window, all rows see":
        assert not torch.allclose(spoilt[0], true[0])
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b)
