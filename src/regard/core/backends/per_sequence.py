"""Padding and packed documents on the CPU: one call of torch's kernel per sequence, with only its keys and no mask.

A run of queries is a range of consecutive queries with one segment id; without segments, the run consists of all
queries. The keys with this segment id must form one range too, which ends at the sequence's length.
"""

import functools
import math
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.backends import torch_sdpa
from regard.core.backends.result import Direct
from regard.core.clauses import Clauses, clauses
from regard.core.mask_cache import stored
from regard.core.masks import And, Band, Mask, Padding, Segments
from regard.core.nonfinite import harmless
from regard.core.problem import Problem
from regard.core.scores import ScaledDot, Score
from regard.core.spans import Stretch, all_of

_CALL = 2**14  # overhead of one kernel call, as the number of query-key pairs that take the same time
_TILE = 64  # the kernel takes as long for fewer queries or keys as for this many
_ROW = 4  # the kernel takes as long for fewer queries as for this many, because it reads all keys in either case
# Two matrix products and a softmax are faster than torch's fused kernel if batch × heads is at least _PLAIN_SLICES and
# there are at most _PLAIN queries and keys (_PLAIN_LENGTH with gradients), or at most _STEP queries without gradients.
_PLAIN_SLICES, _PLAIN, _PLAIN_LENGTH, _STEP = 16, 32, 256, 2
_PLAIN_PAIRS = 2**22  # the largest number of scores for two matrix products, which hold all scores in memory


class Piece(NamedTuple):
    """The arguments of one kernel call: a range of queries with one segment id, the range of their keys, and how many
    of these keys to use.

    `causal` is whether the call has a causal mask.
    """

    rows: Stretch
    keys: Stretch
    count: int
    causal: bool


class Packed(NamedTuple):
    """The kernel calls (`Piece`) of consecutive sequences of the batch that have equal boundaries.

    `batch` is the number of sequences that the calls compute.
    """

    batch: int
    pieces: list[Piece]


def packed(rules: Clauses | None, shape: tuple[int, ...]) -> list[Packed] | None:
    """Return the kernel calls for scores of shape (*lead, h, q, k).

    The result is None if a mask tensor is necessary, or if one call with a mask tensor is faster.
    """
    if rules is None or rules.by_head or rules.dense or rules.low is not None or len(rules.segments) > 1:
        return None
    if torch.compiler.is_compiling() or (rules.lengths is None and not rules.segments):
        return None
    *lead, heads, queries, keys = shape
    batch = math.prod(lead)
    if max(queries, keys) <= _TILE and (batch > 1 or rules.segments):
        return None  # splitting such short sequences would save no time
    lengths = [keys] * batch if rules.lengths is None else rules.lengths.expand(*lead, 1).flatten().tolist()
    if not rules.segments and not _worth_splitting(lengths, shape):
        return None
    runs = _runs(rules, lead, queries, keys)
    if _CALL * sum(map(len, runs[0])) > heads * batch * queries * keys + _CALL:
        return None
    calls: list[Packed] = []
    for (length, own, other), alike in groupby(zip(lengths, *runs, strict=True)):
        pieces = _pieces(own, other, length, rules.high)
        if pieces is None:
            return None
        calls.append(Packed(len(list(alike)), pieces))
    if len(calls) == len(calls[0].pieces) == 1:
        return calls
    cost = sum(_cost(piece, heads * call.batch) for call in calls for piece in call.pieces)
    return calls if cost < heads * batch * queries * keys + _CALL else None


def _worth_splitting(lengths: list[int], shape: tuple[int, ...]) -> bool:
    """Return whether one kernel call for each length, which reads no padding, is faster than one call for all."""
    *_, heads, queries, keys = shape
    saved, further = len(lengths) * keys - sum(lengths), sum(a != b for a, b in pairwise(lengths))
    return heads * max(_ROW, queries) * saved >= _CALL * further


def _by_length(lengths: list[int], shape: tuple[int, ...]) -> list[Packed] | None:
    """Return the kernel calls for a padding mask with these lengths; None if one call with a mask tensor is faster."""
    queries, keys = shape[-2:]
    if (max(queries, keys) <= _TILE and len(lengths) > 1) or not _worth_splitting(lengths, shape):
        return None
    rows, columns = all_of(queries), all_of(keys)
    return [Packed(len(list(alike)), [Piece(rows, columns, length, False)]) for length, alike in groupby(lengths)]


def _cost(piece: Piece, heads: int) -> int:
    """Return the time of one kernel call, measured in query-key pairs.

    A causal call counts all its pairs, because torch's kernel computes all of them up to 512 keys.
    """
    return _CALL + heads * max(_TILE, len(piece.rows)) * max(_TILE, piece.count)


Runs = tuple[tuple[int, Stretch], ...]  # segment ids and the range of positions of each


def _runs(rules: Clauses, lead: list[int], queries: int, keys: int) -> tuple[list[Runs], list[Runs]]:
    """Return the runs of equal query ids and of equal key ids for each sequence of the batch."""
    batch = math.prod(lead)
    if not rules.segments:
        return [((0, all_of(queries)),)] * batch, [((0, all_of(keys)),)] * batch
    ((of_queries, of_keys),) = rules.segments
    own = _runs_of(of_queries, lead)
    return own, own if of_keys is of_queries else _runs_of(of_keys, lead)


def _runs_of(ids: Tensor, lead: list[int]) -> list[Runs]:
    length, batch = ids.shape[-1], math.prod(lead)
    alike = ids.shape[:-1].numel() == 1  # all sequences share one list of ids
    ids = ids.reshape(1, length) if alike else ids.expand(*lead, 1, -1).reshape(batch, length)
    starts = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[:, 1:], ids[:, :-1], out=starts[:, 1:])
    runs: list[list[tuple[int, Stretch]]] = [[] for _ in range(len(ids))]
    places = [*starts.nonzero().tolist(), (len(ids), 0)]
    for ((row, start), (next_row, stop)), value in zip(pairwise(places), ids[starts].tolist(), strict=True):
        runs[row].append((value, Stretch(start, stop if next_row == row else length)))
    rows = [tuple(spans) for spans in runs]
    return rows * batch if alike else rows


def _pieces(own: Runs, other: Runs, length: int, high: int | None) -> list[Piece] | None:
    """Return a `Piece`, the arguments of one kernel call, for each run of queries with one segment id.

    The result is None if an id has several runs of keys, or if the causal diagonal does not start at the first query
    and first key of a run.
    """
    where = dict(other)
    if len(where) < len(other):
        return None
    pieces = []
    for value, rows in own:
        keys = where.get(value, Stretch(0, 0))
        count = max(0, min(keys.stop, length) - keys.start)
        # The upper bound of the band mask, relative to the first query and first key of this kernel call.
        edge = None if high is None else high + rows.start - keys.start
        causal = edge is not None and edge < count - 1
        if causal and edge != 0:
            return None
        pieces.append(Piece(rows, keys, count, causal))
    return pieces


class Numbers(NamedTuple):
    """A mask as numbers to add to the scores, 0 or −inf, of shape (b or 1, 1, q or 1, k).

    `full` is whether every query may attend to at least one key.
    """

    tensor: Tensor
    full: bool


def plain_serves(problem: Problem) -> bool:
    """Return whether two matrix products and a softmax compute a call faster than one call of torch's fused kernel.

    The matrix products are faster only for contiguous tensors, which they do not copy. If values and keys differ in
    size, the fused kernel would need padded copies.
    """
    tensors, (*_, queries, keys) = (problem.query, problem.key, problem.value), problem.shape
    slices = math.prod(problem.shape[:-2])
    if problem.group > 1 or problem.query.dtype != problem.dtype or slices * queries * keys > _PLAIN_PAIRS:
        return False
    if problem.value.shape[-1] != problem.key.shape[-1]:
        return keys <= _PLAIN_LENGTH
    if not all(t.is_contiguous() for t in tensors) or slices < _PLAIN_SLICES:
        return False
    longest = _PLAIN_LENGTH if problem.differentiated else _PLAIN
    return max(queries, keys) <= longest or (queries <= _STEP and not problem.differentiated)


def direct(problem: Problem) -> Direct:
    """Return a function that computes calls equal to `problem` but for tensor values, by sequence or with a mask
    tensor."""
    shape, learning, grouped, dtype = problem.shape, problem.differentiated, problem.group > 1, problem.dtype
    as_it_is, plain = isinstance(problem.score, ScaledDot), plain_serves(problem)
    scale = problem.score.factor(problem.query.shape[-1]) if isinstance(problem.score, ScaledDot) else 1.0
    equal = problem.key.shape[-1] == problem.value.shape[-1]
    place = "lowered", shape, dtype, equal

    def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        if causal or grouped or scale <= 0:
            options = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
            return torch_sdpa.attend(query, key, value, **options)
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Score, mask: Any, _: object) -> Tensor | None:
        if learning and not harmless(query, key, value, True):
            return None
        lowered = stored(mask, query.device, place, lambda: _lowered(mask, shape, dtype, equal))
        factor, inputs = scale, (query, key)
        if not as_it_is:
            product = score.as_product(query, key)
            assert product is not None  # `refuses` has checked that the score is a dot product of vectors
            query, key, factor = product
        # Without gradients, non-finite values are detected in the results. NaN and Inf in `value` always reach the
        # output. NaN and Inf in `query` and `key` reach the scores, but the softmax may remove them, so that the output
        # is finite: they are detected in the scores or in the inputs.
        if plain and isinstance(lowered, Numbers) and lowered.full:
            scores = query @ key.mT
            if not learning and not finite_sum(scores):
                return None
            output = torch.add(lowered.tensor, scores, alpha=factor).softmax(-1) @ value
        elif not equal or not (learning or (finite_sum(inputs[0]) and finite_sum(inputs[1]))):
            return None
        elif isinstance(lowered, Numbers):
            output = kernel(query, key, value, lowered.tensor, False, factor)
        else:
            output = attend(query, key, value, lowered, functools.partial(kernel, scale=factor))
        return output if learning or finite_sum(output) else None

    return attended


def finite_sum(tensor: Tensor) -> bool:
    """Return whether a tensor without an autograd graph holds no NaN or Inf.

    The sum of the values is computed first, because it takes the least time: if the sum is finite, so are all values.
    """
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def _lowered(mask: Mask, shape: tuple[int, ...], dtype: torch.dtype, split: bool) -> list[Packed] | Numbers:
    """Return the kernel calls for a mask of scores (b, h, q, k), or the mask as numbers for a single call.

    A single call is used if it is faster, or if `split` is False.
    """
    queries, keys = shape[-2:]
    if max(queries, keys) <= _TILE or type(mask) is Padding:
        lowered = _of_simple_rules(mask, shape, dtype, split)
        if lowered is not None:
            return lowered
    mask = mask.aligned(shape)
    rules = clauses(mask, queries, keys)
    calls = packed(rules, shape) if split else None
    if calls is not None:
        return calls
    by_key = rules is not None and rules.by_key
    allowed = mask.allowed(all_of(1 if by_key else queries), all_of(keys), torch.device("cpu"))
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + tuple(allowed.shape))
    full = bool(allowed.any(-1).all())
    return Numbers(_minus_infinity(~allowed, dtype), full)


def _of_simple_rules(
    mask: Mask, shape: tuple[int, ...], dtype: torch.dtype, split: bool
) -> list[Packed] | Numbers | None:
    """Return the kernel calls or the numbers that `_lowered` returns, for a mask of one or two simple rules; else None.

    A simple rule is a band, one length per sequence, or segments whose queries and keys share one tensor of ids.
    """
    batch, _, queries, keys = shape
    band, lengths, ids = None, None, None
    for part in (mask.left, mask.right) if type(mask) is And else (mask,):
        if type(part) is Band and band is None:
            band = part
        elif type(part) is Padding and lengths is None and part.lengths.shape == (batch,) and not part.plain:
            lengths = part.lengths
        elif type(part) is Segments and ids is None and part.query_ids is part.key_ids and not part.plain:
            ids = part.query_ids
            if ids.shape != (batch, queries) or queries != keys:
                return None
        else:
            return None
    masked, least = None, keys
    if lengths is not None:
        numbers = lengths.tolist()
        least = min(numbers)
        if least < 0 or max(numbers) > keys:
            return None
        calls = _by_length(numbers, shape) if split and type(mask) is Padding else None
        if calls is not None:
            return calls
        masked = torch.arange(keys) >= lengths.view(-1, 1, 1, 1)
    if ids is not None:
        apart = ids.view(batch, 1, queries, 1) != ids.view(batch, 1, 1, keys)
        masked = apart if masked is None else masked | apart
    low, high = (None, None) if band is None else (band.low, band.high)
    if band is not None:
        outside = _outside(low, high, queries, keys)
        masked = outside if masked is None else masked | outside
    assert masked is not None  # the mask has at least one rule
    # Whether every query has an allowed key, as far as it is known without the pairs: with lengths above 0 and no ids,
    # the first key; with ids and no lengths, the key at its own position; in both cases only if the band allows it.
    to_first = ids is None and least > 0 and low is None and (high is None or high >= 0)
    to_own = lengths is None and (low or 0) <= 0 <= (high or 0)
    return Numbers(_minus_infinity(masked, dtype), to_first or to_own or bool((~masked).any(-1).all()))


@functools.lru_cache(maxsize=64)
def _outside(low: int | None, high: int | None, queries: int, keys: int) -> Tensor:
    """Return which pairs of queries and keys a band mask masks, as a bool tensor, which is cached."""
    with torch.inference_mode(False):
        return ~Band(low, high).allowed(all_of(queries), all_of(keys), torch.device("cpu"))


def _minus_infinity(masked: Tensor, dtype: torch.dtype) -> Tensor:
    """Return −inf where a pair is masked, else 0."""
    return torch.zeros(masked.shape, dtype=dtype).masked_fill_(masked, -math.inf)


def attend(query: Tensor, key: Tensor, value: Tensor, calls: list[Packed], kernel: Callable[..., Tensor]) -> Tensor:
    """Compute attention (b, h, q, d) by one call of kernel(query, key, value, mask=…, causal=…) for each `Piece`."""
    if len(calls) == 1:
        return _of_rows(calls[0].pieces, query, key, value, kernel)
    # Split, not sliced: the gradient of a split is one concatenation, but the gradients of slices are many sums of
    # whole tensors.
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
    if piece.count == 0:  # sums of empty slices connect the output to the inputs, with gradients of zero
        nothing = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
        return query.new_zeros(*query.shape[:-1], value.shape[-1]) + nothing
    key, value = (t if t.shape[-2] == piece.count else t[..., : piece.count, :] for t in (key, value))
    return kernel(query, key, value, mask=None, causal=piece.causal)
