"""Gradients against finite differences, against the reference, and within an error budget in half precision."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import regard
from cases import FUSED_PATHS, NORMALIZERS, SCORES, TYPICAL_PATHS, attend, mlp, paths, randn, slopes_like
from regard.core.backends import blocked

SMALL = {"batch": 1, "heads": 2, "groups": 1, "queries": 3, "keys": 4, "size": 2, "value_size": 1}
SMOOTH = [name for name in NORMALIZERS if name != "hard"]  # hard attention has estimators instead: test_hard.py
SMOOTH_PATHS = [path for path in TYPICAL_PATHS if not path.endswith("hard")]
REQUESTS = {
    "full": regard.full(),
    "rows": regard.rows([2, 0]),
    "top": regard.top(2),
    "received": regard.received(),
    "entropy": regard.entropy(),
}


def leaves_of(score: str, **sizes: int) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in SCORES[score].inputs(**(SMALL | sizes))]


def closed() -> Tensor:
    """A mask with an empty row and an open one."""
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    return mask.expand(1, 2, 3, 4)


# Finite differences


@pytest.mark.parametrize("path", paths(normalizers=SMOOTH))
def test_gradcheck(path: str) -> None:
    leaves = leaves_of(path.split("/")[1])
    assert gradcheck(lambda *inputs: attend(path, inputs).output, leaves)
    assert gradcheck(lambda *inputs: attend(path, inputs, mask=closed()).output, leaves, fast_mode=True)


@pytest.mark.parametrize("path", [path for path in paths(normalizers=SMOOTH) if path.startswith("reference")])
def test_gradgradcheck(path: str) -> None:
    leaves = leaves_of(path.split("/")[1])
    assert gradgradcheck(lambda *inputs: attend(path, inputs, mask=closed()).output, leaves, fast_mode=True)


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("path", SMOOTH_PATHS)
def test_gradcheck_through_the_weights(path: str, request_name: str) -> None:
    def asked(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        attended = attend(path, inputs, mask=closed(), weights=REQUESTS[request_name])
        return attended.output, attended.weights.values if request_name == "top" else attended.weights

    leaves = leaves_of(path.split("/")[1])
    assert gradcheck(asked, leaves, fast_mode=True)
    # The weights do not know the values.
    slope = torch.autograd.grad(asked(*leaves)[1].sum(), leaves[2], materialize_grads=True)[0]
    assert torch.count_nonzero(slope) == 0


@pytest.mark.parametrize("path", [path for path in FUSED_PATHS if path in SMOOTH_PATHS])
def test_blocks_and_grouped_heads_learn_as_the_reference(path: str) -> None:
    """Sizes that no block divides, several blocks long."""
    score = path.split("/")[1]
    sizes = {"heads": 4, "groups": 2, "queries": 307, "keys": 1301, "size": 3, "value_size": 2}
    results = {}
    for chosen in (path, path.replace(path.split("/")[0], "reference", 1)):
        leaves = leaves_of(score, **sizes)
        attended = attend(chosen, leaves, mask=regard.causal(offset=900), weights=regard.entropy())
        loss = (attended.output * slopes_like(attended.output)).sum() + attended.weights.sum()
        results[chosen] = [attended.output, attended.weights, *torch.autograd.grad(loss, leaves)]
    for result, expected in zip(*results.values(), strict=True):
        assert_close(result, expected, rtol=1e-8, atol=1e-9)


# Learned biases


BIASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], object]]] = {
    "dense": ((2, 6, 5, 7), lambda leaf: leaf),
    "per head": ((6, 1, 1), lambda leaf: leaf),
    "per key": ((2, 1, 1, 7), lambda leaf: leaf),
    "per pair": ((5, 7), lambda leaf: leaf),
    "number": ((), lambda leaf: leaf),
    "alibi": ((6,), lambda leaf: regard.alibi(leaf)),
    "relative": ((6, 5), lambda leaf: regard.relative(leaf)),
    "relative, shared": ((7,), lambda leaf: regard.relative(leaf)),
}


def alone(shape: tuple[int, ...], build: Callable[[Tensor], object], leaf: Tensor) -> Tensor:
    """The bias as a dense tensor, written out."""
    i, j = torch.arange(5).unsqueeze(1), torch.arange(7)
    if isinstance(build(leaf), Tensor):
        return leaf.expand(2, 6, 5, 7)
    if shape == (6,):
        return -leaf.reshape(6, 1, 1) * (i - j).abs()
    reach = shape[-1] // 2
    return leaf[..., (j - i).clamp(-reach, reach) + reach]


@pytest.mark.parametrize("mask", [None, regard.causal(offset=1)], ids=["open", "causal"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("path", SMOOTH_PATHS)
def test_a_learned_bias_learns(path: str, bias: str, mask: object) -> None:
    shape, build = BIASES[bias]
    inputs = SCORES[path.split("/")[1]].inputs()

    def slope(chosen: str, make: Callable[[Tensor], object]) -> Tensor:
        leaf = randn(*shape, seed=40).requires_grad_()
        attended = attend(chosen, inputs, mask=mask, bias=make(leaf), weights=regard.received())
        loss = (attended.output * slopes_like(attended.output)).sum() + attended.weights.square().sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return gradient

    dense_reference = slope(path.replace(path.split("/")[0], "reference", 1), lambda leaf: alone(shape, build, leaf))
    assert torch.count_nonzero(dense_reference) > 0 or bias in ("number", "per head")  # softmax sees no constant
    assert_close(slope(path, build), dense_reference)


# Whatever a custom score closes over


class Judge(nn.Module):
    """A score with parameters of its own, some of them shared between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(13, 4), nn.Linear(13, 4, bias=False)
        self.readout = nn.Linear(4, 1)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.readout((self.left(query).unsqueeze(-2) + self.right(key).unsqueeze(-3)).tanh()).squeeze(-1)


def closure(kind: str) -> tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]:
    """A score, and the leaves it depends on."""
    if kind == "module":
        judge = Judge().double()
        return judge, list(judge.parameters())
    if kind == "bound method":
        judge = Judge().double()
        return judge.forward, list(judge.parameters())
    leaves = [randn(4, 26, seed=50), randn(4, seed=51), randn(4, seed=52)]
    for leaf in leaves:
        leaf.requires_grad_()
    if kind == "leaves":
        return mlp(*leaves), leaves
    layer, shift, readout = (leaf.tanh() for leaf in leaves)
    if kind == "made from leaves":
        return mlp(layer, shift, readout), leaves
    parts = {"parts": [mlp(layer, shift, readout)], "scale": leaves[1].exp().sum()}
    return lambda query, key: parts["parts"][0](query, key) * parts["scale"] / 10, leaves  # held inside containers


@pytest.mark.parametrize("normalize", SMOOTH)
@pytest.mark.parametrize("kind", ["leaves", "made from leaves", "module", "bound method", "containers"])
def test_a_closure_learns_on_blocked_as_on_reference(kind: str, normalize: str) -> None:
    inputs = SCORES["scaled"].inputs()

    def slopes(backend: str) -> list[Tensor]:
        torch.manual_seed(5)
        score, leaves = closure(kind)
        attended = regard.attention(
            *inputs, score=score, normalize=NORMALIZERS[normalize].record, mask=regard.causal(offset=2),
            weights=regard.received(), backend=backend,
        )  # fmt: skip
        loss = (attended.output * slopes_like(attended.output)).sum() + attended.weights.square().sum()
        return list(torch.autograd.grad(loss, leaves))

    for gradient, expected in zip(slopes("blocked"), slopes("reference"), strict=True):
        assert torch.count_nonzero(expected) > 0 or expected.shape == (1,)  # softmax does not see the readout's bias
        assert_close(gradient, expected)


# Half precision: an error budget, not a tolerance


def plain_scores(name: str, query: Tensor, key: Tensor, *parameters: Tensor) -> Tensor:
    if name == "additive":
        return (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh() @ parameters[0]
    if name == "mlp":
        return mlp(*parameters)(query, key)
    if name == "bilinear":
        query = query @ parameters[0]
    if name == "cosine":
        query, key = nn.functional.normalize(query, dim=-1), nn.functional.normalize(key, dim=-1)
    scores = query @ key.mT
    scale = {"scaled": query.shape[-1] ** -0.5, "softcap": 0.5, "cosine": 3.0}.get(name, 1.0)
    return 2 * torch.tanh(scores * scale / 2) if name == "softcap" else scores * scale


def plain_weights(name: str, scores: Tensor) -> Tensor:
    """The textbook formula of each normaliser, in the dtype of the scores."""
    if name == "softmax":
        return scores.softmax(dim=-1)
    if name == "sigmoid":
        return (scores - 0.5).sigmoid()
    ordered = scores.sort(dim=-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1).to(scores)
    if name == "sparsemax":  # Martins and Astudillo 2016, algorithm 1
        sums = ordered.cumsum(dim=-1) - 1
        support = (count * ordered > sums).sum(dim=-1, keepdim=True)
        return (scores - sums.gather(-1, support - 1) / support).clamp(min=0)
    ordered, scores = ordered / 2, scores / 2  # Peters, Niculae and Martins 2019, algorithm 2
    mean, square = ordered.cumsum(dim=-1) / count, ordered.square().cumsum(dim=-1) / count
    threshold = mean - ((1 - count * (square - mean.square())) / count).clamp(min=torch.finfo(scores.dtype).tiny).sqrt()
    support = (threshold <= ordered).sum(dim=-1, keepdim=True)
    return (scores - threshold.gather(-1, support - 1)).clamp(min=0).square()


BUDGETED = [
    *paths(scores=["dot", "scaled", "softcap", "cosine", "bilinear", "additive", "mlp"], normalizers=["softmax"]),
    *paths(scores=["scaled"], normalizers=["sparsemax", "entmax1.5", "sigmoid"]),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("path", BUDGETED)
def test_half_precision_keeps_its_error_budget(path: str, dtype: torch.dtype) -> None:
    _, score, normalize = path.split("/")
    sizes = {"batch": 2, "heads": 3, "groups": 3, "queries": 61, "keys": 127, "size": 32, "value_size": 17}
    inputs = [tensor.to(dtype) for tensor in SCORES[score].inputs(**sizes)]

    def plain(query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor) -> Tensor:
        return plain_weights(normalize, plain_scores(score, query, key, *parameters)) @ value

    def results(function: Callable[..., Tensor], precision: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(precision).requires_grad_() for tensor in inputs]
        output = function(*leaves)
        return [output, *torch.autograd.grad((output * slopes_like(output)).sum(), leaves)]

    exact = results(plain, torch.float64)
    budget = [(a - b).norm() for a, b in zip(results(plain, dtype), exact, strict=True)]
    ours = [
        (a - b).norm() for a, b in zip(results(lambda *given: attend(path, given).output, dtype), exact, strict=True)
    ]

    assert ours[0] <= 2 * budget[0], f"output: {ours[0]:.2e}, plain {budget[0]:.2e}"
    names = ["query", "key", "value", "first parameter", "second parameter", "third parameter"]
    for name, error, allowed in zip(names, ours[1:], budget[1:], strict=False):
        assert error <= 3 * allowed, f"gradient of {name}: {error:.2e}, plain {allowed:.2e}"


@pytest.mark.parametrize("score", ["additive", "bilinear"])
def test_what_is_learned_in_half_precision_is_summed_in_single(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many blocks: sums in bfloat16 would stop growing."""
    monkeypatch.setattr(blocked, "_BUDGET", 2**14)
    sizes = {"batch": 1, "heads": 1, "groups": 1, "queries": 160, "keys": 160, "size": 16, "value_size": 4}
    inputs = [tensor.to(torch.bfloat16) for tensor in SCORES[score].inputs(**sizes)]

    def learned(backend: str, dtype: torch.dtype) -> list[Tensor]:
        tensors = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        output = attend(f"{backend}/{score}/softmax", tensors).output
        return list(torch.autograd.grad((output * slopes_like(output)).sum(), tensors[3:]))

    exact = learned("reference", torch.float64)
    ours, plain = (learned(backend, torch.bfloat16) for backend in ("blocked", "reference"))
    for found, budget, wanted in zip(ours, plain, exact, strict=True):
        assert (found - wanted).norm() <= 3 * (budget - wanted).norm()


def _changing() -> dict[str, tuple[Tensor, dict[str, object], str]]:
    """A tensor of a call, the call, and what it is called there."""
    lengths, allowed, bias, weight = torch.tensor([4]), torch.ones(6, 6) > 0, torch.zeros(6, 6), torch.ones(8)
    matrix = torch.eye(8)
    return {
        "lengths": (lengths, {"mask": regard.padding(lengths)}, "mask"),
        "allowed": (allowed, {"mask": allowed}, "mask"),
        "bias": (bias, {"bias": bias}, "bias"),
        "weight": (weight, {"score": regard.Additive(weight)}, "score"),
        "a score of one's own": (matrix, {"score": lambda query, key: (query @ matrix) @ key.mT}, "score"),
    }


@pytest.mark.parametrize("asked", [None, regard.entropy(), regard.received()], ids=["output", "entropy", "received"])
@pytest.mark.parametrize("what", _changing())
def test_what_the_way_back_reads_again_must_not_change(what: str, asked: object) -> None:
    tensor, arguments, name = _changing()[what]
    x = torch.randn(1, 1, 6, 8, requires_grad=True)
    found = regard.attention(x, x, x, weights=asked, backend="blocked", **arguments)
    tensor.copy_(tensor.logical_not() if tensor.dtype == torch.bool else tensor - 1)
    with pytest.raises(RuntimeError, match=rf"^{name} .* was changed in place"):
        torch.autograd.grad((found.output if asked is None else found.weights).sum(), x)


@pytest.mark.parametrize("asked", [None, regard.entropy()], ids=["output", "entropy"])
def test_a_score_may_keep_statistics(asked: object) -> None:
    """What it changes itself at every call is nobody's change in between."""
    calls = torch.zeros(())
    x = torch.randn(1, 1, 40, 8, requires_grad=True)

    def score(query: Tensor, key: Tensor) -> Tensor:
        calls.add_(1)
        return query @ key.mT

    found = regard.attention(x, x, x, score=score, weights=asked, backend="blocked")
    total = (found.output if asked is None else found.weights).square().sum()
    first, second = (torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(2))
    assert_close(first, second)
    assert calls > 0


state = torch.ones(())
OTHERS = {
    "keys": lambda query, key: (query @ key.mT).softmax(-1) * 10,
    "queries": lambda query, key: query @ key.mT - (query @ key.mT).mean(-2, keepdim=True),
    "itself": lambda query, key: state.mul_(1.1) * (query @ key.mT),
}


@pytest.mark.parametrize("asked", [None, regard.entropy()], ids=["output", "entropy"])
@pytest.mark.parametrize("frozen", [False, True], ids=["learned", "frozen"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["function", "autocast"])
def test_scores_written_in_a_loop_keep_their_layers(wrapped: bool, frozen: bool, asked: object) -> None:
    """By the way back the loop's variable is its last layer, for all of them."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).requires_grad_(not frozen)
    x = torch.randn(1, 1, 40, 8, requires_grad=True)

    def learned(backend: str) -> tuple[Tensor, ...]:
        rows, total = x, torch.zeros(())
        for layer in layers:
            score = lambda query, key: layer(query) @ key.mT  # noqa: B023, E731
            with torch.autocast("cpu", enabled=wrapped):
                found = regard.attention(rows, rows, rows, score=score, weights=asked, backend=backend)
            rows = found.output
            total = total if asked is None else total + found.weights.float().sum()
        return torch.autograd.grad(rows.float().square().sum() + total, [x, *(() if frozen else layers.parameters())])

    near = 5e-2 if wrapped else 1e-5
    for found, wanted in zip(learned("blocked"), learned("reference"), strict=True):
        assert (found - wanted).norm() <= near * wanted.norm() + 1e-6


WRAPPED = {
    "partial": lambda score: functools.partial(score, factor=1.0),
    "called by another": lambda score: lambda query, key: score(query, key),
    "an argument": lambda score: functools.partial(lambda inner, query, key: inner(query, key), score),
    "a keyword": lambda score: functools.partial(lambda query, key, inner: inner(query, key), inner=score),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_scores_held_by_others_keep_their_layers_too(wrapped: str) -> None:
    layers = [nn.Linear(8, 8).requires_grad_(False) for _ in range(2)]
    x = torch.randn(1, 1, 40, 8, requires_grad=True)

    def learned(backend: str) -> Tensor:
        total = torch.zeros(())
        for layer in layers:
            score = WRAPPED[wrapped](lambda query, key, factor=1.0: layer(query) @ key.mT * factor)  # noqa: B023
            total = total + regard.attention(x, x, x, score=score, backend=backend).output.square().sum()
        return torch.autograd.grad(total, x)[0]

    assert_close(learned("blocked"), learned("reference"), rtol=1e-4, atol=1e-4)


class Sharp(nn.Module):
    """A score with settings that are no tensors, and a layer that may be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.centred, self.layer = 1.0, False, nn.Linear(8, 8).requires_grad_(False)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores = self.layer(query) @ key.mT * self.factor
        return scores - scores.mean(-1, keepdim=True) if self.centred else scores


@pytest.mark.parametrize("asked", [None, regard.entropy()], ids=["output", "entropy"])
@pytest.mark.parametrize("held", ["module", "bound method"])
@pytest.mark.parametrize("what", ["factor", "layer"])
def test_a_score_that_is_another_by_the_way_back_is_an_error(what: str, held: str, asked: object) -> None:
    """Its gradients would be those of another function."""
    x, module = torch.randn(1, 1, 40, 8, requires_grad=True), Sharp()
    score = module if held == "module" else module.forward
    found = regard.attention(x, x, x, score=score, weights=asked, backend="blocked")
    total = (found.output if asked is None else found.weights).square().sum()
    torch.autograd.grad(total, x, retain_graph=True)
    if what == "factor":
        module.factor = 0.1
    else:
        module.layer = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"^score is another function by now"):
        torch.autograd.grad(total, x)


def test_a_score_is_asked_again_whether_it_looks_at_pairs_alone() -> None:
    x, score = torch.randn(1, 4, 1500, 8), Sharp()
    assert regard.explain(x, x, x, score=score).backend == "blocked"
    score.centred = True
    assert regard.explain(x, x, x, score=score).backend == "reference"


def test_a_score_that_takes_no_single_pair_is_asked_with_more() -> None:
    """Statistics over the keys of a block are others than those over all."""
    norm = nn.BatchNorm1d(8)
    score = lambda query, key: query @ norm(key.flatten(0, -2)).view_as(key).mT  # noqa: E731
    x = torch.randn(1, 1, 3000, 8)
    assert regard.explain(x, x, x, score=score).backend == "reference"
    norm.eval()
    assert regard.explain(x, x, x, score=score).backend == "blocked"


@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Sparsemax(), regard.Entmax(1.3)], ids=lambda n: n.name)
@pytest.mark.parametrize("score", [regard.ScaledDot(4.0), lambda query, key: 4 * query @ key.mT], ids=["own", "custom"])
def test_a_backward_pass_inside_autocast_is_as_exact_as_outside(score: object, normalize: regard.Softmax) -> None:
    base = [torch.randn(1, 2, 64, 16).bfloat16().float() for _ in range(3)]

    def learned(inside: bool) -> list[Tensor]:
        tensors = [tensor.clone().requires_grad_() for tensor in base]
        with torch.autocast("cpu", torch.bfloat16):
            out = regard.attention(*tensors, score=score, normalize=normalize, backend="blocked").output
            if inside:
                return list(torch.autograd.grad(out, tensors, slopes_like(out)))
        return list(torch.autograd.grad(out, tensors, slopes_like(out)))

    for found, wanted in zip(learned(True), learned(False), strict=True):
        assert_close(found, wanted)


class Counting(nn.Module):
    """A score that keeps statistics in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        self.calls.add_(1)
        torch.mean(query.detach().flatten(0, -2), 0, out=self.last)
        return self.norm(query.flatten(0, -2)).view_as(query) @ key.mT


def test_trying_a_score_leaves_no_trace() -> None:
    x, score, alone = torch.randn(2, 2, 64, 8) + 3, Counting(), Counting()
    state = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in score.named_buffers()}
    regard.explain(x, x, x, score=score)
    assert all(torch.equal(tensor, before[name]) for name, tensor in score.named_buffers())
    regard.attention(x, x, x, score=score)
    alone(x, x)
    assert_close(dict(score.named_buffers()), dict(alone.named_buffers()))
    with pytest.raises(RuntimeError, match="by itself"):
        regard.attention(x, x, x, score=lambda query, key: fail(score(query, key)))
    assert_close(dict(score.named_buffers()), dict(alone.named_buffers()))
    assert torch.equal(torch.get_rng_state(), state)


def fail(scores: Tensor) -> Tensor:
    raise RuntimeError("by itself")


def by_distance(query: Tensor, key: Tensor) -> Tensor:
    i, j = torch.arange(query.shape[-2])[:, None], torch.arange(key.shape[-2])
    return query @ key.mT - (i - j).abs()


def not_itself(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT).masked_fill(torch.eye(query.shape[-2], key.shape[-2], dtype=torch.bool), -torch.inf)


def inside_a_ball(query: Tensor, key: Tensor) -> Tensor:
    """NaN for the numbers that it would be asked with."""
    return 40 * query @ (key - key.mean(-2, keepdim=True)).mT + (1 - query.square().sum(-1, keepdim=True)).sqrt()


@pytest.mark.parametrize("score", [by_distance, not_itself, inside_a_ball])
def test_a_score_of_positions_or_of_all_keys_runs_whole(score: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.rand(1, 4, 1500, 8) * 0.2
    assert regard.explain(x, x, x, score=score).backend == "reference"


def with_attributes() -> Callable[[Tensor, Tensor], Tensor]:
    factor = torch.ones(())

    def inner(rows: Tensor) -> Tensor:
        inner.calls += 1
        return rows * factor * inner.gain

    inner.calls, inner.gain = 0, 0.5
    return lambda query, key: inner(query) @ key.mT


def by_identity() -> Callable[[Tensor, Tensor], Tensor]:
    factor = torch.ones(())

    def inner(rows: Tensor) -> Tensor:
        return rows * factor

    table = {inner: 0.5}
    chosen = nn.functional.relu
    return lambda query, key: table[inner] * inner(query) @ key.mT * (1 if chosen is nn.functional.relu else -1)


def of_a_shared_variable() -> Callable[[Tensor, Tensor], Tensor]:
    state = None

    def prepare(rows: Tensor) -> None:
        nonlocal state
        state = rows.tanh()

    def score(query: Tensor, key: Tensor) -> Tensor:
        prepare(query)
        return state @ key.mT

    return score


@pytest.mark.parametrize("make", [with_attributes, by_identity, of_a_shared_variable])
def test_a_score_of_functions_learns_as_on_reference(make: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> None:
    x = torch.randn(1, 2, 60, 8, requires_grad=True)

    def learned(backend: str) -> Tensor:
        found = regard.attention(x, x, x, score=make(), weights=regard.entropy(), backend=backend)
        return torch.autograd.grad(found.output.square().sum() + found.weights.sum(), x)[0]

    assert_close(learned("blocked"), learned("reference"), rtol=1e-4, atol=1e-4)


def test_scores_written_at_one_place_are_not_taken_for_one() -> None:
    x = torch.randn(1, 4, 1500, 8)
    chosen = [
        regard.explain(x, x, x, score=lambda query, key: inner(query, key)).backend  # noqa: B023
        for inner in (lambda query, key: query @ key.mT, lambda query, key: (query @ key.mT).softmax(-1))
    ]
    assert chosen == ["blocked", "reference"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_score_that_draws_runs_whole_and_is_tried_without_a_draw(device: str) -> None:
    x = torch.randn(1, 4, 1500, 8, device=device)
    torch.manual_seed(3)
    wanted = torch.rand(3, device=device)
    torch.manual_seed(3)
    plan = regard.explain(x, x, x, score=lambda query, key: (query + 0.01 * torch.randn_like(query)) @ key.mT)
    assert torch.equal(torch.rand(3, device=device), wanted)
    assert plan.backend == "reference"
    assert "draws random numbers" in plan.refused["blocked"]


def test_a_score_that_gives_keys_by_queries_is_told() -> None:
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match=r"queries, keys\) = \(1, 2, 2, 3\).*got \(1, 2, 3, 2\)"):
        regard.attention(x, x, x, score=lambda query, key: key @ query.mT)


def positive(query: Tensor, key: Tensor) -> Tensor:
    assert query.min() >= 0
    return query @ key.mT


def test_a_score_that_does_not_take_any_numbers_runs_as_it_is() -> None:
    x = torch.rand(1, 1, 2000, 8)
    assert regard.explain(x, x, x, score=positive).backend == "blocked"
    norm = nn.BatchNorm1d(8)  # in training it takes no single row
    score = lambda query, key: norm(query.flatten(0, -2)).view_as(query) @ key.mT  # noqa: E731
    assert regard.attention(x[..., :9, :], x, x, score=score).output.shape == (1, 1, 9, 8)


@pytest.mark.parametrize("looks_at", OTHERS)
def test_a_score_that_is_not_of_its_pair_alone_runs_whole(looks_at: str) -> None:
    """Cut into blocks it would be another score: `auto` takes the plain form, and `blocked` says why not."""
    score, x = OTHERS[looks_at], torch.randn(1, 1, 2000, 8)
    assert regard.explain(x, x, x, score=score).backend == "reference"
    assert regard.explain(x, x, x, score=lambda query, key: query @ key.mT).backend == "blocked"
    with pytest.raises(ValueError, match=r"depends on the other pairs|changes what it reads"):
        regard.attention(x[..., :9, :], x[..., :9, :], x[..., :9, :], score=score, backend="blocked")


def test_queries_whose_weights_are_computed_again_must_not_change() -> None:
    """Values may: weights do not depend on them."""
    x, value = torch.randn(1, 1, 600, 8, requires_grad=True), torch.randn(1, 1, 600, 8)
    weights = regard.attention(x, x, value, weights=regard.entropy(), backend="sdpa").weights
    (wanted,) = torch.autograd.grad(weights.sum(), x, retain_graph=True)
    value.zero_()
    assert_close(torch.autograd.grad(weights.sum(), x, retain_graph=True)[0], wanted)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match=r"^query .* was changed in place"):
        torch.autograd.grad(weights.sum(), x)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("alpha", [1.0000001, 1.00001, 1.2, 3.0, 4.0])
def test_entmax_of_any_alpha_in_single_precision(alpha: float, backend: str) -> None:
    """Powers of 1 / (α − 1) are steep, and so are those of their derivatives."""
    base = [torch.randn(1, 2, 50, 8, dtype=torch.float64) for _ in range(3)]

    def learned(dtype: torch.dtype, backend: str) -> list[Tensor]:
        tensors = [tensor.to(dtype).requires_grad_() for tensor in base]
        out = regard.attention(*tensors, normalize=regard.Entmax(alpha), weights=regard.full(), backend=backend)
        assert_close(out.weights.sum(-1), torch.ones_like(out.weights[..., 0]), atol=1e-4, rtol=0)
        return [out.output, *torch.autograd.grad(out.output.square().sum(), tensors)]

    wanted = learned(torch.float64, "reference")
    for found, true in zip(learned(torch.float32, backend), wanted, strict=True):
        assert found.dtype == torch.float32
        assert (found - true).norm() <= 1e-4 * true.norm()
