"""Dot-product attention on the CPU in compiled C, with one call of C for each forward and backward pass.

The products, the mask, the bias and the softmax of a block of queries are computed in float32, while the block is in
the processor's cache. On processors with instructions for bfloat16, products of bfloat16 use these instructions, with
sums in float32; attention weights and gradients of scores are then rounded to bfloat16. For short sequences, torch's
kernels and separate operations spend most of their time outside of the matrix products. The reference implementation is
`regard.core.backends.reference`.

The same loops compute what a call requests beside the output: all attention weights, the weights of some queries, the
sums of the weights over the queries, or the entropy of each query. Only the request of all weights stores all weights.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.kernels.native_library import library

_FILE = "dot_attention.c"
# Numbers of multiplications, and of entries of key and value, from which on a call uses several threads.
_PARALLEL, _PARALLEL_KEYS = 2**20, 2**18
# Constants of the normalisers in C. `hard` gives the key with the largest score the weight 1; it has no gradients.
# `entmax` is entmax with α = 1.5, and `power` is entmax with any 1 < α ≤ 2.
_NORMALIZERS = {"softmax": 0, "sigmoid": 1, "sparsemax": 2, "entmax": 3, "hard": 4, "power": 5}
_REQUESTS = {"nothing": 0, "weights": 1, "received": 2, "entropy": 3, "rows": 4}


class Limits(NamedTuple):
    """The tensors that mask or change the scores; each of them may be None.

    Query i attends key j if j < lengths (b,), int64; if query_ids (b, q) and key_ids (b, k), int64, are equal; and if
    `allowed` (b, h, q, k) is true. `bias` (b, h, q, k) and −slopes (h,) · |i + offset − j|, in float32, are added to
    the scores. `bias`, `allowed` and the ids may broadcast.
    """

    lengths: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    allowed: Tensor | None = None


class Rows(NamedTuple):
    """The queries whose weights are requested.

    `positions` holds the indices of these queries; `places` has, for each query of the call, its index in `positions`,
    or −1.
    """

    positions: Tensor
    places: Tensor


class Results(NamedTuple):
    """The output (b, h, q, e), the requested result and, with `hard`, the log-probability and index of the best keys.

    `requested` is in float32. Its shape depends on the request: (b, h, q, k) for weights, (b, h, k) for received,
    (b, h, q) for entropy and (b, h, r, k) for rows.
    """

    output: Tensor
    requested: Tensor | None
    log_prob: Tensor | None = None
    index: Tensor | None = None


class Form(NamedTuple):
    """What all calls with one signature share: sizes, strides and options, and the layout of the output.

    `numbers` is the struct `shape` of the C code.
    """

    numbers: Any
    factors: tuple[float, float, float, float, float]  # scale, softcap, shift, alpha and dropout of `form()`
    shape: tuple[int, ...]
    given: tuple[tuple[int, ...], ...]  # the strides of query, key and value
    strides: tuple[int, ...]
    dtype: torch.dtype
    parallel: bool  # whether the C code uses several threads
    normalizer: str
    band: tuple[int | None, int | None]
    offset: int
    request: str
    complete: bool = False  # whether `numbers` includes the strides of the tensors in `Limits`


NO_LIMITS = Limits()
_ANY = ctypes.c_void_p
# Indices in `Form.numbers`: of the strides of `query`, `bias` and `query_ids`, and of the request.
_QUERY, _BIAS, _IDS, _REQUEST = 13, 25, 33, 36


@functools.cache
def available() -> bool:
    """Return whether the library can be used: it was compiled before, or a C compiler is available now."""
    return library(__package__ or "", _FILE) is not None


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether the processor has AMX, which multiplies bfloat16 many times as fast as float32."""
    loaded = library(__package__ or "", _FILE)
    return loaded is not None and bool(loaded.regard_dot_amx())


@functools.cache
def outruns_torch() -> bool:
    """Return whether the C code multiplies matrices faster than torch: on processors with AVX-512 not made by Intel.

    On an AMD EPYC of 2024 (two cores), float32 attention of 1,024 tokens and size 64 takes 2.3 ms in the C code, and
    5.4 ms in torch's fused kernel. On Intel's processors, torch's kernel uses AVX-512 as well.
    """
    loaded = library(__package__ or "", _FILE)
    return loaded is not None and bool(loaded.regard_dot_outruns_torch())


def form(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    shift: float = 0.0,
    normalizer: str = "softmax",
    band: tuple[int | None, int | None] = (None, None),
    offset: int = 0,
    request: str = "nothing",
    alpha: float = 2.0,
    dropout: float = 0.0,
) -> Form:
    """Return the `Form` of calls with query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e).

    Scores are scale · q · k + shift, or softcap · tanh(scale · q · k / softcap) + shift if `softcap` is above 0. With
    the band (low, high), query i attends only keys j with low ≤ j − i ≤ high. The request is one of nothing, weights,
    received, entropy and rows. Only the normaliser "power" uses `alpha`. `dropout` must be less than 1; requested
    weights are those before dropout.
    """
    batch, heads, queries, size = query.shape
    kv_heads, keys, value_size = *key.shape[1:3], value.shape[3]
    # The output has the layout of the outputs of torch's kernels: in memory, the token axis precedes the head axis.
    strides = (queries * heads * value_size, value_size, heads * value_size, 1)
    low, high = band
    numbers = [batch, heads, kv_heads, queries, keys, size, value_size]
    numbers += [int(query.dtype == torch.bfloat16), _NORMALIZERS[normalizer]]
    numbers += [int(low is not None), low or 0, int(high is not None), high or 0]
    numbers += [*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides[:3]]
    numbers += [0] * 8 + [queries, keys, offset, _REQUESTS[request], 0]
    numbers_read = batch * kv_heads * keys * (size + value_size)
    work = batch * heads * queries * keys * (size + value_size)
    return Form(
        (ctypes.c_long * len(numbers))(*numbers),
        (scale, softcap, shift, alpha, dropout),
        (batch, heads, queries, value_size),
        (query.stride(), key.stride(), value.stride()),
        strides,
        query.dtype,
        work >= _PARALLEL or numbers_read >= _PARALLEL_KEYS,
        normalizer,
        band,
        offset,
        request,
    )


def rows(positions: Tensor, queries: int) -> Rows:
    """Return the `Rows` of the queries at `positions`; a position that is given several times has one index."""
    places = torch.full((queries,), -1, dtype=torch.long, device="cpu")
    places[positions] = torch.arange(len(positions), device="cpu")
    return Rows(positions, places)


def attention(
    query: Tensor, key: Tensor, value: Tensor, form: Form, limits: Limits, learning: bool, *, seed: int = 0
) -> Tensor | None:
    """Return the output (b, h, q, e); None if the loops read a NaN or infinity, or a length is out of range.

    With dropout, calls with the same seed drop the same weights.
    """
    if not learning:
        return _forward(query, key, value, form, limits, seed=seed)
    output = cast(Tensor, _Attention.apply(query, key, value, limits.bias, form, limits, None, seed))
    return None if output.numel() == 0 else output


def with_request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: Form,
    limits: Limits,
    learning: bool,
    rows: Rows | None = None,
    *,
    seed: int = 0,
) -> Results | None:
    """Return the output and the requested result, or None where `attention` does; the request "rows" needs `rows`."""
    if learning:
        both = _Attention.apply(query, key, value, limits.bias, form, limits, rows, seed)
        output, requested = cast(tuple[Tensor, Tensor], both)
        return None if output.numel() == 0 else Results(output, _in_order(requested, rows))
    requested, choice = _new_request(query, key, form, rows), (None, None)
    if form.normalizer == "hard":
        choice = _floats(query, *form.shape[:3]).zero_(), query.new_zeros(form.shape[:3], dtype=torch.long)
    output = _forward(query, key, value, form, limits, rows, requested, *choice, seed=seed)
    return None if output is None else Results(output, _in_order(requested, rows), *choice)


def _in_order(requested: Tensor | None, rows: Rows | None) -> Tensor | None:
    """Return the weights of the requested rows in the order of the request; repeated positions give repeated rows."""
    if requested is None or rows is None or len(rows.positions) == 1:
        return requested
    return requested.index_select(2, rows.places[rows.positions])


def _new_request(query: Tensor, key: Tensor, form: Form, rows: Rows | None) -> Tensor | None:
    """Return an uninitialised or zero tensor for the requested result; None without a request."""
    batch, heads, queries = form.shape[:3]
    if form.request == "nothing":
        return None
    if form.request == "entropy":
        return _floats(query, batch, heads, queries)
    if form.request == "received":
        return _floats(query, batch, heads, key.shape[2])
    # If a row is requested several times, the C code writes it only once.
    made = _floats(query, batch, heads, queries if rows is None else len(rows.positions), key.shape[2])
    return made if rows is None else made.zero_()


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: Form,
    limits: Limits,
    rows: Rows | None = None,
    *more: Tensor | None,
    seed: int = 0,
) -> Tensor | None:
    """Return the output.

    `more` are the tensors to which the requested result, the log-probabilities and the indices of the best keys are
    written, in this order; those that are not needed may be omitted.
    """
    output, more = query.new_empty_strided(form.shape, form.strides), (*more, None, None, None)[:3]
    bad = _functions()[0](
        _numbers(form, limits, rows), query.data_ptr(), key.data_ptr(), value.data_ptr(), *_pointers(limits, rows),
        output.data_ptr(), *[None if t is None else t.data_ptr() for t in more], *form.factors, seed,
        torch.get_num_threads() if form.parallel else 1,
    )  # fmt: skip
    return None if bad else output


def _floats(query: Tensor, *shape: int) -> Tensor:
    """Return a new tensor in float32, whatever torch's default dtype and device are."""
    return query.new_empty(shape, dtype=torch.float32)


def _pointers(limits: Limits, rows: Rows | None) -> tuple[int | None, ...]:
    if limits is NO_LIMITS and rows is None:
        return (None,) * 7
    tensors = (*limits, None if rows is None else rows.places)
    return tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])


def completed(form: Form, limits: Limits) -> Form:
    """Return the form with the strides of the ids in `limits`, or unchanged if `limits` has a bias or a mask tensor."""
    if limits.bias is not None or limits.allowed is not None:
        return form
    return form._replace(numbers=_numbers(form, limits, None), complete=True)


def _numbers(form: Form, limits: Limits, rows: Rows | None) -> Any:
    """Return `form.numbers` with the strides of bias, mask and ids, and the number of requested rows."""
    bias, allowed, ids = limits.bias, limits.allowed, limits.query_ids
    if rows is None and (form.complete or (bias is None and allowed is None and ids is None)):
        return form.numbers
    numbers = type(form.numbers).from_buffer_copy(form.numbers)
    if rows is not None:
        numbers[_REQUEST + 1] = len(rows.positions)
    for place, tensor in ((_BIAS, bias), (_BIAS + 4, allowed)):
        if tensor is not None:
            for axis, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
                numbers[place + axis] = 0 if length == 1 else step
    if ids is not None and limits.key_ids is not None:
        numbers[_IDS] = 0 if len(ids) == 1 else ids.shape[1]
        numbers[_IDS + 1] = 0 if len(limits.key_ids) == 1 else limits.key_ids.shape[1]
    return numbers


@functools.cache
def _functions() -> tuple[Any, Any]:
    loaded = library(__package__ or "", _FILE)
    assert loaded is not None  # the caller has tested available()
    forward, backward = loaded.regard_dot_attention, loaded.regard_dot_gradients
    more = [ctypes.c_double] * 5 + [ctypes.c_uint64, ctypes.c_long]
    forward.argtypes, backward.argtypes = [_ANY] * 15 + more, [_ANY] * 17 + more
    forward.restype, backward.restype = ctypes.c_int, None
    return forward, backward


def formula(
    query: Tensor, key: Tensor, value: Tensor, form: Form, limits: Limits, rows: Rows | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the output and the requested result (all weights if nothing was requested), computed by torch operations.

    The C code has computed this call in the forward pass. Unlike the result of the C code, the result of the torch
    operations can be differentiated twice.
    """
    scale, softcap, shift, alpha, dropout = form.factors
    group, device = query.shape[1] // key.shape[1], query.device
    key_given, value_given = key, value
    # The C code accepted the call, so numbers that are not finite belong to keys that are masked for all queries.
    key, value = (t.float().nan_to_num(0.0, 0.0, 0.0).repeat_interleave(group, 1) for t in (key, value))
    scores = query.float().nan_to_num(0.0, 0.0, 0.0) @ key.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap > 0.0 else scores
    scores = scores if limits.bias is None else scores + limits.bias
    i, j = torch.arange(query.shape[2], device=device)[:, None], torch.arange(key.shape[2], device=device)
    if limits.slopes is not None:
        scores = scores - limits.slopes[:, None, None] * (i + form.offset - j).abs()
    allowed, (low, high) = scores.detach() > -math.inf, form.band
    allowed = allowed if low is None else allowed & (j - i >= low)
    allowed = allowed if high is None else allowed & (j - i <= high)
    allowed = allowed if limits.allowed is None else allowed & limits.allowed
    if limits.lengths is not None:
        allowed = allowed & (j < limits.lengths.view(-1, 1, 1, 1))
    if limits.query_ids is not None and limits.key_ids is not None:
        allowed = allowed & (limits.query_ids[:, None, :, None] == limits.key_ids[:, None, None, :])
    if form.normalizer == "sigmoid":
        weights = torch.sigmoid(torch.where(allowed, scores, 0.0) + shift)
    elif form.normalizer != "softmax":
        weights, detached = _floats(query, *scores.shape), (query.detach(), key_given.detach(), value_given.detach())
        numbers = type(form.numbers).from_buffer_copy(form.numbers)
        numbers[_REQUEST] = _REQUESTS["weights"]
        _forward(*detached, form._replace(numbers=numbers, request="weights"), limits, None, weights)
        scores = torch.where(allowed, scores, 0.0)
        if form.normalizer == "power":
            weights = _to_the_power(scores, weights, alpha)
        else:
            weights = _on_support(scores, weights > 0, form.normalizer == "entmax")
    else:
        lowest = torch.where(allowed.any(-1, keepdim=True), -math.inf, 0.0)
        weights = torch.softmax(torch.where(allowed, scores, lowest), -1)
    weights = torch.where(allowed, weights, 0.0)
    summed = weights * dropout_factors(weights.shape, dropout, seed) if dropout > 0.0 else weights
    return (summed @ value).to(query.dtype), _requested_of(weights, form.request, rows)


def _requested_of(weights: Tensor, request: str, rows: Rows | None) -> Tensor:
    if request == "received":
        return weights.sum(2)
    if request == "entropy":
        return -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
    return weights if rows is None else weights.index_select(2, rows.positions)


def _on_support(scores: Tensor, support: Tensor, square: bool) -> Tensor:
    """Return the weights of sparsemax, or of entmax with α = 1.5 if `square`, given which keys have a weight above 0.

    Given which keys have a weight above 0, the threshold of the scores follows from their mean for sparsemax, and from
    a quadratic equation for entmax.
    """
    count, scores = support.sum(-1, keepdim=True).clamp_min(1), scores / 2 if square else scores
    mean = torch.where(support, scores, 0.0).sum(-1, keepdim=True) / count
    if not square:
        return torch.where(support, scores - mean + 1 / count, 0.0)
    spread = torch.where(support, scores - mean, 0.0).square().sum(-1, keepdim=True)
    filled = support.any(-1, keepdim=True)
    root = torch.where(filled, (1 - spread) / count, 1.0).clamp_min(1e-12).sqrt()
    return torch.where(support, scores - mean + root, 0.0).square()


def _to_the_power(scores: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Return the weights of entmax in a form that can be differentiated twice, given their values in `weights`.

    The value of the threshold t of the scores follows from the largest weight. Two steps of Newton's method from this
    value change it only by rounding errors, but give t its first and second derivatives with respect to the scores.
    """
    factor, power = alpha - 1, 1 / (alpha - 1)
    support, scores = weights > 0, scores * (alpha - 1)
    best = weights.argmax(-1, keepdim=True)
    t = (scores.gather(-1, best) - weights.gather(-1, best) ** factor).detach()
    for _ in range(2):
        base = torch.where(support, (scores - t).clamp_min(1e-30), 1.0)
        sums = torch.where(support, base**power, 0.0).sum(-1, keepdim=True)
        slopes = torch.where(support, power * base ** (power - 1), 0.0).sum(-1, keepdim=True)
        t = t + torch.where(slopes > 0, (sums - 1) / torch.where(slopes > 0, slopes, 1.0), 0.0)
    return torch.where(support, torch.where(support, (scores - t).clamp_min(1e-30), 1.0) ** power, 0.0)


def dropout_factors(shape: tuple[int, ...], probability: float, seed: int) -> Tensor:
    """Return the dropout factors of the C code for weights (b, h, q, k): 0 if dropped, else 1 / (1 − probability)."""
    batch, heads, queries, keys = shape
    row = (torch.arange(batch * heads * queries, device="cpu") + 1) * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        row = (row ^ _shifted(row, shift)) * _signed(factor)
    low, high = (row & 0xFFFFFFFF).view(batch, heads, queries, 1), _shifted(row, 32).view(batch, heads, queries, 1)
    numbers = _mixed(_mixed(torch.arange(keys, device="cpu") ^ low) + high & 0xFFFFFFFF)
    return (numbers >= int(probability * 2**32)).float() / (1 - probability)


def _mixed(numbers: Tensor) -> Tensor:
    """Return the hash `mixed` of the C code for numbers of 32 bits, stored in int64."""
    numbers = (numbers ^ numbers >> 16) * 0x7FEB352D & 0xFFFFFFFF
    numbers = (numbers ^ numbers >> 15) * 0x846CA68B & 0xFFFFFFFF
    return numbers ^ numbers >> 16


def _signed(number: int) -> int:
    """Return the signed 64-bit integer that has the same bits as an unsigned 64-bit integer."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(numbers: Tensor, places: int) -> Tensor:
    """Return int64 numbers shifted to the right as if they were unsigned."""
    return numbers >> places & (1 << (64 - places)) - 1


def _laid_out(query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Form]:
    """Return the saved tensors, and a form with their strides: hooks on saved tensors may have changed the strides."""
    if form.given == (query.stride(), key.stride(), value.stride()):
        return query, key, value, form
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    numbers = type(form.numbers).from_buffer_copy(form.numbers)
    numbers[_QUERY : _BIAS - 3] = [*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]]
    return query, key, value, form._replace(numbers=numbers)


class _Attention(torch.autograd.Function):
    """The output, and the requested result if there is a request.

    `bias` is `limits.bias`. It is an argument of its own because it may need a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        form: Form,
        limits: Limits,
        rows: Rows | None,
        seed: int,
    ) -> Any:
        requested = _new_request(query, key, form, rows)
        output = _forward(query, key, value, form, limits, rows, requested, seed=seed)
        if output is None:
            return query.new_empty(0) if requested is None else (query.new_empty(0), query.new_empty(0))
        # The tensors in `limits` are saved too: torch raises an error if one of these tensors was changed in place
        # before the backward pass.
        ctx.save_for_backward(query, key, value, *(() if limits is NO_LIMITS else limits))
        ctx.form, ctx.rows, ctx.seed = form, rows, seed
        ctx.set_materialize_grads(False)
        return output if requested is None else (output, requested)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, *given = ctx.saved_tensors
        query, key, value, form = _laid_out(query, key, value, ctx.form)
        limits, learned, rows = Limits(*given) if given else NO_LIMITS, ctx.needs_input_grad[:4], ctx.rows
        if torch.is_grad_enabled():  # with create_graph=True, so the gradients may be differentiated again
            results = functools.partial(formula, form=form, limits=limits, rows=rows, seed=ctx.seed)
            return *_again(query, key, value, limits.bias, results, learned, upstream), None, None, None, None
        change = upstream[0]
        change = query.new_zeros(form.shape) if change is None else change.contiguous()
        drequested = upstream[1].contiguous() if len(upstream) > 1 and upstream[1] is not None else None
        grads = [t.new_empty(t.shape) for t in (query, key, value)]
        dscores = _floats(query, *form.shape[:3], key.shape[2]) if learned[3] else None
        _functions()[1](
            _numbers(form, limits, rows), query.data_ptr(), key.data_ptr(), value.data_ptr(), *_pointers(limits, rows),
            change.data_ptr(), None if drequested is None else drequested.data_ptr(), *[t.data_ptr() for t in grads],
            None if dscores is None else dscores.data_ptr(), *form.factors, ctx.seed,
            torch.get_num_threads() if form.parallel else 1,
        )  # fmt: skip
        dbias = None if dscores is None or limits.bias is None else dscores.sum_to_size(limits.bias.shape)
        return *grads, dbias, None, None, None, None


def _again(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    results: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    learned: tuple[bool, ...],
    upstream: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and bias with an autograd graph, by differentiating `results`."""
    # The inputs are views, because one tensor may be passed as query, key and value, and each input needs its own
    # gradient.
    query, key, value = (tensor.view_as(tensor) for tensor in (query, key, value))
    pairs = [(y, g) for y, g in zip(results(query, key, value), upstream, strict=False) if g is not None]
    leaves = [t for t, one in zip((query, key, value, bias), learned, strict=True) if one and t is not None]
    if not pairs or not leaves:
        return (None,) * 4
    outputs, changes = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(outputs, leaves, changes, create_graph=True, allow_unused=True))
    return tuple([next(grads) if one else None for one in learned])
