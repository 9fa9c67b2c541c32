"""Masks of sharded sequences: checks of a mask, gathering of its segment ids, and its restriction to one block of
scores."""

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from regard.core.masks import And, Band, Dense, Joined, Mask, Not, Or, Padding, Segments
from regard.core.spans import Stretch, take
from regard.parallel.exchange import count
from regard.parallel.sequences import Group, Layout, gathered


def checked(mask: Mask, part: tuple[int, ...], whole: tuple[int, ...], device: torch.device) -> Mask:
    """Return the mask with its tensors reshaped to broadcast to the scores, or raise if the mask is not supported.

    Lengths are those of whole sequences, segment ids those of this process's part.
    """
    if isinstance(mask, Joined):
        left, right = (checked(operand, part, whole, device) for operand in (mask.left, mask.right))
        return replace(mask, left=left, right=right)
    if isinstance(mask, Not):
        return Not(checked(mask.mask, part, whole, device))
    if not isinstance(mask, (Band, Padding, Segments)):
        came = "a tensor of all pairs" if isinstance(mask, Dense) else type(mask).__name__
        raise TypeError(f"a mask over a process group is causal, window, padding or segments, not {came}")
    for tensor in mask.tensors():
        if tensor.device != device:
            raise ValueError(f"mask is on {tensor.device}, query is on {device}: they must be on one device")
    return mask.aligned(part if isinstance(mask, Segments) else whole)


def with_all_ids(mask: Mask, group: Group, where: Layout) -> Mask:
    """Return the same mask with the segment ids of the whole sequences, gathered from all processes."""
    if isinstance(mask, Joined):
        left, right = (with_all_ids(operand, group, where) for operand in (mask.left, mask.right))
        return replace(mask, left=left, right=right)
    if isinstance(mask, Not):
        return Not(with_all_ids(mask.mask, group, where))
    if not isinstance(mask, Segments):
        return mask
    query_ids = _all(mask.query_ids, group, where)
    return Segments(query_ids, query_ids if mask.key_ids is mask.query_ids else _all(mask.key_ids, group, where))


def _all(ids: Tensor, group: Group, where: Layout) -> Tensor:
    count("masks", ids.numel() * ids.element_size() * (where.size - 1))
    return gathered(ids, group, where, ids.ndim - 1)


def local(mask: Mask, rows: Stretch, columns: Stretch) -> Mask:
    """Return a mask of whole sequences restricted to one block, with positions relative to its first query and key."""
    match mask:
        case Band(low, high):
            shift = rows.start - columns.start
            return Band(None if low is None else low + shift, None if high is None else high + shift)
        case Padding(lengths):
            return Padding(lengths.clamp(columns.start, columns.stop) - columns.start)
        case Segments(query_ids, key_ids):
            return Segments(take(query_ids, -1, rows), take(key_ids, -1, columns))
        case And() | Or():
            return replace(mask, left=local(mask.left, rows, columns), right=local(mask.right, rows, columns))
        case Not(inner):
            return Not(local(inner, rows, columns))
    raise AssertionError("checked() has refused every other mask")


def described(mask: Mask) -> str:
    """Return the mask as text, which the processes compare to verify that all of them make the same call.

    Segment ids are described by shape and dtype alone, because each process holds those of its own part.
    """
    match mask:
        case Band(low, high):
            return f"band({low}, {high})"
        case Padding(lengths):
            numbers = lengths.flatten().tolist()
            if len(numbers) > 8:
                digest = hashlib.sha256(repr(numbers).encode()).hexdigest()[:8]
                return f"padding({len(numbers)} lengths, {digest})"
            return f"padding({numbers})"
        case Segments(query_ids, key_ids):
            shared = " shared" if key_ids is query_ids else ""
            kinds = f"{query_ids.dtype} and {key_ids.dtype}"
            return f"segments({tuple(query_ids.shape)}, {tuple(key_ids.shape)}, {kinds}{shared})"
        case And(left, right):
            return f"({described(left)} & {described(right)})"
        case Or(left, right):
            return f"({described(left)} | {described(right)})"
        case Not(inner):
            return f"~{described(inner)}"
    return type(mask).__name__
