"""One step of beam search in one kernel: `advance` updates the beam in place, with a program for each row.

With PyTorch operations, the two hundred small launches of a step would take longer than the model's forward pass. A
program loads all its inputs before it overwrites them, because it has one warp and its writes depend on all its loads.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _advance(
    values, tokens, at_stop, sums, last, parents, done_score, done_sum, done_time, done_slot, count, closed, broken,
    limit, table, hope, time, trail_tokens, trail_parents, trail_values, rows, reach, stop, RANK: tl.constexpr,
    W: tl.constexpr, N: tl.constexpr, CELLS: tl.constexpr, SLOTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    now = tl.load(time)
    shut = tl.load(closed + row) != 0
    forced = now >= tl.load(limit + row)

    slot_index = tl.arange(0, SLOTS)
    stops = tl.load(at_stop + row * W + slot_index, mask=slot_index < W, other=0.0)
    bad = tl.max((stops != stops).to(tl.int32), 0) != 0
    was = tl.load(broken + row) != 0
    ended_before = tl.load(count + row)

    cell = tl.arange(0, CELLS)
    real = cell < W * RANK
    slot = cell // RANK
    value = tl.load(values + row * W * RANK + cell, mask=real, other=-float("inf"))
    token = tl.load(tokens + row * W * RANK + cell, mask=real, other=stop)
    first = cell % RANK == 0
    own = tl.load(at_stop + row * W + slot, mask=real, other=-float("inf"))
    value = tl.where(forced, tl.where(first & real, own, -float("inf")), value)
    token = tl.where(forced & first, stop, token)
    total = tl.load(sums + row * W + slot, mask=real, other=-float("inf")) + value.to(tl.float64)
    total = tl.where(shut | (real == 0), -float("inf"), total)

    place = tl.arange(0, PLACES)
    held = place < N
    score = tl.load(done_score + row * N + place, mask=held, other=-float("inf"))
    summed = tl.load(done_sum + row * N + place, mask=held, other=-float("inf"))
    when = tl.load(done_time + row * N + place, mask=held, other=0)
    whence = tl.load(done_slot + row * N + place, mask=held, other=0)
    divisor = tl.load(table + now + 1)
    kindest = tl.load(hope + row * reach + now)

    going = 0
    ended = 0
    best = tl.full([], -float("inf"), tl.float64)
    place_now = (now * rows + row) * W
    for pick in tl.static_range(2 * W):
        most = tl.max(total, 0)
        where = tl.min(tl.where(total == most, cell, CELLS - 1), 0)
        chosen = cell == where
        what = tl.sum(tl.where(chosen, token, 0), 0)
        gain = tl.sum(tl.where(chosen, value, 0.0), 0)
        origin = (where // RANK).to(tl.int64)
        total = tl.where(chosen, -float("inf"), total)
        stopped = what == stop
        if pick < W:
            done = stopped & (most > -float("inf"))
            ended += done.to(tl.int32)
            new = place == N + pick
            score = tl.where(new, tl.where(done, most / divisor, -float("inf")), score)
            summed = tl.where(new, most, summed)
            when = tl.where(new, now, when)
            whence = tl.where(new, origin, whence)
        kept = (stopped == 0) & (going < W)
        best = tl.where(kept & (going == 0), most, best)
        at = row * W + going
        tl.store(sums + at, most, mask=kept)
        tl.store(last + at, what, mask=kept)
        tl.store(parents + at, origin, mask=kept)
        tl.store(trail_tokens + place_now + going, what, mask=kept)
        tl.store(trail_parents + place_now + going, origin, mask=kept)
        tl.store(trail_values + place_now + going, gain.to(trail_values.dtype.element_ty), mask=kept)
        going += kept.to(tl.int32)
    # If there are fewer continuations than slots (W), because the vocabulary is small, the other slots of the beam are
    # empty: their sums are -inf.
    empty = (slot_index >= going) & (slot_index < W)
    nothing = slot_index * 0
    tl.store(sums + row * W + slot_index, nothing.to(tl.float64) - float("inf"), mask=empty)
    tl.store(last + row * W + slot_index, nothing.to(tl.int64) + stop, mask=empty)
    tl.store(parents + row * W + slot_index, nothing.to(tl.int64), mask=empty)
    tl.store(trail_tokens + place_now + slot_index, nothing.to(tl.int64) + stop, mask=empty)
    tl.store(trail_parents + place_now + slot_index, nothing.to(tl.int64), mask=empty)

    # `standing` is the rank of each finished hypothesis: higher scores come first, and of equal scores the hypothesis
    # with the smaller index.
    known = place < N + W
    above = score[:, None] > score[None, :]
    level = (score[:, None] == score[None, :]) & (place[:, None] < place[None, :])
    standing = tl.sum(((above | level) & known[:, None]).to(tl.int32), 0)
    in_time = known & (standing < N)
    tl.store(done_score + row * N + standing, score, mask=in_time)
    tl.store(done_sum + row * N + standing, summed, mask=in_time)
    tl.store(done_time + row * N + standing, when, mask=in_time)
    tl.store(done_slot + row * N + standing, whence, mask=in_time)
    worst = tl.max(tl.where(known & (standing == N - 1), score, -float("inf")), 0)
    counted = ended_before + ended
    over = shut | (counted >= W) | (worst >= best / kindest)
    tl.store(count + row, counted)
    tl.store(closed + row, over)
    tl.store(broken + row, was | (bad & (shut == 0)))


def advance(
    beam: Sequence[Tensor], found: tuple[Tensor, Tensor, Tensor], *, stop: int, limit: Tensor, table: Tensor,
    hope: Tensor, time: Tensor, broken: Tensor, trail: list[Tensor],
) -> None:  # fmt: skip
    """Advance the beam in place by one step, and write its tokens, parents and values to `trail` at index `time`.

    `found` are log-probabilities and tokens of the best continuations of each slot, and log-probabilities of the stop
    token. `beam` is sums, tokens, parents (b, s); done_score, done_sum, done_time, done_slot (b, n); count and closed
    (b,). A row stops at time `limit`. `table` holds the length penalty of each length, `hope` (b, time) the largest one
    that a row can still get, and `broken` marks rows with NaN. Reference implementation:
    `regard.decode.beam_state.advance`.
    """
    values, tokens, at_stop = (part.contiguous() for part in found)
    (rows, slots), n_best, rank = beam[0].shape, beam[3].shape[1], values.shape[-1]
    _advance[(rows,)](
        *(values, tokens, at_stop, *beam, broken),
        *(limit, table, hope, time, trail[0], trail[1], trail[2], rows, hope.shape[1], stop),
        RANK=rank, W=slots, N=n_best, CELLS=triton.next_power_of_2(slots * rank),
        SLOTS=triton.next_power_of_2(slots), PLACES=triton.next_power_of_2(n_best + slots), num_warps=1,
    )  # fmt: skip
