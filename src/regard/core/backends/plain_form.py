"""Attention with the matrix of all scores in memory, in few torch operations or by one Triton kernel.

This module computes the calls for which `backend="auto"` chooses `reference`, by the same formula with fewer kernel
launches. On a GPU no value is inspected, because the host would have to wait for the device. Instead every masked score
is replaced, even if it is NaN, `attended` removes the effect of masked values, and the backward pass multiplies only
with finite numbers. On the CPU the values are inspected, and calls with NaN or Inf are left to `reference`. Matrix
products of half-precision tensors have inputs in half precision and sums in float32; on a CPU, float16 and, without
instructions for it, bfloat16 are converted to float32 first. The operations between the products are in float32; for
bfloat16 on a CPU with such instructions, their results are rounded to bfloat16 (`_rounds`).
"""

import functools
import math
from typing import Any, cast

import torch
from torch import Tensor

from regard.core.backends.kernel_arguments import by_pairs, odd_values, pairs_of
from regard.core.backends.result import Result, WithRequest
from regard.core.biases import DenseBias
from regard.core.kernel_scores import by_kernel
from regard.core.mask_cache import stored
from regard.core.masks import Band, Dense
from regard.core.nonfinite import finite, harmless
from regard.core.normalizers import (
    Entmax,
    Hard,
    Sigmoid,
    Softmax,
    Sparsemax,
    filled_with,
    log_sum_exp,
    one_hot,
)
from regard.core.problem import HALF, Problem
from regard.core.requests import Entropy, Full, LogSumExp, Request, Rows, Top, returned
from regard.core.scores import Additive, Bilinear, Cosine, Dot, ScaledDot, ScaledProduct, Score
from regard.core.spans import all_of, constant
from regard.core.transforms import transformed
from regard.kernels import availability
from regard.kernels.availability import TRITON

_SCORES = (Dot, ScaledDot, Cosine, Bilinear, Additive)
_NORMALIZERS = (Softmax, Entmax, Sparsemax, Sigmoid, Hard)
_STORED_NUMBERS = 2**20  # the largest number of entries of mask and bias that is cached
_SIZE = 128  # the largest size of queries, keys and values for which one kernel computes weights and output
# In float32 the kernel is slower than torch's matrix products if keys times size exceed _SINGLE, unless the call has at
# most _WORK multiplications (pairs times size): then the launches of torch's kernels take longer than the products.
_SINGLE = 2**13
_WORK = 2**28
_LONGEST = 8192  # the longest row, in keys, whose gradients a program of the kernel holds in registers
_PROGRAMS = 65_535  # the largest number of thread blocks on the second axis of a CUDA kernel launch
_ROWS = 64  # up to this number of requested rows, the kernel stores the weights of these rows alone


def serves(problem: Problem) -> bool:
    """Return whether this module supports the call.

    The module supports scores and normalisers of regard on plain tensors, without sampling and dropout, in eager mode.
    """
    if problem.named or problem.sample or problem.dropout > 0.0 or problem.bad_keys is not None or problem.empty:
        return False
    if type(problem.score) not in _SCORES or type(problem.normalize) not in _NORMALIZERS:
        return False
    if not all(type(t) in (Tensor, torch.nn.Parameter) for t in (problem.query, problem.key, problem.value)):
        return False
    if torch.compiler.is_compiling() or transformed() or torch.jit.is_tracing():
        return False
    return problem.device.type in ("cpu", "cuda")


def attend(problem: Problem) -> Result | None:
    """Compute the call; return None on the CPU if values of a masked call are not finite: `reference` computes it."""
    if problem.request is not None and by_one_kernel(problem) and (computed := with_request(problem)) is not None:
        inputs = (problem.query, problem.key, problem.value, problem.score, problem.mask, problem.bias, problem.request)
        if (results := computed(*inputs)) is not None:
            return Result(*results)
    learning, inspected = problem.differentiated, problem.masked and inspects(problem)
    if inspected and not (
        harmless(problem.query, problem.key, problem.value, True) if learning else finite(problem.key)
    ):
        return None
    allowed, bias = mask_and_bias(problem)
    cautious = allowed is not None and not inspected
    scores = _scores(problem, cautious and learning)
    if bias is not None:
        scores = scores + bias if learning else scores.add_(bias)
    if isinstance(problem.normalize, Hard):
        return _hard(problem, scores, allowed)
    weights = _weights(problem, scores, allowed, learning)
    output = weighted_sum(weights, problem.value, allowed if cautious else None, learning)
    if inspected and not learning and not finite(output):
        return None
    if isinstance(problem.request, LogSumExp):
        return Result(output, log_sum_exp(scores, allowed))
    if isinstance(problem.request, Entropy):
        weights = weights.to(problem.dtype)
    return Result(output, problem.request.of(weights) if problem.request is not None else None)


def asks(problem: Problem) -> bool:
    """Return whether the call requests softmax weights of dot products, and no value must be inspected for NaN and Inf.

    Values must be inspected for NaN and Inf unless there is no mask or a kernel evaluates the mask.
    """
    if problem.request is None or isinstance(problem.request, LogSumExp) or not serves(problem):
        return False
    if problem.masked and not _kernel_fits(problem):
        return False
    score, normalize = problem.score, problem.normalize
    if type(score) not in (Dot, ScaledDot) or type(normalize) is not Softmax:
        return False
    if isinstance(score, ScaledDot) and score.softcap is not None:
        return False
    return problem.device.type == "cuda" or problem.query.dtype == problem.dtype


def with_request(problem: Problem) -> WithRequest | None:
    """Return a function that computes output and requested weights of calls equal to `problem` but for the tensors'
    values; None if `asks` is False."""
    if not asks(problem):
        return None
    score, learning, query, masked = problem.score, problem.differentiated, problem.query, problem.masked
    scale = score.factor(query.shape[-1]) if isinstance(score, ScaledDot) else 1.0
    # Requested weights without gradients are rounded at once to the dtype that is returned. Summaries, and gradients by
    # torch operations, are computed from weights that are not rounded.
    exact = query.dtype if isinstance(problem.request, (Full, Rows)) and not learning else problem.dtype
    run, pairs_of_call, rows = None, None, None
    if by_one_kernel(problem):
        from regard.kernels.triton import full_weights, learned_weights  # imported here: the modules import Triton

        tensors = query, problem.key, problem.value
        if learning:
            run = learned_weights.learned(*tensors, scale, masked)
        else:
            rows = _rows(problem) if full_weights.picks_rows(*tensors) else None
            run = full_weights.attended(*tensors, scale, exact, masked, None if rows is None else len(rows))
        pairs_of_call = pairs_of(problem)
    queries, device = problem.shape[-2], problem.device

    def place_rows() -> Tensor:
        """Return for each query its place among the requested rows, or −1."""
        places = torch.full((queries,), -1, dtype=torch.int32)
        places[rows] = torch.arange(len(rows or ()), dtype=torch.int32)
        return places.to(device)

    def computed(
        query: Tensor, key: Tensor, value: Tensor, _: object, mask: Any, bias: Any, request: Request | None
    ) -> tuple[Tensor, Tensor | Top | None, None] | None:
        assert request is not None  # `asks` has checked that weights are requested
        if run is not None and pairs_of_call is not None and query.device.index == availability.current_device():
            pairs = pairs_of_call(mask, bias, query.device)
            if rows is not None:
                places = constant(("places", queries, *rows), query.device, place_rows, queries)
                return *run(query, key, value, pairs, places), None
            output, weights = run(query, key, value, pairs)
        elif masked:
            return None
        else:
            weights = torch.softmax(product(query, key, scale, False, learning), -1)
            weights = weights if weights.dtype == exact else weights.to(exact)
            output = weighted_sum(weights, value, None, learning)
        return output, returned(request.of(weights), request, query.dtype), None

    return computed


def _rows(problem: Problem) -> list[int] | None:
    """Return the positions of the requested rows; None unless they are few, on the host, and different."""
    request = problem.request
    if not isinstance(request, Rows) or (isinstance(request.index, Tensor) and request.index.device.type != "cpu"):
        return None
    rows = request.positions(problem.shape[-2]).tolist()
    return rows if len(set(rows)) == len(rows) <= _ROWS else None


def by_one_kernel(problem: Problem) -> bool:
    """Return whether one Triton kernel computes both the output and the requested weights of the call.

    If the call is differentiated, the backward pass computes gradients from these weights.
    """
    return _kernel_fits(problem) and asks(problem)


def _kernel_fits(problem: Problem) -> bool:
    """Return whether the kernel that computes output and weights supports these tensors, mask and bias."""
    tensors = (problem.query, problem.key, problem.value)
    if problem.device.type != "cuda" or problem.query.ndim != 4:
        return False
    if problem.differentiated and not _has_gradients(problem):
        return False
    if odd_values(problem.query, problem.value) or not by_pairs(problem):
        return False
    if not TRITON or problem.query.dtype not in (*HALF, torch.float32) or math.prod(problem.shape[:-2]) > _PROGRAMS:
        return False
    size = max(problem.query.shape[-1], problem.value.shape[-1])
    work = math.prod(problem.shape) * size
    if problem.query.dtype == torch.float32 and problem.shape[-1] * size > _SINGLE and work > _WORK:
        return False
    return all(t.shape[-1] <= _SIZE and t.stride(-1) == 1 for t in tensors)


def _has_gradients(problem: Problem) -> bool:
    """Return whether the gradients of output and weights can be computed from the weights in the queries' dtype.

    Otherwise torch operations compute them from weights that are not rounded: in float32, with a bias, if less than all
    weights are requested, and for rows longer than `_LONGEST`.
    """
    if not isinstance(problem.request, Full) or problem.query.dtype not in HALF or problem.bias is not None:
        return False
    return problem.shape[-1] <= _LONGEST


def inspects(problem: Problem) -> bool:
    """Return whether values are inspected for NaN and Inf: on the CPU, where that takes little time."""
    return problem.device.type == "cpu"


def _few(problem: Problem) -> bool:
    return problem.matrices * math.prod(problem.shape[-2:]) <= _STORED_NUMBERS


def mask_and_bias(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Return which pairs mask and bias allow (None: all pairs), and the numbers of the bias (None: no bias).

    A bias of −inf masks its pair.
    """
    rows, columns = all_of(problem.shape[-2]), all_of(problem.shape[-1])
    mask, rule, device = problem.mask, problem.bias, problem.device
    few = _few(problem)
    allowed: Tensor | None = None
    if mask is not None:
        if few and not isinstance(mask, (Dense, Band)):
            allowed = stored(mask, device, ("allowed", rows, columns), lambda: mask.allowed(rows, columns, device))
        else:
            allowed = mask.allowed(rows, columns, device)
    if rule is None:
        return allowed, None

    def evaluated() -> tuple[Tensor, Tensor | None]:
        numbers = rule.values(rows, columns, problem.dtype)
        return numbers, numbers.detach() != -math.inf if rule.may_mask else None

    if few and not isinstance(rule, DenseBias):
        bias, finite_bias = stored(rule, device, ("values", rows, columns, problem.dtype), evaluated)
    else:
        bias, finite_bias = evaluated()
    if finite_bias is not None:
        allowed = finite_bias if allowed is None else allowed & finite_bias
    return allowed, bias


def _scores(problem: Problem, clean: bool) -> Tensor:
    """Return the scores (…, h, q, k) without mask and bias.

    With `clean`, NaN and Inf in query and key are replaced by zeros in the backward pass.
    """
    score, query, key, learning = problem.score, problem.query, problem.key, problem.differentiated
    if problem.device.type == "cpu" and not _rounds(problem):
        query, key = query.to(problem.dtype), key.to(problem.dtype)
    softcap = score.softcap if isinstance(score, ScaledDot) else None
    if type(score) in (Dot, ScaledDot) and softcap is None:
        return product(*vectors(score, query, key), clean, learning)
    spoilt = None
    if clean:  # if `clean` were False, a masked score of NaN would have a gradient of 0 · NaN
        # 0 · NaN and 0 · Inf are NaN, so each vector with NaN or Inf gives NaN here, and any other vector gives 0.
        of_query, of_key = (t.detach() @ t.new_zeros(t.shape[-1]) for t in (query, key))
        spoilt = of_query.unsqueeze(-1) + problem.repeat(of_key.unsqueeze(-1)).mT
        query, key = (cast(Tensor, _Finite.apply(t)) for t in (query, key))
    if isinstance(score, Additive):
        scores = by_kernel(problem).score(query.to(problem.dtype), problem.repeat(key.to(problem.dtype)))
    else:
        scores = product(*vectors(score, query, key), False, learning)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return scores if spoilt is None else scores + spoilt


def vectors(score: Score, query: Tensor, key: Tensor) -> ScaledProduct:
    """Return the vectors, and their scale, whose dot products are the scores before a softcap; not for additive
    scores."""
    if isinstance(score, ScaledDot):
        return ScaledProduct(query, key, score.factor(query.shape[-1]))
    wide = isinstance(score, Bilinear) and query.dtype == torch.float16  # query @ weight can overflow float16
    rewritten = score.as_product(query.float(), key.float()) if wide else score.as_product(query, key)
    assert rewritten is not None  # dot, cosine and bilinear scores are dot products of vectors
    return rewritten


def _rounds(problem: Problem) -> bool:
    """Return whether scores may be rounded to bfloat16.

    Scores are not rounded for normalisers that depend on their order or on exact differences (hard attention,
    sparsemax, entmax), nor for a requested log-sum-exp.
    """
    if isinstance(problem.request, LogSumExp):
        return False
    return problem.normalize.is_softmax or isinstance(problem.normalize, Sigmoid)


def _weights(problem: Problem, scores: Tensor, allowed: Tensor | None, learning: bool) -> Tensor:
    """Return the weights: the normalised scores, 0 where masked."""
    normalize = problem.normalize
    if isinstance(normalize, Sigmoid) and normalize.bias:
        scores = scores + normalize.bias
    masked = scores if allowed is None else filled_with(scores, allowed, -math.inf)
    if not normalize.is_softmax:
        weights = torch.sigmoid(masked) if isinstance(normalize, Sigmoid) else normalize(masked)
        # The gradient of a masked weight may be Inf; it is excluded by writing 0 to the weight.
        return filled_with(weights, allowed, 0.0) if learning and allowed is not None else weights
    if allowed is None:
        return torch.softmax(scores, -1)
    weights = torch.softmax(masked, -1)
    # In a row with a score of NaN the weights of masked keys are NaN too, as in `reference`.
    return weights if no_row_empty(problem, allowed) else filled_with(weights, _filled(problem, allowed), 0.0)


def _filled(problem: Problem, allowed: Tensor) -> Tensor:
    """Return which queries may attend to at least one key, (…, q, 1)."""
    mask, shape = problem.mask, problem.shape[-2:]
    bias = problem.bias is not None and problem.bias.may_mask
    if mask is None or bias or isinstance(mask, (Dense, Band)) or not _few(problem):
        return allowed.any(-1, keepdim=True)
    return stored(mask, problem.device, ("filled", shape), lambda: allowed.any(-1, keepdim=True))


def _hard(problem: Problem, scores: Tensor, allowed: Tensor | None) -> Result | None:
    """Return the result of hard attention without sampling, or None on the CPU if a value is not finite.

    The output of each query is the value of the key with the largest score.
    """
    hard, request = problem.normalize, problem.request
    assert isinstance(hard, Hard)
    if inspects(problem) and not finite(problem.value):
        return None
    full = allowed is None or no_row_empty(problem, allowed)
    scores = scores if hard.sharpness == 1.0 else scores * hard.sharpness
    scores = scores if allowed is None else filled_with(scores, allowed, -math.inf)
    index = scores.detach().argmax(-1, keepdim=True)
    logarithms = torch.log_softmax(scores, -1)
    value = problem.repeat(problem.value)
    results = [
        value.gather(-2, index.expand(*index.shape[:-1], value.shape[-1])),
        logarithms.gather(-1, index),
        logarithms.exp() if isinstance(request, Entropy) else None,
    ]
    if allowed is not None and not full:
        filled = allowed.any(-1, keepdim=True)
        results = [None if tensor is None else filled_with(tensor, filled, 0.0) for tensor in results]
    output, log_prob, distribution = results
    assert output is not None
    assert log_prob is not None
    index = index.squeeze(-1)
    if request is not None and distribution is None:
        distribution = one_hot(index, scores.detach(), None if full else allowed)
    weights = request.of(distribution) if request is not None and distribution is not None else None
    return Result(output, weights, log_prob.squeeze(-1), index)


def no_row_empty(problem: Problem, allowed: Tensor) -> bool:
    """Return whether every query certainly has an allowed key; mask tensors on a GPU are not inspected."""
    mask, (queries, keys) = problem.mask, problem.shape[-2:]
    if isinstance(mask, Band) and (problem.bias is None or not problem.bias.may_mask):
        low, high = 1 - queries if mask.low is None else mask.low, keys - 1 if mask.high is None else mask.high
        return low <= high and high >= 0 and queries - 1 + low < keys
    return inspects(problem) and bool(allowed.any(-1).all())


class _Finite(torch.autograd.Function):
    """The autograd function that replaces NaN and Inf by zeros and returns the incoming gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _finite(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _finite(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor, 0.0, 0.0, 0.0)


def product(query: Tensor, key: Tensor, scale: float, clean: bool, learning: bool) -> Tensor:
    """Return scale · query @ keyᵀ, (…, h, q, k), for keys of h or fewer heads, in the dtype of `wide_product`.

    With `clean`, the backward pass replaces NaN and Inf in query and key by zeros, so that the zero gradient of a
    masked score is not multiplied with NaN.
    """
    return cast(Tensor, _Product.apply(query, key, scale, clean)) if learning else _scaled_product(query, key, scale)


def _scaled_product(query: Tensor, key: Tensor, scale: float) -> Tensor:
    queries, heads = query.shape[-2], query.shape[-3]
    # The queries are scaled instead of the scores, because they are fewer numbers. In half precision they are scaled
    # only by a power of two, with which the multiplication is exact.
    early = scale != 1.0 and (query.dtype not in HALF or math.frexp(scale)[0] in (0.5, -0.5))
    shape = (*query.shape[:-3], heads, queries, key.shape[-2])
    if early and query.is_cuda and query.dtype not in HALF:  # baddbmm multiplies and scales in one call
        left, right = (t.reshape(-1, *t.shape[-2:]) for t in (_grouped(query, key.shape[-3]), key.mT))
        return torch.baddbmm(left.new_empty(()), left, right, beta=0.0, alpha=scale).view(shape)
    scores = wide_product(_grouped(query * scale if early else query, key.shape[-3]), key.mT)
    scores = scores if early or scale == 1.0 else scores.mul_(scale)
    return scores.view(shape)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in at least float32, or in bfloat16 for bfloat16 tensors on a CPU with instructions for them.

    torch's CPU operations on bfloat16 compute in float32.
    """
    if left.dtype not in HALF:
        return left @ right
    if left.device.type == "cpu":
        return left @ right if in_half(left) else left.float() @ right.float()
    batched = [t.reshape(-1, *t.shape[-2:]) for t in (left, right)]
    return torch.bmm(*batched, out_dtype=torch.float32).view(*left.shape[:-1], right.shape[-1])


def in_half(tensor: Tensor) -> bool:
    """Return whether products of the tensor are computed in half precision, with sums in float32."""
    return tensor.device.type == "cuda" or (tensor.dtype == torch.bfloat16 and _has_bfloat16())


@functools.cache
def _has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16 matrices."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _grouped(tensor: Tensor, heads: int) -> Tensor:
    """Return (…, h, n, d) as (…, heads, h / heads · n, d): the rows of all query heads that share a key head are
    joined."""
    h, n, d = tensor.shape[-3:]
    return tensor if h == heads else tensor.reshape(*tensor.shape[:-3], heads, h // heads * n, d)


class _Product(torch.autograd.Function):
    """The autograd function of `product`; its backward pass is torch operations, so second derivatives exist."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, scale: float, clean: bool) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.scale, ctx.clean = scale, clean
        return _scaled_product(query, key, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.saved_tensors
        query, key = (_finite(query), _finite(key)) if ctx.clean else (query, key)
        late = ctx.scale != 1.0 and 2 * query.shape[-1] < key.shape[-2]  # scale dquery and dkey, which are smaller
        change = grads[0] if late or ctx.scale == 1.0 else grads[0] * ctx.scale
        change = _grouped(_narrowed(change, query), key.shape[-3])
        dquery = dkey = None
        if ctx.needs_input_grad[0]:
            dquery = change @ _like(key, change)
            dquery = (dquery * ctx.scale if late else dquery).to(query.dtype).view(query.shape)
        if ctx.needs_input_grad[1]:
            dkey = change.mT @ _like(_grouped(query, key.shape[-3]), change)
            dkey = (dkey * ctx.scale if late else dkey).to(key.dtype)
        return dquery, dkey, None, None


def _narrowed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor cast to the dtype in which it is multiplied with the tensor `like`."""
    return tensor.to(like.dtype) if like.dtype not in HALF or in_half(like) else tensor


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor if tensor.dtype == other.dtype else tensor.to(other.dtype)


def weighted_sum(weights: Tensor, value: Tensor, allowed: Tensor | None, learning: bool) -> Tensor:
    """Return weights @ value, (…, h, q, e), in the dtype of the values; masked values have no effect, even NaN."""
    return cast(Tensor, _Sum.apply(weights, value, allowed)) if learning else _sum(weights, value, allowed)


def _sum(weights: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
    narrow = _narrowed(weights, value)
    output = _grouped(narrow, value.shape[-3]) @ _like(value, narrow)
    output = output.view(*weights.shape[:-1], value.shape[-1]).to(value.dtype)
    return output if allowed is None else attended(output, narrow, value, allowed)


def attended(output: Tensor, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Return `output`, which is weights @ value, corrected so that NaN and Inf in `value` affect only queries that
    attend to them."""
    group = weights.shape[-3] // value.shape[-3]
    if weights.device.type == "cuda" and TRITON and value.dtype != torch.float64:
        from regard.kernels.triton.attended_values import repair  # imported here: the module imports Triton

        tensors = (output, weights if weights.stride(-1) == 1 else weights.contiguous(), value)
        output, weights, value = (t if t.ndim == 4 else t.reshape(-1, *t.shape[-3:]) for t in tensors)
        repair(output, weights, value, allowed if allowed.ndim <= 4 else allowed.flatten(0, -4))
        return tensors[0]
    wide = torch.promote_types(value.dtype, torch.float32)
    value = value.detach().repeat_interleave(group, -3).to(wide) if group > 1 else value.detach().to(wide)
    seen = allowed.expand(weights.shape).to(wide)
    above, below = ((seen @ (~side).to(wide)) > 0 for side in (value < math.inf, value > -math.inf))
    marks = torch.where(above, math.inf, 0.0) + torch.where(below, -math.inf, 0.0)
    return (weights.to(wide) @ _finite(value) + marks).to(output.dtype)


class _Sum(torch.autograd.Function):
    """The autograd function of `weighted_sum`; its backward pass is torch operations, so second derivatives exist."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        ctx.clean = allowed is not None
        # The weights themselves are saved, not a rounded copy, so that second derivatives propagate to them.
        ctx.save_for_backward(weights, value)
        return _sum(weights, value, allowed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, value = ctx.saved_tensors
        heads = value.shape[-3]
        change = _grouped(grads[0], heads)
        dweights = dvalue = None
        if ctx.needs_input_grad[0]:
            finite_value = _finite(value) if ctx.clean else value
            dweights = wide_product(change, finite_value.mT).to(weights.dtype).view(weights.shape)
        if ctx.needs_input_grad[1]:
            narrow = _grouped(_narrowed(weights, value), heads)
            dvalue = (narrow.mT @ _like(change, narrow)).to(value.dtype)
        return dweights, dvalue, None
