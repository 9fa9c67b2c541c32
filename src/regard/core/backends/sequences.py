"""Padding and documents on the CPU: a call of torch's kernel for each sequence, with its own keys alone and no mask.

A query run is a stretch of queries with one segment id; without segments it is all queries. Its keys must be one
stretch too, cut at the sequence's length.
"""

import math
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core.clauses import Clauses
from regard.core.spans import Stretch, all_of

_CALL = 2**14  # number of pairs that are computed in the time of one more call
_TILE = 64  # number of rows and keys below which the kernel takes no less time


class Piece(NamedTuple):
    """A run of queries, the run of keys that holds theirs, how many of these they attend, and whether causally."""

    rows: Stretch
    keys: Stretch
    count: int
    causal: bool


class Packed(NamedTuple):
    """The pieces of batch rows that are cut alike."""

    batch: int
    pieces: list[Piece]


def packed(found: Clauses | None, shape: tuple[int, ...]) -> list[Packed] | None:
    """Return the calls for scores of a shape (*lead, h, q, k); None if a mask is necessary, or one call is faster."""
    if found is None or found.by_head or found.dense or found.low is not None or len(found.segments) > 1:
        return None
    if torch.compiler.is_compiling() or (found.lengths is None and not found.segments):
        return None
    *lead, heads, queries, keys = shape
    batch = math.prod(lead)
    if heads * batch * queries * keys <= _CALL and (batch > 1 or found.segments):
        return None
    lengths = [keys] * batch if found.lengths is None else found.lengths.expand(*lead, 1).flatten().tolist()
    if not found.segments and found.high is None:  # the commonest case is decided without describing each call
        saved, further = batch * keys - sum(lengths), sum(a != b for a, b in pairwise(lengths))
        if heads * queries * saved < _CALL * further:
            return None
    runs = _runs(found, lead, queries, keys)
    calls: list[Packed] = []
    for (length, own, other), alike in groupby(zip(lengths, *runs, strict=True)):
        pieces = _pieces(own, other, length, found.high)
        if pieces is None:
            return None
        calls.append(Packed(len(list(alike)), pieces))
    if len(calls) == len(calls[0].pieces) == 1:
        return calls
    cost = sum(_cost(piece, heads * call.batch) for call in calls for piece in call.pieces)
    return calls if cost < heads * batch * queries * keys + _CALL else None


def _cost(piece: Piece, heads: int) -> int:
    """Return the time of a piece, in pairs; torch's kernel computes about half of those of a causal one."""
    return _CALL + heads * max(_TILE, len(piece.rows)) * max(_TILE, piece.count) // (2 if piece.causal else 1)


Runs = tuple[tuple[int, Stretch], ...]  # stretches of one id


def _runs(found: Clauses, lead: list[int], queries: int, keys: int) -> tuple[list[Runs], list[Runs]]:
    """Return the runs of query and key ids for each row of the batch."""
    batch = math.prod(lead)
    if not found.segments:
        return [((0, all_of(queries)),)] * batch, [((0, all_of(keys)),)] * batch
    ((of_queries, of_keys),) = found.segments
    own = _runs_of(of_queries, lead)
    return own, own if of_keys is of_queries else _runs_of(of_keys, lead)


def _runs_of(ids: Tensor, lead: list[int]) -> list[Runs]:
    if ids.shape[:-1].numel() == 1:
        return [_run(ids.flatten())] * math.prod(lead)
    return [_run(row) for row in ids.expand(*lead, 1, -1).reshape(-1, ids.shape[-1])]


def _run(ids: Tensor) -> Runs:
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    runs: list[tuple[int, Stretch]] = []
    start = 0
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        runs.append((value, Stretch(start, start + count)))
        start += count
    return tuple(runs)


def _pieces(own: Runs, other: Runs, length: int, high: int | None) -> list[Piece] | None:
    """Return the piece of each query run; None if an id has several runs of keys, or a band starts off its corner."""
    where = dict(other)
    if len(where) < len(other):
        return None
    pieces = []
    for value, rows in own:
        keys = where.get(value, Stretch(0, 0))
        count = max(0, min(keys.stop, length) - keys.start)
        edge = None if high is None else high + rows.start - keys.start  # the band's, counted from the piece's corner
        causal = edge is not None and edge < count - 1
        if causal and edge != 0:
            return None
        pieces.append(Piece(rows, keys, count, causal))
    return pieces


def attend(query: Tensor, key: Tensor, value: Tensor, calls: list[Packed], kernel: Callable[..., Tensor]) -> Tensor:
    """Compute the attention (b, h, q, d) of all pieces by a kernel (query, key, value, mask=, causal=)."""
    if len(calls) == 1:
        return _of_rows(calls[0].pieces, query, key, value, kernel)
    # Split, not sliced: the gradient of a split is one concatenation, those of slices as many sums of whole tensors.
    sizes = [call.batch for call in calls]
    parts = zip(calls, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    return torch.cat([_of_rows(call.pieces, q, k, v, kernel) for call, q, k, v in parts])


def _of_rows(pieces: list[Piece], query: Tensor, key: Tensor, value: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
    if len(pieces) == 1:
        start = pieces[0].keys.start
        key, value = (t if start == 0 else t[..., start:, :] for t in (key, value))
        return _of_piece(pieces[0], query, key, value, kernel)
    edges = {edge for piece in pieces for edge in (piece.keys.start, piece.keys.stop)}
    starts = sorted(edges | {0, key.shape[-2]})
    sizes = [b - a for a, b in pairwise(starts)]
    keys, values = (dict(zip(starts, t.split(sizes, -2), strict=False)) for t in (key, value))
    rows = query.split([len(piece.rows) for piece in pieces], -2)
    parts = zip(pieces, rows, strict=True)
    return torch.cat([_of_piece(p, own, keys[p.keys.start], values[p.keys.start], kernel) for p, own in parts], -2)


def _of_piece(piece: Piece, query: Tensor, key: Tensor, value: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
    if piece.count == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    key, value = (t if t.shape[-2] == piece.count else t[..., : piece.count, :] for t in (key, value))
    return kernel(query, key, value, mask=None, causal=piece.causal)
