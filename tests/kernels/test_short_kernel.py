"""The Triton kernel for at most 64 queries and keys, against float64: interpreted, and compiled on CUDA."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from interpreting import DEVICES
from regard.kernels import cuda_graphs

BATCH, HEADS, SIZE = 2, 3, 10
# The largest error of a tensor relative to its norm: three times the error of torch's matrix product.
BUDGET = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def kernel() -> Any:
    from regard.kernels.triton.short_attention import short_attention

    return short_attention


def explicit(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = torch.where(allowed, query @ key.mT / math.sqrt(query.shape[-1]), -math.inf)
    weights = torch.where(allowed.any(-1, keepdim=True), scores.softmax(-1).nan_to_num(), 0.0)
    return weights @ value


CASES = [
    (5, 7, False, ""),
    (32, 32, True, ""),
    (33, 17, False, "lengths"),
    (7, 64, False, "mask lengths"),
    (11, 29, True, "mask"),
    (1, 3, True, ""),
]
SHAPES = [
    (16, 16, 16, "causal"),
    (32, 32, 64, ""),
    (23, 31, 64, "lengths"),
    (10, 40, 48, "lengths"),
    (64, 64, 64, "causal lengths"),
    (61, 13, 128, ""),
]
# Half precision is tested on a GPU only.
KINDS = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted, id="interpreted-float32"),
    *(pytest.param("cuda", dtype, marks=pytest.mark.cuda, id=f"cuda-{dtype}") for dtype in BUDGET),
]


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize(("queries", "keys", "causal", "masked"), CASES)
def test_the_kernels_agree_with_float64(
    queries: int, keys: int, causal: bool, masked: str, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(queries)
    packed = torch.randn(BATCH, max(queries, keys), 3, HEADS, SIZE, device=device).to(dtype)
    # The inputs are strided views, like the heads of a layer.
    query, key, value = (t.transpose(1, 2) for t in packed.unbind(2))
    leaves = [query[:, :, :queries], key[:, :, :keys], value[:, :, :keys]]
    allowed = torch.ones(BATCH, HEADS, queries, keys, dtype=torch.bool, device=device)
    lengths = mask = None
    if causal:
        allowed = allowed & torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
    if "lengths" in masked:
        # The lengths are a view with stride 2.
        lengths = torch.tensor([[0, 1], [keys - 2, 1]], device=device)[:, 0]
        allowed = allowed & (torch.arange(keys, device=device) < lengths[:, None, None, None])
    if "mask" in masked:
        mask = torch.rand(BATCH, keys, device=device) > 0.3
        allowed = allowed & mask[:, None, None]
    grad = torch.randn(BATCH, HEADS, queries, SIZE, device=device).to(dtype)
    found: list[list[Tensor]] = []
    for exact in (True, False):
        mine = [(t.double() if exact else t).detach().requires_grad_() for t in leaves]
        if exact:
            out = explicit(*mine, allowed)
        else:
            out = kernel()(*mine, lengths, mask, None, 1 / math.sqrt(SIZE), causal, 0.0)
        found.append([out.detach().double(), *(g.double() for g in torch.autograd.grad(out, mine, grad.to(out.dtype)))])
    for mine, right in zip(found[1], found[0], strict=True):
        assert (mine - right).norm() <= BUDGET[dtype] * right.norm() + 1e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by", ["lengths", "mask", "causal"])
def test_what_is_masked_is_not_read(by: str, device: str) -> None:
    """NaN in keys masked by a length, by a mask or by causality reaches neither the output nor a gradient."""
    lengths = torch.tensor([3], device=device) if by == "lengths" else None
    mask = torch.tensor([[True, True, True, False, False]], device=device) if by == "mask" else None
    query, key, value = (torch.randn(1, 1, n, 16, device=device) for n in (3, 5, 5))
    key[:, :, 3:], value[:, :, 3:] = math.nan, math.inf
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = kernel()(*leaves, lengths, mask, None, 0.25, by == "causal", 0.0)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_repeats_what_is_dropped(device: str) -> None:
    """Dropout with the same seed drops the same pairs, forward and backward, and scales the other weights."""
    query, key = torch.randn(2, 2, 31, 16, device=device), torch.randn(2, 2, 37, 16, device=device) * 0.1
    value = torch.ones(2, 2, 37, 16, device=device, requires_grad=True)
    runs = [
        kernel()(query, key, value, None, None, torch.tensor([s], device=device), 0.25, False, 0.25) for s in (7, 7, 8)
    ]
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    assert not torch.equal(runs[0], runs[2])
    torch.testing.assert_close(runs[0].mean(), torch.ones((), device=device), rtol=0.03, atol=0)
    # The output is linear in the values, which are 1: the sum of their gradients is the sum of the output, if forward
    # and backward pass drop the same pairs.
    torch.testing.assert_close(torch.autograd.grad(runs[0].sum(), value)[0].sum(), runs[0].sum())


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize(("queries", "keys", "size", "masked"), SHAPES)
def test_both_passes_drop_the_same_pairs(
    queries: int, keys: int, size: int, masked: str, dtype: torch.dtype, device: str
) -> None:
    """The backward pass drops the same pairs as the forward pass, in the gradients of query, key and value.

    If the values are the identity matrix, the output is P ⊙ M: the weights P times the dropout mask M. If the output's
    gradient is the identity, the values' gradient is the transpose of P ⊙ M. With the M that is read from the output,
    the gradients of query and key are compared with float64.
    """
    drop, scale, batch, heads = 0.3, size**-0.5, 3, 2
    query, key, value, grad = (
        torch.randn(batch, heads, n, size, device=device).to(dtype) for n in (queries, keys, keys, queries)
    )
    allowed = torch.ones(batch, heads, queries, keys, dtype=torch.bool, device=device)
    lengths = None
    if "lengths" in masked:
        lengths = torch.tensor([keys, 1, keys // 2], device=device)
        allowed &= torch.arange(keys, device=device) < lengths[:, None, None, None]
    if "causal" in masked:
        allowed = allowed.tril()
    columns = torch.eye(queries, size, device=device, dtype=dtype).expand(batch, heads, queries, size)
    runs = []
    for seed in (3, 2**31 - 5):
        settings = (lengths, None, torch.tensor([seed], device=device), scale, "causal" in masked, drop)
        rows = torch.eye(keys, size, device=device, dtype=dtype).expand(batch, heads, keys, size).clone()
        out = kernel()(query, key, rows.requires_grad_(), *settings)
        (back,) = torch.autograd.grad(out, rows, columns)
        there = out.detach()[..., :keys]
        torch.testing.assert_close(there, back[..., :queries].mT, rtol=BUDGET[dtype], atol=1e-6)
        kept = (there > 0).double()
        assert not kept[~allowed].any()
        assert abs(float(kept[allowed].mean()) - 0.7) < 5 * math.sqrt(0.21 / int(allowed.sum()))
        runs.append(kept)
        mine = [t.detach().clone().requires_grad_() for t in (query, key, value)]
        found = torch.autograd.grad(kernel()(*mine, *settings), mine, grad)
        exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
        weights = torch.where(allowed, exact[0] @ exact[1].mT * scale, -math.inf).softmax(-1)
        right = torch.autograd.grad((weights * kept / (1 - drop)) @ exact[2], exact, grad.double())
        for a, b in zip(found, right, strict=True):
            assert (a.double() - b).norm() <= BUDGET[dtype] * b.norm()
    # Two seeds, two sequences or two heads drop pairs independently of each other.
    both = allowed[0] & allowed[2]
    for a, b, seen in ((*runs, allowed), (runs[0][0], runs[0][2], both), (runs[0][:, 0], runs[0][:, 1], allowed[:, 0])):
        assert abs(float((a * b)[seen].mean()) - 0.49) < 5 * math.sqrt(0.25 / int(seen.sum()))


def test_explain_says_that_it_is_for_cuda() -> None:
    tensors = [torch.zeros(2, 3, 5, 8) for _ in range(3)]
    assert "CUDA" in regard.explain(*tensors, dropout=0.1).refused["short"]
    with pytest.raises(ValueError, match="short"):
        regard.attention(*tensors, backend="short")


def inputs(queries: int = 29, keys: int = 29, heads: int = 2, size: int = 64) -> list[Tensor]:
    return [
        torch.randn(3, heads, n, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (queries, keys, keys)
    ]


MASKS: dict[str, Any] = {
    "none": lambda: None,
    "causal": regard.causal,
    "padding": lambda: regard.padding(torch.tensor([29, 3, 0], device="cuda")),
    "both": lambda: regard.causal() & regard.padding(torch.tensor([29, 3, 0], device="cuda")),
    "keys": lambda: regard.dense(torch.rand(3, 1, 1, 29, device="cuda") > 0.4),
}


@pytest.mark.cuda
@pytest.mark.parametrize("score", [regard.ScaledDot(), regard.Dot(), regard.Cosine(scale=4.0)], ids=lambda s: s.name)
@pytest.mark.parametrize("name", MASKS)
def test_attention_by_it_stays_within_the_error_budget(name: str, score: Any) -> None:
    """The kernel's error is at most twice that of torch's operations in bfloat16, and three times in gradients."""
    tensors, mask = inputs(), MASKS[name]()
    tensors = [(t.detach() * 0.4).requires_grad_() for t in tensors]
    runs: dict[str, list[Tensor]] = {}
    upstream = torch.randn(3, 2, 29, 64, device="cuda")
    for how in ("exact", "plain", "short"):
        mine = [(t.double() if how == "exact" else t).detach().requires_grad_() for t in tensors]
        if how == "plain":
            scores = score(mine[0], mine[1])
            if mask is not None:
                seen = mask.aligned((3, 2, 29, 29)).allowed(range(29), range(29), scores.device)
                scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
                weights = scores.softmax(-1) * seen.any(-1, keepdim=True)
            else:
                weights = scores.softmax(-1)
            out = weights @ mine[2]
        else:
            out = regard.attention(*mine, score=score, mask=mask, backend="short" if how == "short" else "reference")
            out = out.output
        runs[how] = [out.detach(), *torch.autograd.grad(out, mine, upstream.to(out.dtype))]
    for index, (found, plain, exact) in enumerate(zip(runs["short"], runs["plain"], runs["exact"], strict=True)):
        errors = [float((t.double() - exact).norm() / exact.norm()) for t in (found, plain)]
        assert found.isfinite().all()
        assert errors[0] <= (2 if index == 0 else 3) * max(errors[1], torch.finfo(torch.bfloat16).eps / 4), index


@pytest.mark.cuda
def test_auto_takes_it_for_dropout_padding_and_many_heads() -> None:
    assert regard.explain(*inputs(), mask=MASKS["padding"]()).backend == "short"
    assert regard.explain(*inputs(heads=2731)).backend == "short"
    with torch.no_grad():
        assert regard.explain(*inputs(), dropout=0.1).backend == "short"
        assert regard.explain(*inputs(heads=683), mask=regard.causal()).backend == "short"
        assert "few" in regard.explain(*inputs(heads=682)).refused["short"]
    # While a CUDA graph is recorded, the backend is chosen by its time on the GPU alone.
    with cuda_graphs.recorded():
        assert regard.explain(*inputs(), dropout=0.1).backend == "short"
        assert regard.explain(*inputs(heads=171)).backend == "short"
    assert "few" in regard.explain(*inputs(heads=171), dropout=0.1).refused["short"]
    assert "queries" in regard.explain(*inputs(65, 29), dropout=0.1).refused["short"]
    assert "bias" in regard.explain(*inputs(), dropout=0.1, bias=torch.zeros(29, 29, device="cuda")).refused["short"]
    assert "band" in regard.explain(*inputs(), dropout=0.1, mask=regard.window(3, 0)).refused["short"]


@pytest.mark.cuda
def test_compiled_whole_with_dropout_drawn_anew_at_each_call() -> None:
    query, key, value = inputs()

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query, key, value, mask=regard.causal(), dropout=0.5).output

    compiled = torch.compile(call, fullgraph=True)
    first, second = compiled(query, key, value), compiled(query, key, value)
    assert not torch.equal(first, second)
    grads = torch.autograd.grad(first.square().sum(), (query, key, value))
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in grads)
    # The mean over many dropout samples is the output without dropout.
    many = torch.stack([compiled(query, key, value).detach().float() for _ in range(200)]).mean(0)
    exact = regard.attention(query, key, value, mask=regard.causal()).output.float()
    assert (many - exact).norm() < 0.15 * exact.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("way", ["eager", "compiled", "captured"])
def test_what_is_dropped_is_the_same_on_the_way_back(way: str) -> None:
    """For the upstream gradient `output`, ⟨output, output⟩ = ⟨values, gradient⟩ if both passes drop the same pairs."""
    query, key, value = inputs(31, 29, heads=5)

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = regard.attention(query * 0.1, key, value, dropout=0.3, backend="short").output
        return out, out.detach().float().square().sum()

    if way == "compiled":
        call = torch.compile(call, fullgraph=True)

    def both() -> tuple[Tensor, Tensor]:
        out, square = call(query, key, value)
        (grad,) = torch.autograd.grad(out, value, out.detach())
        return square, (grad.float() * value.detach().float()).sum()

    found = both()
    if way == "captured":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = both()
        graph.replay()
        first = found[0].item()
        graph.replay()
        assert found[0].item() != first  # each replay of the graph samples another dropout mask
    assert abs(found[0].item() / found[1].item() - 1) < 0.02
