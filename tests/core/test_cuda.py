"""Calls on CUDA: every backend against the reference in float64. Skipped without a GPU."""

import pytest
import torch

import regard

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

B, H, G, Q, K, D = 2, 6, 3, 1153, 1307, 32  # Q and K are prime, and so large that `auto` chooses the backend `flex`
LENGTHS = torch.tensor([1307, 611])
IDS = (torch.arange(Q) // 200, torch.arange(K) // 200)
MASKS = {
    "none": lambda: None,
    "causal": lambda: regard.causal(),
    "causal-offset": lambda: regard.causal(K - Q),
    "window": lambda: regard.window(100, 3),
    "padding": lambda: regard.padding(LENGTHS.cuda()),
    "segments": lambda: regard.segments(IDS[0].cuda(), IDS[1].cuda()),
    "dense": lambda: torch.rand(B, 1, Q, K, generator=torch.Generator().manual_seed(1)).cuda() > 0.5,
    "causal&padding": lambda: regard.causal() & regard.padding(LENGTHS.cuda()),
    "empty-rows": lambda: regard.causal(-5) & regard.padding(torch.tensor([7, 0]).cuda()),
    "or": lambda: regard.window(9, 9) | regard.padding(torch.tensor([3, 5]).cuda()),
}
BIASES = {
    "none": lambda: None,
    "alibi": lambda: regard.alibi(torch.linspace(0.01, 0.5, H).cuda().requires_grad_()),
    "relative": lambda: regard.relative(_seeded(H, 65).cuda().requires_grad_()),
    "dense": lambda: _seeded(1, H, Q, K).cuda().requires_grad_(),
}
SCORES = {
    "scaled_dot": lambda: regard.ScaledDot(),
    "softcap": lambda: regard.ScaledDot(softcap=5.0),
    "cosine": lambda: regard.Cosine(4.0),
    "bilinear": lambda: regard.Bilinear(_seeded(D, D).cuda() / D),
}


def _seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _inputs(dtype):
    shapes = ((B, H, Q, D), (B, G, K, D), (B, G, K, D))
    return [_seeded(*shape).cuda().to(dtype).requires_grad_() for shape in shapes]


def _double(thing):
    """Return a mask, bias or score with its float tensors in float64."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().double().requires_grad_() if thing.is_floating_point() else thing
    if isinstance(thing, regard.Bilinear):
        return regard.Bilinear(thing.weight.double())
    if isinstance(thing, regard.Bias):
        make = regard.alibi if thing.tensors()[0].ndim == 1 else regard.relative
        return make(thing.tensors()[0].detach().double().requires_grad_())
    return thing


def _learned(bias):
    return [] if bias is None else [bias] if isinstance(bias, torch.Tensor) else list(bias.tensors())


def _run(inputs, backend, mask, bias, score):
    out = regard.attention(*inputs, score=score, mask=mask, bias=bias, backend=backend)
    upstream = torch.linspace(-1, 1, out.output.numel(), device="cuda").reshape(out.output.shape).to(out.output.dtype)
    grads = torch.autograd.grad(out.output, [*inputs, *_learned(bias)], upstream)
    return [out.output, *grads]


def _error(found, exact):
    found, exact = found.detach(), exact.detach()
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def _crossed(backend, mask, bias, score, dtype):
    if score != "scaled_dot":
        return mask == "window" and bias in ("none", "alibi") and dtype == torch.bfloat16
    if backend == "sdpa":
        return True
    return bias == "none" if dtype == torch.bfloat16 and mask != "window" else mask == "window"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_fused_backends_stay_within_the_error_budget(backend, mask, bias, score, dtype):
    if not _crossed(backend, mask, bias, score, dtype):
        pytest.skip("each flex kernel takes seconds to compile: only telling combinations are crossed")
    mask, bias, score = MASKS[mask](), BIASES[bias](), SCORES[score]()
    inputs = _inputs(dtype)
    try:
        regard.explain(*inputs, score=score, mask=mask, bias=bias, backend=backend)
    except ValueError as reason:
        pytest.skip(str(reason))
    found = _run(inputs, backend, mask, bias, score)
    double = [t.detach().double().requires_grad_() for t in inputs]
    exact = _run(double, "reference", mask, _double(bias), _double(score))
    plain = _plain(inputs, mask, bias, score)
    for index, (a, b, c) in enumerate(zip(found, exact, plain, strict=True)):
        # Float32 kernels sum in another order than the reference. The gradients of learned biases (results after the
        # output and the three gradients of query, key and value) are atomic sums over all pairs, whose terms cancel.
        least = torch.finfo(dtype).eps * (300 if index > 3 else 4)
        budget = (2 if index == 0 else 3) * max(_error(c, b), least)
        assert a.isfinite().all()
        assert _error(a, b) <= budget, (index, _error(a, b), budget)


def _plain(inputs, mask, bias, score):
    """Return output and gradients of attention written as plain torch operations, in the dtype of the inputs."""
    query, key, value = inputs
    key, value = (t.repeat_interleave(H // G, 1) for t in (key, value))
    if isinstance(score, regard.Bilinear):
        score = regard.Bilinear(score.weight.to(query.dtype))
    scores = score(query, key)
    if bias is not None:
        numbers = bias if isinstance(bias, torch.Tensor) else bias.values(range(Q), range(K), torch.float32)
        scores = scores + numbers.to(query.dtype)
    if mask is not None:
        mask = mask if isinstance(mask, regard.Mask) else regard.dense(mask)
        allowed = mask.aligned((B, H, Q, K)).allowed(range(Q), range(K), torch.device("cuda"))
        scores = scores.masked_fill(~allowed, torch.finfo(query.dtype).min)
        weights = torch.softmax(scores, -1) * allowed.any(-1, keepdim=True)
    else:
        weights = torch.softmax(scores, -1)
    output = weights @ value
    upstream = torch.linspace(-1, 1, output.numel(), device="cuda").reshape(output.shape).to(output.dtype)
    return [output, *torch.autograd.grad(output, [*inputs, *_learned(bias)], upstream)]


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex", "blocked", "reference"])
def test_padding_full_of_nan_has_no_effect(backend):
    query, key, value = _inputs(torch.float32)
    dirty = [t.detach().clone() for t in (key, value)]
    for tensor in dirty:
        tensor[1, :, 611:] = float("nan")
        tensor.requires_grad_()
    mask = regard.padding(LENGTHS.cuda())
    clean = regard.attention(query, key, value, mask=mask, backend=backend).output
    found = regard.attention(query, *dirty, mask=mask, backend=backend).output
    torch.testing.assert_close(found, clean)
    wanted = torch.autograd.grad(clean.sum(), (query, key, value))
    grads = torch.autograd.grad(found.sum(), (query, *dirty))
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex", "blocked", "reference"])
def test_rows_with_nothing_to_attend_are_zero_in_value_and_gradient(backend):
    query, key, value = _inputs(torch.float32)
    out = regard.attention(query, key, value, mask=regard.causal(-5), backend=backend).output
    assert (out[:, :, :5] == 0).all()
    (grad,) = torch.autograd.grad(out.square().sum(), query)
    assert (grad[:, :, :5] == 0).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    "request_", [regard.full(), regard.rows([0, 5]), regard.top(4), regard.received(), regard.entropy()], ids=str
)
def test_weights_on_request_equal_the_plain_ones(request_):
    query, key, value = (t.detach() for t in _inputs(torch.float32))
    mask = regard.causal() & regard.padding(LENGTHS.cuda())
    found = regard.attention(query, key, value, mask=mask, weights=request_).weights
    plain = regard.attention(query, key, value, mask=mask, weights=request_, backend="reference").weights
    if isinstance(found, regard.Top):
        found, plain = found.values, plain.values
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", [None, regard.window(90, 0), regard.causal(-3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("queries", "keys", "size"), [(53, 71, 24), (1061, 1301, 40)], ids=["few pairs", "many pairs"])
def test_all_weights_and_their_sum(queries: int, keys: int, size: int, dtype: torch.dtype, mask) -> None:
    """Calls with few and many pairs, with and without a mask, use different kernels for the weights."""
    torch.manual_seed(6)
    query = torch.randn(2, queries, 6, size, device="cuda", dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(2, 2, keys, width, device="cuda", dtype=dtype) for width in (size, 17))
    doubles = [t.double() for t in (query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1))]
    scores = doubles[0] @ doubles[1].mT / size**0.5
    if mask is not None:
        allowed = mask.allowed(range(queries), range(keys), query.device)
        scores = scores.masked_fill(~allowed, -torch.inf)
    real = scores.softmax(-1).nan_to_num(0.0)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for _ in range(2):  # the second call runs the kernel that the first call chose and stored
        found = regard.attention(query, key, value, mask=mask, weights=regard.full())
        assert found.weights.dtype == dtype
        torch.testing.assert_close(found.weights.double(), real, atol=limit / 4, rtol=limit)
        torch.testing.assert_close(found.output.double(), real @ doubles[2], atol=limit, rtol=limit)
    assert (found.weights[real == 0] == 0).all()


@pytest.mark.parametrize(
    "normalize", [regard.Sparsemax(), regard.Entmax(1.5), regard.Sigmoid(), regard.Hard()], ids=str
)
def test_blocks_equal_the_plain_form_for_every_normaliser(normalize):
    query, key, value = _inputs(torch.float32)
    if isinstance(normalize, regard.Hard):
        normalize = regard.Hard(sample=False)
    found = regard.attention(query, key, value, normalize=normalize, mask=regard.window(60, 5), backend="blocked")
    plain = regard.attention(query, key, value, normalize=normalize, mask=regard.window(60, 5), backend="reference")
    torch.testing.assert_close(found.output, plain.output, atol=1e-4, rtol=1e-4)
    for a, b in zip(
        torch.autograd.grad(found.output.square().sum(), (query, key, value), allow_unused=True),
        torch.autograd.grad(plain.output.square().sum(), (query, key, value), allow_unused=True),
        strict=True,
    ):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)


def test_sampling_repeats_with_a_cuda_generator():
    query, key, value = _inputs(torch.float32)
    draws = [
        regard.attention(
            query,
            key,
            value,
            normalize=regard.Hard(),
            generator=torch.Generator("cuda").manual_seed(3),
            backend=backend,
        ).output
        for backend in ("reference", "reference", "blocked", "blocked")
    ]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[2], draws[3])


@pytest.mark.parametrize("learned", [False, True], ids=["given", "learned"])
@pytest.mark.parametrize("kind", ["alibi", "relative", "dense"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_biases_of_heads_of_common_sizes(dtype, size, kind, learned):
    """A kernel that loads a bias for each pair needs shared memory for it: at head size 64 three tiles do not fit."""
    query, key, value = (torch.randn(2, 4, 1100, size, device="cuda").to(dtype).requires_grad_() for _ in range(3))
    shape = {"alibi": (4,), "relative": (4, 65), "dense": (1, 4, 1100, 1100)}[kind]
    tensor = _seeded(*shape).abs() / 4
    tensor = tensor.cuda().requires_grad_(learned)
    bias = {"alibi": regard.alibi, "relative": regard.relative, "dense": lambda bias: bias}[kind](tensor)
    leaves = [query, key, value, *([tensor] if learned else [])]

    def learn(backend):
        output = regard.attention(query, key, value, mask=regard.causal(), bias=bias, backend=backend).output
        return [output, *torch.autograd.grad(output.float().square().sum(), leaves)]

    exact = learn("reference")
    for backend in ("auto", "flex", "sdpa"):
        for index, (found, wanted) in enumerate(zip(learn(backend), exact, strict=True)):
            # FlexAttention sums the gradient of a learned bias by atomic additions, in no fixed order.
            exactly = dtype == torch.float32 and not (backend == "flex" and index > 3)
            assert _error(found, wanted.double()) < (2e-3 if exactly else 2e-2)


@pytest.mark.parametrize("length", [300, 1100], ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_learned_table_of_heads_of_odd_sizes(dtype, length):
    """Heads of size 48 are computed by torch's kernels. The gradient of the table is a sum over all pairs, too large
    for half precision."""
    query, key, value = (_seeded(2, 4, length, 48).add(n).cuda().to(dtype).requires_grad_() for n in range(3))
    table = _seeded(4, 9).cuda().requires_grad_()

    def learn(backend):
        output = regard.attention(query, key, value, bias=regard.relative(table), backend=backend).output
        return torch.autograd.grad(output.float().square().sum(), [table])[0]

    assert _error(learn("auto"), learn("reference").double()) < 2e-2


def test_a_bias_beyond_half_precision_is_not_a_mask():
    query = torch.zeros(1, 1, 4, 64, device="cuda", dtype=torch.float16)
    value = _seeded(1, 1, 32, 64).cuda().half()
    bias = torch.tensor([-1e9, 1e9, -torch.inf, 0.0], device="cuda")[:, None].expand(4, 32)
    found = regard.attention(query, value, value, bias=bias).output
    mean = value.float().mean(-2)
    assert torch.allclose(found[..., [0, 1, 3], :].float(), mean.unsqueeze(-2).expand(1, 1, 3, 64), atol=1e-3)
    assert not found[..., 2, :].any()


def test_kernels_read_rules_and_learn_tables_but_no_slopes():
    query = torch.zeros(1, 4, 1100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    slopes, table = torch.ones(4, device="cuda"), torch.ones(4, 65, device="cuda")

    def taken(mask=None, score=regard.ScaledDot()):
        biases = (regard.alibi(slopes), regard.relative(table))
        return [regard.explain(query, query, query, score=score, mask=mask, bias=bias).backend for bias in biases]

    assert taken() == ["flex", "flex"]
    slopes.requires_grad_()
    table.requires_grad_()
    assert taken() == taken(regard.window(100, 0)) == ["sdpa", "flex"]
    # On CUDA, `flex` is the only fused backend that computes a softcap.
    assert taken(score=regard.ScaledDot(softcap=30.0)) == ["flex", "flex"]
    with torch.no_grad():
        assert taken() == ["flex", "flex"]
