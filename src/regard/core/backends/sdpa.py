"""Dot-product attention by `F.scaled_dot_product_attention`; each mask is passed in the way for which its kernels are
fastest.

Dot, scaled dot, cosine and bilinear scores can all be written as scale · Q' K'ᵀ, which torch's kernels compute.
A causal mask becomes `is_causal`, a mask that is equal for all queries becomes one row, and a window is computed as a
band (`banded`). Any other mask is built for one block of queries at a time, over the range of keys that the block may
attend (on a GPU blocks are large: 2²⁶ entries of the mask). On the CPU, calls with padding or packed documents are
split into sequences, with one kernel call without a mask for each (`per_sequence`).
"""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.core import summaries
from regard.core.backends import alibi_numbers, banded, decoding_step, mask_blocks, per_sequence, reference, torch_sdpa
from regard.core.backends.result import Both, Direct, Result
from regard.core.clauses import Clauses
from regard.core.mask_cache import stored
from regard.core.masks import Band, Dense
from regard.core.nonfinite import all_finite, finite, harmless, needs_cleaning, zeroed_with_row
from regard.core.problem import HALF, Problem
from regard.core.requests import LogSumExp, Rows
from regard.core.scores import Bilinear, Dot, ScaledDot, Score
from regard.core.spans import all_of, take
from regard.core.transforms import mapped

NAME = "sdpa"
FEW = 16  # with fewer keys than this, torch's CPU kernels return 0, not NaN, for a query of NaN
_BAND_NUMBERS = 2**15  # the largest number of entries of a band's mask tensor that is cached
_SHORT = 64  # on the CPU, up to this number of keys `plain_form` is faster than padding keys and values to one size
_MEMORY = 512  # from this number of keys on, this library's kernel for decoding steps is faster than torch's in float32


def refuses(problem: Problem) -> str | None:
    """Return the reason why torch's kernels cannot compute the call, or None."""
    if problem.dropout > 0.0 and problem.generator is not None:
        return "its dropout takes no generator"
    if _inspected(problem) and mapped():
        return "in vmap the data cannot be checked for NaN or Inf, which its kernels would carry past a mask or lose"
    return None


def refuses_data(problem: Problem) -> str | None:
    """Return the reason why torch's kernels cannot compute a call with these tensor values, or None."""
    if not _inspected(problem):
        return None
    if problem.masked:
        wrong = "NaN or Inf in query, key or value, or numbers near it: its kernels would carry them past the mask"
        return wrong if needs_cleaning(problem) else None
    if not all_finite(problem):
        return "NaN or Inf in query, key or value: its kernels lose them among few keys"
    return None


def _inspected(problem: Problem) -> bool:
    """Return whether query, key and value must be inspected for NaN and Inf; False where this is impossible (CUDA,
    compiled)."""
    if problem.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return problem.masked or problem.key.shape[-2] < FEW


def not_worth_it(problem: Problem) -> str | None:
    """Return the reason why another backend is faster or needs much less memory, or None."""
    if isinstance(problem.score, Bilinear) and problem.query.dtype == torch.float16 and problem.device.type == "cpu":
        return "a product in float16 on the CPU: the plain form computes it in float32"
    requested = problem.request is not None and not isinstance(problem.request, LogSumExp | Rows)
    if requested and problem.device.type == "cpu" and reference.working_bytes(problem) <= reference.SMALL:
        return "small, and weights are requested: the plain form computes them with the output"
    if reference.in_bfloat16(problem) and not torch.compiler.is_compiling():
        simple = problem.mask is None or (isinstance(problem.mask, Band) and problem.mask.low is None)
        if simple or (problem.shape[-1] <= 2 * _SHORT and not _at_once(problem)):
            return "products of bfloat16 on this CPU: the plain form is faster"
    padded = problem.value.shape[-1] != problem.key.shape[-1] and not _at_once(problem)
    if padded and problem.device.type == "cpu" and problem.shape[-1] <= _SHORT and reference.small(problem):
        return "few keys, and values of another size: the plain form is faster than padding"
    if plain(problem) and working_bytes(problem) > _affordable(problem.device):
        return "torch would form the whole matrix for dropout or a learned bias"
    return None


def _affordable(device: torch.device) -> int:
    """Return the largest number of bytes that the scores of all pairs may take when torch uses its math path.

    On a GPU the limit is high, because other backends are much slower there.
    """
    if device.type != "cuda":
        return reference.SMALL
    return 2**31 if torch.compiler.is_compiling() else torch.cuda.get_device_properties(device).total_memory // 16


def gives_weights(problem: Problem) -> bool:
    """Return whether requested weights are computed together with the output: only the log-sum-exp, on the CPU."""
    return isinstance(problem.request, LogSumExp) and problem.device.type == "cpu" and problem.bias is None


def working_bytes(problem: Problem) -> int:
    """Return the bytes of the mask of one block of queries, or of all scores where torch uses its math path."""
    if plain(problem):
        return 2 * math.prod(problem.shape) * problem.query.element_size()
    rules = problem.mask_rules
    if (problem.bias is None and _needs_no_block(rules)) or _sequences(problem, rules) is not None:
        return 0
    if problem.bias is None and rules is not None and banded.worth_it(rules, *problem.shape[-2:]):
        key_bytes = math.prod(problem.key.shape) // problem.shape[-1] * problem.key.element_size()
        return banded.working_bytes(rules, queries=problem.shape[-2], keys=problem.shape[-1], row_bytes=key_bytes)
    if problem.device.type == "cpu":
        return min(mask_blocks.CPU_NUMBERS, math.prod(problem.shape)) * 4
    numbers = min(mask_blocks.CUDA_NUMBERS, problem.matrices * math.prod(problem.shape[-2:]))
    return numbers * (4 if problem.bias is None else 3 * problem.query.element_size())


def has_rules(problem: Problem) -> bool:
    """Return whether torch's CUDA kernel supports vmap: in half precision, without a tensor as mask or bias."""
    if problem.bias is not None or problem.query.dtype not in HALF:
        return False
    return problem.mask is None or _is_causal_alone(problem.mask_rules)


def plain(problem: Problem) -> bool:
    """Return whether torch will use its math path, which stores all scores: a learned bias, or dropout on the CPU."""
    return problem.bias_learned or (problem.dropout > 0.0 and problem.device.type == "cpu")


def kernel(problem: Problem) -> str:
    """Return the name of the kernel: torch's flash, efficient, cudnn or math, or this library's kernel for decoding
    steps."""
    rules = problem.mask_rules
    if _is_step(problem, rules):
        return "triton decode"
    if isinstance(problem.request, LogSumExp) and problem.device.type == "cpu" and problem.bias is None:
        return "flash"
    tensors, dot = (problem.query, problem.key, problem.value), isinstance(problem.score, (Dot, ScaledDot))
    plain = dot and not problem.masked and problem.request is None and problem.query.ndim == 4 and not problem.named
    if plain and torch_sdpa.operator(*tensors, False, problem.dropout) == "products":
        return "products"
    query, key, value = _like_kernels(problem)
    causal, mask = False, None
    if problem.bias is None and rules is not None and _needs_no_block(rules):
        causal = rules.banded
        masked = rules.lengths is not None or len(rules.dense) > 0
        mask = torch.empty(1, 1, 1, key.shape[-2], dtype=torch.bool, device=query.device) if masked else None
    else:
        kind = torch.bool if problem.bias is None else query.dtype
        rows = min(query.shape[-2], mask_blocks.rows_at_once(problem))
        mask = torch.empty(1, 1, 1, key.shape[-2], dtype=kind, device=query.device).expand(1, 1, rows, -1)
        mask = mask.requires_grad_(problem.bias_learned) if kind != torch.bool else mask
        query = query[..., :rows, :]
    return torch_sdpa.kernel(query, key, value, mask, problem.dropout, causal)


def _like_kernels(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors for which torch chooses the same kernel as for the tensors of the call, without computing any
    values."""
    wanted = torch_sdpa.sizes(problem.query, problem.value, problem.masked)
    tensors = (problem.query, problem.key, problem.value)
    if all(t.ndim == 4 and t.shape[-1] == size for t, size in zip(tensors, wanted, strict=True)):
        return tensors
    shapes = ((1, *t.shape[-3:-1], size) for t, size in zip(tensors, wanted, strict=True))
    query, key, value = (
        torch.empty(shape, dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)
        for t, shape in zip(tensors, shapes, strict=True)
    )
    return query, key, value


def _is_step(problem: Problem, rules: Clauses | None) -> bool:
    """Return whether the Triton kernel for decoding steps computes the call.

    This kernel never loads padded keys and values, so NaN and Inf in the padding need not be replaced.
    """
    if rules is None or not decoding_step.serves(problem):
        return False
    if rules.lengths is not None:
        return True
    if torch.compiler.is_compiling():
        return False
    # Without padding, torch's kernels support decoding steps. In float32 a single thread block of torch's kernels reads
    # all keys of a head, which takes long for many keys.
    if problem.query.dtype != torch.float32 or problem.shape[-1] < _MEMORY:
        return torch_sdpa.pads(problem.query, problem.value)
    tensors = problem.query, problem.key, problem.value
    plain = problem.mask is None and problem.query.ndim == 4
    return not plain or torch_sdpa.operator(*tensors, False, 0.0) != "products"


def attend(problem: Problem) -> Result:
    """Compute attention by torch's fused kernels."""
    totals = isinstance(problem.request, LogSumExp) or summaries.sums_serve(problem)
    if totals and (result := _with_log_sum_exp(problem)) is not None:
        return result
    lead, size = problem.query.shape[:-3], problem.value.shape[-1]
    rules = problem.mask_rules
    step, row = _is_step(problem, rules), None
    if not step:  # masked NaN is replaced before any product with the keys: in the backward pass 0 · NaN is NaN
        problem, row = zeroed_with_row(problem, rules)
        row = None if row is None else mask_blocks.four_axes(row, problem)
    product = problem.score.as_product(problem.query, problem.key)
    assert product is not None  # `refuses` has checked that the score is a dot product of vectors
    if step:
        return Result(decoding_step.attend(problem, product.query, product.key, None, product.scale))
    if product.query is not problem.query or product.key is not problem.key:
        problem = replace(problem, query=product.query, key=product.key)
    query, key, value = _as_kernels_want(problem)

    lse: Tensor | None = None
    banding = problem.bias is None and rules is not None and banded.worth_it(rules, *problem.shape[-2:])
    # The last block of queries in `banded` is padded with rows that may have no key to attend.
    emptied = _wants_full_rows(problem.device) and (banding or not _every_row_sees(rules, *problem.shape[-2:]))

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
            enable_gqa=bool(query.shape[-3] != key.shape[-3]),  # torch.jit.trace returns tensors for comparisons
        )
        return output if filled is None else torch.where(filled, output, 0)

    calls = _sequences(problem, rules)
    if calls is not None:
        output = per_sequence.attend(query, key, value, calls, kernel)
    elif problem.bias is None and rules is not None and _needs_no_block(rules):
        one_row = rules.lengths is not None or len(rules.dense) > 0
        both = None
        mask = mask_blocks.built(problem, all_of(1), all_of(problem.shape[-1])) if one_row and row is None else row
        # The kernels that compute requested weights (`summaries`) need the log-sum-exp.
        if mask is None and problem.dropout == 0.0 and summaries.serves(problem):
            both, lse = torch_sdpa.attend_with_lse(query, key, value, causal=rules.banded, scale=product.scale)
            lse = None if lse is None else lse.reshape(problem.shape[:-1])
        output = kernel(query, key, value, mask, causal=rules.banded) if both is None else both
    elif banding and rules is not None and query.numel() > 0:
        output = banded.attend(query, key, value, rules, lead, kernel)
    else:
        parts = [
            kernel(
                take(query, -2, rows),
                take(key, -2, columns),
                take(value, -2, columns),
                mask_blocks.built(problem, rows, columns),
            )
            for rows, columns in mask_blocks.visible(problem)
        ]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    output = output[..., :size]
    return Result(output if len(lead) == 1 else output.reshape(*lead, *output.shape[-3:]), lse=lse)


def direct(problem: Problem) -> Direct | None:
    """Return a function that only runs the kernel, for calls equal to `problem` but for the tensors' values; or None.

    The result is None if these calls need other operations too, such as copies of tensors. `problem` must hold the
    caller's own tensors, not views of them, and must not request weights.
    """
    rules, (queries, keys) = problem.mask_rules, problem.shape[-2:]
    if rules is None or problem.query.ndim != 4:
        return None
    if _is_step(problem, rules):
        return _step(problem)
    if problem.bias is not None:
        return alibi_numbers.direct(problem, rules)
    causal, pairs = _is_causal_alone(rules), _pairs_at_once(problem)
    if problem.device.type == "cpu" and (rules.lengths is not None or rules.segments):
        small = rules.by_key or (problem.matrices * queries * keys <= mask_blocks.STORED_NUMBERS and not rules.dense)
        served = problem.key.shape[-1] == problem.value.shape[-1] or per_sequence.plain_serves(problem)
        return (
            per_sequence.direct(problem) if small and served and problem.dropout == 0.0 and rules.low is None else None
        )
    band = None if causal else _small_band(problem, rules)
    if (
        not causal
        and band is None
        and pairs is None
        and (rules.banded or rules.segments or rules.lengths is not None or rules.dense)
    ):
        return None
    on_cpu = problem.device.type == "cpu"
    if causal and queries < keys and not on_cpu:  # keys after the last query are masked for all queries
        return None
    masked, few, learning = problem.mask is not None, keys < FEW, problem.differentiated
    as_it_is = isinstance(problem.score, (Dot, ScaledDot))
    scale = problem.score.factor(problem.query.shape[-1]) if isinstance(problem.score, ScaledDot) else 1.0
    dropout, size = problem.dropout, problem.value.shape[-1]
    tensors = (problem.query, problem.key, problem.value)
    plain = as_it_is and band is None and pairs is None and torch_sdpa.fits(*tensors, causal, dropout)
    run = torch_sdpa.prepared(*tensors, causal, dropout, scale) if plain else None
    if run is not None and not (on_cpu and (masked or few)):
        return run
    if not on_cpu and not as_it_is and (by_product := _prepared_product(problem, causal)) is not None:
        return by_product
    options = {"dropout_p": dropout, "is_causal": causal, "enable_gqa": problem.group > 1}
    afterwards = on_cpu and masked and not learning

    def sound(query: Tensor, key: Tensor, value: Tensor) -> bool:
        if learning:
            return harmless(query, key, value, True)
        # NaN and Inf in `value`, and products that overflow, reach the output, which is checked after the kernel.
        return per_sequence.finite_sum(query) and per_sequence.finite_sum(key)

    def checked(output: Tensor | None) -> Tensor | None:
        return output if not afterwards or output is None or per_sequence.finite_sum(output) else None

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Score, mask: Any, bias: object) -> Tensor | None:
        if on_cpu and (not sound(query, key, value) if masked else few and not finite(query, key, value)):
            return None
        if run is not None:
            return checked(run(query, key, value, score, mask, bias))
        attn_mask = band
        if pairs is not None:
            if not isinstance(mask, (Tensor, Dense)):  # an `And` of a tensor mask and a mask that masks no pair
                return None
            attn_mask = (mask if isinstance(mask, Tensor) else mask.tensor).reshape(pairs)
        factor = scale
        if not as_it_is:
            product = score.as_product(query, key)
            assert product is not None  # `refuses` has checked that the score is a dot product of vectors
            query, key, factor = product
        query, key, value = torch_sdpa.padded(query, key, value, attn_mask is not None)
        output = torch_sdpa.attend(query, key, value, attn_mask=attn_mask, scale=factor, **options)
        return checked(output if output.shape[-1] == size else output[..., :size])

    return attended


def with_lse(problem: Problem) -> Both | None:
    """Return a function that computes output and log-sum-exp by one kernel, or None if no kernel returns both.

    The function is valid for all calls equal to `problem` but for the tensors' values.
    """
    rules, score = problem.mask_rules, problem.score
    tensors, causal = (problem.query, problem.key, problem.value), rules is not None and rules.banded
    if problem.mask is not None and not _is_causal_alone(rules):
        return None
    if problem.bias is not None or problem.dropout > 0.0 or problem.query.ndim != 4:
        return None
    if not torch_sdpa.fits(*tensors, causal, 0.0):
        return None
    scale = score.factor(problem.query.shape[-1]) if isinstance(score, ScaledDot) else 1.0
    return functools.partial(torch_sdpa.attend_with_lse, causal=causal, scale=scale)


def _prepared_product(problem: Problem, causal: bool) -> Direct | None:
    """Return a function that runs only the kernel on CUDA, for a score rewritten as a dot product of other vectors; or
    None.

    The result is None if the vectors of the product must be padded.
    """
    product, value = problem.score.as_product(problem.query, problem.key), problem.value
    assert product is not None  # `refuses` has checked that the score is a dot product of vectors
    if not torch_sdpa.fits(product.query, product.key, value, causal, problem.dropout):
        return None
    run = torch_sdpa.prepared(product.query, product.key, value, causal, problem.dropout, product.scale)

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Any, mask: Any, bias: object) -> Tensor | None:
        query, key, _ = score.as_product(query, key)
        return run(query, key, value, score, mask, bias)

    return attended


def _step(problem: Problem) -> Direct | None:
    """Return a function that runs only the Triton kernel for decoding steps; None unless scores are dot products."""
    if not isinstance(problem.score, (Dot, ScaledDot)):
        return None
    product = problem.score.as_product(problem.query, problem.key)
    return None if product is None else decoding_step.direct(problem, None, product.scale)


def _small_band(problem: Problem, rules: Clauses) -> Tensor | None:
    """Return a small band on the CPU as a float mask of 0 and −inf, or None for any other mask."""
    (queries, keys), device = problem.shape[-2:], problem.device
    alone = rules.banded and rules.lengths is None and not rules.segments and not rules.dense
    if problem.mask is None or not alone or device.type != "cpu" or queries * keys > _BAND_NUMBERS:
        return None
    if banded.worth_it(rules, queries, keys):
        return None
    allowed = problem.mask.allowed(all_of(queries), all_of(keys), device)
    return torch.zeros(allowed.shape, dtype=problem.dtype).masked_fill_(~allowed, -math.inf)


def _pairs_at_once(problem: Problem) -> torch.Size | None:
    """Return the shape of the mask if it is a tensor that is passed to the CPU kernel unchanged, else None."""
    mask = problem.mask
    if (
        not isinstance(mask, Dense)
        or problem.device.type != "cpu"
        or mask_blocks.rows_at_once(problem) < problem.shape[-2]
    ):
        return None
    return mask.tensor.shape


def _at_once(problem: Problem) -> bool:
    """Return whether `direct` computes padding or packed documents by two matrix products and a softmax."""
    rules = problem.mask_rules
    if rules is None or problem.bias is not None or problem.request is not None or problem.dropout > 0.0:
        return False
    masked = (rules.lengths is not None or len(rules.segments) > 0) and rules.low is None and not rules.dense
    return masked and problem.query.ndim == 4 and per_sequence.plain_serves(problem)


def _sequences(problem: Problem, rules: Clauses | None) -> list[per_sequence.Packed] | None:
    """Return the arguments of kernel calls, one for each sequence; None if this is impossible or a single call is
    faster.

    One kernel call for each sequence is possible if the lengths and segment ids of the mask are on the CPU.
    """
    if problem.device.type != "cpu" or problem.bias is not None or problem.dropout > 0.0 or problem.empty:
        return None
    shape, mask = problem.shape, problem.mask
    if mask is None or rules is None or rules.low is not None or rules.dense:
        return None
    return stored(mask, problem.device, ("sequences", shape), lambda: per_sequence.packed(rules, shape))


def _with_log_sum_exp(problem: Problem) -> Result | None:
    """Return output and log-sum-exp from one kernel, or None if no kernel returns both."""
    if torch.compiler.is_compiling():
        return None
    from regard.core.backends import flash  # imported here: `flash` imports this module

    product = problem.score.as_product(problem.query, problem.key)
    assert product is not None  # `refuses` has checked that the score is a dot product of vectors
    plain = replace(problem, query=product.query, key=product.key, score=ScaledDot(product.scale))
    if not flash.serves(plain):
        return None
    output, lse = flash.attend(plain)[:2]
    assert isinstance(lse, Tensor)
    return Result(output, lse) if isinstance(problem.request, LogSumExp) else Result(output, lse=lse)


def _needs_no_block(rules: Clauses | None) -> bool:
    """Return whether the mask is absent, equal to `is_causal=True`, or one row that is the same for all queries."""
    return rules is not None and (rules.by_key or _is_causal_alone(rules))


def _is_causal_alone(rules: Clauses | None) -> bool:
    if rules is None or rules.lengths is not None or len(rules.segments) > 0 or len(rules.dense) > 0:
        return False
    return rules.low is None and rules.high == 0


def _wants_full_rows(device: torch.device) -> bool:
    """Return whether a query without an allowed key must be passed to the kernels as if all its keys were allowed.

    cuDNN replaces masked scores by the lowest finite number, so a query without an allowed key gets the mean of the
    values and, at some lengths, NaN gradients (pytorch#196678). The CPU kernels return 0 for a query without an allowed
    key.
    """
    return device.type != "cpu"


def _every_row_sees(rules: Clauses | None, queries: int, keys: int) -> bool:
    """Return whether every query has an allowed key, as far as this is known without inspecting any tensor."""
    if rules is None or rules.lengths is not None or len(rules.segments) > 0 or len(rules.dense) > 0:
        return False
    low, high = 1 - queries if rules.low is None else rules.low, keys - 1 if rules.high is None else rules.high
    return low <= high and high >= 0 and queries - 1 + low < keys


def _as_kernels_want(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with four axes, padded to sizes for which torch has a kernel."""
    tensors = (problem.query, problem.key, problem.value)
    query, key, value = (t if t.ndim == 4 else t.flatten(0, -4) if t.ndim > 4 else t.unsqueeze(0) for t in tensors)
    return torch_sdpa.padded(query, key, value, problem.masked)
