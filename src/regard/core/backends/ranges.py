"""Attention on CUDA under bands, lengths and segments, with ALiBi: a block of queries only visits its range of keys.

Lengths and ids are arguments of the Triton kernel: no mask tensor is built, and the host does not wait for the device.
The ranges of segments are computed on the device, in one or two launches, once per mask object.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.backends import decoding_step
from regard.core.backends.kernel_arguments import beside_a_band, odd_values
from regard.core.backends.result import Direct, Result
from regard.core.biases import Alibi
from regard.core.clauses import Clauses, clauses
from regard.core.mask_cache import stored
from regard.core.masks import Mask, Padding, Segments
from regard.core.nonfinite import seen_keys, zero_masked_keys, zeroed
from regard.core.problem import HALF, Problem
from regard.core.scores import Dot, ScaledDot
from regard.kernels.availability import TRITON

KERNEL = "triton ranges"
_SIZE = 256  # the largest size of queries, keys and values
_SINGLE = 128  # the largest size in float32 with gradients, or where few blocks of keys are skipped
_PROGRAMS = 65_535  # the largest number of programs on the second axis of a launch


class Lowered(NamedTuple):
    """The mask as kernel arguments, and the keys that any query may attend, if the kernel does not test that."""

    rules: Any
    seen: Tensor | None
    known: Any = None  # a cache key for the properties of the rules


def serves(problem: Problem, found: Clauses | None) -> bool:
    """Return whether the kernel supports the problem, and torch's own kernels do not support its mask or bias."""
    if found is None or not _simple(found) or problem.dropout > 0.0 or problem.score.why_no_product() is not None:
        return False
    if problem.bias is not None and (type(problem.bias) is not Alibi or problem.bias_learned):
        return False
    if not _worth_it(found, problem.bias) or decoding_step.serves(problem):
        return False
    sparse = found.low is not None or len(found.segments) > 0
    small = problem.query.dtype == torch.float32 and (problem.differentiated or not sparse)
    return _fits(problem.query, problem.key, problem.value, _SINGLE if small else _SIZE)


def _simple(found: Clauses) -> bool:
    return not found.dense and len(found.segments) <= 1 and not found.by_head


def _worth_it(found: Clauses, bias: object) -> bool:
    by_torch = found.low is None and found.high in (None, 0)
    return bias is not None or not by_torch or found.lengths is not None or len(found.segments) > 0


def _fits(query: Tensor, key: Tensor, value: Tensor, most: int) -> bool:
    """Return whether the kernel supports these shapes and dtypes; query heads may share key heads."""
    queries, keys, heads, size = query.shape[-2], key.shape[-2], query.shape[-3], max(key.shape[-1], value.shape[-1])
    if query.dtype not in (*HALF, torch.float32) or not TRITON or torch.compiler.is_compiling():
        return False
    if size > most or math.prod(query.shape[:-2]) > _PROGRAMS:
        return False
    if 0 in (queries, keys, key.shape[-1], value.shape[-1]) or odd_values(query, value):
        return False
    # The kernel's 32-bit offsets must reach all heads and rows of a batch row, also in a contiguous copy.
    tensors = (query, key, value)
    reach = max(_SIZE * max(queries, keys), *(t.stride(-3) for t in tensors))
    return heads * reach < 2**31 and max(queries, keys) * max(t.stride(-2) for t in tensors) < 2**31


def working_bytes(problem: Problem, found: Clauses) -> int:
    """Return the bytes of the segments' bounds: four numbers for each 32 queries and each 32 keys."""
    spans = sum(-(-length // 32) for length in problem.shape[-2:])
    return 16 * math.prod(problem.shape[:-3]) * spans if found.segments else 0


def attend(problem: Problem, found: Clauses) -> Result:
    """Compute attention by the kernel."""
    from regard.kernels.triton.range_attention import range_attention  # imported here, because it imports Triton

    lead, mask, shape, device = problem.query.shape[:-3], problem.mask, problem.shape, problem.device
    if mask is None:
        lowered = _lowered(found, shape, device)
    else:
        lowered = stored(mask, device, ("ranges", shape), lambda: _lowered(found, shape, device))
    rules = lowered.rules
    if not isinstance(problem.score, (Dot, ScaledDot)):
        # The kernel never loads fully masked keys, but other scores transform the keys first, and their gradient would
        # be 0 · NaN.
        problem = zero_masked_keys(problem)
    elif lowered.seen is not None:
        problem = zeroed(problem, lowered.seen)
    if isinstance(problem.bias, Alibi):
        slopes = problem.bias.slopes.detach().expand(problem.shape[-3])
        rules = rules._replace(slopes=slopes, slopes_h=slopes.stride(0), offset=problem.bias.offset)
    product = problem.score.as_product(problem.query, problem.key)
    assert product is not None  # checked by serves()
    tensors = (product.query, product.key, problem.value)
    query, key, value = (t if t.ndim == 4 else t.reshape(-1, *t.shape[-3:]) for t in tensors)
    output = range_attention(query, key, value, rules, product.scale)
    return Result(output if len(lead) == 1 else output.reshape(*lead, *output.shape[-3:]))


def direct(problem: Problem, found: Clauses) -> Direct | None:
    """Return a function that runs the kernel alone, for all calls with the signature of this one, or None."""
    # Imported here, because they import Triton.
    from regard.kernels.triton.range_attention import plan_of, planned_attention

    as_it_is, rules_of = isinstance(problem.score, (Dot, ScaledDot)), _rules_of(problem, found)
    product, value = problem.score.as_product(problem.query, problem.key), problem.value
    assert product is not None  # checked by serves()
    if problem.differentiated and product.key is not problem.key:
        return None  # masked keys may have to be cleaned before they are transformed
    if any(t.stride(-1) != 1 for t in (product.query, product.key, value)):
        return None
    plan, learning = plan_of(product.query, product.key, value, product.scale), problem.differentiated
    heads, biased = problem.shape[1], problem.bias is not None

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Any, mask: Any, bias: Any) -> Tensor | None:
        device = query.device
        rules, known = rules_of(mask, device) if device.index == torch.cuda.current_device() else (None, None)
        if rules is None:
            return None
        if biased:
            slopes = bias.slopes if not bias.plain else stored(bias, device, "slopes", lambda: bias.on(device).slopes)
            step = slopes.stride(0) if slopes.shape == (heads,) else 0
            rules = rules._replace(slopes=slopes, slopes_h=step, offset=bias.offset)
            known = None if known is None else (known, slopes.dtype, step, slopes.data_ptr() & 15, bias.offset)
        if not as_it_is:
            query, key, _ = score.as_product(query, key)
        return planned_attention(query, key, value, rules, known, plan, learning)

    return attended


def _rules_of(problem: Problem, found: Clauses) -> Callable[[Any, torch.device], tuple[Any, Any]]:
    """Return a function that returns the kernel's rules for the mask of a call, and a cache key for their properties.

    It returns no rules for a mask whose calls need more than the kernel.
    """
    from regard.kernels.triton.range_pairs import Rules  # imported here, because it imports Triton

    shape, batch, low, high = problem.shape, problem.shape[0], found.low, found.high
    band = Rules(low, high)
    shared = found.lengths is not None and found.lengths.numel() == 1
    padded, packed = found.lengths is not None, len(found.segments) > 0
    itself = all(own is other for own, other in found.segments) and _reaches_itself(band)

    def rules_of(mask: Any, device: torch.device) -> tuple[Any, Any]:
        if not padded and not packed:
            return band, (low, high)
        part = beside_a_band(mask)
        if type(part) is Padding and not part.plain and (shared or len(part.lengths) == batch):
            lengths = part.lengths
            step = 0 if shared else lengths.stride(0)
            return Rules(low, high, lengths, step), (low, high, lengths.dtype, step, lengths.data_ptr() & 15)
        if itself and type(part) is Segments and not part.plain and part.query_ids.shape == (batch, shape[-1]):
            lowered = stored(mask, device, ("ranges", shape), lambda: _packed(band, part.query_ids))
        else:
            lowered = stored(mask, device, ("ranges", shape), lambda: _lowered_for(mask, shape, device))
        return (None, None) if lowered.seen is not None else (lowered.rules, lowered.known)

    return rules_of


def _lowered_for(mask: Mask, shape: tuple[int, ...], device: torch.device) -> Lowered:
    """Return the mask of a checked call as the kernel takes it."""
    found = clauses(mask.on(device).aligned(shape), *shape[-2:])
    assert found is not None  # checked by serves()
    return _lowered(found, shape, device)


def _lowered(found: Clauses, shape: tuple[int, ...], device: torch.device) -> Lowered:
    from regard.kernels.triton.range_pairs import Rules  # imported here, because it imports Triton
    from regard.kernels.triton.segment_bounds import segment_bounds

    lead, (queries, keys) = shape[:-3], shape[-2:]
    rules = Rules(found.low, found.high)
    if found.lengths is not None:
        lengths = found.lengths.expand(*lead, 1).reshape(-1)
        rules = rules._replace(lengths=lengths, lengths_b=lengths.stride(0))
    if not found.segments:
        return Lowered(rules, None)
    ((of_queries, of_keys),) = found.segments
    own, other = (t.expand(*lead, 1, -1).reshape(-1, t.shape[-1]) for t in (of_queries, of_keys))
    if of_queries is of_keys and _reaches_itself(rules):
        return _packed(rules, own)
    rules = rules._replace(
        query_ids=own, query_b=own.stride(0), query_n=own.stride(1), row_bounds=segment_bounds(own, other),
        key_ids=other, key_b=other.stride(0), key_n=other.stride(1), key_bounds=segment_bounds(other, own),
    )  # fmt: skip
    return Lowered(rules, seen_keys(found, queries, keys, device))


def _reaches_itself(rules: Any) -> bool:
    """Return whether the band contains the key at the query's own position."""
    return (rules.low or 0) <= 0 <= (rules.high or 0)


def _packed(rules: Any, ids: Tensor) -> Lowered:
    """Return the rules with segments that are the same for queries and keys, ids (b, n).

    Every key can be attended by the query at its own position; the kernel tests lengths and bands.
    """
    # Imported here, because they import Triton.
    from regard.kernels.triton.additive.plan import trait
    from regard.kernels.triton.segment_bounds import segment_bounds

    bounds, (batch, step) = segment_bounds(ids, ids), ids.stride()
    rules = rules._replace(
        query_ids=ids, query_b=batch, query_n=step, row_bounds=bounds,
        key_ids=ids, key_b=batch, key_n=step, key_bounds=bounds,
    )  # fmt: skip
    return Lowered(rules, None, trait(rules))
