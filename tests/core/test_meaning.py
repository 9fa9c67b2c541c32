"""The same semantics on every path: masks, empty rows, masked NaN and ties, forward and backward."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import regard
from cases import (
    BATCH,
    GROUPS,
    HEADS,
    KEYS,
    QUERIES,
    SCORES,
    TYPICAL_PATHS,
    Learned,
    attend,
    learn,
    paths,
    randn,
    slopes_like,
)  # fmt: skip

every_path = pytest.mark.parametrize("path", TYPICAL_PATHS)
POISONS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def inputs_of(path: str, **sizes: int) -> list[torch.Tensor]:
    return SCORES[path.split("/")[1]].inputs(**sizes)


def assert_same(learned: Learned, expected: Learned) -> None:
    """Compare output, weights and gradients of two calls."""
    for result, wanted in zip(learned.everything, expected.everything, strict=True):
        assert_close(result, wanted)


# Tests of queries with no key to attend (empty rows).


def rows_closed_by(how: str) -> dict:
    """Return arguments with which queries 1 and 3 have nothing to attend."""
    keep = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    keep[[1, 3]] = False
    query_ids = torch.tensor([0, 9, 0, 9, 0]).expand(BATCH, QUERIES)
    return {
        "dense": {"mask": regard.dense(keep)},
        "per head": {"mask": keep.expand(BATCH, HEADS, QUERIES, KEYS)},
        "segments": {"mask": regard.segments(query_ids, torch.zeros(BATCH, KEYS, dtype=torch.long))},
        "bias": {"bias": torch.zeros(QUERIES, KEYS, dtype=torch.float64).masked_fill(~keep, -math.inf)},
    }[how]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dense", "per head", "segments", "bias"])
@every_path
def test_empty_rows_give_zeros_and_touch_nothing(path: str, how: str) -> None:
    inputs = inputs_of(path)
    learned = learn(path, inputs, **rows_closed_by(how))
    for result in (learned.output, learned.weights, learned.gradients[0]):
        assert torch.count_nonzero(result[:, :, [1, 3]]) == 0

    # The rows that attend to keys have the same results as in a call without the empty rows.
    expected = learn(path, inputs, rows=[0, 2, 4])
    assert_close(learned.output[:, :, [0, 2, 4]], expected.output[:, :, [0, 2, 4]])
    assert_close(learned.weights[:, :, [0, 2, 4]], expected.weights[:, :, [0, 2, 4]])
    for gradient, wanted in zip(learned.gradients, expected.gradients, strict=True):
        assert_close(gradient, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        regard.padding(torch.zeros(BATCH, dtype=torch.long)),
        regard.causal(offset=-QUERIES),
        regard.window(0, 0, offset=KEYS),
        regard.causal() & ~regard.causal(),
        torch.zeros(BATCH, 1, QUERIES, KEYS, dtype=torch.bool),
    ],
    ids=["padding", "causal", "window", "contradiction", "dense"],
)
@every_path
def test_a_mask_that_closes_everything_gives_zeros(path: str, mask: object) -> None:
    learned = learn(path, inputs_of(path), mask=mask)
    for result in learned.everything:
        assert torch.count_nonzero(result) == 0
    if learned.log_prob is not None:
        assert torch.count_nonzero(learned.log_prob) == 0


@pytest.mark.parametrize("path", [path.replace("sdpa", "auto") for path in TYPICAL_PATHS])
def test_the_query_of_an_empty_row_does_not_matter(path: str) -> None:
    query, *rest = inputs_of(path)
    clean = learn(path, [query, *rest], mask=regard.causal(offset=-2))
    query = query.clone()
    query[:, :, :2] = math.nan
    assert_same(learn(path, [query, *rest], mask=regard.causal(offset=-2)), clean)


# NaN and Inf at masked keys. torch's own kernels propagate them, so `sdpa` refuses and `auto` chooses another backend.

CLEAN_PATHS = [path.replace("sdpa", "auto") for path in TYPICAL_PATHS]


def closed_keys(how: str) -> tuple[object, torch.Tensor]:
    """Return a mask, and the keys (batch, group, key) that it masks for every query."""
    closed = torch.zeros(BATCH, GROUPS, KEYS, dtype=torch.bool)
    if how == "padding":
        closed[0, :, 4:] = closed[1, :, 6:] = True
        return regard.padding(torch.tensor([4, 6])), closed
    if how == "causal":
        closed[:, :, QUERIES:] = True
        return regard.causal(), closed
    if how == "window":
        closed[:, :, :2] = True
        return regard.window(1, 0, offset=3), closed
    closed[0, 1, 2] = closed[1, 0, 0] = closed[1, 2, 5:] = True
    return ~closed.repeat_interleave(HEADS // GROUPS, dim=1).unsqueeze(2), closed


@pytest.mark.slow
@pytest.mark.parametrize("poison", [*POISONS, "large"])
@pytest.mark.parametrize("how", ["padding", "causal", "window", "per head"])
@pytest.mark.parametrize("path", CLEAN_PATHS)
def test_what_a_masked_key_holds_has_no_effect(path: str, how: str, poison: str) -> None:
    mask, closed = closed_keys(how)
    query, key, value, *parameters = inputs_of(path)
    clean = learn(path, [query, key, value, *parameters], mask=mask)

    key, value = key.clone(), value.clone()
    key[closed] = value[closed] = POISONS.get(poison, 1.7e308)  # 1.7e308 is finite, but its products overflow
    poisoned = learn(path, [query, key, value, *parameters], mask=mask)

    assert_same(poisoned, clean)
    assert torch.count_nonzero(poisoned.gradients[1][closed]) == 0
    assert torch.count_nonzero(poisoned.gradients[2][closed]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("mask", [regard.causal(), regard.window(2, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("path", CLEAN_PATHS)
def test_a_future_key_has_no_effect_on_the_past(path: str, mask: object, poison: str, where: str) -> None:
    inputs = inputs_of(path, queries=KEYS)
    past = slice(0, KEYS - 2)
    clean = learn(path, inputs, rows=past, mask=mask)

    inputs[{"key": 1, "value": 2}[where]][:, :, KEYS - 2] = POISONS[poison]
    poisoned = learn(path, inputs, rows=past, mask=mask)

    # NaN or Inf in a later key changes neither output, weights nor gradients of earlier queries.
    for result, expected in zip(poisoned.everything[:3], clean.everything[:3], strict=True):
        assert_close(result[:, :, past], expected[:, :, past])


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("where", ["key", "value"])
def test_sdpa_refuses_what_its_kernels_would_let_through(poison: str, where: str) -> None:
    inputs = inputs_of("sdpa/scaled/softmax")
    inputs[{"key": 1, "value": 2}[where]][0, 0, 6, 1] = POISONS[poison]
    with pytest.raises(ValueError, match=r"sdpa.*NaN or Inf"):
        attend("sdpa/scaled/softmax", inputs, mask=regard.causal())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["padding", "dense", "window", "bias", "not", "or", "causal and segments"])
def test_numbers_that_overflow_behind_a_mask_have_no_effect(how: str, dtype: torch.dtype) -> None:
    """Masked keys have the dtype's largest number, as in an uninitialised cache; torch's kernels add −inf to +inf."""
    closed = torch.arange(20) >= 12
    bias = torch.zeros(1, 20).masked_fill(closed, -torch.inf)
    calls = {"padding": {"mask": regard.padding(12)}, "dense": {"mask": ~closed[None]}, "bias": {"bias": bias}}
    calls["window"] = {"mask": regard.window(4, 0) & regard.padding(12)}
    # Only query 0 is in the segment of the masked keys, which all come after it.
    ids = torch.where(torch.arange(20) > 0, 1, 2), torch.where(closed, 2, 1)
    calls["causal and segments"] = {"mask": regard.causal() & regard.segments(*ids)}
    calls |= {"not": {"mask": ~regard.dense(closed[None])}, "or": {"mask": regard.padding(12) | regard.padding(10)}}
    query, key, value = (torch.randn(1, 2, 20, 8).to(dtype) for _ in range(3))
    # The call without extreme numbers at masked keys may use another backend, so results may differ by rounding.
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]

    def learned() -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (query * 10, key, value)]
        output = regard.attention(*leaves, **calls[how]).output
        return output, *torch.autograd.grad(output.sum(), leaves)

    clean = learned()
    key[..., closed, :] = value[..., closed, :] = torch.finfo(dtype).max
    for found, wanted in zip(learned(), clean, strict=True):
        assert (found - wanted).norm() <= near * wanted.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["causal", "window", "per head", "future"])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked", "flex", "auto"])
def test_what_a_masked_key_holds_has_no_effect_on_cuda(backend: str, how: str) -> None:
    """NaN is in keys masked for every query; for `reference` and `blocked` also in a key of the last query alone."""
    if how == "future" and backend not in ("reference", "blocked"):
        pytest.skip("fused CUDA kernels multiply whole tiles: docs/attention.md says what that means")
    mask, closed = closed_keys("causal" if how == "future" else how)
    past = slice(0, QUERIES - 1) if how == "future" else slice(None)
    query, key, value = (tensor.float() for tensor in SCORES["scaled"].inputs(size=16, value_size=16))
    clean = attend("reference/scaled/softmax", [query, key, value], mask=mask).output
    if how == "future":
        closed[:, :, QUERIES - 1] = True
    key[closed] = value[closed] = math.nan
    mask = mask.cuda() if isinstance(mask, torch.Tensor) else mask
    poisoned = attend(f"{backend}/scaled/softmax", [tensor.cuda() for tensor in (query, key, value)], mask=mask).output
    assert_close(poisoned.cpu()[:, :, past], clean[:, :, past], rtol=2e-3, atol=2e-3)


# Tests that sequences give the same results padded, packed into one row, and one by one.

LENGTHS = [3, 5, 2]


def padded(packed: torch.Tensor) -> torch.Tensor:
    """Unpack (1, h, total, d) to (sequences, h, longest, d), with zeros after each sequence."""
    parts = [part.squeeze(0).transpose(0, 1) for part in packed.split(LENGTHS, dim=2)]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2)


def repacked(results: torch.Tensor) -> torch.Tensor:
    return torch.cat([result[None, :, :length] for result, length in zip(results, LENGTHS, strict=True)], dim=2)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@every_path
def test_padded_is_packed_is_one_by_one(path: str, causal: bool) -> None:
    total = sum(LENGTHS)
    leaves = [leaf.requires_grad_() for leaf in inputs_of(path, batch=1, queries=total, keys=total)]
    (query, key, value), parameters = leaves[:3], leaves[3:]
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).unsqueeze(0)

    def both(mask: object) -> object:
        return mask if not causal else regard.causal() if mask is None else mask & regard.causal()

    padded_inputs = [padded(query), padded(key), padded(value), *parameters]
    sequences = zip(*(tensor.split(LENGTHS, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = {
        "packed": attend(path, leaves, mask=both(regard.segments(ids, ids))).output,
        "padded": repacked(attend(path, padded_inputs, mask=both(regard.padding(torch.tensor(LENGTHS)))).output),
        "one by one": torch.cat(
            [attend(path, [*sequence, *parameters], mask=both(None)).output for sequence in sequences], dim=2
        ),
    }
    gradients = {
        name: torch.autograd.grad((output * slopes_like(output)).sum(), leaves, materialize_grads=True)
        for name, output in outputs.items()
    }
    for name in ("packed", "padded"):
        assert_close(outputs[name], outputs["one by one"])
        for gradient, expected in zip(gradients[name], gradients["one by one"], strict=True):
            assert_close(gradient, expected)


# Tests that several masks intersect.


@every_path
def test_masks_intersect(path: str) -> None:
    random = randn(BATCH, HEADS, QUERIES, KEYS, seed=7) > -0.5
    query, key = torch.arange(QUERIES).unsqueeze(1), torch.arange(KEYS)
    near = (query - 2 <= key) & (key <= query + 1)
    short = key < torch.tensor([4, 6]).reshape(BATCH, 1, 1, 1)
    inputs = inputs_of(path)

    together = regard.causal() & regard.window(2, 1) & regard.padding(torch.tensor([4, 6])) & random
    expected = learn(path, inputs, mask=random & near & short & (key <= query))
    assert_same(learn(path, inputs, mask=together), expected)

    # The mask is also intersected with a bias of −inf.
    closed = torch.zeros(BATCH, HEADS, QUERIES, KEYS, dtype=torch.float64).masked_fill(~random, -math.inf)
    most = regard.causal() & regard.window(2, 1) & regard.padding(torch.tensor([4, 6]))
    assert_same(learn(path, inputs, mask=most, bias=closed), expected)


FAR = (1031, 1301)  # queries and keys of many blocks, and more pairs than any backend computes at once


def far_masks() -> dict[str, object]:
    packed, shuffled = (
        torch.arange(FAR[1]) // 150,
        torch.randperm(FAR[1], generator=torch.Generator().manual_seed(1)) // 150,
    )
    sparse = torch.zeros(2, 2, *FAR, dtype=torch.bool)
    sparse[0, 1, 100:400, 700:900] = sparse[1, :, 900:] = True
    lengths = regard.padding(torch.tensor([200, 1300]))
    segments = regard.segments(packed[: FAR[0]].expand(2, -1), packed.expand(2, -1))
    return {
        "causal": regard.causal(offset=100),
        "window": regard.window(30, 60, offset=200),
        "padding": lengths,
        "padding by head": regard.padding(torch.tensor([[200, 0], [1301, 900]])),
        "segments": segments,
        "one question": regard.segments(torch.zeros(2, FAR[0]).long(), (torch.arange(FAR[1]) // 600).expand(2, -1)),
        "shuffled segments": regard.segments(shuffled[: FAR[0]].expand(2, -1), shuffled.expand(2, -1)),
        "dense": regard.dense(sparse),
        "one row": torch.arange(FAR[1]) > 500,
        "outside a window": ~regard.window(400, 300),
        "not dense": ~regard.dense(sparse),
        "future": ~regard.causal() & lengths,
        "either": regard.window(10, 10) | segments,
        "neither": ~(regard.causal() | lengths),
        "all": regard.causal() & regard.window(500, 9) & segments & lengths & sparse.any(dim=1, keepdim=True),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mask", far_masks())
def test_masks_over_many_blocks(mask: str) -> None:
    """Fully masked blocks are skipped, and fully visible ones computed without the mask: the result is the same."""
    path = "reference/scaled/softmax"
    inputs = inputs_of(path, heads=2, groups=1, queries=FAR[0], keys=FAR[1], size=2, value_size=2)

    def results(backend: str) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        chosen = path.replace("reference", backend)
        attended = attend(chosen, leaves, mask=far_masks()[mask], weights=regard.received())
        loss = (attended.output * slopes_like(attended.output)).sum() + attended.weights.square().sum()
        return [attended.output, attended.weights, *torch.autograd.grad(loss, leaves)]

    wanted = results("reference")
    for backend in ("sdpa", "blocked"):
        for result, expected in zip(results(backend), wanted, strict=True):
            assert_close(result, expected, msg=lambda message, backend=backend: f"{backend}: {message}")


@every_path
def test_a_bias_of_minus_infinity_masks(path: str) -> None:
    bias = randn(BATCH, HEADS, QUERIES, KEYS, seed=8)
    closed = randn(BATCH, HEADS, QUERIES, KEYS, seed=9) > 0.3
    closed[:, 2, 3] = True
    slopes: dict[str, torch.Tensor] = {}
    runs = {}
    for name, given in {"bias": bias.masked_fill(closed, -math.inf), "mask": bias}.items():
        leaf = given.clone().requires_grad_()
        mask = ~closed if name == "mask" else None
        runs[name] = learn(path, inputs_of(path), mask=mask, bias=given)
        attended = attend(path, inputs_of(path), mask=mask, bias=leaf)
        learnt = attended.output if attended.log_prob is None else attended.log_prob
        loss = (learnt * slopes_like(learnt)).sum()
        (slopes[name],) = torch.autograd.grad(loss, leaf)
    assert_same(runs["bias"], runs["mask"])
    assert_close(slopes["bias"], slopes["mask"])
    assert torch.count_nonzero(slopes["bias"][closed]) == 0


# Tests of ties, zero vectors and large scores.


@pytest.mark.parametrize("estimator", ["straight_through", "reinforce", "gumbel"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_the_first_of_equal_keys_wins(backend: str, score: str, estimator: str) -> None:
    """All keys are equal, in several blocks, and the first 701 are masked."""
    keys, first = 2003, 701
    query, key, value, *parameters = SCORES[score].inputs(keys=keys, size=3, value_size=2)
    # Keys and queries have one nonzero entry, so scores are not rounded: sums in another order, as in a shorter block,
    # would break ties.
    key, query = torch.zeros_like(key).index_fill(-1, torch.tensor(0), 1), query * torch.tensor([1.0, 0.0, 0.0])
    attended = attend(
        f"{backend}/{score}/hard", [query, key, value, *parameters],
        normalize=regard.Hard(estimator, sample=False), mask=torch.arange(keys) >= first, weights=regard.top(1),
    )  # fmt: skip
    chosen = value[:, :, first].repeat_interleave(HEADS // GROUPS, dim=1).unsqueeze(2)
    assert (attended.weights.indices == first).all()
    assert_close(attended.output, chosen.expand_as(attended.output))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", paths(scores=["cosine"]))
def test_cosine_of_a_zero_vector_is_zero(path: str, dtype: torch.dtype) -> None:
    query, key, value = (tensor.to(dtype) for tensor in SCORES["cosine"].inputs())
    query[0, :, 1] = key[1, :, 2] = 0
    learned = learn(path, [query, key, value])

    if path.endswith("softmax"):  # a query of zeros has the score 0 for every key
        assert_close(learned.weights[0, :, 1], torch.full((HEADS, KEYS), 1 / KEYS, dtype=dtype))
    for result in learned.everything:
        assert result.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("path", paths(scores=["dot", "additive"]))
def test_scores_of_1e5_stay_finite(path: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(path, size=16)
    if "dot" in path:
        inputs[:2] = [80 * tensor.sign() for tensor in inputs[:2]]
        inputs[1][:, :, 3] = inputs[0][:, ::2, 2]
        assert (inputs[0][:, ::2] @ inputs[1].mT).max() > 1e5
    else:
        inputs[3] = 7000 * inputs[3].sign()
    inputs = [tensor.to(dtype) for tensor in inputs]
    learned = learn(path, inputs)
    for result in learned.everything:
        assert result.isfinite().all()
    if "dot" in path:  # every score is a multiple of 12,800, so there is no rounding
        path = path.replace(path.split("/")[0], "reference", 1)
        expected = attend(path, [tensor.double() for tensor in inputs], weights=regard.full())
        assert_close(learned.output.double(), expected.output, rtol=2e-2, atol=2e-2)
        assert_close(learned.weights.double(), expected.weights, rtol=2e-2, atol=2e-2)


def test_what_autocast_makes_infinite_behind_a_causal_mask_has_no_effect() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
    value[:, :, 3] = 1e6  # this value becomes infinite when autocast rounds it to float16
    with torch.autocast("cpu", dtype=torch.float16):
        found = regard.attention(query, key, value, mask=regard.causal()).output
    assert found[:, :, :3].isfinite().all()
    assert not found[:, :, 3].isfinite().any()


@pytest.mark.parametrize("keys", [1, 5, 15, 16, 33])
@pytest.mark.parametrize("score", [regard.ScaledDot(), regard.Cosine()], ids=["scaled", "cosine"])
@pytest.mark.parametrize("heads", [True, False], ids=["heads", "headless"])
def test_a_query_of_nan_gives_nan_however_few_the_keys(keys: int, score: Any, heads: bool) -> None:
    """A query with NaN gives NaN, although torch's CPU kernels return 0 if there are fewer keys than a SIMD vector
    holds."""
    query, key = torch.randn(3, 8), torch.randn(keys, 8)
    query[1, 2] = math.nan
    if heads:
        query, key = query.expand(2, 2, -1, -1), key.expand(2, 2, -1, -1)
    output = regard.attention(query, key, key, score=score).output
    assert output[..., 1, :].isnan().all()
    assert output[..., 0::2, :].isfinite().all()


# Tests of scales of 0 or less, and of NaN and Inf in inputs.


@pytest.mark.parametrize("backend", ["auto", "sdpa", "blocked", "reference"])
@pytest.mark.parametrize(
    "mask", [None, regard.causal(), regard.causal() & regard.padding([20])], ids=["", "causal", "both"]
)
@pytest.mark.parametrize("score", [regard.ScaledDot(-0.5), regard.ScaledDot(0.0), regard.Cosine(-2.0)], ids=str)
def test_a_scale_may_be_negative_or_nothing(score: regard.Cosine, mask: object, backend: str) -> None:
    query, key, value = (torch.randn(1, 2, 32, 8, requires_grad=True) for _ in range(3))
    allowed = torch.ones(32, 32, dtype=torch.bool)
    if mask is not None:
        allowed = allowed.tril()
    if isinstance(mask, regard.Mask) and mask.tensors():
        allowed = allowed & (torch.arange(32) < 20)
    q, k, v = (t.detach().double().requires_grad_() for t in (query, key, value))
    unit = torch.nn.functional.normalize if isinstance(score, regard.Cosine) else lambda x, dim: x
    scores = unit(q, dim=-1) @ unit(k, dim=-1).mT * score.scale
    true = torch.where(allowed, scores, -math.inf).softmax(-1) @ v
    found = regard.attention(query, key, value, score=score, mask=mask, backend=backend).output
    assert_close(found.double(), true, atol=1e-5, rtol=1e-5)
    for a, b in zip(
        torch.autograd.grad(found.sin().sum(), (query, key, value)),
        torch.autograd.grad(true.sin().sum(), (q, k, v)),
        strict=True,
    ):
        assert_close(a.double(), b, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("far", [0.0, 50.0])
@pytest.mark.parametrize("length", [2, 300, 1100])
@pytest.mark.parametrize("backend", ["auto", "additive", "blocked"])
def test_a_query_of_nan_spoils_its_own_row_alone(backend: str, length: int, far: float) -> None:
    query, key, value = torch.randn(length, 8) - far, torch.randn(length, 8) + far, torch.randn(length, 4)
    score = regard.Additive(torch.randn(8))
    wanted = regard.attention(query, key, value, score=score, backend="reference").output
    query[0] = math.nan
    found = regard.attention(query, key, value, score=score, backend=backend).output
    assert found[0].isnan().all()
    assert_close(found[1:], wanted[1:], atol=1e-4, rtol=1e-4)


def by_hand(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query @ key.mT / (query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :])


def lifted(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return scores that are only defined for vectors of norm up to 4; for others the square root is NaN."""
    rest = [(16 - rows.square().sum(-1, keepdim=True)).sqrt() for rows in (query, key)]
    return query @ key.mT + rest[0] @ rest[1].mT


@pytest.mark.parametrize("poison", [math.nan, math.inf, 60000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("score", [by_hand, lifted, lambda query, key: torch.sin(query @ key.mT)])
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_padding_does_not_reach_a_score_of_ones_own(
    backend: str, score: object, dtype: torch.dtype, poison: float
) -> None:
    """NaN or Inf in padding has no effect, even if a score divides by the norm of a key or uses half precision."""
    query, key, value = (torch.randn(1, 2, 20, 4).clamp(-1.5, 1.5).to(dtype) for _ in range(3))
    query.requires_grad_()
    key[:, :, 15:] = poison
    output = regard.attention(query, key, value, score=score, mask=regard.padding([15]), backend=backend).output
    alone = regard.attention(query, key[:, :, :15], value[:, :, :15], score=score, backend=backend).output
    near = 1e-5 if dtype == torch.float32 else 5e-3
    assert_close(output, alone, atol=near, rtol=near)
    for found, wanted in zip(
        torch.autograd.grad(output.sum(), query), torch.autograd.grad(alone.sum(), query), strict=True
    ):
        assert_close(found, wanted, atol=near, rtol=near)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_row_with_nothing_to_attend_does_not_reach_a_score_of_ones_own(backend: str) -> None:
    """A NaN key that only query 7 attends changes no other query's result, not even that of query 0, which attends to
    nothing."""
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[0] = mask[7] = mask[1:, 5:] = False
    mask[7, 5] = True
    query, key, value = (torch.randn(1, 1, 8, 4) for _ in range(3))
    key[..., 5:, :] = math.nan
    key.requires_grad_()
    output = regard.attention(query, key, value, score=by_hand, mask=mask, backend=backend).output
    (found,) = torch.autograd.grad(output[..., :7, :].square().sum(), key)
    fewer = regard.attention(query[..., 1:7, :], key[..., :5, :], value[..., :5, :], score=by_hand).output
    (wanted,) = torch.autograd.grad(fewer.square().sum(), key)
    assert_close(found[..., :5, :], wanted[..., :5, :])
