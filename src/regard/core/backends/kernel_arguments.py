"""Mask and bias of a call as tensors and numbers, for Triton kernels that evaluate them pair by pair."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.core.biases import Bias, DenseBias, Relative, Rule, as_bias
from regard.core.clauses import Clauses, clauses
from regard.core.mask_cache import stored
from regard.core.masks import And, Band, Mask, Padding, Segments, as_mask
from regard.core.problem import HALF, Problem

_SPANS = 512  # with at most this many queries and keys, the kernels skip no tile because of its segments


def mask_arguments(problem: Problem, lead: torch.Size) -> dict[str, Any]:
    """Return the mask of the problem as keyword arguments of the additive kernels.

    `lead` are the leading axes of the scores before the head axis, which the kernels have as one batch axis.
    """
    rules = problem.mask_rules
    assert rules is not None  # the caller has checked that kernels can evaluate the mask
    return _clause_arguments(rules, lead)


def mask_pairs(mask: Mask, shape: tuple[int, ...], device: torch.device) -> Any:
    """Return the mask of a checked call with four axes as the `Pairs` record of the kernels."""
    from regard.kernels.triton.additive.operator import kernel_pairs  # imported here: the module imports Triton

    rules = clauses(mask.on(device).aligned(shape), *shape[-2:])
    assert rules is not None  # the caller has checked that kernels can evaluate the mask
    arguments: dict[str, Any] = dict.fromkeys(("mask", "lengths", "query_ids", "key_ids"))
    arguments |= _clause_arguments(rules, torch.Size(shape[:1]))
    lengths, arguments["lengths"] = arguments["lengths"], None
    arguments = narrowed(arguments, shape[-1])
    arguments["lengths"] = None if lengths is None else lengths.contiguous()  # lengths of any integer dtype are valid
    return kernel_pairs(shape, *arguments.pop("band"), **arguments, bias=None, table=None)


def by_pairs(problem: Problem) -> bool:
    """Return whether Triton kernels can evaluate mask and bias of the call pair by pair."""
    if problem.bias_learned or not (problem.bias is None or isinstance(problem.bias, (DenseBias, Rule))):
        return False
    rules = problem.mask_rules
    return rules is not None and not rules.by_head and len(rules.segments) <= 1


def pairs_of(problem: Problem) -> Callable[[Any, Any, torch.device], Any]:
    """Return a function of (mask, bias, device) that returns the `Pairs` record of the kernels.

    The function is valid for calls equal to `problem` but for tensor values, whose tensors have four axes and for which
    `by_pairs` is True.
    """
    from regard.kernels.triton.additive.pairs import EVERY, Pairs  # imported here: the module imports Triton

    shape, rules = problem.shape, problem.mask_rules
    assert rules is not None  # `by_pairs` has checked that kernels can evaluate the mask
    (batch, _, queries, keys), masked = shape, problem.mask is not None
    # `alone`: the mask has no dense tensor, and it does not have both lengths and segments.
    alone = not rules.dense and (rules.lengths is None or not rules.segments)
    few = max(queries, keys) <= _SPANS

    def of_mask(mask: Any, device: torch.device) -> Any:
        if not masked:
            return EVERY
        part = beside_a_band(mask)
        if type(part) is Band:
            return Pairs(rules.low, rules.high)
        if alone and type(part) is Padding and not part.plain and part.lengths.shape == (batch,):
            lengths = part.lengths
            return Pairs(rules.low, rules.high, lengths if lengths.stride(0) == 1 else lengths.contiguous())
        if alone and few and type(part) is Segments and not part.plain:
            own, other = part.query_ids, part.key_ids
            if own.shape == (batch, queries) and other.shape == (batch, keys) and own.dtype == other.dtype:
                own, other = own.contiguous(), other.contiguous()
                return Pairs(rules.low, rules.high, query_ids=own, key_ids=other)
        if not isinstance(mask, Mask):
            return mask_pairs(as_mask(mask), shape, device)
        return stored(mask, device, ("pairs", shape), lambda: mask_pairs(mask, shape, device))

    def of_both(mask: Any, bias: Any, device: torch.device) -> Any:
        pairs = of_mask(mask, device)
        if bias is None:
            return pairs
        bias = as_bias(bias)

        def placed() -> dict[str, Any]:
            return bias_arguments(bias.on(device).aligned(shape), shape, torch.Size(shape[:1]))

        arguments = placed() if isinstance(bias, DenseBias) else stored(bias, device, ("pairs", shape), placed)
        if "bias" in arguments:
            wide = arguments["bias"].expand(shape)
            return pairs._replace(
                bias=wide, **dict(zip(("bias_b", "bias_h", "bias_q", "bias_k"), wide.stride(), strict=True))
            )
        table = arguments["relative"].contiguous()
        return pairs._replace(table=table, radius=table.shape[1] // 2)

    return of_both


def narrowed(arguments: dict[str, Any], keys: int) -> dict[str, Any]:
    """Return the arguments with 32-bit lengths, and with contiguous ids of queries and keys in one dtype."""
    if arguments["lengths"] is not None:
        arguments["lengths"] = arguments["lengths"].long().clamp_max(keys).int().contiguous()
    if arguments["query_ids"] is not None:  # ids of queries and keys must have the same dtype, of any width
        wide = torch.promote_types(arguments["query_ids"].dtype, arguments["key_ids"].dtype)
        arguments |= {name: arguments[name].to(wide).contiguous() for name in ("query_ids", "key_ids")}
    return arguments


def _clause_arguments(rules: Clauses, lead: torch.Size) -> dict[str, Any]:
    pairs: dict[str, Any] = {"band": (rules.low, rules.high)}
    if rules.lengths is not None:
        pairs["lengths"] = rules.lengths.expand(*lead, 1).reshape(-1)
    if rules.segments:
        ids = (t.expand(*lead, 1, -1).reshape(-1, t.shape[-1]) for t in rules.segments[0])
        pairs["query_ids"], pairs["key_ids"] = ids
    if rules.dense:
        pairs["mask"] = _four_axes(functools.reduce(torch.logical_and, rules.dense), lead)
    return pairs


def bias_arguments(bias: Bias | None, shape: tuple[int, ...], lead: torch.Size) -> dict[str, Any]:
    """Return the bias of scores (…, h, q, k) as keyword arguments of the additive kernels."""
    heads = shape[-3]
    if isinstance(bias, DenseBias):
        return {"bias": _four_axes(bias.tensor, lead)}
    if bias is None or (isinstance(bias, Relative) and bias.offset == 0):
        return {} if bias is None else {"relative": bias.table.expand(heads, -1)}
    assert isinstance(bias, Rule)  # the caller has checked that the bias is a function of the distance
    # A rule of the distance becomes a table over all distances j - i that occur; its size is linear in the length.
    reach = bias.reach if isinstance(bias, Relative) else max(shape[-2:])
    far = reach + abs(bias.offset)
    table = bias.values(range(1), range(-far, far + 1), torch.float32).squeeze(-2)
    return {"relative": table.expand(heads, -1)}


def _four_axes(tensor: Tensor, lead: torch.Size) -> Tensor:
    """Return the tensor as (batch, heads, queries, keys), with size 1 on axes that broadcast."""
    if len(lead) < 2:
        return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
    return tensor.expand(*lead, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])


def beside_a_band(mask: Any) -> Any:
    """Return `other` if the mask is `band & other`; return any other mask unchanged."""
    if not isinstance(mask, And):
        return mask
    if isinstance(mask.left, Band):
        return mask.right
    return mask.left if isinstance(mask.right, Band) else mask


def odd_values(query: Tensor, value: Tensor) -> bool:
    """Return whether the value size differs from the query size and is no multiple of 8, in half precision.

    For queries of size 40 and values of size 17 the Triton kernels computed wrong sums over 1,300 keys on an H200 with
    Triton 3.6.
    """
    size = value.shape[-1]
    return query.dtype in HALF and size != query.shape[-1] and size % 8 != 0
