"""Decoding steps on CUDA (calls of few queries over many keys): which calls the Triton kernel supports, and its
launch."""

import functools
from typing import Any

import torch
from torch import Tensor

from regard.core.backends.result import Direct
from regard.core.clauses import Clauses, clauses
from regard.core.mask_cache import stored
from regard.core.masks import Mask, Padding
from regard.core.problem import HALF, Problem
from regard.core.transforms import transformed
from regard.kernels import availability
from regard.kernels.availability import TRITON

# The largest number of queries for which splitting the keys over programs is faster than splitting the queries.
MOST = 8


def serves(problem: Problem) -> bool:
    """Return whether the call is a decoding step: few queries, no gradient, one mask for all heads and queries."""
    if problem.device.type != "cuda" or not 0 < problem.shape[-2] <= MOST or problem.shape[-1] == 0 or transformed():
        return False
    if problem.differentiated or problem.bias is not None or problem.dropout > 0.0 or not TRITON:
        return False
    rules = problem.mask_rules
    if rules is None or rules.banded or rules.by_head or len(rules.segments) > 0:
        return False
    if any(tensor.shape[-2] > 1 or tensor.shape[-3] > 1 for tensor in rules.dense):
        return False  # the kernel only supports masks that are equal for all heads and all queries
    return problem.query.dtype in (*HALF, torch.float32) and problem.value.shape[-1] <= 1024


def attend(problem: Problem, query: Tensor, key: Tensor, weight: Tensor | None, scale: float) -> Tensor:
    """Return the output of a decoding step, with additive scores if a weight is given, else scale · ⟨query, key⟩."""
    from regard.kernels.triton.decode_attention import decode  # imported here: the module imports Triton

    rules = problem.mask_rules
    lead = problem.query.shape[:-3]
    assert rules is not None  # `serves` has checked that kernels can evaluate the mask
    lengths, mask = _seen(rules, lead, problem.shape[-1])
    query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, problem.value))
    output = decode(query, key, value, weight, lengths, mask, scale, _workers(problem.device))
    return output.reshape(*lead, *output.shape[-3:])


def direct(problem: Problem, weight: Tensor | None, scale: float) -> Direct | None:
    """Return a function that only runs the kernel, for calls equal to `problem` but for the tensors' values; or None.

    `weight` is the weight (f,) or (h, f) of an additive score, with equal strides in all these calls; None for dot
    products.
    """
    if problem.query.ndim != 4 or (weight is not None and weight.stride(-1) != 1):
        return None
    from regard.kernels.triton.decode_attention import Steps, prepare  # imported here: the module imports Triton

    shape, batch = problem.shape, problem.shape[0]
    query, key, value = problem.query, problem.key, problem.value
    rules = problem.mask_rules
    assert rules is not None  # `serves` has checked that kernels can evaluate the mask
    shared = rules.lengths is None or rules.lengths.numel() == 1
    steps = Steps(
        (query.shape, key.shape, value.shape), (query.stride(), key.stride(), value.stride()), key.element_size(),
        None if weight is None else weight.stride(0) if weight.ndim == 2 else 0,
        0 if shared else 1, scale, _workers(problem.device),
    )  # fmt: skip
    run, places = prepare(steps), None if weight is None else weight.stride()

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Any, mask: Any, _: object) -> Tensor | None:
        device, own = query.device, None if places is None else score.weight
        if device.index != availability.current_device() or (own is not None and own.stride() != places):
            return None
        if mask is None:
            return run(query, key, value, own, None, None)
        if type(mask) is Padding and not mask.plain:
            lengths = mask.lengths
            if not shared and (lengths.shape[0] != batch or lengths.stride(0) != 1):
                return None
            return run(query, key, value, own, lengths, None)
        if not isinstance(mask, Mask):
            return None
        seen = stored(mask, device, ("step", shape), lambda: _seen_by(mask, shape, device))
        return run(query, key, value, own, *seen)

    return attended


def _workers(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _seen(rules: Clauses, lead: torch.Size, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask as lengths (b,) and a bool tensor (b, k); each is None if the mask does not need it."""
    lengths = None if rules.lengths is None else rules.lengths.expand(*lead, 1).reshape(-1)
    if not rules.dense:
        return lengths, None
    mask = functools.reduce(torch.logical_and, rules.dense).expand(*lead, 1, 1, keys)
    return lengths, mask.reshape(-1, keys)


def _seen_by(mask: Mask, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of a checked call with four axes as contiguous lengths and a uint8 tensor for the kernel."""
    rules = clauses(mask.on(device).aligned(shape), *shape[-2:])
    assert rules is not None  # `serves` has checked that kernels can evaluate the mask
    lengths, dense = _seen(rules, torch.Size(shape[:1]), shape[-1])
    dense = None if dense is None else dense.contiguous().view(torch.uint8)
    return None if lengths is None else lengths.contiguous(), dense
