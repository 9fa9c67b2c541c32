"""The Triton kernels of additive attention that store the scores of small calls, against float64."""

from typing import Any

import pytest
import torch

import regard
from additive_cases import BRAIN, CASES, FULL, HALF, compare, explicit
from interpreting import DEVICES

TANH = [name for name, (_, settings) in CASES.items() if settings.get("activation", "tanh") in ("tanh", "sigmoid")]
INTERPRETED = ("float16, heavy weights", "every head its keys", "lengths", "everything float32", "a 60, b -59")


def _stored(name: str) -> tuple[torch.dtype, dict[str, Any]]:
    dtype, settings = CASES[name]
    return dtype, {**settings, "form": "stored"}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str) -> None:
    dtype, settings = _stored(name)
    compare(dtype, "cpu", **settings)


@pytest.mark.cuda
@pytest.mark.parametrize("name", TANH)
def test_compiled(name: str) -> None:
    dtype, settings = _stored(name)
    compare(dtype, "cuda", **settings)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", HALF, marks=pytest.mark.interpreted, id="interpreted"),
        pytest.param("cuda", FULL, marks=pytest.mark.cuda, id="cuda-float32"),
        pytest.param("cuda", BRAIN, marks=pytest.mark.cuda, id="cuda-bfloat16"),
        pytest.param("cuda", HALF, marks=pytest.mark.cuda, id="cuda-float16"),
    ],
)
def test_one_query_and_wide_values(device: str, dtype: torch.dtype) -> None:
    """Calls with a single query, more keys than a tile of the kernel, wide values, a weight of another dtype, or
    strided rows."""
    from regard.kernels.additive.fused import additive_attention

    torch.manual_seed(5)
    rows = torch.randn(1, 2, 1, 40), torch.randn(1, 2, 67, 40), torch.randn(1, 2, 67, 139)
    query, key, value = (x.to(device, dtype)[..., ::2].requires_grad_() for x in rows)
    weight = (torch.randn(20, device=device) / 4).requires_grad_()
    leaves = [query, key, value, weight]
    true_leaves = [x.detach().double().requires_grad_() for x in leaves]
    allowed = torch.ones(1, 2, 1, 67, dtype=torch.bool, device=device)
    true, _ = explicit(*true_leaves[:3], true_leaves[3].expand(2, -1), "tanh", allowed, 0.0)
    found, _ = additive_attention(*leaves, form="stored")
    grads = [torch.autograd.grad(out.double().square().sum(), x) for out, x in ((found, leaves), (true, true_leaves))]
    most = {FULL: 3e-6, HALF: 5e-3, BRAIN: 4e-2}[dtype]
    for name, a, t in zip(("out", *"qkvw"), (found, *grads[0]), (true, *grads[1]), strict=True):
        assert (a.double() - t).norm() <= most * t.norm(), name


@pytest.mark.parametrize("device", DEVICES)
def test_without_stored_scores(device: str) -> None:
    """The operator for torch.compile does not store scores: its backward pass recomputes them, with the same result."""
    from regard.kernels.triton.additive.operator import additive, additive_forward

    torch.manual_seed(6)
    leaves = [torch.randn(1, 1, n, d, device=device).requires_grad_() for n, d in ((3, 4), (5, 4), (5, 2))]
    leaves.append(torch.randn(4, device=device).requires_grad_())
    rest = (None, None, None, None, None, None, None, 1, "tanh", 0.0, 0, "auto")
    found = []
    for out, lse in (additive(*leaves, *rest), additive_forward(*leaves, *rest, True)):
        found.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_checked_call(device: str) -> None:
    """`stored_call`, which runs the kernel without checks of its arguments, gives the result of the operator."""
    from regard.kernels.triton.additive.operator import additive, kernel_pairs, stored_call

    torch.manual_seed(6)
    leaves = [torch.randn(2, 1, n, d, device=device).requires_grad_() for n, d in ((3, 4), (5, 4), (5, 2))]
    leaves.append(torch.randn(4, device=device).requires_grad_())
    lengths = torch.tensor([5, 2], device=device, dtype=torch.int32)
    rest = (lengths, None, None, None, None, None, None, 1, "tanh", 0.0, 0, "auto")
    pairs = kernel_pairs((2, 1, 3, 5), None, 1, lengths, *[None] * 5)
    found = []
    for out in (additive(*leaves, *rest)[0], stored_call(learning=True)(*leaves, pairs, None)):
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    with torch.no_grad():
        bare = stored_call(learning=False)(*leaves, pairs, None)
        torch.testing.assert_close(bare, found[0][0], rtol=0, atol=0)
    out = stored_call(learning=True)(*leaves, pairs, None)
    # Changing `lengths` in place is an error, because the backward pass reads this tensor again.
    lengths.fill_(4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaves)


@pytest.mark.parametrize(
    ("learned", "keys", "size"),
    [("both", 67, 7), ("output", 67, 7), ("weights", 67, 7), ("both", 5, 37), ("both", 11, 7), ("both", 23, 7)],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_all_weights(device: str, learned: str, keys: int, size: int) -> None:
    """Output and all weights from one call equal float64, and so do gradients through the output, the weights, or both.

    The keys fill two tiles of the kernel or a part of one; one of the sequences has no keys.
    """
    from regard.kernels.triton.additive.operator import kernel_pairs, stored_weights

    torch.manual_seed(7)
    leaves = [torch.randn(3, 2, n, d, device=device) for n, d in ((5, size), (keys, size), (keys, 3))]
    leaves = [x.requires_grad_() for x in (*leaves, torch.randn(2, size, device=device))]
    lengths = torch.tensor([keys, 0, keys - 1], device=device)
    pairs = kernel_pairs((3, 2, 5, keys), None, keys - 5, lengths, *[None] * 5)
    i, j = torch.arange(5, device=device)[:, None], torch.arange(keys, device=device)
    allowed = (j - i <= keys - 5) & (j < lengths[:, None, None, None])
    wide = [x.detach().double().requires_grad_() for x in leaves]
    scores = (torch.tanh(wide[0][..., :, None, :] + wide[1][..., None, :, :]) * wide[3][:, None, None]).sum(-1)
    powers = scores.exp() * allowed
    weights = powers / powers.sum(-1, keepdim=True).clamp_min(1e-30)
    found, true = stored_weights(*leaves, pairs), (weights @ wide[2], weights)
    upstream = [torch.randn(x.shape, device=device) for x in true]
    used = {"both": (0, 1), "output": (0,), "weights": (1,)}[learned]
    grads = [
        torch.autograd.grad([x[n] for n in used], y, [upstream[n].to(x[n].dtype) for n in used], allow_unused=True)
        for x, y in ((found, leaves), (true, wide))
    ]
    for a, t in zip((*found, *grads[0]), (*true, *grads[1]), strict=True):
        t = torch.zeros_like(a).double() if t is None else t
        torch.testing.assert_close(a.double(), t, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_beside_nan(device: str) -> None:
    """A key of NaN makes the output and the weights NaN of queries that attend to it, and of no other query."""
    from regard.kernels.triton.additive.operator import kernel_pairs, stored_weights

    torch.manual_seed(9)
    query, key, value = (torch.randn(1, 1, n, 4, device=device) for n in (3, 7, 7))
    key[0, 0, 5], value[0, 0, 6] = torch.nan, torch.inf
    weight = torch.ones(4, device=device)
    pairs = kernel_pairs((1, 1, 3, 7), None, 3, None, *[None] * 5)
    found = stored_weights(query, key, value, weight, pairs)
    settings = {"score": regard.Additive(weight), "mask": regard.causal(offset=3), "weights": regard.full()}
    true = regard.attention(query, key, value, backend="reference", **settings)
    for a, t in zip(found, (true.output, true.weights), strict=True):
        torch.testing.assert_close(a, t, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert found[1][0, 0, 2].isnan().all()
    assert found[1][0, 0, :2].isfinite().all()


@pytest.mark.parametrize("backend", ["additive", "reference"])
@pytest.mark.cuda
def test_weights_beside_the_output(backend: str) -> None:
    """A small call with `weights=full()` uses the kernels; output, weights and gradients equal those of float64."""
    torch.manual_seed(8)
    leaves = [torch.randn(2, 3, n, d, device="cuda") for n, d in ((37, 24), (71, 24), (71, 5))]
    leaves = [x.requires_grad_() for x in (*leaves, torch.randn(24, device="cuda") / 5)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    settings = {"mask": regard.padding([71, 40]) & regard.causal(offset=30), "weights": regard.full()}
    found = regard.attention(*leaves[:3], score=regard.Additive(leaves[3]), backend=backend, **settings)
    true = regard.attention(*wide[:3], score=regard.Additive(wide[3]), backend="reference", **settings)
    assert regard.explain(*leaves[:3], score=regard.Additive(leaves[3]), **settings).backend == "additive"
    both = [(x.output, x.weights) for x in (found, true)]
    grads = [
        torch.autograd.grad(x[0].square().sum() + x[1].square().sum(), y)
        for x, y in zip(both, (leaves, wide), strict=True)
    ]
    for a, t in zip((*both[0], *grads[0]), (*both[1], *grads[1]), strict=True):
        assert (a.double() - t).norm() <= 1e-5 * t.norm()


@pytest.mark.interpreted
@pytest.mark.parametrize("activation", ["gelu", "leaky_relu"])
def test_other_activations_are_refused(activation: str) -> None:
    from regard.kernels.additive.fused import additive_attention

    rows = torch.ones(1, 1, 2, 3)
    with pytest.raises(ValueError, match="stored scores serve tanh and sigmoid"):
        additive_attention(rows, rows, rows, torch.ones(3), activation=activation, form="stored")


@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_scores_alone(device: str, lead: tuple[int, ...]) -> None:
    """The kernel that returns scores w · tanh(q + k), and its gradients, against the formula in float64."""
    from regard.kernels.triton.additive.score_operator import scores

    torch.manual_seed(4)
    leaves = [torch.randn(*lead, n, 5, device=device) for n in (3, 7)] + [torch.randn(3, 5, device=device)]
    leaves = [x.requires_grad_() for x in leaves]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found, true = scores(*leaves), (torch.tanh(wide[0][..., None, :] + wide[1][..., None, :, :])
                                    * wide[2][:, None, None]).sum(-1)  # fmt: skip
    torch.testing.assert_close(found.double(), true, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(true.shape, device=device)
    grads = [torch.autograd.grad(x, y, upstream.to(x.dtype)) for x, y in ((found, leaves), (true, wide))]
    for a, t in zip(*grads, strict=True):
        torch.testing.assert_close(a.double(), t, rtol=1e-5, atol=1e-5)
    again = scores(*leaves)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(again.sum(), leaves, create_graph=True)


@pytest.mark.cuda
@pytest.mark.parametrize("request_", [regard.received(), regard.entropy(), regard.rows([0, 40])], ids=str)
@pytest.mark.parametrize("dtype", [FULL, BRAIN], ids=str)
def test_weights_on_request(request_: Any, dtype: torch.dtype) -> None:
    """Weights of additive scores equal those of the reference, with their gradients."""
    torch.manual_seed(4)
    sizes = ((4, 61, 24), (2, 83, 24), (2, 83, 5))
    leaves = [torch.randn(2, *x, device="cuda").to(dtype).requires_grad_() for x in sizes]
    leaves.append((torch.randn(4, 24, device="cuda") / 5).to(dtype).requires_grad_())
    found = []
    for backend in ("additive", "reference"):
        settings = {"score": regard.Additive(leaves[3]), "mask": regard.causal(offset=22), "weights": request_}
        result = regard.attention(*leaves[:3], backend=backend, **settings).weights
        grads = torch.autograd.grad(result.float().square().sum(), (leaves[0], leaves[1], leaves[3]))
        found.append((result, *grads))
    for a, b in zip(*found, strict=True):
        assert (a.float() - b.float()).norm() <= (1e-5 if dtype == FULL else 1e-2) * b.float().norm()


@pytest.mark.cuda
def test_other_normalizers() -> None:
    """Sparsemax of additive scores, computed block by block, equals the reference, and so do its gradients."""
    torch.manual_seed(4)
    leaves = [torch.randn(2, 2, n, d, device="cuda").requires_grad_() for n, d in ((61, 24), (83, 24), (83, 5))]
    leaves.append(torch.randn(24, device="cuda").requires_grad_())
    found = []
    for backend in ("blocked", "reference"):
        settings = {"score": regard.Additive(leaves[3]), "normalize": regard.Sparsemax()}
        output = regard.attention(*leaves[:3], backend=backend, **settings).output
        found.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.cuda
@pytest.mark.parametrize(("queries", "backend"), [(4, "reference"), (1500, "additive")])
def test_small_calls_with_weights_take_the_plain_form(queries: int, backend: str) -> None:
    query, key = (torch.zeros(2, 3, n, 64, device="cuda") for n in (queries, 1500))
    score = regard.Additive(torch.ones(64, device="cuda"))
    assert regard.explain(query, key, key, score=score, weights=regard.top(4)).backend == backend
    assert regard.explain(query, key, key, score=score).backend == "additive"
