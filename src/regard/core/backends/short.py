"""Softmax attention of at most 64 queries and keys on CUDA: one tile of a Triton kernel for each head.

torch's kernels are designed for long sequences: at 32 queries and keys most of what they compute is padding, and
sampling dropout for that padding takes longer than the attention. Scores are scale · Q' K'ᵀ, as for `sdpa`. Masks may
be causal, or mask the same keys for every query, by lengths or by a bool tensor. Masked keys are never loaded.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from regard.core.backends import decoding_step
from regard.core.backends.kernel_arguments import beside_a_band
from regard.core.backends.result import Direct, Result
from regard.core.masks import Dense, Padding
from regard.core.nonfinite import zero_masked_keys
from regard.core.problem import HALF, Problem
from regard.core.scores import Dot, ScaledDot
from regard.kernels import availability, cuda_graphs
from regard.kernels.availability import TRITON

NAME = "short"
_LENGTH = 64  # the largest number of queries and of keys, so that one tile holds all of them
_SIZE = 128
# The number of heads (over the batch) from which on this kernel saves more time than its call takes: inside compiled
# functions and CUDA graphs, in eager calls, and in eager calls with gradients.
_HEADS, _EAGER, _LEARNING = 512, 2048, 8192


def refuses(problem: Problem) -> str | None:
    """Return the reason why the Triton kernel for short sequences cannot compute the call, or None."""
    if not TRITON:
        return "Triton is not installed"
    if problem.query.dtype not in HALF:
        return f"half precision only, not {problem.query.dtype}"
    if problem.dropout > 0.0 and problem.generator is not None:
        return "its dropout takes no generator"
    return _does_not_fit(problem) or _mask_refused(problem)


def _does_not_fit(problem: Problem) -> str | None:
    """Return the reason why the kernel for short sequences does not support the shapes or the bias, or None."""
    queries, keys = problem.shape[-2:]
    if not (0 < queries <= _LENGTH and 0 < keys <= _LENGTH):
        return f"at most {_LENGTH} queries and keys, got {queries} and {keys}"
    sizes = (problem.query.shape[-1], problem.value.shape[-1])
    if sizes[0] != sizes[1] or problem.key.shape[-1] != sizes[0] or sizes[0] > _SIZE:
        return f"one size of at most {_SIZE} for queries, keys and values, got {sizes[0]} and {sizes[1]}"
    if problem.group > 1:
        return "as many key heads as query heads"
    return None if problem.bias is None else "it takes no bias"


def _mask_refused(problem: Problem) -> str | None:
    """Return the reason why the kernel for short sequences cannot evaluate the mask, or None."""
    rules = problem.mask_rules
    if rules is None:
        return "the mask cannot be written as rules for kernels (see Mask.clauses)"
    if rules.low is not None or rules.high not in (None, 0):
        return "of bands it knows causality from position 0"
    if rules.by_head or len(rules.segments) > 0 or any(t.shape[-2] > 1 or t.shape[-3] > 1 for t in rules.dense):
        return "it takes keys that are masked for all heads and queries alike"
    return None


def not_worth_it(problem: Problem) -> str | None:
    """Return the reason why another backend's kernel is faster for the call, or None."""
    if decoding_step.serves(problem):
        return "a decoding step has a kernel of its own"
    rules = problem.mask_rules
    masked = rules is not None and (rules.lengths is not None or len(rules.dense) > 0)
    eager = not torch.compiler.is_compiling() and not cuda_graphs.recording
    learning = eager and problem.differentiated
    if masked or (problem.dropout > 0.0 and not learning):
        return None
    if eager and not learning and problem.query.shape[-1] % 8:
        return None  # torch's kernels would first copy the tensors, to pad each vector to a multiple of 16 bytes
    least = _LEARNING if learning else _EAGER if eager else _HEADS
    if math.prod(problem.shape[:-2]) < least or problem.shape[-2] <= decoding_step.MOST:
        return f"few: under {least} heads in all, without padding, torch's kernel starts sooner"
    return None


def working_bytes(problem: Problem) -> int:
    """Return 0 bytes: the kernel for short sequences needs no working memory."""
    return 0


def kernel(problem: Problem) -> str:
    """Return the name of the kernel for `regard.explain`."""
    return "triton short"


def attend(problem: Problem) -> Result:
    """Compute attention of short sequences by the Triton kernel."""
    from regard.kernels.triton.short_attention import short_attention  # imported here: the module imports Triton

    if not isinstance(problem.score, (Dot, ScaledDot)):
        # The kernel never loads masked keys. But other scores transform the keys before the kernel, and the gradient
        # of that transformation would be 0 · NaN.
        problem = zero_masked_keys(problem)
    product = problem.score.as_product(problem.query, problem.key)
    rules = problem.mask_rules
    assert product is not None  # `refuses` has checked that the score is a dot product of vectors
    assert rules is not None
    lead, keys = problem.query.shape[:-3], problem.shape[-1]
    lengths = None if rules.lengths is None else rules.lengths.expand(*lead, 1).reshape(-1)
    mask = None
    if rules.dense:
        mask = functools.reduce(torch.logical_and, rules.dense).expand(*lead, 1, 1, keys).reshape(-1, keys)
    # The seed is sampled on the device, so that each replay of a CUDA graph samples a new one.
    seed = torch.randint(2**31 - 1, (1,), device=problem.device) if problem.dropout > 0.0 else None
    query, key, value = (_four_axes(t) for t in (product.query, product.key, problem.value))
    causal = rules.high is not None
    output = short_attention(query, key, value, lengths, mask, seed, product.scale, causal, problem.dropout)
    return Result(output if len(lead) == 1 else output.reshape(*lead, *output.shape[-3:]))


def direct(problem: Problem) -> Direct | None:
    """Return a function that only runs the kernel, for calls equal to `problem` but for the tensors' values; or None.

    The result is None if these calls need other operations too, such as copies of tensors. `problem` must hold the
    caller's own tensors, not views of them, and must not request weights.
    """
    rules, dropout = problem.mask_rules, problem.dropout
    if rules is None or problem.query.ndim != 4 or not isinstance(problem.score, (Dot, ScaledDot)):
        return None
    if (rules.lengths is not None and not _lengths_alone(problem)) or (rules.dense and type(problem.mask) is not Dense):
        return None
    from regard.kernels.triton.short_attention import short_attention  # imported here: the module imports Triton

    product = problem.score.as_product(problem.query, problem.key)
    assert product is not None  # `refuses` has checked that the score is a dot product of vectors
    scale, causal, padded, dense = product.scale, rules.high is not None, rules.lengths is not None, bool(rules.dense)
    batch, keys = problem.shape[0], problem.shape[-1]

    def attended(query: Tensor, key: Tensor, value: Tensor, score: object, mask: Any, _: object) -> Tensor | None:
        device, padding = query.device, beside_a_band(mask) if padded else None
        if device.index != availability.current_device() or (padding is not None and padding.plain):
            return None
        lengths = None if padding is None else padding.lengths
        one_row = mask if isinstance(mask, Tensor) else mask.tensor if dense else None
        one_row = one_row.expand(batch, 1, 1, keys).reshape(batch, keys) if one_row is not None else None
        seed = torch.randint(2**31 - 1, (1,), device=device) if dropout > 0.0 else None
        return short_attention(query, key, value, lengths, one_row, seed, scale, causal, dropout)

    return attended


def _lengths_alone(problem: Problem) -> bool:
    """Return whether the mask consists of one length for each sequence, with or without a band."""
    mask = beside_a_band(problem.mask)
    return isinstance(mask, Padding) and mask.lengths.shape == (problem.query.shape[0], 1)


def _four_axes(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 4 else tensor.reshape(-1, *tensor.shape[-3:])
