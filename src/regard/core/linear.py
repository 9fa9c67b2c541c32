"""Attention in time linear in the sequence length: dot products of features replace exponentials of dot products.

With φ(q)·φ(k) in place of exp(q·k/√d) the sums over the keys no longer depend on the query (Katharopoulos et al. 2020):

    output_i = φ(q_i) Σ_j φ(k_j) v_jᵀ / φ(q_i) Σ_j φ(k_j)

Therefore the sums over keys and values are computed once, as a summary of fixed size. Causal attention updates the
summary key by key.

Performer features are exponentials, so they are stored as logarithms, and the summary of each feature is divided by
exp(shift), the largest value of that feature *so far*. Every factor in this file is then at most 1 and every
denominator at least 1, whatever the size of the inputs; and no product of a key with an earlier query is computed, not
even with a weight of zero. Rounding does not break this bound: exponents are summed before the largest one of the row
is subtracted, so none is above 0. Features without logarithms are divided by the largest feature of each query, which
cancels in the quotient.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.core import linear_kernel, torch_names
from regard.core.features import EluFeatures as EluFeatures
from regard.core.features import Features, LogFeatures, default_features
from regard.core.features import PerformerFeatures as PerformerFeatures
from regard.core.linear_masks import allowed_keys, filled
from regard.core.masks import Mask
from regard.core.normalizers import Softmax
from regard.core.problem import HALF, Problem, build, said
from regard.core.scores import Score
from regard.core.torch_names import Unknown
from regard.core.transforms import transformed

CHUNK = 64  # number of positions of a causal chunk, in which queries and keys are compared pair by pair; a power of two
# The number of query rows, over all batches and heads, whose features are in memory at a time. On the CPU they fit its
# caches; on a GPU there are enough of them to keep it busy between kernel launches.
ROWS, ROWS_ON_DEVICE = 4096, 65536


Given = tuple[Tensor, Tensor, Tensor]  # query, key and value in the shapes that the caller gave


class LinearState(NamedTuple):
    """The sums over all keys and values so far, one per key head, divided by exp(shift)."""

    summary: Float[Tensor, "... m e"]  # Σ_j φ(k_j) v_jᵀ over all keys j so far
    normalizer: Float[Tensor, "... m"]  # Σ_j φ(k_j) over all keys j so far
    shift: Float[Tensor, "... m"]  # max_j ln φ(k_j) over all keys j so far; 0 for features without logarithms


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: Features | None = None,
    causal: bool = False,
    mask: Mask | Tensor | None = None,
    **unknown: Unknown,
) -> Float[Tensor, "... q e"]:
    """Compute φ(Q) (φ(K)ᵀ V), each row divided by φ(Q) (φ(K)ᵀ 1), in time and memory linear in the sequence length.

    query (…, h, q, d), key (…, g, k, d), value (…, g, k, e) → output (…, h, q, e). The result is a tensor, because no
    weights are computed. Leading axes broadcast, the head axis may be left out, and query head i attends to key head
    i // (h / g).

    `features` is a `PerformerFeatures`, an `EluFeatures` or any function from (…, d) to (…, m) numbers ≥ 0: a negative
    one is an error on the CPU, and gives NaN where values cannot be inspected (on CUDA, compiled, under vmap). Without
    `features`, softmax attention is approximated by Performer features, which are sampled once for each size d from a
    fixed seed, the same in every process. With `causal`, query i attends to keys j ≤ i. `mask` may exclude keys, the
    same ones for every query: `padding(lengths)`, or a bool tensor (…, 1, k).

    >>> x = torch.randn(2, 8, 100, 16)
    >>> linear_attention(x, x, x, causal=True).shape
    torch.Size([2, 8, 100, 16])
    """
    if unknown:
        torch_names.refuse("linear_attention", linear_attention, unknown, torch_names.LINEAR_CALL)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {said(causal)}")
    described = None
    if mask is None:
        output, described = linear_kernel.repeated(query, key, value, features, causal)
        if output is not None:
            return output
    problem, given = _checked(query, key, value, mask)
    if features is None:
        features = default_features(problem.query.shape[-1], problem.dtype, problem.device)
    if linear_kernel.serves(problem, features, causal):
        return linear_kernel.attend(problem, given, features, causal, described)
    if linear_kernel.blocks_serve(problem, given, features, causal):
        with _without_autocast(problem.device):
            output = linear_kernel.attend_in_blocks(
                problem, features, CHUNK if causal else None, ROWS, _general(features, causal)
            )
        if output is not None:
            return output
    return _attend(problem, given, None, features, causal)[0]


def linear_step(
    state: LinearState | None, query: Tensor, key: Tensor, value: Tensor, features: Features | None = None
) -> tuple[Float[Tensor, "... n e"], LinearState]:
    """Compute causal attention for one or several new positions, given the sums over the earlier keys and values
    (`state`).

    Return the output and the new `state`, the sums over keys and values so far; `state` is None at the start of a
    sequence. Shapes are those of `linear_attention` with as many queries as keys. Processing a sequence step by step,
    or a prompt at once and then step by step, gives the same result as one causal pass.
    """
    problem, given = _checked(query, key, value, None)
    queries, keys = problem.shape[-2:]
    if queries != keys:
        raise ValueError(f"query has {queries} positions, key has {keys}: a step brings as many of each")
    return _attend(problem, given, state, features, True)


def _general(features: Features, causal: bool) -> Callable[..., Tensor]:
    """Return a function of query, key and value that computes the output in torch operations, for any feature map."""
    return lambda query, key, value: _attend(*_checked(query, key, value, None), None, features, causal)[0]


# The forward passes. In the functions below queries are (…, g, q, r, d): r query heads share each of the g key heads.


def _attend(
    problem: Problem, given: Given, state: LinearState | None, features: Features | None, causal: bool
) -> tuple[Tensor, LinearState]:
    """Return the output, and the sums over all keys and values (`state`), in at least float32."""
    if features is None:
        features = default_features(problem.query.shape[-1], problem.dtype, problem.device)
    if isinstance(features, type) or not (callable(features) or isinstance(features, LogFeatures)):
        raise TypeError(f"features must be a PerformerFeatures, an EluFeatures or a function, got {said(features)}")
    whole = problem.query, problem.key, problem.value
    query, key, value = (_once(x, own) for x, own in zip(whole, given, strict=True))
    keep, group = allowed_keys(problem), problem.group
    if group > 1 and keep is not None and keep.shape[-2] > 1:  # query heads of one key head may have different masks
        key, value, group = problem.repeat(key), problem.repeat(value), 1
    query = query.unflatten(-3, (key.shape[-3], group)).movedim(-3, -2)
    if keep is not None:
        # A query without allowed keys must not affect any result, even if it is NaN.
        query = torch.where(filled(keep, query.shape[-3], causal)[..., None, None], query, 0)
    with _without_autocast(problem.device):
        output, state = _segments(state, query, key, value, keep, features, causal)
    output = output.movedim(-2, -3).flatten(-4, -3).to(problem.query.dtype)
    output = output.expand(*problem.shape[:-1], -1)
    return output.squeeze(0) if problem.headless else output, state


def _segments(
    state: LinearState | None,
    query: Float[Tensor, "... q r d"],
    key: Float[Tensor, "... k d"],
    value: Float[Tensor, "... k e"],
    keep: Bool[Tensor, "... k"] | None,
    features: Features,
    causal: bool,
) -> tuple[Float[Tensor, "... q r e"], LinearState]:
    """Return output and sums over all keys, computed segment by segment, so that only one segment's features are in
    memory.

    The backward pass recomputes the features of each segment.
    """
    queries, keys = query.shape[-3], key.shape[-2]
    heads = math.prod(query.shape[:-3]) * query.shape[-2]
    size = max(1, (ROWS if query.device.type == "cpu" else ROWS_ON_DEVICE) // max(1, heads * CHUNK)) * CHUNK
    # A feature map given by the caller may hold parameters that require gradients even if query, key and value do not.
    learns = not isinstance(features, PerformerFeatures | EluFeatures)
    wanted = torch.is_grad_enabled() and (learns or any(x.requires_grad for x in (query, key, value)))
    again = wanted and max(queries, keys) > size and not transformed()  # torch.func does not support checkpoints

    outputs = []
    if causal:
        # No query attends to the keys after the last query's position; queries after the last key attend to all keys.
        keys = min(queries, keys)
        key, value, keep = key[..., :keys, :], value[..., :keys, :], None if keep is None else keep[..., :keys]
    # Split, not sliced: the gradient of each slice would be a tensor of the whole length, so together quadratic.
    keeps: Iterable[Tensor | None] = repeat(None) if keep is None else keep.split(size, -1)
    parts = zip(key.split(size, -2), value.split(size, -2), keeps, strict=False)
    if causal and keys > 0:
        now, query = query.split([keys, queries - keys], -3)
        for rows, part in zip(now.split(size, -3), parts, strict=True):
            output, state = _run(again, _advance, state, rows, *part, features)
            outputs.append(output)
    else:
        for part in parts:
            state = _run(again, _absorb, state, *part, features)
    assert state is not None  # the loop runs at least once: `split` returns one part even of an empty tensor
    if query.shape[-3] > 0 or not outputs:
        outputs += [_run(again, _recall, state, rows, features) for rows in query.split(size, -3)]
    return torch.cat(outputs, -3), state


def _run(again: bool, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return function(*inputs); with `again` the backward pass calls the function again instead of storing its
    activations."""
    return checkpoint(function, *inputs, use_reentrant=False) if again else function(*inputs)


def _absorb(
    state: LinearState | None,
    key: Float[Tensor, "... k d"],
    value: Float[Tensor, "... k e"],
    keep: Bool[Tensor, "... k"] | None,
    features: Features,
) -> LinearState:
    """Return the sums `state` after these keys and values are added to them."""
    log = isinstance(features, LogFeatures)
    keys, values = _memory(key, value, keep, features)
    state = _start(state, keys, values, log)
    shift = state.shift
    if log and keys.shape[-2] > 0:
        shift = torch.maximum(shift, keys.detach().amax(-2))
    summary = _joined(state) * (state.shift - shift).exp().unsqueeze(-1)
    return _split(summary + _lift(keys, -shift.unsqueeze(-2), log).mT @ values, shift)


def _recall(state: LinearState, query: Float[Tensor, "... q r d"], features: Features) -> Float[Tensor, "... q r e"]:
    """Return the output of these queries, which attend to all keys whose sums are in `state`."""
    log = isinstance(features, LogFeatures)
    queries, shift = _mapped(features, query), state.shift[..., None, None, :]
    if log:
        largest = (queries.detach() + shift).amax(-1, keepdim=True)
    else:
        queries, largest = _unit_rows(queries), None
    return _quotient(_read(_lift(queries, shift, log, largest), _joined(state)))


def _advance(
    state: LinearState | None,
    query: Float[Tensor, "... n r d"],
    key: Float[Tensor, "... n d"],
    value: Float[Tensor, "... n e"],
    keep: Bool[Tensor, "... n"] | None,
    features: Features,
) -> tuple[Float[Tensor, "... n r e"], LinearState]:
    """Return the causal output of these queries, and the sums `state` with the keys of this segment added.

    Each query attends to the keys whose sums are in `state`, and the keys of this segment up to the query's position.
    """
    log, length = isinstance(features, LogFeatures), key.shape[-2]
    queries, (keys, values) = _mapped(features, query), _memory(key, value, keep, features)
    state = _start(state, keys, values, log)

    chunk = min(CHUNK, 1 << (length - 1).bit_length())
    missing = -length % chunk
    queries = F.pad(queries, (0, 0, 0, 0, 0, missing)).unflatten(-3, (-1, chunk))  # (…, chunks, chunk, r, m)
    keys = F.pad(keys, (0, 0, 0, missing), value=-torch.inf if log else 0.0).unflatten(-2, (-1, chunk))
    values = F.pad(values, (0, 0, 0, missing)).unflatten(-2, (-1, chunk))

    # The logarithm of each feature's largest value so far, at each position (`peaks`) and at the boundaries of chunks
    # (`shifts`). Both cancel in the quotient, so they are constants for the gradient.
    if log:
        peaks = _running_maximum(keys.detach().clamp_min(state.shift[..., None, None, :]))
        shifts = torch.cat([state.shift.unsqueeze(-2), peaks[..., -1, :]], -2).cummax(-2).values
        peaks = torch.maximum(peaks, shifts[..., :-1, None, :])
        largest = (queries.detach() + peaks.unsqueeze(-2)).amax(-1, keepdim=True)
    else:
        queries, largest = _unit_rows(queries), None
        peaks = keys.new_zeros(()).expand_as(keys)
        shifts = state.shift.unsqueeze(-2).expand(*state.shift.shape[:-1], keys.shape[-3] + 1, -1)
    before, after = shifts[..., :-1, :], shifts[..., 1:, :]

    # Within a chunk, each query first attends to the key at its own position. Then the chunk is halved repeatedly, and
    # the queries in the second half of each part attend to the keys in its first half. So no key is multiplied with an
    # earlier query. `peaks` at the end of the first half splits the exponent of each pair into two terms that are both
    # ≤ 0.
    own = _lift(queries, keys.unsqueeze(-2), True, largest) if log else queries * keys.unsqueeze(-2)
    output = own.sum(-1, keepdim=True) * values.unsqueeze(-2)
    for half in _halves(chunk):
        middle = peaks.unflatten(-2, (-1, 2, half))[..., 0, -1, :]
        below = None if largest is None else largest.unflatten(-3, (-1, 2, half))[..., 1, :, :, :]
        second = _lift(queries.unflatten(-3, (-1, 2, half))[..., 1, :, :, :], middle[..., None, None, :], log, below)
        first = _lift(keys.unflatten(-2, (-1, 2, half))[..., 0, :, :], -middle.unsqueeze(-2), log)
        reading = _read(second, first.mT, values.unflatten(-2, (-1, 2, half))[..., 0, :, :])
        output = output + F.pad(reading, (0, 0, 0, 0, half, 0)).flatten(-4, -3)

    # Across chunks, each query attends to the keys of earlier chunks through their summary.
    summary = _joined(state)
    summaries: list[Tensor] = []
    decay = (before - after).exp().unsqueeze(-1)
    added = _lift(keys, -after.unsqueeze(-2), log).mT @ values
    for fade, new in zip(decay.unbind(-3), added.unbind(-3), strict=True):
        summaries.append(summary)
        summary = torch.addcmul(new, summary, fade)
    output = output + _read(_lift(queries, before[..., None, None, :], log, largest), torch.stack(summaries, -3))
    return _quotient(output.flatten(-4, -3)[..., :length, :, :]), _split(summary, shifts[..., -1, :])


# Steps of the forward passes. Values have a last column of ones, so that one matrix product gives both the weighted
# sums of the values and the sums of the weights.


def _lift(x: Tensor, shift: Tensor, log: bool, largest: Tensor | None = None) -> Tensor:
    """Return exp(x + shift − largest) for features x given as logarithms (`log`); return other features unchanged."""
    if not log:
        return x
    return (x + shift).exp_() if largest is None else (x + shift).sub_(largest).exp_()


def _unit_rows(queries: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
    """Return query features scaled to a maximum of 1, so that products of query and key features do not overflow."""
    if queries.shape[-1] == 0:
        return queries
    largest = queries.detach().amax(-1, keepdim=True)
    return queries / torch.where(largest > 0, largest, 1)


def _read(queries: Float[Tensor, "... n r m"], *matrices: Tensor) -> Float[Tensor, "... n r e"]:
    """Return the n · r rows of queries multiplied by the first of `matrices`, the product by the second, and so on."""
    rows = queries.flatten(-3, -2)
    for matrix in matrices:
        rows = rows @ matrix
    return rows.unflatten(-2, queries.shape[-3:-1])


def _quotient(sums: Float[Tensor, "... n r e1"]) -> Float[Tensor, "... n r e"]:
    """Return the weighted sums divided by the sums of the weights, which are the last column; 0 where that sum is 0."""
    total = sums[..., -1:]
    return torch.where(total == 0, 0, sums[..., :-1] / torch.where(total == 0, 1, total))


def _halves(chunk: int) -> list[int]:
    """Return the lengths 1, 2, 4, … chunk / 2 to which repeated halving splits a chunk."""
    return [1 << level for level in range(chunk.bit_length() - 1)]


def _running_maximum(x: Float[Tensor, "... n m"]) -> Float[Tensor, "... n m"]:
    """Compute the cumulative maximum along n positions in place; n must be a power of two (Sklansky 1960).

    On a CPU this function is faster than `torch.cummax`.
    """
    for half in _halves(x.shape[-2]):
        parts = x.unflatten(-2, (-1, 2, half))
        parts[..., 1, :, :] = torch.maximum(parts[..., 1, :, :], parts[..., 0, -1:, :])
    return x


def _mapped(features: Features, x: Float[Tensor, "... d"]) -> Float[Tensor, "... m"]:
    """Return the features of x in at least float32, as logarithms if the feature map has `log_features`."""
    x = x.float() if x.dtype in HALF else x
    mapped = features.log_features(x) if isinstance(features, LogFeatures) else features(x)
    if not isinstance(mapped, Tensor) or not mapped.is_floating_point():
        came = mapped.dtype if isinstance(mapped, Tensor) else type(mapped).__name__
        raise TypeError(f"features must return a float tensor, got {came}")
    if mapped.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"features must map (…, d) to (…, m): they turned {tuple(x.shape)} into {tuple(mapped.shape)}")
    return mapped if isinstance(features, LogFeatures | EluFeatures) else _not_negative(mapped)


def _not_negative(mapped: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
    """Return features that a user's function computed; raise if one is negative.

    Where values cannot be inspected, negative features become NaN instead. Negative features are refused because a sum
    of weights of both signs can be near 0, and the quotient by that sum is then arbitrary.
    """
    if mapped.device.type == "cpu" and mapped.numel() and not torch.compiler.is_compiling():
        try:
            least = float(mapped.detach().amin())
        except RuntimeError:  # the values of tensors under vmap and of fake tensors cannot be read
            pass
        else:
            if least < 0:
                raise ValueError(f"features must be 0 or more, got {least:g}: their products stand for exponentials")
            return mapped
    return torch.where(mapped < 0, torch.nan, mapped)


def _memory(
    key: Float[Tensor, "... k d"],
    value: Float[Tensor, "... k e"],
    keep: Bool[Tensor, "... k"] | None,
    features: Features,
) -> tuple[Float[Tensor, "... k m"], Float[Tensor, "... k e1"]]:
    """Return the keys' features, which are 0 (as logarithms −inf) for masked keys, and values with a column of ones."""
    if keep is not None:
        keep = keep.unsqueeze(-1)
        key, value = torch.where(keep, key, 0), torch.where(keep, value, 0)  # a masked value may be NaN
    keys = _mapped(features, key)
    if keep is not None:
        keys = torch.where(keep, keys, -torch.inf if isinstance(features, LogFeatures) else 0)
    return keys, F.pad(value.to(keys.dtype), (0, 1), value=1.0)


def _start(state: LinearState | None, keys: Tensor, values: Tensor, log: bool) -> LinearState:
    """Return the sums `state` expanded to the leading axes of keys and values; if `state` is None, the sums before any
    key."""
    count, size = keys.shape[-1], values.shape[-1] - 1
    if state is None:
        # Before any key the shift (the largest logarithm of a feature so far) is a finite number and not −inf, because
        # differences of shifts must not be NaN.
        lowest = torch.finfo(keys.dtype).min / 4 if log else 0.0
        state = LinearState(keys.new_zeros(count, size), keys.new_zeros(count), keys.new_full((count,), lowest))
    try:
        shift = state.shift.expand(torch.broadcast_shapes(state.shift.shape, (*keys.shape[:-2], count)))
        lead = torch.broadcast_shapes(state.normalizer.shape[:-1], shift.shape[:-1], values.shape[:-2])
        return LinearState(state.summary.expand(*lead, count, size), state.normalizer.expand(*lead, count), shift)
    except RuntimeError:
        came, needed = tuple(state.summary.shape), (*keys.shape[:-2], count, size)
        raise ValueError(f"state has a summary {came}: it does not fit keys, values and features of {needed}") from None


def _joined(state: LinearState) -> Float[Tensor, "... m e1"]:
    return torch.cat([state.summary, state.normalizer.unsqueeze(-1)], -1)


def _split(joined: Float[Tensor, "... m e1"], shift: Float[Tensor, "... m"]) -> LinearState:
    return LinearState(joined[..., :-1], joined[..., -1], shift)


# Checks and conversion of arguments


def _checked(query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None) -> tuple[Problem, Given]:
    """Return the checked arguments as a `Problem`, and query, key and value in the shapes given by the caller.

    Under autocast, query, key and value are cast to autocast's dtype.
    """
    if isinstance(query, Tensor) and _autocasting(query.device):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (_cast(t, dtype) for t in (query, key, value))
    problem = build(query, key, value, Score(), Softmax(), mask, None, 0.0, None, None)
    sizes = query.shape[-1], key.shape[-1]
    if sizes[0] != sizes[1]:
        raise ValueError(f"query has size {sizes[0]}, key has size {sizes[1]}: they must be equal")
    return problem, (query, key, value)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor cast to autocast's dtype.

    Like autocast, this function leaves float64 unchanged. It also leaves values that are not float tensors unchanged; a
    later check raises an error that names them.
    """
    casts = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if casts else x


def _autocasting(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda", "mps", "xpu") and torch.is_autocast_enabled(device.type)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False) if _autocasting(device) else nullcontext()


def _once(x: Tensor, given: Tensor) -> Tensor:
    """Return x with leading axes of stride 0 reduced to size 1, so that keys shared by a batch are processed once.

    An axis that the caller expanded is reduced only if `given` needs no gradient, because each repeat has a gradient of
    its own.
    """
    unknown = torch.compiler.is_compiling() or transformed()  # torch.func does not report whether a gradient is needed
    constant = not unknown and not (given.requires_grad and torch.is_grad_enabled())
    for axis in range(-x.ndim, -3):
        ours = -axis > given.ndim or given.shape[axis] != x.shape[axis]
        if x.stride(axis) == 0 and (ours or constant):
            x = x.narrow(axis, 0, min(1, x.shape[axis]))
    return x
