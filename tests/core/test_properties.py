"""Properties over random shapes, strides, masks and heads."""

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import oracles
import regard
from cases import NORMALIZERS, SCORES, attend, learn, mlp, paths, randn, slopes_like

sizes = st.integers(1, 7)
offsets = st.integers(-4, 4)
FAST_PATHS = [path for path in paths() if not path.startswith("reference")]


class Shape(NamedTuple):
    batch: int
    heads: int
    groups: int
    queries: int
    keys: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    groups = draw(st.integers(1, 3))
    heads = groups * draw(st.integers(1, 3))
    return Shape(draw(st.integers(1, 3)), heads, groups, draw(sizes), draw(sizes))


# Tensors with other memory layouts, to test that strides do not matter.


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the same numbers in another memory layout."""
    if layout == "transposed":  # in memory as (batch, length, heads, size), as projections of a layer are stored
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "feature first":
        return tensor.mT.contiguous().mT
    if layout == "every other":
        return torch.stack((tensor, torch.full_like(tensor, torch.nan)), dim=-1).flatten(-2)[..., ::2]
    # The tensor is a view of a part of a larger tensor.
    if layout == "slice":
        return torch.nn.functional.pad(tensor, (2, 3, 1, 1), value=torch.nan)[..., 1:-1, 2:-3]
    return tensor


LAYOUTS = ["contiguous", "transposed", "feature first", "every other", "slice"]


# Random masks: an expression is sampled, then converted to a mask of the library and to a predicate of the oracle.


def expressions(shape: Shape) -> st.SearchStrategy[tuple]:
    """Return a strategy of mask expressions: ("causal", offset), …, ("and", left, right), ("or", left, right), ("not",
    inner)."""

    def ids(count: int) -> st.SearchStrategy[list[list[int]]]:
        row = st.lists(st.integers(0, 2), min_size=count, max_size=count)
        return st.lists(row, min_size=shape.batch, max_size=shape.batch)

    lengths = st.lists(st.integers(0, shape.keys), min_size=shape.batch, max_size=shape.batch)
    single = st.one_of(
        st.tuples(st.just("causal"), offsets),
        st.tuples(st.just("window"), st.integers(0, 3), st.integers(0, 3), offsets),
        st.tuples(st.just("padding"), lengths),
        st.tuples(st.just("segments"), ids(shape.queries), ids(shape.keys)),
        st.tuples(st.just("dense"), st.integers(0, 99), st.booleans(), st.booleans(), st.booleans()),
    )
    return st.recursive(
        single,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(["and", "or"]), inner, inner), st.tuples(st.just("not"), inner)
        ),
        max_leaves=5,
    )


def written(expression: tuple | None, shape: Shape) -> tuple[Any, oracles.Allowed]:
    """Return a mask expression as the library's mask and as the oracle's predicate."""
    match expression:
        case None:
            return None, oracles.everywhere
        case "causal", offset:
            return regard.causal(offset=offset), oracles.causal(offset)
        case "window", before, after, offset:
            return regard.window(before, after, offset=offset), oracles.window(before, after, offset)
        case "padding", lengths:
            return regard.padding(torch.tensor(lengths)), oracles.padding(lengths)
        case "segments", query_ids, key_ids:
            return regard.segments(torch.tensor(query_ids), torch.tensor(key_ids)), oracles.segments(query_ids, key_ids)
        case "dense", seed, *shared:
            full = (shape.batch, shape.heads, shape.queries, shape.keys)
            keep = randn(*(1 if one else n for n, one in zip(full, (*shared, False), strict=True)), seed=seed) > 0
            table = keep.expand(full).tolist()
            return regard.dense(keep), lambda b, h, i, j: table[b][h][i][j]
        case "not", inner:
            mask, allowed = written(inner, shape)
            return ~mask, lambda *at: not allowed(*at)
        case combined, *parts:
            (left, first), (right, second) = (written(part, shape) for part in parts)
            if combined == "and":
                return left & right, lambda *at: first(*at) and second(*at)
            return left | right, lambda *at: first(*at) or second(*at)


class Problem(NamedTuple):
    shape: Shape
    size: int
    value_size: int
    seed: int
    layouts: list[str]
    expression: tuple | None

    def inputs(self, score: str) -> list[Tensor]:
        sizes = {"size": self.size, "value_size": self.value_size, "seed": self.seed}
        query, key, value, *parameters = SCORES[score].inputs(**self.shape._asdict(), **sizes)
        tensors = zip((query, key, value), self.layouts, strict=True)
        return [*(laid_out(tensor, layout) for tensor, layout in tensors), *parameters]

    @property
    def mask(self) -> Any:
        return written(self.expression, self.shape)[0]

    @property
    def allowed(self) -> oracles.Allowed:
        return written(self.expression, self.shape)[1]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    shape = draw(shapes())
    layouts = draw(st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3))
    expression = draw(st.none() | expressions(shape))
    return Problem(shape, draw(sizes), draw(sizes), draw(st.integers(0, 9)), layouts, expression)


@pytest.mark.slow
@pytest.mark.parametrize("path", FAST_PATHS)
@settings(max_examples=12)
@given(problem=problems())
def test_every_backend_agrees_with_the_reference(path: str, problem: Problem) -> None:
    backend, score, _ = path.split("/")
    both = (path, path.replace(backend, "reference", 1))
    results, wanted = (learn(each, problem.inputs(score), mask=problem.mask).everything for each in both)
    for result, expected in zip(results, wanted, strict=True):
        assert_close(result, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "blocked"])
@given(problem=problems())
def test_masks_mean_what_their_predicate_says(backend: str, problem: Problem) -> None:
    """Sigmoid gives every allowed pair a weight and every masked pair none, so the weights show the mask."""
    inputs, (batch, heads, _, queries, keys) = problem.inputs("scaled"), problem.shape
    weights = attend(f"{backend}/scaled/sigmoid", inputs, mask=problem.mask, weights=regard.full()).weights
    allowed = problem.allowed
    expected = [
        [[[allowed(b, h, i, j) for j in range(keys)] for i in range(queries)] for h in range(heads)]
        for b in range(batch)
    ]
    assert (weights > 0).tolist() == expected


@pytest.mark.slow
@given(path=st.sampled_from(paths(normalizers=["softmax"])), problem=problems())
def test_softmax_weights_are_a_distribution(path: str, problem: Problem) -> None:
    inputs = problem.inputs(path.split("/")[1])
    weights = attend(path, inputs, mask=problem.mask, weights=regard.full()).weights
    assert (weights >= 0).all()
    assert (weights <= 1 + 1e-12).all()
    sums = weights.sum(dim=-1)
    assert_close(sums, (weights > 0).any(dim=-1).to(sums))


@pytest.mark.slow
# Hard attention is left out: of equal keys it chooses the first, so the order of keys matters.
@pytest.mark.parametrize("path", [path for path in paths() if not path.endswith("hard")])
@settings(max_examples=5)
@given(problem=problems(), random=st.randoms(use_true_random=False))
def test_attention_is_a_bag_of_keys(path: str, problem: Problem, random: Random) -> None:
    """Permuting keys and values together changes nothing, because there are no positions."""
    query, key, value, *parameters = inputs = problem.inputs(path.split("/")[1])
    order = torch.tensor(random.sample(range(problem.shape.keys), problem.shape.keys))
    plain = attend(path, inputs, weights=regard.full())
    shuffled = attend(path, [query, key[:, :, order], value[:, :, order], *parameters], weights=regard.full())
    assert_close(shuffled.output, plain.output)
    assert_close(shuffled.weights, plain.weights[..., order])


@pytest.mark.slow
@given(score=st.sampled_from(sorted(SCORES)), normalize=st.sampled_from(sorted(NORMALIZERS)), problem=problems())
def test_auto_never_changes_the_meaning(score: str, normalize: str, problem: Problem) -> None:
    both = [f"{backend}/{score}/{normalize}" for backend in ("auto", "reference")]
    results, wanted = (learn(path, problem.inputs(score), mask=problem.mask).everything for path in both)
    for result, expected in zip(results, wanted, strict=True):
        assert_close(result, expected, rtol=1e-8, atol=1e-10)


# Tests of particular memory layouts.


@pytest.mark.parametrize("path", paths(scores=["scaled", "cosine", "additive", "mlp"]))
def test_views_of_one_packed_tensor(path: str) -> None:
    """query, key and value are views of one tensor, as of one projection, so it gets all their gradients."""
    parameters = SCORES[path.split("/")[1]].inputs(size=7, heads=3)[3:]
    packed = randn(2, 5, 3 * 3 * 7, seed=60)

    def run(contiguous: bool) -> tuple[Tensor, Tensor]:
        leaf = packed.clone().requires_grad_()
        views = [part.unflatten(-1, (3, 7)).transpose(1, 2) for part in leaf.chunk(3, dim=-1)]
        views = [view.contiguous() for view in views] if contiguous else views
        output = attend(path, [*views, *parameters], mask=regard.causal()).output
        return output, torch.autograd.grad((output * slopes_like(output)).sum(), leaf)[0]

    for result, expected in zip(run(contiguous=False), run(contiguous=True), strict=True):
        assert_close(result, expected)


@pytest.mark.parametrize("path", paths(scores=["scaled", "bilinear", "additive", "mlp"]))
def test_expanded_keys_have_stride_zero(path: str) -> None:
    """Keys and values are expanded over the batch, as in beam search; their gradients are summed over it."""
    query, key, value, *parameters = SCORES[path.split("/")[1]].inputs(batch=3)

    def run(copy: bool) -> list[Tensor]:
        leaves = [key[:1].clone().requires_grad_(), value[:1].clone().requires_grad_()]
        memory = [leaf.expand(3, -1, -1, -1) for leaf in leaves]
        memory = [tensor.contiguous() for tensor in memory] if copy else memory
        output = attend(path, [query, *memory, *parameters]).output
        gradients = torch.autograd.grad((output * slopes_like(output)).sum(), leaves, materialize_grads=True)
        return [output, *gradients]

    for result, expected in zip(run(copy=False), run(copy=True), strict=True):
        assert_close(result, expected)


# Tests of axes that broadcast or are missing.


@pytest.mark.slow
@pytest.mark.parametrize("path", paths(scores=["scaled", "bilinear", "additive", "mlp"]))
def test_leading_axes_broadcast(path: str) -> None:
    query, key, value, *parameters = SCORES[path.split("/")[1]].inputs()
    many = torch.stack([query, query + 1, query - 1])  # queries (3, b, h, q, d) over keys (b, g, k, d)
    attended = attend(path, [many, key, value, *parameters], weights=regard.full())
    for number in range(3):
        single = attend(path, [many[number], key, value, *parameters], weights=regard.full())
        assert_close(attended.output[number], single.output)
        assert_close(attended.weights[number], single.weights)

    lengths = torch.tensor([[4, 7], [1, 0], [6, 2]])  # one length for each entry of the two leading axes
    masked = attend(path, [many, key, value, *parameters], mask=regard.padding(lengths) & regard.causal(1)).output
    for number in range(3):
        mask = regard.padding(lengths[number]) & regard.causal(1)
        assert_close(masked[number], attend(path, [many[number], key, value, *parameters], mask=mask).output)

    one_memory = attend(path, [query, key[:1], value[:1], *parameters]).output
    assert_close(one_memory, attend(path, [query, *(t[:1].expand_as(t) for t in (key, value)), *parameters]).output)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize(
    "path", [path for path in paths() if path.split("/")[1] not in ("bilinear-heads", "additive-heads")]
)
def test_no_head_axis(path: str, axes: int) -> None:
    """Tensors (q, d) and (b, q, d) have one head, and masks have no head axis either."""
    query, key, value, *parameters = SCORES[path.split("/")[1]].inputs(heads=1, groups=1)
    lengths = torch.tensor([4, 6])
    expected = attend(path, [query, key, value, *parameters], mask=regard.padding(lengths), weights=regard.full())
    if axes == 3:
        inputs = [tensor.squeeze(1) for tensor in (query, key, value)]
        attended = attend(path, [*inputs, *parameters], mask=regard.padding(lengths), weights=regard.full())
        assert_close(attended.output, expected.output.squeeze(1))
        assert_close(attended.weights, expected.weights.squeeze(1))
        chances = None if expected.log_prob is None else expected.log_prob.squeeze(1)
    else:
        inputs = [tensor[1, 0] for tensor in (query, key, value)]
        attended = attend(path, [*inputs, *parameters], mask=torch.arange(7) < 6, weights=regard.full())
        assert_close(attended.output, expected.output[1, 0])
        assert_close(attended.weights, expected.weights[1, 0])
        chances = None if expected.log_prob is None else expected.log_prob[1, 0]
    assert_close(attended.log_prob, chances)


@pytest.mark.parametrize("path", paths(scores=["scaled", "cosine", "additive", "mlp"]))
def test_one_query_head_asks_every_key_head(path: str) -> None:
    query, key, value, *parameters = SCORES[path.split("/")[1]].inputs(heads=1)
    shared = attend(path, [query, key, value, *parameters], weights=regard.full())
    copied = attend(path, [query.expand(-1, 3, -1, -1), key, value, *parameters], weights=regard.full())
    assert shared.output.shape == (2, 3, 5, 11)
    assert_close(shared.output, copied.output)
    assert_close(shared.weights, copied.weights)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked", "auto"])
def test_attention_to_one_key_returns_its_value(backend: str) -> None:
    query, key, value = SCORES["scaled"].inputs(keys=1)
    output = regard.attention(query, key, value, backend=backend).output
    assert_close(output, value.repeat_interleave(2, dim=1).expand_as(output))


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_a_score_is_a_function_one_can_call(backend: str) -> None:
    """A score of the library (a `Score` record) and a Python function with the same formula give the same output."""
    for name, case in SCORES.items():
        # A user-defined function has no separate parameters for each head.
        if name.endswith("heads"):
            continue
        query, key, value, *parameters = case.inputs(groups=6)
        record = case.build(*parameters)
        plain = regard.attention(query, key, value, score=lambda q, k, s=record: s(q, k), backend=backend).output
        assert_close(plain, regard.attention(query, key, value, score=record, backend="reference").output, msg=name)


def test_mlp_case_is_what_its_oracle_says() -> None:
    """The score "mlp", a user-defined function of the tests, agrees with the oracle of the same formula."""
    query, key, _, *parameters = SCORES["mlp"].inputs(batch=1, heads=1, groups=1)
    scores = mlp(*parameters)(query, key)[0, 0]
    lists = [tensor.tolist() for tensor in parameters]
    expected = [[oracles.mlp(q, k, *lists) for k in key[0, 0].tolist()] for q in query[0, 0].tolist()]
    assert_close(scores, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])
def test_a_support_wider_than_usual_is_found(alpha: float) -> None:
    """Entmax first searches its threshold among a row's largest scores; here hundreds of keys share the weight."""
    scores = torch.zeros(2, 401, dtype=torch.float64)
    scores[1, :7] = 0.001
    weights = regard.Entmax(alpha)(scores)
    assert_close(weights[0], torch.full((401,), 1 / 401, dtype=torch.float64))
    assert_close(weights.sum(-1), torch.ones(2, dtype=torch.float64))
    assert weights[1].min() > 0
    assert weights[1, 0] > weights[1, -1]


# Tests of reading a block (some rows and columns) of a bias, as backends that compute in blocks do.


@pytest.mark.slow
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4), st.integers(0, 4), offsets)
def test_any_part_of_a_rule_is_that_of_its_distances(q: int, k: int, row: int, column: int, offset: int) -> None:
    table, slopes = randn(2, 5).requires_grad_(), randn(2).requires_grad_()
    rows, columns = range(row, row + q), range(column, column + k)
    distance = [j - i - offset for i in rows for j in columns]
    entries = table[:, [max(-2, min(2, d)) + 2 for d in distance]]
    slanted = -slopes[:, None] * torch.tensor([abs(d) for d in distance], dtype=torch.float64)
    for leaf, bias, exact in (
        (table, regard.relative(table, offset), entries),
        (slopes, regard.alibi(slopes, offset), slanted),
    ):
        upstream = torch.linspace(-1, 1, exact.numel(), dtype=torch.float64).reshape(exact.shape)
        (wanted,) = torch.autograd.grad(exact, leaf, upstream)
        for places in ((rows, columns), (torch.tensor(list(rows), dtype=torch.long), columns)):
            found = bias.values(*places, torch.float64)
            assert_close(found, exact.reshape(2, q, k), rtol=0, atol=0)
            # Rows of the block must be contiguous, because some kernels require it.
            assert found.stride(-1) == 1 or 0 in found.shape
            assert_close(torch.autograd.grad(found, leaf, upstream.reshape(2, q, k))[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_in_half_precision_masks_nothing_that_was_finite(dtype: torch.dtype) -> None:
    numbers = torch.tensor([torch.finfo(torch.float32).min, 3.3e38, 0.1, -torch.inf, torch.nan])
    most = torch.finfo(dtype).max
    dense = regard.core.biases.DenseBias(numbers.expand(1, 5)).values(range(1), range(5), dtype)[0]
    ruled = regard.relative(numbers).values(range(1), range(-2, 3), dtype)[0]
    for found in (dense, ruled):
        assert found.dtype == dtype
        assert found[[0, 2, 3]].tolist() == [-most, torch.tensor(0.1, dtype=dtype).item(), -torch.inf]
        assert found[1].isfinite()
        assert found[4].isnan()
