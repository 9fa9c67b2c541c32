"""Attention of short sequences with dot products on the CPU in compiled C: one parallel region for each pass.

The products, the mask, the bias and softmax of a block of rows are computed while they are in the cache, in float32 for
bfloat16 too. For short sequences torch's kernels and separate operations spend most of their time outside of the
products. Reference implementation: `regard.core.backends.reference`.
"""

import ctypes
import functools
import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.kernels.native_library import library

_FILE = "dot_attention.c"
_PARALLEL = 2**20  # products of pairs and sizes from which on a call uses several threads
_NORMALIZERS = {"softmax": 0, "sigmoid": 1}


class Limits(NamedTuple):
    """The tensors that restrict or change the scores, each or None; all but the lengths may broadcast.

    Keys j < lengths (b,) int64; equal ids (b, q) and (b, k) int64; allowed (b, h, q, k) bool; bias (b, h, q, k) and
    slopes (h,) float32, which multiply −|i + offset − j|.
    """

    lengths: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    allowed: Tensor | None = None


class Form(NamedTuple):
    """What calls with one signature have in common: the numbers of `shape` in C, and the layout of the output."""

    numbers: Any
    factors: tuple[float, float, float]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    parallel: bool  # whether a call uses several threads
    normalizer: str
    band: tuple[int | None, int | None]
    offset: int


NO_LIMITS = Limits()
_ANY, _BIAS, _IDS = ctypes.c_void_p, 25, 33  # the index of the strides of `bias` and of `query_ids` in the numbers


@functools.cache
def available() -> bool:
    """Return whether there is a C compiler, or a library compiled before."""
    return library(__package__ or "", _FILE) is not None


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
) -> Form:
    """Return the form of calls with query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e).

    Scores are scale · q · k, with a softcap softcap · tanh(score / softcap), plus `shift`; a band is
    low ≤ j − i ≤ high.
    """
    batch, heads, queries, size = query.shape
    kv_heads, keys, value_size = *key.shape[1:3], value.shape[3]
    strides = (queries * heads * value_size, value_size, heads * value_size, 1)  # torch's kernels return this layout
    low, high = band
    numbers = [batch, heads, kv_heads, queries, keys, size, value_size]
    numbers += [int(query.dtype == torch.bfloat16), _NORMALIZERS[normalizer]]
    numbers += [int(low is not None), low or 0, int(high is not None), high or 0]
    numbers += [*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides[:3]]
    numbers += [0] * 8 + [queries, keys, offset]
    work = batch * heads * queries * keys * (size + value_size)
    return Form(
        (ctypes.c_long * len(numbers))(*numbers),
        (scale, softcap, shift),
        (batch, heads, queries, value_size),
        strides,
        query.dtype,
        work >= _PARALLEL,
        normalizer,
        band,
        offset,
    )


def attention(query: Tensor, key: Tensor, value: Tensor, form: Form, limits: Limits, learning: bool) -> Tensor | None:
    """Return the output (b, h, q, e); None if a number is not finite, or a length is out of range."""
    if not learning:
        return _forward(query, key, value, form, limits)
    output = cast(Tensor, _Attention.apply(query, key, value, form, *limits))
    return None if output.numel() == 0 else output


def _forward(query: Tensor, key: Tensor, value: Tensor, form: Form, limits: Limits) -> Tensor | None:
    output = torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
    bad = _functions()[0](
        _numbers(form, limits), query.data_ptr(), key.data_ptr(), value.data_ptr(), *_pointers(limits),
        output.data_ptr(), *form.factors, torch.get_num_threads() if form.parallel else 1,
    )  # fmt: skip
    return None if bad else output


def _pointers(limits: Limits) -> tuple[int | None, ...]:
    if limits is NO_LIMITS:
        return (None,) * 6
    return tuple([None if tensor is None else tensor.data_ptr() for tensor in limits])


def _numbers(form: Form, limits: Limits) -> Any:
    """Return the numbers of the form with the strides of bias, mask and ids."""
    bias, allowed, ids = limits.bias, limits.allowed, limits.query_ids
    if bias is None and allowed is None and ids is None:
        return form.numbers
    numbers = type(form.numbers)(*form.numbers)
    for place, tensor in ((_BIAS, bias), (_BIAS + 4, allowed)):
        if tensor is not None:
            numbers[place : place + 4] = [
                0 if length == 1 else step for length, step in zip(tensor.shape, tensor.stride(), strict=True)
            ]
    if ids is not None and limits.key_ids is not None:
        numbers[_IDS : _IDS + 2] = [0 if t.shape[0] == 1 else t.shape[1] for t in (ids, limits.key_ids)]
    return numbers


@functools.cache
def _functions() -> tuple[Any, Any]:
    loaded = library(__package__ or "", _FILE)
    assert loaded is not None  # checked by available()
    forward, backward = loaded.regard_dot_attention, loaded.regard_dot_gradients
    forward.argtypes = [_ANY] * 11 + [ctypes.c_double] * 3 + [ctypes.c_long]
    backward.argtypes = [_ANY] * 14 + [ctypes.c_double] * 3 + [ctypes.c_long]
    forward.restype, backward.restype = ctypes.c_int, None
    return forward, backward


def formula(query: Tensor, key: Tensor, value: Tensor, form: Form, limits: Limits) -> Tensor:
    """Return the output of a call that the loops did not refuse, in torch operations that differentiate again."""
    scale, softcap, shift = form.factors
    group, device = query.shape[1] // key.shape[1], query.device
    # The loops have read finite numbers alone; others are masked for all queries.
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
    else:
        lowest = torch.where(allowed.any(-1, keepdim=True), -math.inf, 0.0)
        weights = torch.softmax(torch.where(allowed, scores, lowest), -1)
    return (torch.where(allowed, weights, 0.0) @ value).to(query.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, form: Form, *given: Tensor | None) -> Tensor:
        output = _forward(query, key, value, form, Limits(*given))
        if output is None:
            return query.new_empty(0)
        ctx.save_for_backward(query, key, value, *given)
        ctx.form = form
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *given = ctx.saved_tensors
        form, limits = ctx.form, Limits(*given)
        if torch.is_grad_enabled():  # the gradients are differentiated again
            wanted = [n for n in range(3) if ctx.needs_input_grad[n]]
            given = [ctx.saved_tensors[n] for n in wanted]
            found = torch.autograd.grad(formula(query, key, value, form, limits), given, upstream[0], create_graph=True)
            of_each = dict(zip(wanted, found, strict=True))
            return *[of_each.get(n) for n in range(3)], *(None,) * 7
        change = upstream[0].contiguous()
        grads = [torch.empty(t.shape, dtype=form.dtype) for t in (query, key, value)]
        _functions()[1](
            _numbers(form, limits), query.data_ptr(), key.data_ptr(), value.data_ptr(), *_pointers(limits),
            change.data_ptr(), *[grad.data_ptr() for grad in grads], *form.factors,
            torch.get_num_threads() if form.parallel else 1,
        )  # fmt: skip
        return *grads, *(None,) * 7
