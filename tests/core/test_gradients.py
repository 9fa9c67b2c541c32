"""Gradients against finite differences, against the reference, and within an error budget in half precision."""

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
# All normalisers except hard attention, which is not differentiable: see test_hard.py.
SMOOTH = [name for name in NORMALIZERS if name != "hard"]
WHOLE_JACOBIAN = {*paths(["scaled", "additive-heads"]), *paths(["bilinear", "mlp"], ["softmax"])}
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
    """Return a mask with an empty row and a full row."""
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    return mask.expand(1, 2, 3, 4)


# Tests of gradients against finite differences.


@pytest.mark.slow
@pytest.mark.parametrize("path", paths(normalizers=SMOOTH))
def test_gradcheck(path: str) -> None:
    """Check every element of the Jacobian for typical paths, and one random direction for all other paths."""
    leaves = leaves_of(path.split("/")[1])
    assert gradcheck(lambda *inputs: attend(path, inputs).output, leaves, fast_mode=path not in WHOLE_JACOBIAN)
    assert gradcheck(lambda *inputs: attend(path, inputs, mask=closed()).output, leaves, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in paths(normalizers=SMOOTH) if path.startswith("reference")])
def test_gradgradcheck(path: str) -> None:
    leaves = leaves_of(path.split("/")[1])
    assert gradgradcheck(lambda *inputs: attend(path, inputs, mask=closed()).output, leaves, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "request_name"),
    # Each "backend/score/normaliser" is tested with two kinds of requested weights, so that each kind occurs with every
    # backend and normaliser.
    [(path, name) for n, path in enumerate(SMOOTH_PATHS) for m, name in enumerate(REQUESTS) if (m - n) % 5 < 2],
)
def test_gradcheck_through_the_weights(path: str, request_name: str) -> None:
    def asked(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        attended = attend(path, inputs, mask=closed(), weights=REQUESTS[request_name])
        return attended.output, attended.weights.values if request_name == "top" else attended.weights

    leaves = leaves_of(path.split("/")[1])
    assert gradcheck(asked, leaves, fast_mode=True)
    # Attention weights do not depend on the values: this gradient is 0.
    slope = torch.autograd.grad(asked(*leaves)[1].sum(), leaves[2], materialize_grads=True)[0]
    assert torch.count_nonzero(slope) == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FUSED_PATHS if path in SMOOTH_PATHS])
def test_blocks_and_grouped_heads_learn_as_the_reference(path: str) -> None:
    """The sizes are not multiples of a block, and there are several blocks."""
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


# Tests of the gradients of learned biases.


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
    """Return the bias that `build` makes from a leaf as a dense tensor, by the bias's formula."""
    i, j = torch.arange(5).unsqueeze(1), torch.arange(7)
    if isinstance(build(leaf), Tensor):
        return leaf.expand(2, 6, 5, 7)
    if shape == (6,):
        return -leaf.reshape(6, 1, 1) * (i - j).abs()
    reach = shape[-1] // 2
    return leaf[..., (j - i).clamp(-reach, reach) + reach]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "bias", "masked"),
    [(path, bias, (n + m) % 2 == 1) for n, path in enumerate(SMOOTH_PATHS) for m, bias in enumerate(BIASES)],
)
def test_a_learned_bias_learns(path: str, bias: str, masked: bool) -> None:
    mask = regard.causal(offset=1) if masked else None
    shape, build = BIASES[bias]
    inputs = SCORES[path.split("/")[1]].inputs()

    def slope(chosen: str, make: Callable[[Tensor], object]) -> Tensor:
        leaf = randn(*shape, seed=40).requires_grad_()
        attended = attend(chosen, inputs, mask=mask, bias=make(leaf), weights=regard.received())
        loss = (attended.output * slopes_like(attended.output)).sum() + attended.weights.square().sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return gradient

    dense_reference = slope(path.replace(path.split("/")[0], "reference", 1), lambda leaf: alone(shape, build, leaf))
    # Softmax does not change with a constant bias, whose gradient is therefore 0.
    assert torch.count_nonzero(dense_reference) > 0 or bias in ("number", "per head")
    assert_close(slope(path, build), dense_reference)


# Tests of the gradients of tensors that user-defined scores hold.


class Judge(nn.Module):
    """A user-defined additive score: a module of three linear layers with learned parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(13, 4), nn.Linear(13, 4, bias=False)
        self.readout = nn.Linear(4, 1)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.readout((self.left(query).unsqueeze(-2) + self.right(key).unsqueeze(-3)).tanh()).squeeze(-1)


def closure(kind: str) -> tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]:
    """Return a score function of the given kind, and the leaf tensors that it depends on."""
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
    # The returned function is a score whose closure holds tensors in a dict and in a list.
    return lambda query, key: parts["parts"][0](query, key) * parts["scale"] / 10, leaves


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
        # Softmax does not change with the bias of the readout (shape (1,)), whose gradient is therefore 0.
        assert torch.count_nonzero(expected) > 0 or expected.shape == (1,)
        assert_close(gradient, expected)


# Tests in half precision: errors are compared with those of the reference, not with a fixed tolerance.


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
    """Return weights by the textbook formula of a normaliser, in the dtype of the scores."""
    if name == "softmax":
        return scores.softmax(dim=-1)
    if name == "sigmoid":
        return (scores - 0.5).sigmoid()
    ordered = scores.sort(dim=-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1).to(scores)
    if name == "sparsemax":  # algorithm 1 of Martins and Astudillo 2016
        sums = ordered.cumsum(dim=-1) - 1
        support = (count * ordered > sums).sum(dim=-1, keepdim=True)
        return (scores - sums.gather(-1, support - 1) / support).clamp(min=0)
    ordered, scores = ordered / 2, scores / 2  # algorithm 2 of Peters, Niculae and Martins 2019
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
    """Gradients are summed over many blocks: a running sum in bfloat16 would stop growing."""
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
    """Return, for each test case, a tensor, options of a call that uses it, and the argument that the error must
    name."""
    lengths, allowed, bias, weight = torch.tensor([4]), torch.ones(6, 6) > 0, torch.zeros(6, 6), torch.ones(8)
    return {
        "lengths": (lengths, {"mask": regard.padding(lengths)}, "mask"),
        "allowed": (allowed, {"mask": allowed}, "mask"),
        "bias": (bias, {"bias": bias}, "bias"),
        "weight": (weight, {"score": regard.Additive(weight)}, "score"),
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


def test_queries_whose_weights_are_computed_again_must_not_change() -> None:
    """Values may change in place between the passes, because weights do not depend on them; queries may not."""
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
    """Entmax raises scores to the power 1 / (α − 1), which is steep for α near 1, as is its derivative."""
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
