"""Dot-product attention on the CPU in compiled C, with one call of C for each forward and backward pass.

The products, the mask, the bias and the softmax of a block of queries are computed in float32, while the block is in
the processor's cache. On processors with instructions for bfloat16, products of bfloat16 use these instructions, with
sums in float32; attention weights and gradients of scores are then rounded to bfloat16. For short sequences, torch's
kernels and separate operations spend most of their time outside of the matrix products. The reference implementation is
`regard.core.backends.reference`.

The same loops compute what a call requests beside the output: all attention weights, the weights of some queries, the
sums of the weights over the queries, the entropy or the log-sum-exp of each query. Only the request of all weights
stores all weights.
"""

import ctypes
import functools
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.kernels.dot_form import NO_LIMITS, Form, Limits, Rows
from regard.kernels.dot_formula import formula
from regard.kernels.huge_pages import LARGE, on_huge_pages
from regard.kernels.native_library import library

_FILE = "dot_attention.c"
# The structs `outputs` and `gradients` of the C code: pointers, the seed, the number of threads, then pointers again
# (and, in `gradients`, the strides of the gradient of the output).
_OUTPUTS, _GRADIENTS = struct.Struct("10PQq4P"), struct.Struct("10PQqP3q5P")


class Results(NamedTuple):
    """The output (b, h, q, e) and the requested result; with the normaliser "hard" also the log-probability and the
    index (b, h, q) of each query's best key.

    `requested` is in float32. Its shape depends on the request: (b, h, q, k) for weights, (b, h, k) for received,
    (b, h, q) for entropy and logsumexp, and (b, h, r, k) for r rows. All lack the batch axis if query, key and value
    do.
    """

    output: Tensor
    requested: Tensor | None
    log_prob: Tensor | None = None
    index: Tensor | None = None


class _Call(NamedTuple):
    """The arguments of a call beside query, key, value and bias, the tensors that may need a gradient.

    `alone` computes the forward pass of a call without limits, requests and dropout; see `repeated`.
    """

    form: Form
    limits: Limits
    rows: Rows | None
    seed: int
    alone: Callable[..., Tensor | None] | None = None


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


@functools.cache
def _functions() -> tuple[Any, Any]:
    loaded = library(__package__ or "", _FILE)
    assert loaded is not None  # the caller has tested available()
    forward, backward = loaded.regard_dot_attention, loaded.regard_dot_gradients
    forward.argtypes = backward.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    forward.restype, backward.restype = ctypes.c_int, None
    return forward, backward


def repeated(form: Form, learning: bool) -> Callable[..., Tensor | None]:
    """Return a function of query, key and value that computes `attention` without limits; it ignores other arguments.

    For a short call, every line of Python between the call and the C code counts: the returned function runs as few as
    possible.
    """
    numbers, shape, strides, most = form.numbers, form.shape, form.strides, form.threads
    forward, pack = _functions()[0], _OUTPUTS.pack
    large = 4 * math.prod(shape) >= LARGE

    def computed(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor | None:
        output, threads = query.new_empty_strided(shape, strides), _threads(most)
        if large:
            on_huge_pages(output)
        bad = forward(
            numbers,
            pack(
                query.data_ptr(), key.data_ptr(), value.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0, threads,
                output.data_ptr(), 0, 0, 0,
            ),
        )  # fmt: skip
        return None if bad else output

    if not learning:
        return computed
    call = _Call(form, NO_LIMITS, None, 0, computed)

    def learned(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor | None:
        output = _apply(query, key, value, None, call)
        return None if output.numel() == 0 else output

    return learned


def attention(
    query: Tensor, key: Tensor, value: Tensor, form: Form, limits: Limits, learning: bool, *, seed: int = 0
) -> Tensor | None:
    """Return the output (b, h, q, e); None if the loops read a NaN or infinity, or a length is out of range.

    With dropout, calls with the same seed drop the same weights.
    """
    if not learning:
        return _forward(query, key, value, _Call(form, limits, None, seed))
    output = _apply(query, key, value, limits.bias, _Call(form, limits, None, seed))
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
    call = _Call(form, limits, rows, seed)
    if learning:
        output, requested = cast(tuple[Tensor, Tensor], _apply(query, key, value, limits.bias, call))
        return None if output.numel() == 0 else Results(output, _in_order(requested, rows))
    requested, choice = _new_request(query, call), (None, None)
    if form.normalizer == "hard":
        choice = _floats(query, *form.shape[:-1]).zero_(), query.new_zeros(form.shape[:-1], dtype=torch.long)
    output = _forward(query, key, value, call, requested, *choice)
    return None if output is None else Results(output, _in_order(requested, rows), *choice)


def _in_order(requested: Tensor | None, rows: Rows | None) -> Tensor | None:
    """Return the weights of the requested rows in the order of the request; repeated positions give repeated rows.

    Other requested results, for which `rows` is None, are returned unchanged.
    """
    if requested is None or rows is None or len(rows.positions) == 1:
        return requested
    return requested.index_select(-2, rows.places[rows.positions])


def _new_request(query: Tensor, call: _Call) -> Tensor | None:
    """Return an uninitialised or zero tensor for the requested result; None without a request."""
    form, rows = call.form, call.rows
    (*lead, queries), keys = form.shape[:-1], form.keys
    if form.request == "nothing":
        return None
    if form.request in ("entropy", "logsumexp"):
        return _floats(query, *lead, queries)
    if form.request == "received":
        return _floats(query, *lead, keys)
    if rows is None:
        return _floats(query, *lead, queries, keys)
    # If a row is requested several times, the C code writes it only once.
    return _floats(query, *lead, len(rows.positions), keys).zero_()


def _forward(query: Tensor, key: Tensor, value: Tensor, call: _Call, *more: Tensor | None) -> Tensor | None:
    """Return the output, or None where `attention` does.

    `more` are the tensors to which the requested result, the log-probabilities and the indices of the best keys are
    written, in this order; those that are not needed may be omitted.
    """
    form, limits, rows, seed, _ = call
    output = on_huge_pages(query.new_empty_strided(form.shape, form.strides))
    more = (*more, None, None, None)[:3]
    packed = _OUTPUTS.pack(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), *_pointers(limits, rows), seed,
        _threads(form.threads), output.data_ptr(), *map(_pointer, more),
    )  # fmt: skip
    return None if _functions()[0](form.numbers_with(limits, rows), packed) else output


def _threads(most: int) -> int:
    """Return the number of threads of a call for which at most `most` threads are worthwhile."""
    return 1 if most == 1 else min(most, torch.get_num_threads())


def _floats(query: Tensor, *shape: int) -> Tensor:
    """Return a new tensor in float32, whatever torch's default dtype and device are."""
    return on_huge_pages(query.new_empty(shape, dtype=torch.float32))


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pointers(limits: Limits, rows: Rows | None) -> tuple[int, ...]:
    if limits is NO_LIMITS and rows is None:
        return (0,) * 7
    return (*map(_pointer, limits), _pointer(None if rows is None else rows.places))


def _all_weights(form: Form, limits: Limits, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return all weights of a call that the C code has accepted before."""
    weights = _floats(query, *form.shape[:-1], form.keys)
    _forward(query, key, value, _Call(form.requesting("weights"), limits, None, 0), weights)
    return weights


def _saved(limits: Limits) -> tuple[Tensor | None, ...]:
    """Return the tensors of `limits` as they are saved for the backward pass.

    The lengths are a copy, because the caller may change them where torch does not see it, as through a NumPy array.
    Tensors that were created in inference mode cannot be saved, so they are copied too.
    """
    copied = [t.clone() if t is not None and (t is limits.lengths or t.is_inference()) else t for t in limits]
    return tuple(copied)


class _Attention(torch.autograd.Function):
    """The autograd function: returns the output, and the requested result if there is a request.

    Empty tensors are returned where `attention` returns None. `bias` is the bias in `call.limits`. It is an argument of
    its own because it may need a gradient.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, call: _Call) -> Any:
        ctx.call = call
        if call.alone is not None:
            ctx.save_for_backward(query, key, value)
            output = call.alone(query, key, value)
            return query.new_empty(0) if output is None else output
        requested = _new_request(query, call)
        output = _forward(query, key, value, call, requested)
        if output is None:
            return query.new_empty(0) if requested is None else (query.new_empty(0), query.new_empty(0))
        # The limits are saved too: torch raises an error if one of them was changed before the backward pass.
        ctx.save_for_backward(query, key, value, *(() if call.limits is NO_LIMITS else _saved(call.limits)))
        if requested is None:
            return output
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[place] for place in (0, 1, 3)):  # the weights do not depend on the values
            ctx.mark_non_differentiable(requested)
        return output, requested

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, *given = ctx.saved_tensors
        form, limits, rows, seed, _ = ctx.call
        limits, learned = Limits(*given) if given else NO_LIMITS, ctx.needs_input_grad[:4]
        if form.given != (query.stride(), key.stride(), value.stride()):  # hooks on saved tensors have changed them
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
            form = form.of_strides(query, key, value)
        if torch.is_grad_enabled():  # with create_graph=True, so the gradients may be differentiated again
            weigh = functools.partial(_all_weights, form, limits)
            results = functools.partial(formula, form=form, limits=limits, rows=rows, seed=seed, weigh=weigh)
            return *_again(query, key, value, limits.bias, results, learned, upstream), None
        change, drequested = upstream[0], upstream[1] if len(upstream) > 1 else None
        # Gradients whose negative bit is set are copied, because the C code reads their memory.
        change = query.new_zeros(form.shape) if change is None else change.resolve_neg()
        change = change if change.stride(-1) == 1 else change.contiguous()
        drequested = None if drequested is None else drequested.resolve_neg().contiguous()
        grads = [on_huge_pages(t.new_empty(t.shape)) for t in (query, key, value)]
        dscores = None
        if learned[3]:
            dscores = _floats(query, *form.shape[:-1], form.keys)
        packed = _GRADIENTS.pack(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), *_pointers(limits, rows), seed,
            _threads(2 * form.threads), change.data_ptr(), *(0, *change.stride())[-4:-1],
            _pointer(drequested), *[t.data_ptr() for t in grads], _pointer(dscores),
        )  # fmt: skip
        _functions()[1](form.numbers_with(limits, rows), packed)
        if dscores is None or limits.bias is None:
            return *grads, None, None
        dscores = dscores if dscores.ndim == 4 else dscores.unsqueeze(0)
        return *grads, dscores.sum_to_size(limits.bias.shape), None


# `_Attention.apply` without the rules for torch.func and for default arguments, which are not needed: calls inside
# torch.func never reach the loops.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply  # pyrefly: ignore[missing-attribute]


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
    computed = zip(results(query, key, value), upstream, strict=False)
    pairs = [(y, g) for y, g in computed if g is not None and y.requires_grad]
    leaves = [t for t, one in zip((query, key, value, bias), learned, strict=True) if one and t is not None]
    if not pairs or not leaves:
        return (None,) * 4
    outputs, changes = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(outputs, leaves, changes, create_graph=True, allow_unused=True))
    return tuple([next(grads) if one else None for one in learned])
