"""Padding and documents on the CPU: one call of torch's kernel for each sequence, with its own keys and without a mask.

A query run is a range of queries with one segment id; without segments it is all queries. Its keys must form one range
too, limited to the sequence's length.
"""

import functools
import math
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.backends import torch_sdpa
from regard.core.backends.result import Direct
from regard.core.clauses import Clauses, clauses
from regard.core.mask_cache import stored
from regard.core.masks import Mask
from regard.core.nonfinite import harmless
from regard.core.problem import Problem
from regard.core.scores import Score
from regard.core.spans import Stretch, all_of

_CALL = 2**14  # number of pairs whose time equals the overhead of one more call
_TILE = 64  # number of rows and keys below which the kernel is not faster


class Piece(NamedTuple):
    """A run of queries, the run of their keys, the number of these that they attend, and whether causally."""

    rows: Stretch
    keys: Stretch
    count: int
    causal: bool


class Packed(NamedTuple):
    """The pieces of batch rows with equal boundaries."""

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
    if max(queries, keys) <= _TILE and (batch > 1 or found.segments):
        return None  # splitting would save no time
    lengths = [keys] * batch if found.lengths is None else found.lengths.expand(*lead, 1).flatten().tolist()
    if not found.segments:  # the most frequent case is decided without listing the calls
        saved, further = batch * keys - sum(lengths), sum(a != b for a, b in pairwise(lengths))
        if heads * queries * saved < _CALL * further:
            return None
    runs = _runs(found, lead, queries, keys)
    if _CALL * sum(map(len, runs[0])) > heads * batch * queries * keys + _CALL:
        return None
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
    """Return the cost of a piece in pairs; for a causal one torch's kernel computes all pairs up to 512 keys."""
    return _CALL + heads * max(_TILE, len(piece.rows)) * max(_TILE, piece.count)


Runs = tuple[tuple[int, Stretch], ...]  # ranges of one id


def _runs(found: Clauses, lead: list[int], queries: int, keys: int) -> tuple[list[Runs], list[Runs]]:
    """Return the runs of query and key ids for each row of the batch."""
    batch = math.prod(lead)
    if not found.segments:
        return [((0, all_of(queries)),)] * batch, [((0, all_of(keys)),)] * batch
    ((of_queries, of_keys),) = found.segments
    own = _runs_of(of_queries, lead)
    return own, own if of_keys is of_queries else _runs_of(of_keys, lead)


def _runs_of(ids: Tensor, lead: list[int]) -> list[Runs]:
    length, batch = ids.shape[-1], math.prod(lead)
    alike = ids.shape[:-1].numel() == 1  # one list of ids for the whole batch
    ids = ids.reshape(1, length) if alike else ids.expand(*lead, 1, -1).reshape(batch, length)
    starts = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[:, 1:], ids[:, :-1], out=starts[:, 1:])
    runs: list[list[tuple[int, Stretch]]] = [[] for _ in range(len(ids))]
    places = [*starts.nonzero().tolist(), (len(ids), 0)]
    for ((row, start), (next_row, stop)), value in zip(pairwise(places), ids[starts].tolist(), strict=True):
        runs[row].append((value, Stretch(start, stop if next_row == row else length)))
    found = [tuple(each) for each in runs]
    return found * batch if alike else found


def _pieces(own: Runs, other: Runs, length: int, high: int | None) -> list[Piece] | None:
    """Return the piece of each query run; None if an id has several runs of keys, or a band does not start at its
    corner."""
    where = dict(other)
    if len(where) < len(other):
        return None
    pieces = []
    for value, rows in own:
        keys = where.get(value, Stretch(0, 0))
        count = max(0, min(keys.stop, length) - keys.start)
        # Upper bound of the band, relative to the piece's corner.
        edge = None if high is None else high + rows.start - keys.start
        causal = edge is not None and edge < count - 1
        if causal and edge != 0:
            return None
        pieces.append(Piece(rows, keys, count, causal))
    return pieces


def direct(problem: Problem) -> Direct:
    """Return a function that computes all calls with the signature of this one, by sequences or with a mask tensor."""
    shape, learning, grouped = problem.shape, problem.differentiated, problem.group > 1

    def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        options = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
        return torch_sdpa.attend(query, key, value, **options)

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Score, mask: Any, _: object) -> Tensor | None:
        if not harmless(query, key, value, learning):
            return None
        lowered = stored(mask, query.device, ("lowered", shape), lambda: _lowered(mask, shape))
        product = score.as_product(query, key)
        assert product is not None  # checked by refuses()
        if isinstance(lowered, Tensor):
            return kernel(product.query, product.key, value, lowered, False, product.scale)
        return attend(product.query, product.key, value, lowered, functools.partial(kernel, scale=product.scale))

    return attended


def _lowered(mask: Mask, shape: tuple[int, ...]) -> list[Packed] | Tensor:
    """Return the calls for a mask of scores (b, h, q, k), or the mask as a tensor if one call is faster."""
    mask = mask.aligned(shape)
    found = clauses(mask, *shape[-2:])
    calls = packed(found, shape)
    if calls is not None or found is None:
        return calls or []
    allowed = mask.allowed(all_of(1 if found.by_key else shape[-2]), all_of(shape[-1]), torch.device("cpu"))
    return allowed.reshape((1,) * (4 - allowed.ndim) + tuple(allowed.shape))


def attend(query: Tensor, key: Tensor, value: Tensor, calls: list[Packed], kernel: Callable[..., Tensor]) -> Tensor:
    """Compute the attention (b, h, q, d) of all pieces by a kernel (query, key, value, mask=, causal=)."""
    if len(calls) == 1:
        return _of_rows(calls[0].pieces, query, key, value, kernel)
    # Split, not sliced: the gradient of a split is one concatenation, that of slices many sums of whole tensors.
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
    if piece.count == 0:  # sums of nothing, so that the output has a gradient, of zeros
        nothing = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
        return query.new_zeros(*query.shape[:-1], value.shape[-1]) + nothing
    key, value = (t if t.shape[-2] == piece.count else t[..., : piece.count, :] for t in (key, value))
    return kernel(query, key, value, mask=None, causal=piece.causal)
