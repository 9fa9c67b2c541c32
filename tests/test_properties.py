"""Properties over random shapes, strides, masks and heads."""

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


# Strides


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in another memory order."""
    if layout == "transposed":  # as projections leave them: (batch, length, heads, size)
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "feature first":
        return tensor.mT.contiguous().mT
    if layout == "every other":
        return torch.stack((tensor, torch.full_like(tensor, torch.nan)), dim=-1).flatten(-2)[..., ::2]
    if layout == "slice":  # an offset into something larger
        return torch.nn.functional.pad(tensor, (2, 3, 1, 1), value=torch.nan)[..., 1:-1, 2:-3]
    return tensor


LAYOUTS = ["contiguous", "transposed", "feature first", "every other", "slice"]


# Masks: the library's expression beside the oracle's predicate


def masks(shape: Shape) -> st.SearchStrategy[tuple[Any, oracles.Allowed]]:
    def ids(count: int) -> st.SearchStrategy[list[list[int]]]:
        row = st.lists(st.integers(0, 2), min_size=count, max_size=count)
        return st.lists(row, min_size=shape.batch, max_size=shape.batch)

    def segments(of: tuple[list, list]) -> tuple[Any, oracles.Allowed]:
        return regard.segments(torch.tensor(of[0]), torch.tensor(of[1])), oracles.segments(*of)

    def padding(lengths: list[int]) -> tuple[Any, oracles.Allowed]:
        return regard.padding(torch.tensor(lengths)), oracles.padding(lengths)

    def dense(of: tuple[int, tuple[bool, bool, bool]]) -> tuple[Any, oracles.Allowed]:
        seed, shared = of
        full = (shape.batch, shape.heads, shape.queries, shape.keys)
        keep = randn(*(1 if one else n for n, one in zip(full, (*shared, False), strict=True)), seed=seed) > 0
        table = keep.expand(full).tolist()
        return regard.dense(keep), lambda b, h, i, j: table[b][h][i][j]

    bool3 = st.tuples(st.booleans(), st.booleans(), st.booleans())
    lengths = st.lists(st.integers(0, shape.keys), min_size=shape.batch, max_size=shape.batch)
    single = st.one_of(
        offsets.map(lambda o: (regard.causal(offset=o), oracles.causal(o))),
        st.tuples(st.integers(0, 3), st.integers(0, 3), offsets).map(
            lambda w: (regard.window(*w[:2], offset=w[2]), oracles.window(*w))
        ),
        lengths.map(padding),
        st.tuples(ids(shape.queries), ids(shape.keys)).map(segments),
        st.tuples(st.integers(0, 99), bool3).map(dense),
    )

    def both(pair: tuple) -> tuple[Any, oracles.Allowed]:
        (left, open_left), (right, open_right) = pair
        return left & right, lambda *at: open_left(*at) and open_right(*at)

    def either(pair: tuple) -> tuple[Any, oracles.Allowed]:
        (left, open_left), (right, open_right) = pair
        return left | right, lambda *at: open_left(*at) or open_right(*at)

    def negated(one: tuple) -> tuple[Any, oracles.Allowed]:
        return ~one[0], lambda *at: not one[1](*at)

    return st.recursive(
        single,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(both), st.tuples(inner, inner).map(either), inner.map(negated)
        ),
        max_leaves=5,
    )


class Drawn(NamedTuple):
    inputs: list[Tensor]
    mask: Any
    allowed: oracles.Allowed
    shape: Shape


@st.composite
def problems(draw: st.DrawFn, score: str) -> Drawn:
    shape = draw(shapes())
    inputs = SCORES[score].inputs(
        **shape._asdict(), size=draw(sizes), value_size=draw(sizes), seed=draw(st.integers(0, 9))
    )
    inputs[:3] = [laid_out(tensor, draw(st.sampled_from(LAYOUTS))) for tensor in inputs[:3]]
    mask, allowed = draw(st.one_of(st.just((None, oracles.everywhere)), masks(shape)))
    return Drawn(inputs, mask, allowed, shape)


@pytest.mark.parametrize("path", FAST_PATHS)
@settings(max_examples=12)
@given(data=st.data())
def test_every_backend_agrees_with_the_reference(path: str, data: st.DataObject) -> None:
    problem = data.draw(problems(path.split("/")[1]))
    reference = path.replace(path.split("/")[0], "reference")
    results, wanted = (learn(chosen, problem.inputs, mask=problem.mask).everything for chosen in (path, reference))
    for result, expected in zip(results, wanted, strict=True):
        assert_close(result, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@given(data=st.data())
def test_masks_mean_what_their_predicate_says(backend: str, data: st.DataObject) -> None:
    """Sigmoid gives every open pair a weight and every closed pair none: the weights show the mask."""
    problem = data.draw(problems("scaled"))
    attended = attend(f"{backend}/scaled/sigmoid", problem.inputs, mask=problem.mask, weights=regard.full())
    expected = [
        [
            [[problem.allowed(b, h, i, j) for j in range(problem.shape.keys)] for i in range(problem.shape.queries)]
            for h in range(problem.shape.heads)
        ]
        for b in range(problem.shape.batch)
    ]
    assert (attended.weights > 0).tolist() == expected


@given(data=st.data())
def test_softmax_weights_are_a_distribution(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths(normalizers=["softmax"])))
    problem = data.draw(problems(path.split("/")[1]))
    weights = attend(path, problem.inputs, mask=problem.mask, weights=regard.full()).weights
    assert (weights >= 0).all()
    assert (weights <= 1 + 1e-12).all()
    sums = weights.sum(dim=-1)
    assert_close(sums, (weights > 0).any(dim=-1).to(sums))


@pytest.mark.parametrize("path", paths())
@settings(max_examples=12)
@given(data=st.data())
def test_attention_is_a_bag_of_keys(path: str, data: st.DataObject) -> None:
    """Shuffling keys and values together changes nothing; without positions there is no order."""
    problem = data.draw(problems(path.split("/")[1]))
    query, key, value, *parameters = problem.inputs
    order = torch.tensor(data.draw(st.permutations(range(problem.shape.keys))))
    plain = attend(path, problem.inputs, weights=regard.full())
    shuffled = attend(path, [query, key[:, :, order], value[:, :, order], *parameters], weights=regard.full())
    assert_close(shuffled.output, plain.output)
    assert_close(shuffled.weights, plain.weights[..., order])


# Particular layouts


@pytest.mark.parametrize("path", paths(scores=["scaled", "cosine", "additive", "mlp"]))
def test_views_of_one_packed_tensor(path: str) -> None:
    """query, key and value cut out of one projection: their gradients meet in it."""
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
    """One memory read by a whole batch, as in beam search; its gradient is the sum."""
    query, key, value, *parameters = SCORES[path.split("/")[1]].inputs(batch=3)

    def run(copy: bool) -> list[Tensor]:
        leaves = [key[:1].clone().requires_grad_(), value[:1].clone().requires_grad_()]
        memory = [leaf.expand(3, -1, -1, -1) for leaf in leaves]
        memory = [tensor.contiguous() for tensor in memory] if copy else memory
        output = attend(path, [query, *memory, *parameters]).output
        return [output, *torch.autograd.grad((output * slopes_like(output)).sum(), leaves)]

    for result, expected in zip(run(copy=False), run(copy=True), strict=True):
        assert_close(result, expected)


# Axes that broadcast, and axes that are not there


@pytest.mark.parametrize("path", paths(scores=["scaled", "bilinear", "additive", "mlp"]))
def test_leading_axes_broadcast(path: str) -> None:
    query, key, value, *parameters = SCORES[path.split("/")[1]].inputs()
    many = torch.stack([query, query + 1, query - 1])  # (3, b, h, q, d) over (b, g, k, d)
    attended = attend(path, [many, key, value, *parameters], weights=regard.full())
    for number in range(3):
        single = attend(path, [many[number], key, value, *parameters], weights=regard.full())
        assert_close(attended.output[number], single.output)
        assert_close(attended.weights[number], single.weights)
    one_memory = attend(path, [query, key[:1], value[:1], *parameters]).output
    assert_close(one_memory, attend(path, [query, *(t[:1].expand_as(t) for t in (key, value)), *parameters]).output)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize(
    "path", [path for path in paths() if path.split("/")[1] not in ("bilinear-heads", "additive-heads")]
)
def test_no_head_axis(path: str, axes: int) -> None:
    """(q, d) and (b, q, d) mean one head; a mask's axes follow."""
    query, key, value, *parameters = SCORES[path.split("/")[1]].inputs(heads=1, groups=1)
    lengths = torch.tensor([4, 6])
    expected = attend(path, [query, key, value, *parameters], mask=regard.padding(lengths), weights=regard.full())
    if axes == 3:
        inputs = [tensor.squeeze(1) for tensor in (query, key, value)]
        attended = attend(path, [*inputs, *parameters], mask=regard.padding(lengths), weights=regard.full())
        assert_close(attended.output, expected.output.squeeze(1))
        assert_close(attended.weights, expected.weights.squeeze(1))
    else:
        inputs = [tensor[1, 0] for tensor in (query, key, value)]
        attended = attend(path, [*inputs, *parameters], mask=torch.arange(7) < 6, weights=regard.full())
        assert_close(attended.output, expected.output[1, 0])
        assert_close(attended.weights, expected.weights[1, 0])


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


@given(data=st.data())
def test_auto_never_changes_the_meaning(data: st.DataObject) -> None:
    score = data.draw(st.sampled_from(sorted(SCORES)))
    normalize = data.draw(st.sampled_from(sorted(NORMALIZERS)))
    problem = data.draw(problems(score))
    both = [f"{backend}/{score}/{normalize}" for backend in ("auto", "reference")]
    results, wanted = (learn(path, problem.inputs, mask=problem.mask).everything for path in both)
    for result, expected in zip(results, wanted, strict=True):
        assert_close(result, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_a_score_is_a_function_one_can_call(backend: str) -> None:
    """A record and a plain function with the same formula are the same mechanism."""
    for name, case in SCORES.items():
        if name.endswith("heads"):  # a plain function knows no heads
            continue
        query, key, value, *parameters = case.inputs(groups=6)
        record = case.build(*parameters)
        plain = regard.attention(query, key, value, score=lambda q, k, s=record: s(q, k), backend=backend).output
        assert_close(plain, regard.attention(query, key, value, score=record, backend="reference").output, msg=name)


def test_mlp_case_is_what_its_oracle_says() -> None:
    """The hand-written score of these tests agrees with its own oracle, so a failure elsewhere is not its fault."""
    query, key, _, *parameters = SCORES["mlp"].inputs(batch=1, heads=1, groups=1)
    scores = mlp(*parameters)(query, key)[0, 0]
    lists = [tensor.tolist() for tensor in parameters]
    expected = [[oracles.mlp(q, k, *lists) for k in key[0, 0].tolist()] for q in query[0, 0].tolist()]
    assert_close(scores, torch.tensor(expected, dtype=torch.float64))
