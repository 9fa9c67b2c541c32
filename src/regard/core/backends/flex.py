"""FlexAttention on CUDA: windows, segments, ALiBi, softcaps and relative biases inside one compiled kernel.

Two Triton kernels of this library take precedence over FlexAttention: one for windows alone in half precision, and
`ranges` for bands, lengths, segments and ALiBi together. FlexAttention receives a mask both as a function of a single
pair and as a list of the blocks that are not fully masked, from `Mask.coarse`, so that no n × n tensor is allocated.
The function and the list are computed once for a mask object.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.core.backends import ranges, sdpa
from regard.core.backends.result import Direct, Result
from regard.core.biases import Alibi, DenseBias, Relative, Rule
from regard.core.clauses import Clauses
from regard.core.mask_cache import stored
from regard.core.masks import Band, Blocks, Coarse
from regard.core.nonfinite import zero_masked_keys
from regard.core.problem import HALF, Problem
from regard.core.scores import Dot, ScaledDot
from regard.kernels import availability
from regard.kernels.availability import TRITON

NAME = "flex"
_BLOCK = 128
_NARROW = 2048  # the widest window, in keys, that the Triton kernel for attention windows supports
_PROGRAMS = 65_535  # the largest number of thread blocks on the second axis of a CUDA kernel launch
# A bias with a number for each pair is prefetched in float32 tiles; three pipeline stages of such tiles exceed the
# shared memory of the GPU.
_READING: Any = {"num_stages": 2}
_WORTH = 1024  # with fewer queries or keys than this, the set-up of FlexAttention takes longer than it saves


def refuses(problem: Problem) -> str | None:
    """Return the reason why neither `ranges` nor FlexAttention can compute the call, or None."""
    rules = problem.mask_rules
    if ranges.serves(problem, rules):
        return None
    if not problem.normalize.is_softmax:
        return f"softmax only, not {problem.normalize.name}"
    if _softcap(problem) is None and (reason := problem.score.why_no_product()):
        return reason
    if problem.dropout > 0.0:
        return "it has no dropout"
    if problem.query.dtype not in (*HALF, torch.float32):
        return f"it does not compute in {problem.query.dtype}"
    if rules is None:
        return "the mask cannot be written as rules for kernels (see Mask.clauses)"
    if problem.bias_learned and torch.are_deterministic_algorithms_enabled():
        return "its gradient of a learned bias is summed in no fixed order"
    sizes = (problem.query.shape[-1], problem.value.shape[-1])
    if not all(map(_whole, sizes)):
        return f"sizes must be powers of two from 16, got {sizes[0]} and {sizes[1]}"
    return None


def _whole(size: int) -> bool:
    """Return whether FlexAttention supports vectors of this size: a power of two of at least 16."""
    return size >= 16 and size & (size - 1) == 0


def not_worth_it(problem: Problem) -> str | None:
    """Return the reason why another backend would be at least as fast, or None."""
    queries, keys = problem.shape[-2:]
    rules = problem.mask_rules
    if ranges.serves(problem, rules):
        return None
    if min(queries, keys) < _WORTH:
        return f"under {_WORTH} queries or keys its set-up costs more than it saves"
    sparse = rules is not None and (rules.low is not None or len(rules.segments) > 0)
    if problem.query.dtype not in HALF and not sparse:
        if isinstance(problem.bias, (DenseBias, Relative)):
            return "in single precision plain kernels read a bias sooner"
        if isinstance(problem.bias, Alibi) and problem.bias_learned:
            return "it adds up a slope's gradient pair by pair, and single precision runs out of digits"
    products = problem.score.why_no_product() is None and sdpa.refuses(problem) is None
    if problem.bias_learned and products and sdpa.not_worth_it(problem) is None:
        return "it adds up the gradient of a learned bias pair by pair: plain kernels are faster"
    structured = sparse or (rules is not None and (rules.high or 0) != 0)
    rule = isinstance(problem.bias, Rule) or _softcap(problem) is not None
    return None if structured or rule else "no window, segments or rule of distance: plain kernels are faster"


def working_bytes(problem: Problem) -> int:
    """Return the bytes of FlexAttention's lists of blocks, or of the segment bounds of this library's own kernels."""
    rules = problem.mask_rules
    if rules is not None and (_narrow(problem, rules) or ranges.serves(problem, rules)):
        return ranges.working_bytes(problem, rules)
    queries, keys = (-(-n // _BLOCK) for n in problem.shape[-2:])
    return 16 * math.prod(problem.shape[:-3]) * queries * keys


def kernel(problem: Problem) -> str:
    """Return the name of the kernel: a Triton kernel of this library, or torch's FlexAttention."""
    rules = problem.mask_rules
    if rules is not None and _narrow(problem, rules):
        return "triton window"
    return ranges.KERNEL if ranges.serves(problem, rules) else "flex attention"


def attend(problem: Problem, *, compiled: bool = True) -> Result:
    """Compute attention by FlexAttention or by a Triton kernel of this library.

    If `compiled` is False, FlexAttention runs uncompiled, in torch operations.
    """
    rules = problem.mask_rules
    assert rules is not None  # `refuses` has checked that kernels can evaluate the mask
    if compiled and ranges.serves(problem, rules) and not _narrow(problem, rules):
        return ranges.attend(problem, rules)
    problem = zero_masked_keys(problem)
    query, key, scale = problem.query, problem.key, 1.0
    softcap = _softcap(problem)
    product = problem.score.as_product(query, key)
    if product is not None:
        query, key, scale = product
    elif isinstance(problem.score, ScaledDot):
        scale = problem.score.factor(query.shape[-1])
    lead, value = problem.query.shape[:-3], problem.value
    if len(lead) != 1:
        query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    if compiled and query.shape[-1] == problem.query.shape[-1] and _narrow(problem, rules):
        return Result(_led(_by_window(query, key, value, rules, scale), lead))

    # Imported here: the module imports torch's compiler, which takes seconds.
    from torch.nn.attention.flex_attention import flex_attention

    kernel = _compiled() if compiled and not torch.compiler.is_compiling() else flex_attention
    mods = {"score_mod": _score_rule(problem, softcap, lead), "block_mask": _block_mask(problem, rules, lead)}
    options = _READING if compiled and isinstance(problem.bias, (DenseBias, Relative)) else None
    with _many_kernels(problem, query, key, value, scale) if compiled else contextlib.nullcontext():
        output = kernel(query, key, value, **mods, scale=scale, enable_gqa=problem.group > 1, kernel_options=options)
    return Result(_led(output, lead))


def _led(output: Tensor, lead: torch.Size) -> Tensor:
    return output if len(lead) == 1 else output.reshape(*lead, *output.shape[-3:])


def _narrow(problem: Problem, rules: Clauses) -> bool:
    """Return whether the Triton kernel for windows computes the call: in half precision, with only a window as mask."""
    if rules.low is None or rules.high is None or rules.lengths is not None or rules.segments or rules.dense:
        return False
    plain = problem.bias is None and _softcap(problem) is None and problem.normalize.is_softmax
    plain = plain and problem.query.dtype in HALF
    sizes = problem.query.shape[-1], problem.value.shape[-1]
    small = (
        max(sizes) <= 128
        and all(map(_whole, sizes))
        and rules.high - rules.low <= _NARROW
        and math.prod(problem.shape[:-2]) <= _PROGRAMS
    )
    near = _near(problem.shape[-3], problem.query, problem.key, problem.value)
    return plain and small and near and TRITON and not torch.compiler.is_compiling()


def _near(heads: int, *tensors: Tensor) -> bool:
    """Return whether 32-bit offsets can address every head of a sequence, as the Triton kernel for windows requires."""
    # The number of entries of one head in a contiguous copy of the largest tensor.
    farthest = max(t.shape[-2] for t in tensors) * max(t.shape[-1] for t in tensors)
    return heads * max(farthest, *(t.stride(-3) for t in tensors)) < 2**31


def direct(problem: Problem) -> Direct | None:
    """Return a function that only runs the kernel, for calls equal to `problem` but for the tensors' values; or None.

    The result is None if these calls need other operations too, such as copies of tensors. `problem` must hold the
    caller's own tensors, not views of them, and must not request weights.
    """
    rules = problem.mask_rules
    if rules is None or problem.query.ndim != 4:
        return None
    if not _narrow(problem, rules):
        return ranges.direct(problem, rules) if ranges.serves(problem, rules) else None
    if not isinstance(problem.score, (Dot, ScaledDot)):
        return None
    low, high, square = rules.low, rules.high, problem.query.shape == problem.key.shape
    if low is None or high is None or not (square and low <= 0 <= high):
        return None
    from regard.kernels.triton.window_attention import window_attention  # imported here: the module imports Triton

    scale = problem.score.factor(problem.query.shape[-1]) if isinstance(problem.score, ScaledDot) else 1.0

    def attended(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor | None:
        if query.device.index != availability.current_device():
            return None
        return window_attention(query, key, value, low, high, scale)

    return attended


def _by_window(query: Tensor, key: Tensor, value: Tensor, rules: Clauses, scale: float) -> Tensor:
    from regard.kernels.triton.window_attention import window_attention  # imported here: the module imports Triton

    assert rules.low is not None
    assert rules.high is not None
    return window_attention(query, key, value, rules.low, rules.high, scale)


_served: set[Any] = set()  # cache keys of calls (`call` in `_many_kernels`) whose kernel is already compiled
_MANY = 4096


def _many_kernels(problem: Problem, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Any:
    """Return a context manager that raises torch's limit on recompilations.

    Each shape and each window compiles a kernel of its own, and torch stops compiling after a few recompilations.
    Raising the limit takes as long as a short kernel, so it is skipped for calls whose kernel is already compiled.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    if isinstance(problem.mask, Band) and problem.bias is None:
        tensors = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (query, key, value))
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
        call = tensors, modes, problem.mask.low, problem.mask.high, scale, _softcap(problem), torch.get_num_threads()
        if call in _served:
            return contextlib.nullcontext()
        if len(_served) >= _MANY:
            _served.clear()
        _served.add(call)
    return torch._dynamo.config.patch(recompile_limit=256)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _softcap(problem: Problem) -> float | None:
    return problem.score.softcap if isinstance(problem.score, ScaledDot) else None


def _flat(tensor: Tensor, lead: torch.Size, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that broadcasts to (*lead, *shape) as (batch, *shape), as a view if possible."""
    tensor = tensor.expand(*lead, *shape)
    return tensor.reshape(-1, *shape)


def _score_rule(problem: Problem, softcap: float | None, lead: torch.Size) -> Callable[..., Tensor] | None:
    """Return FlexAttention's `score_mod`, which applies softcap and bias to the score of one pair; None without
    these."""
    bias = problem.bias
    if bias is None and softcap is None:
        return None
    device = problem.device

    def capped(score: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    if bias is None:
        return lambda score, b, h, i, j: capped(score)
    offset = torch.full((), getattr(bias, "offset", 0), device=device)
    heads = problem.shape[-3]
    if isinstance(bias, Alibi):
        slopes = bias.slopes.to(problem.dtype).expand(heads)
        return lambda score, b, h, i, j: capped(score) - slopes[h] * (i + offset - j).abs()
    if isinstance(bias, Relative):
        table, reach = bias.table.to(problem.dtype).expand(heads, -1).contiguous(), bias.reach
        return lambda score, b, h, i, j: capped(score) + table[h, torch.clamp(j - i - offset, -reach, reach) + reach]
    assert isinstance(bias, DenseBias)
    numbers = _flat(bias.tensor.to(problem.dtype), lead, problem.shape[-3:])
    return lambda score, b, h, i, j: capped(score) + numbers[b, h, i, j]


def _block_mask(problem: Problem, rules: Clauses, lead: torch.Size) -> Any:
    """Return the mask as FlexAttention's `BlockMask`, or None without a mask."""
    if problem.mask is None or rules == Clauses():
        return None
    queries, keys = problem.shape[-2:]
    if rules.lengths is None and len(rules.segments) == 0 and len(rules.dense) == 0:
        # torch.compile cannot trace the cache of `_band_mask`.
        build = _band_mask.__wrapped__ if torch.compiler.is_compiling() else _band_mask
        return build(rules.low, rules.high, queries, keys, problem.device)
    return stored(
        problem.mask, problem.device, ("flex", lead, problem.shape[-3:]), lambda: _tensor_mask(problem, rules, lead)
    )


def _tensor_mask(problem: Problem, rules: Clauses, lead: torch.Size) -> Any:
    assert problem.mask is not None
    queries, keys = problem.shape[-2:]
    coarse = problem.mask.coarse(Blocks(_edges(queries, problem.device), _edges(keys, problem.device)))
    return _listed_mask(coarse, lead, _pair_rule(problem, rules, lead), queries, keys)


@functools.lru_cache(maxsize=64)
def _band_mask(low: int | None, high: int | None, queries: int, keys: int, device: torch.device) -> Any:
    """Return the `BlockMask` of a band; it is cached, because every layer and step uses the same one."""
    coarse = Band(low, high).coarse(Blocks(_edges(queries, device), _edges(keys, device)))
    # Bounds as Python numbers are compiled into the kernel. Bounds as tensors would be loaded for every pair, which
    # doubles the time.
    first, last = -queries if low is None else low, keys if high is None else high

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j - i >= first) & (j - i <= last)

    return _listed_mask(coarse, torch.Size([1]), rule, queries, keys)


def _listed_mask(coarse: Coarse, lead: torch.Size, rule: Callable[..., Tensor], queries: int, keys: int) -> Any:
    """Return the `BlockMask` of partly and of fully allowed blocks; heads with equal masks share one entry."""
    from torch.nn.attention.flex_attention import BlockMask

    shape = (-(-queries // _BLOCK), -(-keys // _BLOCK))
    heads = max(part.shape[-3] if part.ndim > 2 else 1 for part in coarse)
    some, every = (_flat(part, lead, (heads, *shape)) for part in coarse)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(every), BLOCK_SIZE=_BLOCK, mask_mod=rule, seq_lengths=(queries, keys)
    )


def _edges(length: int, device: torch.device) -> Tensor:
    return torch.arange(0, -(-length // _BLOCK) * _BLOCK + 1, _BLOCK, device=device).clamp_max(length)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of `blocks` the number of True entries, and all column indices, those of True entries
    first."""
    return blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True).int()


def _pair_rule(problem: Problem, rules: Clauses, lead: torch.Size) -> Callable[..., Tensor]:
    """Return FlexAttention's `mask_mod`, which evaluates the mask for one pair.

    The bounds of a band are tensors, so that another window needs no recompilation.
    """
    device, (heads, queries, keys) = problem.device, problem.shape[-3:]
    # The bounds are created on the device, because copying a number to it would be a synchronisation.
    bounds = ((rules.low, -queries), (rules.high, keys))
    low, high = (torch.full((), d if x is None else x, device=device) for x, d in bounds)
    lengths = _flat(rules.lengths, lead, (heads,)) if rules.lengths is not None else None
    segments = [
        (_flat(query_ids, lead, (heads, queries)), _flat(key_ids, lead, (heads, keys)))
        for query_ids, key_ids in rules.segments
    ]
    dense = [_flat(tensor, lead, (heads, queries, keys)) for tensor in rules.dense]

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = (j - i >= low) & (j - i <= high)
        if lengths is not None:
            allowed = allowed & (j < lengths[b, h])
        for query_ids, key_ids in segments:
            allowed = allowed & (query_ids[b, h, i] == key_ids[b, h, j])
        for tensor in dense:
            allowed = allowed & tensor[b, h, i, j]
        return allowed

    return rule
