"""Attention on CUDA under bands, lengths and segments: each block of queries reads only keys that it may attend.

Lengths and segment ids are arguments of the Triton kernel: no mask tensor is built, and the host does not wait for the
device. The key ranges of segments are computed on the device, in one or two launches, once per mask object. The kernel
also supports ALiBi, relative biases, dense biases, a softcap and sigmoid weights, and a dense mask if the call has one
of these.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.backends import decoding_step, torch_sdpa
from regard.core.backends.kernel_arguments import beside_a_band, odd_values
from regard.core.backends.result import Direct, Result
from regard.core.biases import Alibi, Bias, DenseBias, Relative
from regard.core.clauses import Clauses, clauses
from regard.core.mask_cache import stored
from regard.core.masks import Mask, Padding, Segments
from regard.core.nonfinite import seen_keys, zero_masked_keys, zeroed
from regard.core.normalizers import Sigmoid
from regard.core.problem import HALF, Problem
from regard.core.scores import Dot, ScaledDot, ScaledProduct, Score
from regard.kernels import availability
from regard.kernels.availability import TRITON

KERNEL = "triton ranges"
_SIZE = 256  # the largest vector size of queries, keys and values that the kernel supports
# In float32, the largest size with gradients, or with a mask under which few blocks of keys are skipped and more than
# _SHORT keys.
_SINGLE, _SHORT = 128, 64
# In float32, the sizes for which the kernel is faster than torch's also without a mask: up to _NARROW, and from _WIDE
# (with gradients _LEARNED) to _SINGLE. Sizes are padded to powers of two, so those between are slower. _WORK and, with
# gradients, _LEARNED_WORK are the numbers of multiplications (pairs times size) from which on the kernel saves enough
# time to be worth its compilation and the host's time for an autograd function in Python.
_NARROW, _WIDE, _LEARNED, _WORK, _LEARNED_WORK = 64, 80, 100, 2**26, 2**30
_PROGRAMS = 65_535  # the largest number of thread blocks on the second axis of a CUDA kernel launch
_REACH = 2**20  # the largest distance in the table of a relative bias, and its largest offset
_FEW = 1024  # over more keys than this, other backends are faster than this kernel for few queries
_SUMS = 9 * 2**20  # bytes of the partial sums of a bias's gradient: 528 tiles of 64 × 64 numbers in float32
_STORED = 2**16  # the largest number of entries of a bias that a cached function holds in memory until its next call


class Lowered(NamedTuple):
    """The arguments of the Triton kernel that describe the mask of a call.

    `seen` is which keys at least one query may attend, so that the caller can replace all other keys by zeros. It is
    None if the kernel never loads keys that no query may attend.
    """

    rules: Any
    seen: Tensor | None
    known: Any = None  # a cache key for the properties of the kernel arguments `rules`, if known


def serves(problem: Problem, mask_rules: Clauses | None) -> bool:
    """Return whether the kernel supports the call, and torch's kernels do not (mask, bias, softcap) or are slower."""
    if mask_rules is None or len(mask_rules.segments) > 1 or mask_rules.by_head or problem.dropout > 0.0:
        return False
    if not (problem.normalize.is_softmax or type(problem.normalize) is Sigmoid):
        return False
    if _softcap(problem.score) is None and problem.score.why_no_product() is not None:
        return False
    if (problem.bias is not None and not _takes(problem)) or (mask_rules.dense and problem.query.ndim > 4):
        return False
    if not _worth_it(problem, mask_rules) or decoding_step.serves(problem):
        return False
    sparse = mask_rules.low is not None or len(mask_rules.segments) > 0 or problem.shape[-1] <= _SHORT
    small = problem.query.dtype == torch.float32 and (problem.differentiated or not sparse)
    return _fits(problem.query, problem.key, problem.value, _SINGLE if small else _SIZE)


def _takes(problem: Problem) -> bool:
    """Return whether the kernel supports the bias, and its gradient if it is learned."""
    bias, learned = problem.bias, problem.bias_learned
    if type(bias) is Alibi:
        return not learned
    if type(bias) is Relative:
        return 0 < bias.reach < _REACH > abs(bias.offset)
    if type(bias) is not DenseBias or problem.query.ndim > 4:
        return False
    # The gradient of a bias that broadcasts over queries or keys is a sum over them, which the kernel does not compute.
    return not learned or bias.tensor.shape[-2:] == problem.shape[-2:]


def _worth_it(problem: Problem, mask_rules: Clauses) -> bool:
    bias, queries, keys = problem.bias, *problem.shape[-2:]
    by_torch = mask_rules.low is None and mask_rules.high in (None, 0)
    plain = _softcap(problem.score) is None and problem.normalize.is_softmax
    if not plain or isinstance(bias, (Relative, DenseBias)):
        return queries > decoding_step.MOST or keys <= _FEW
    if mask_rules.dense:
        return bias is not None
    if bias is not None or not by_torch or mask_rules.lengths is not None or len(mask_rules.segments) > 0:
        return True
    return problem.query.dtype == torch.float32 and _faster_in_float32(problem)


def _faster_in_float32(problem: Problem) -> bool:
    """Return whether the kernel is faster than torch's in a call without bias whose mask, if any, is causal."""
    query, key, value = problem.query, problem.key, problem.value
    size = max(query.shape[-1], value.shape[-1])
    if problem.request is not None or query.shape[-2] <= decoding_step.MOST or size > _SINGLE:
        return False
    if problem.mask is None and query.ndim == 4 and torch_sdpa.products_serve(query, key, value):
        return False
    fast = size <= _NARROW or size >= (_LEARNED if problem.differentiated else _WIDE)
    return fast and math.prod(problem.shape) * size >= (_LEARNED_WORK if problem.differentiated else _WORK)


def _softcap(score: Score) -> float | None:
    return score.softcap if isinstance(score, ScaledDot) else None


def _product(score: Score, query: Tensor, key: Tensor) -> ScaledProduct:
    """Return the `ScaledProduct` (query, key and scale) whose dot products the kernel computes as scores, before a
    softcap."""
    if isinstance(score, ScaledDot):
        return ScaledProduct(query, key, score.factor(query.shape[-1]))
    product = score.as_product(query, key)
    assert product is not None  # `serves` has checked that the score is a dot product of vectors
    return product


def _settings(problem: Problem) -> dict[str, float]:
    """Return the softcap and the bias of the sigmoid, if there are any, as fields of the kernel's `Rules`."""
    cap, normalize = _softcap(problem.score), problem.normalize
    # The numbers are converted to float, because Triton compiles special kernels for some integers.
    settings = {} if cap is None else {"cap": float(cap)}
    return settings | ({"shift": float(normalize.bias)} if isinstance(normalize, Sigmoid) else {})


def _of_bias(bias: Bias | None, tensor: Tensor, heads: int) -> dict[str, Any]:
    """Return a bias as fields of the kernel's `Rules`; `tensor` holds its numbers."""
    if isinstance(bias, Alibi):
        return {"slopes": tensor, "slopes_h": _by_head(tensor, heads), "offset": bias.offset}
    if isinstance(bias, Relative):
        step = _by_head(tensor, heads) if tensor.ndim == 2 else 0
        return {"table": tensor, "table_h": step, "reach": tensor.shape[-1] // 2, "offset": bias.offset}
    return {"bias": tensor, **_steps(tensor, "bias")}


def _by_head(tensor: Tensor, heads: int) -> int:
    return tensor.stride(0) if tensor.ndim > 0 and tensor.shape[0] == heads else 0


def _steps(tensor: Tensor, name: str) -> dict[str, int]:
    """Return the strides of a tensor as fields of the kernel's `Rules`; an axis that broadcasts has stride 0."""
    steps = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return dict(zip((f"{name}_{axis}" for axis in "bhqk"), [0] * (4 - len(steps)) + steps, strict=True))


def _fits(query: Tensor, key: Tensor, value: Tensor, most: int) -> bool:
    """Return whether the kernel supports these shapes and dtypes; query heads may share key heads."""
    queries, keys, heads, size = query.shape[-2], key.shape[-2], query.shape[-3], max(key.shape[-1], value.shape[-1])
    if query.dtype not in (*HALF, torch.float32) or not TRITON or torch.compiler.is_compiling():
        return False
    if size > most or math.prod(query.shape[:-2]) > _PROGRAMS:
        return False
    if 0 in (queries, keys, key.shape[-1], value.shape[-1]) or odd_values(query, value):
        return False
    # 32-bit offsets must address all heads and rows of a sequence in the kernel, also in a contiguous copy.
    tensors = (query, key, value)
    reach = max(_SIZE * max(queries, keys), *(t.stride(-3) for t in tensors))
    return heads * reach < 2**31 and max(queries, keys) * max(t.stride(-2) for t in tensors) < 2**31


def working_bytes(problem: Problem, mask_rules: Clauses) -> int:
    """Return the bytes of the segments' bounds, four numbers for each 32 queries and each 32 keys, and of the partial
    sums of a bias's gradient."""
    spans = sum(-(-length // 32) for length in problem.shape[-2:])
    sums = _SUMS if problem.bias_learned else 0
    return sums + (16 * math.prod(problem.shape[:-3]) * spans if mask_rules.segments else 0)


def attend(problem: Problem, mask_rules: Clauses) -> Result:
    """Compute attention by the Triton kernel for bands, lengths and segments."""
    from regard.kernels.triton.range_attention import range_attention  # imported here: the module imports Triton

    lead, mask, shape, device = problem.query.shape[:-3], problem.mask, problem.shape, problem.device
    if mask is None:
        lowered = _lowered(mask_rules, shape, device)
    else:
        lowered = stored(mask, device, ("ranges", shape), lambda: _lowered(mask_rules, shape, device))
    fields, learned = _settings(problem), None
    if problem.bias is not None:
        (tensor,) = problem.bias.tensors()
        tensor = tensor.contiguous() if type(problem.bias) is Relative else tensor
        fields, learned = fields | _of_bias(problem.bias, tensor, shape[-3]), tensor if problem.bias_learned else None
    if not isinstance(problem.score, (Dot, ScaledDot)):
        # The kernel never loads fully masked keys, but other scores transform the keys first, and their gradient would
        # be 0 · NaN.
        problem = zero_masked_keys(problem)
    elif lowered.seen is not None:
        problem = zeroed(problem, lowered.seen)
    product = _product(problem.score, problem.query, problem.key)
    tensors = (product.query, product.key, problem.value)
    query, key, value = (t if t.ndim == 4 else t.reshape(-1, *t.shape[-3:]) for t in tensors)
    output = range_attention(query, key, value, lowered.rules._replace(**fields), product.scale, learned)
    return Result(output if len(lead) == 1 else output.reshape(*lead, *output.shape[-3:]))


def direct(problem: Problem, mask_rules: Clauses) -> Direct | None:
    """Return a function that only runs the kernel, for calls equal to `problem` but for the tensors' values; or None.

    The result is None if these calls need other operations too, such as copies of tensors. `problem` must hold the
    caller's own tensors, not views of them, and must not request weights.
    """
    # Imported here: the modules import Triton.
    from regard.kernels.triton.range_attention import plan_of, planned_attention
    from regard.kernels.triton.range_pairs import Rules

    as_it_is, rules_of = isinstance(problem.score, (Dot, ScaledDot)), _rules_of(problem, mask_rules)
    product, value = _product(problem.score, problem.query, problem.key), problem.value
    if problem.differentiated and product.key is not problem.key:
        return None  # None, because NaN in masked keys may have to be replaced before the score transforms the keys
    if any(t.stride(-1) != 1 for t in (product.query, product.key, value)):
        return None
    completed, learning, learns = _completed(problem), problem.differentiated, problem.bias_learned
    sample, _, _ = completed(Rules(mask=mask_rules.dense or None), None, problem.bias, problem.device)
    if sample is None:
        return None
    plan = plan_of(product.query, product.key, value, product.scale, sample)

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Any, mask: Any, bias: Any) -> Tensor | None:
        device = query.device
        rules, known = rules_of(mask, device) if device.index == availability.current_device() else (None, None)
        if rules is None:
            return None
        rules, known, own = completed(rules, known, bias, device)
        if rules is None:
            return None
        if not as_it_is:
            query, key, _ = score.as_product(query, key)
        return planned_attention(query, key, value, rules, known, plan, learning, own if learns else None)

    return attended


Completed = Callable[[Any, Any, Any, torch.device], tuple[Any, Any, Tensor | None]]


def _completed(problem: Problem) -> Completed:
    """Return a function that adds bias, softcap and sigmoid bias of a call to the kernel arguments (`Rules`) of its
    mask.

    The function returns the complete rules, their cache key and the tensor of the bias. The rules are None for a bias
    that must be copied first. If band and bias are those of the previous call, the previous rules are returned. Rules
    that hold tensors of a mask are not stored for the next call, because these tensors may be large.
    """
    settings, heads, biased = _settings(problem), problem.shape[-3], problem.bias is not None
    kinds = tuple(settings)
    last: tuple[Any, ...] = (None, None, None, None)

    def completed(rules: Any, known: Any, bias: Any, device: torch.device) -> tuple[Any, Any, Tensor | None]:
        nonlocal last
        if not biased:
            return (rules._replace(**settings), known and (known, kinds), None) if kinds else (rules, known, None)
        own = bias if isinstance(bias, Tensor) else _placed(bias, device)
        place = own.data_ptr(), own.stride()
        if last[0] is rules and last[1] is own and last[2] == place:
            return last[3]
        if isinstance(bias, Relative) and own.stride(-1) != 1:
            return None, None, None
        fields = _of_bias(None if isinstance(bias, Tensor) else bias, own, heads)
        traits = tuple(own.dtype if value is own else value for value in fields.values())
        marked = None if known is None else (known, kinds, *fields, traits, place[0] & 15)
        results = rules._replace(**settings, **fields), marked, own
        if own.numel() <= _STORED and rules.lengths is None and rules.query_ids is None and rules.mask is None:
            last = rules, own, place, results
        return results

    return completed


def _placed(bias: Any, device: torch.device) -> Tensor:
    placed = stored(bias, device, "placed", lambda: bias.on(device)) if bias.plain else bias
    return placed.tensors()[0]


def _rules_of(problem: Problem, mask_rules: Clauses) -> Callable[[Any, torch.device], tuple[Any, Any]]:
    """Return a function that returns the kernel's arguments (`Rules`) for the mask of a call, and their cache key.

    The `Rules` are None for a mask whose calls need other operations beside the kernel.
    """
    from regard.kernels.triton.range_pairs import Rules  # imported here: the module imports Triton

    shape, batch, low, high = problem.shape, problem.shape[0], mask_rules.low, mask_rules.high
    band, known = Rules(low, high), (low, high)
    shared = mask_rules.lengths is not None and mask_rules.lengths.numel() == 1
    padded, packed = mask_rules.lengths is not None, len(mask_rules.segments) > 0
    itself = all(own is other for own, other in mask_rules.segments) and _reaches_itself(band)

    def rules_of(mask: Any, device: torch.device) -> tuple[Any, Any]:
        if mask_rules.dense:
            if isinstance(mask, Mask):
                return stored(mask, device, ("ranges", shape), lambda: _lowered_for(mask, shape, device)).rules, None
            return band._replace(**_of_pairs(mask)), None
        if not padded and not packed:
            return band, known
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
    """Return the mask of a checked call as arguments of the kernel."""
    mask_rules = clauses(mask.on(device).aligned(shape), *shape[-2:])
    assert mask_rules is not None  # `serves` has checked that kernels can evaluate the mask
    return _lowered(mask_rules, shape, device)


def _lowered(mask_rules: Clauses, shape: tuple[int, ...], device: torch.device) -> Lowered:
    from regard.kernels.triton.range_pairs import Rules  # imported here: the module imports Triton
    from regard.kernels.triton.segment_bounds import segment_bounds

    lead, (queries, keys) = shape[:-3], shape[-2:]
    rules = Rules(mask_rules.low, mask_rules.high)
    if mask_rules.dense:
        rules = rules._replace(**_of_pairs(functools.reduce(torch.logical_and, mask_rules.dense)))
    if mask_rules.lengths is not None:
        lengths = mask_rules.lengths.expand(*lead, 1).reshape(-1)
        rules = rules._replace(lengths=lengths, lengths_b=lengths.stride(0))
    if not mask_rules.segments:
        return Lowered(rules, None)
    ((of_queries, of_keys),) = mask_rules.segments
    own, other = (t.expand(*lead, 1, -1).reshape(-1, t.shape[-1]) for t in (of_queries, of_keys))
    if of_queries is of_keys and _reaches_itself(rules):
        return _packed(rules, own)
    rules = rules._replace(
        query_ids=own, query_b=own.stride(0), query_n=own.stride(1), row_bounds=segment_bounds(own, other),
        key_ids=other, key_b=other.stride(0), key_n=other.stride(1), key_bounds=segment_bounds(other, own),
    )  # fmt: skip
    return Lowered(rules, seen_keys(mask_rules, queries, keys, device))


def _of_pairs(mask: Tensor) -> dict[str, Any]:
    """Return a dense mask as fields of the kernel's `Rules`."""
    return {"mask": mask.view(torch.uint8), **_steps(mask, "mask")}


def _reaches_itself(rules: Any) -> bool:
    """Return whether the band lets each query attend to the key at its own position."""
    return (rules.low or 0) <= 0 <= (rules.high or 0)


def _packed(rules: Any, ids: Tensor) -> Lowered:
    """Return the kernel arguments for segments whose queries and keys share the ids (b, n).

    The segments let each key be attended by the query at its own position, so they mask no key for all queries. The
    kernel itself skips keys that the lengths or the band mask.
    """
    # Imported here: the modules import Triton.
    from regard.kernels.triton.additive.plan import trait
    from regard.kernels.triton.segment_bounds import segment_bounds

    bounds, (batch, step) = segment_bounds(ids, ids), ids.stride()
    rules = rules._replace(
        query_ids=ids, query_b=batch, query_n=step, row_bounds=bounds,
        key_ids=ids, key_b=batch, key_n=step, key_bounds=bounds,
    )  # fmt: skip
    return Lowered(rules, None, trait(rules))
