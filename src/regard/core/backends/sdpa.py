"""Dot products through torch's fused kernels, `F.scaled_dot_product_attention`; masks in the form it computes fastest.

Dot, scaled dot, cosine and bilinear scores are all scale · Q' K'ᵀ, so they reduce to it exactly. A causal mask becomes
`is_causal`, a mask of keys alone one row, a window a band at the cost of its width; any other is made for a block of
queries at a time, over the span of keys that block can see (on a GPU blocks are large: 2²⁶ entries of the mask).
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import summaries
from regard.core.backends import banded, decoding_step, reference, torch_sdpa
from regard.core.backends.block_grid import survey
from regard.core.backends.result import Result
from regard.core.biases import Rule
from regard.core.clauses import Clauses, clauses
from regard.core.nonfinite import all_finite, needs_cleaning, zero_masked_keys
from regard.core.problem import HALF, Problem
from regard.core.requests import LogSumExp
from regard.core.scores import Bilinear, ScaledDot
from regard.core.spans import Stretch, all_of, cut, take
from regard.core.transforms import mapped

NAME = "sdpa"
FEW = 16  # keys: with fewer, torch's kernels on the CPU return 0 for a query of NaN
_MASK_NUMBERS = 2**22  # entries of a mask made at a time
_CUDA_NUMBERS = 2**26  # the same on a GPU, which has many threads to feed and whose memory is quick
_COLUMNS = 128  # keys in one step of the search for the span that is visible


def refuses(problem: Problem) -> str | None:
    """Why torch's kernels do not compute this, if they do not."""
    if problem.dropout > 0.0 and problem.generator is not None:
        return "its dropout takes no generator"
    if problem.device.type == "cpu" and not torch.compiler.is_compiling():
        masked = problem.mask is not None or problem.bias is not None
        if (masked or problem.shape[-1] < FEW) and mapped():
            return (
                "in vmap the data cannot be checked for NaN or Inf, which its kernels would carry past a mask or lose"
            )
        if needs_cleaning(problem):
            return "NaN or Inf in query, key or value, or numbers near it: its kernels would carry them past the mask"
        if problem.shape[-1] < FEW and not all_finite(problem):
            return "NaN or Inf in query, key or value: its kernels lose them among few keys"
    return None


def not_worth_it(problem: Problem) -> str | None:
    """Where torch would form the whole matrix itself, or a product would have to fit float16 on the way."""
    if isinstance(problem.score, Bilinear) and problem.query.dtype == torch.float16:
        return "query times weight can overflow float16"
    if plain(problem) and working_bytes(problem) > _affordable(problem.device):
        return "torch would form the whole matrix for dropout or a learned bias"
    return None


def _affordable(device: torch.device) -> int:
    """How large a matrix may be before another backend is taken. On a GPU the others are fifty times slower."""
    if device.type != "cuda":
        return reference.SMALL
    return 2**31 if torch.compiler.is_compiling() else torch.cuda.get_device_properties(device).total_memory // 16


def working_bytes(problem: Problem) -> int:
    """A mask for a block of queries at most, unless torch falls back to its plain path."""
    if plain(problem):
        return 2 * math.prod(problem.shape) * problem.query.element_size()
    found = clauses(problem.mask, *problem.shape[-2:])
    if problem.bias is None and _needs_no_block(found):
        return 0
    if problem.bias is None and found is not None and banded.worth_it(found, *problem.shape[-2:]):
        key_bytes = math.prod(problem.key.shape) // problem.shape[-1] * problem.key.element_size()
        return banded.working_bytes(found, queries=problem.shape[-2], keys=problem.shape[-1], row_bytes=key_bytes)
    if problem.device.type == "cpu":
        return min(_MASK_NUMBERS, math.prod(problem.shape)) * 4
    numbers = min(_CUDA_NUMBERS, problem.matrices * math.prod(problem.shape[-2:]))
    return numbers * (4 if problem.bias is None else 3 * problem.query.element_size())


def has_rules(problem: Problem) -> bool:
    """Are there rules for CUDA's kernels in vmap? In half precision, without a tensor for mask or bias."""
    if problem.bias is not None or problem.query.dtype not in HALF:
        return False
    return problem.mask is None or _is_causal_alone(clauses(problem.mask, *problem.shape[-2:]))


def plain(problem: Problem) -> bool:
    """Will torch form the whole matrix? For a bias that is learned it does, on the CPU for dropout too."""
    return problem.bias_learned or (problem.dropout > 0.0 and problem.device.type == "cpu")


def kernel(problem: Problem) -> str:
    """The kernel that torch picks: flash, efficient, cudnn or math; a decoding step on CUDA has one of its own."""
    found = clauses(problem.mask, *problem.shape[-2:])
    if _is_step(problem, found):
        return "triton decode"
    if isinstance(problem.request, LogSumExp) and problem.device.type == "cpu" and problem.bias is None:
        return "flash"
    query, key, value = _like_kernels(problem)
    causal, mask = False, None
    if problem.bias is None and found is not None and _needs_no_block(found):
        causal = found.banded
        masked = found.lengths is not None or bool(found.dense)
        mask = torch.empty(1, 1, 1, key.shape[-2], dtype=torch.bool, device=query.device) if masked else None
    else:
        kind = torch.bool if problem.bias is None else query.dtype
        rows = min(query.shape[-2], _rows_at_once(problem))
        mask = torch.empty(1, 1, 1, key.shape[-2], dtype=kind, device=query.device).expand(1, 1, rows, -1)
        mask = mask.requires_grad_(problem.bias_learned) if kind != torch.bool else mask
        query = query[..., :rows, :]
    return torch_sdpa.kernel(query, key, value, mask, problem.dropout, causal)


def _like_kernels(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors for which torch picks the same kernel as for the real ones; no number is computed."""
    size = max(problem.query.shape[-1], problem.value.shape[-1])
    tensors = (problem.query, problem.key, problem.value)
    if all(t.ndim == 4 and t.shape[-1] == size for t in tensors):
        return tensors
    shapes = ((1, *t.shape[-3:-1], size) for t in tensors)
    query, key, value = (
        torch.empty(shape, dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)
        for t, shape in zip(tensors, shapes, strict=True)
    )
    return query, key, value


def _is_step(problem: Problem, found: Clauses | None) -> bool:
    """A padded memory would have to be cleaned at every step; the kernel for steps does not read its padding."""
    return found is not None and found.lengths is not None and decoding_step.serves(problem)


def attend(problem: Problem) -> Result:
    """Attention by torch's fused kernels."""
    totals = isinstance(problem.request, LogSumExp) or summaries.sums_serve(problem)
    if totals and (result := _with_log_sum_exp(problem)) is not None:
        return result
    lead, size = problem.query.shape[:-3], problem.value.shape[-1]
    found = clauses(problem.mask, *problem.shape[-2:])
    step = _is_step(problem, found)
    if not step:  # before any product with the keys: in the backward pass 0 · NaN would be NaN
        problem = zero_masked_keys(problem)
    product = problem.score.as_product(problem.query, problem.key)
    assert product is not None  # refuses() has said so
    if step:
        return Result(decoding_step.attend(problem, product.query, product.key, None, product.scale))
    if product.query is not problem.query or product.key is not problem.key:
        problem = replace(problem, query=product.query, key=product.key)
    query, key, value = _as_kernels_want(problem)

    lse: Tensor | None = None
    banding = problem.bias is None and found is not None and banded.worth_it(found, *problem.shape[-2:])
    # The padding rows of a band's last block may have no key to attend.
    emptied = _wants_full_rows(problem.device) and (banding or not _every_row_sees(found, *problem.shape[-2:]))

    def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        filled = mask.any(-1, keepdim=True) if emptied and mask is not None and mask.dtype == torch.bool else None
        output = torch_sdpa.attend(
            query,
            key,
            value,
            attn_mask=mask if filled is None or mask is None else mask | ~filled,
            dropout_p=problem.dropout,
            is_causal=causal,
            scale=product.scale,
            enable_gqa=query.shape[-3] != key.shape[-3],
        )
        return output if filled is None else torch.where(filled, output, 0)

    if problem.bias is None and found is not None and _needs_no_block(found):
        one_row = found.lengths is not None or bool(found.dense)
        mask = _mask(problem, all_of(1), all_of(problem.shape[-1])) if one_row else None
        both = None
        if mask is None and problem.dropout == 0.0 and summaries.serves(problem):  # which begin with the log-sum-exp
            both = torch_sdpa.attend_with_lse(query, key, value, causal=found.banded, scale=product.scale)
        if both is not None:
            output, lse = both[0], both[1].reshape(problem.shape[:-1])
        else:
            output = kernel(query, key, value, mask, causal=found.banded)
    elif banding and found is not None and query.numel() > 0:
        output = banded.attend(query, key, value, found, lead, kernel)
    else:
        parts = [
            kernel(
                take(query, -2, rows), take(key, -2, columns), take(value, -2, columns), _mask(problem, rows, columns)
            )
            for rows, columns in visible(problem)
        ]
        output = torch.cat(parts, -2)
    output = output[..., :size]
    return Result(output if len(lead) == 1 else output.reshape(*lead, *output.shape[-3:]), lse=lse)


def _with_log_sum_exp(problem: Problem) -> Result | None:
    """Output and log-sum-exp from one kernel, where there is one that gives both."""
    if torch.compiler.is_compiling():
        return None
    from regard.core.backends import flash  # which imports this module

    product = problem.score.as_product(problem.query, problem.key)
    assert product is not None  # refuses() has said so
    plain = replace(problem, query=product.query, key=product.key, score=ScaledDot(product.scale))
    if not flash.serves(plain):
        return None
    output, lse = flash.attend(plain)[:2]
    assert isinstance(lse, Tensor)
    return Result(output, lse) if isinstance(problem.request, LogSumExp) else Result(output, lse=lse)


def _needs_no_block(found: Clauses | None) -> bool:
    """Is the mask nothing, `is_causal` alone, or one row for all queries?"""
    return found is not None and (found.by_key or _is_causal_alone(found))


def _is_causal_alone(found: Clauses | None) -> bool:
    if found is None or found.lengths is not None or len(found.segments) > 0 or len(found.dense) > 0:
        return False
    return found.low is None and found.high == 0


def _wants_full_rows(device: torch.device) -> bool:
    """Must a row with nothing to attend be kept from the kernels?

    cuDNN takes a bool mask as the lowest number: such a row gets the mean of the values and, at some lengths, NaN for
    gradients (pytorch#196678). The CPU's kernels give 0.
    """
    return device.type != "cpu"


def _every_row_sees(found: Clauses | None, queries: int, keys: int) -> bool:
    """Is it certain, without reading any tensor, that each row has a key to attend?"""
    if found is None or found.lengths is not None or len(found.segments) > 0 or len(found.dense) > 0:
        return False
    low, high = 1 - queries if found.low is None else found.low, keys - 1 if found.high is None else found.high
    return low <= high and high >= 0 and queries - 1 + low < keys


def _as_kernels_want(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Four axes, and equal sizes: columns of zeros change neither scores nor the first columns of the output."""
    size = max(problem.query.shape[-1], problem.value.shape[-1])
    tensors = (problem.query, problem.key, problem.value)
    query, key, value = (t if t.ndim == 4 else t.flatten(0, -4) if t.ndim > 4 else t.unsqueeze(0) for t in tensors)
    query, key, value = (t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1])) for t in (query, key, value))
    return query, key, value


def visible(problem: Problem) -> list[tuple[Stretch, Stretch]]:
    """Blocks of queries, each with the span of keys it can see."""
    queries, keys = problem.shape[-2:]
    rows = cut(queries, _rows_at_once(problem))
    if problem.mask is None or len(rows) < 2:
        return [(block, all_of(keys)) for block in rows]
    columns = cut(keys, _COLUMNS)
    some, _ = survey(problem.mask, rows, columns, problem.device)
    spans = []
    for block, sees in zip(rows, some, strict=True):
        found = [c for c, any_seen in enumerate(sees) if any_seen] or [0]
        spans.append((block, Stretch(columns[found[0]].start, columns[found[-1]].stop)))
    return spans


def _rows_at_once(problem: Problem) -> int:
    """How many queries a block has: on the CPU few, for few keys may be all that they can see."""
    queries, keys = problem.shape[-2:]
    if problem.device.type != "cpu":
        return min(queries, max(64, _CUDA_NUMBERS // max(1, keys * problem.matrices)))
    slices = max(1, math.prod(problem.shape[:-2]))
    if queries * keys * slices <= _MASK_NUMBERS:
        return queries
    return max(64, min(512, _MASK_NUMBERS // (keys * slices)))


def _mask(problem: Problem, rows: Stretch, columns: Stretch) -> Tensor | None:
    """Mask and bias of a block as one tensor with four axes: bool, or numbers to add."""
    allowed = problem.mask.allowed(rows, columns, problem.device) if problem.mask is not None else None
    if problem.bias is None:
        return None if allowed is None else four_axes(allowed, problem)
    # The CPU's kernels take a float32 bias beside half-precision queries; CUDA's want the queries' own dtype.
    cpu = problem.device.type == "cpu"
    numbers = problem.bias.values(rows, columns, problem.dtype if cpu else problem.query.dtype)
    if allowed is not None:
        numbers = torch.where(allowed, numbers, -math.inf)
    elif not cpu and isinstance(problem.bias, Rule):
        numbers = numbers.contiguous()  # its rows are not aligned in memory
    return four_axes(numbers, problem)


def four_axes(tensor: Tensor, problem: Problem) -> Tensor:
    """(batch, heads, rows, columns), with ones kept where the tensor broadcasts."""
    lead = problem.query.shape[:-3]
    if tensor.ndim < 4:
        return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
    return tensor if len(lead) < 2 else tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, -4)
