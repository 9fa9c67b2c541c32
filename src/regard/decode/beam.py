"""Beam search: the best of several hypotheses for each row, all rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.penalties import GNMT, LengthPenalty, best_divisors, divisors
from regard.decode.ranking import best
from regard.decode.records import Bounds, Hypothesis, StepFunction, bounds, check_step, refuse_broken
from regard.decode.single import spread
from regard.decode.trail import Trail


def beam(
    step: StepFunction,
    state: Any,
    *,
    start: Int[Tensor, "b"],
    stop: int,
    limit: int | Tensor,
    width: int = 4,
    n_best: int = 1,
    length_penalty: LengthPenalty | None = GNMT,
    minimum: int = 0,
    never: Sequence[int] = (),
    shrink: float | None = 0.25,
) -> list[list[Hypothesis]]:
    """For each row the `n_best` hypotheses by log p(y) / penalty(length), best first; fewer where fewer exist.

    At every step the `width` best hypotheses of a row go on. One that stops while among the best is done, and is kept
    apart. A row ends when `width` are done, or earlier when nothing that still runs can enter the n best: the
    log-probability of a hypothesis only falls, so its sum over the largest penalty within the limit bounds what it can
    reach, and stopping there changes no result. Ties go to the hypothesis that stood higher, then to the lower token.
    `state` has one row for each of `start`; after the first step it is reordered to `width` rows for each.
    The other arguments are those of `greedy`.

    >>> from types import SimpleNamespace as Step
    >>> table = torch.tensor([[0.0, 0.6, 0.4], [0.4, 0.3, 0.3], [0.0, 0.0, 1.0]]).log()
    >>> class Nothing:
    ...     def reorder(self, index):
    ...         return self
    >>> def step(state, tokens):
    ...     return Step(logits=table[tokens], state=state, weights=None)
    >>> start = torch.tensor([0])
    >>> [[first, second]] = beam(step, Nothing(), start=start, stop=2, limit=1, width=2, n_best=2, length_penalty=None)
    >>> first.tokens, second.tokens  # greedy would say 1; stopping at once has probability 0.4, and 1 has 0.6 × 0.3
    ((), (1,))
    """
    if width < 1:
        raise ValueError(f"width must be 1 or more; got {width}")
    if not 1 <= n_best <= width:
        raise ValueError(f"n_best must be from 1 to width, {width}; got {n_best}")
    limits = bounds(start, stop, limit, minimum, never)
    table = divisors(length_penalty, limits.longest + 1, start.device)
    return _search(step, state, limits, _Front.fresh(limits, width, n_best), table, shrink)


@dataclass(frozen=True, eq=False)
class _Front:
    """Where a search stands: what runs on (s slots a row) and the best of what is done (n of them), for all rows."""

    sums: Float[Tensor, "b s"]  # log-probabilities; −∞ is an empty slot
    tokens: Int[Tensor, "b s"]
    parents: Int[Tensor, "b s"]  # the slot each one came from in this step
    values: Float[Tensor, "b s"]  # log-probability of the token alone
    done_score: Float[Tensor, "b n"]
    done_sum: Float[Tensor, "b n"]
    done_time: Int[Tensor, "b n"]
    done_slot: Int[Tensor, "b n"]  # the slot it had before it stopped
    count: Int[Tensor, "b"]  # how many were done in all
    closed: Bool[Tensor, "b"]
    width: int

    @staticmethod
    def fresh(limits: Bounds, width: int, n_best: int) -> "_Front":
        batch, device = limits.start.shape[0], limits.start.device
        nothing = torch.zeros(batch, 1, dtype=torch.long, device=device)
        zeros = torch.zeros(batch, 1, dtype=torch.float64, device=device)
        none = zeros.new_full((batch, n_best), -torch.inf)
        start, times = limits.start[:, None], nothing.expand(-1, n_best)
        return _Front(
            *(zeros, start, nothing, zeros, none, none, times, times, nothing[:, 0], nothing[:, 0] > 0), width=width
        )


@torch.no_grad()
def _search(
    step: StepFunction, state: Any, limits: Bounds, front: _Front, table: Tensor, shrink: float | None
) -> list[list[Hypothesis]]:
    """The loop. The bookkeeping keeps all rows from first to last; `rows` are those the model still works on."""
    batch, width = limits.start.shape[0], front.width
    if batch == 0:
        return []
    rows = torch.arange(batch, device=limits.start.device)
    broken = torch.zeros_like(front.closed)
    hope = best_divisors(table, limits.limit)
    trail = Trail()
    for time in range(limits.longest + 1):
        slots = front.sums.shape[1]
        produced = step(state, front.tokens[rows].flatten())
        if time == 0:
            check_step(produced, batch, limits.stop)
        state = produced.state
        log_probs, at_stop = limits.distribution(produced.logits, time)
        values, tokens = best(log_probs, 2 * width)
        by_row = [spread(part.unflatten(0, (-1, slots)), rows, batch) for part in (values, tokens, at_stop)]
        broken |= by_row[2].isnan().any(1) & ~front.closed
        front = _advance(front, by_row[0], by_row[1], by_row[2], limits, time, table[time + 1], hope[:, time])
        weights = None if produced.weights is None else produced.weights.unflatten(0, (-1, slots))
        trail.add(front.tokens, front.parents, front.values, None if weights is None else spread(weights, rows, batch))
        if time == limits.longest:
            break
        kept = None
        if (time + 1) % limits.patience == 0:
            refuse_broken(broken, time)
            kept = (~front.closed[rows]).nonzero().flatten()
            if kept.numel() == 0:
                break
            if shrink is None or kept.numel() > (1 - shrink) * rows.numel():
                kept = None
        rows, state = _reorder(front.parents, rows, kept, slots, state)
    refuse_broken(broken, trail.length)
    return trail.hypotheses(front.done_score, front.done_sum, front.done_time, front.done_slot)


def _advance(
    front: _Front,
    values: Tensor,
    tokens: Tensor,
    at_stop: Tensor,
    limits: Bounds,
    time: int,
    divisor: Tensor,
    hope: Tensor,
) -> _Front:
    """One token further: `values` and `tokens` (b, s, c) are the best continuations of each slot."""
    width, rank = front.width, values.shape[-1]
    forced = (time >= limits.limit)[:, None, None]
    first = torch.arange(rank, device=values.device) == 0
    values = torch.where(forced, torch.where(first, at_stop[:, :, None], -torch.inf), values)
    tokens = torch.where(forced & first, limits.stop, tokens)
    # Sums in float64: adding must not make ties that the model's own scores have not.
    totals = front.sums[:, :, None] + values.double()
    totals = torch.where(front.closed[:, None, None], -torch.inf, totals)
    totals, order = totals.flatten(1).sort(dim=1, descending=True, stable=True)
    totals, order = totals[:, : 2 * width], order[:, : 2 * width]
    slot, token, value = order // rank, tokens.flatten(1).gather(1, order), values.flatten(1).gather(1, order)

    stopped = token == limits.stop
    ended = (stopped & (totals > -torch.inf))[:, :width]
    score = torch.where(ended, totals[:, :width] / divisor, -torch.inf)
    done_score, ranks = torch.cat([front.done_score, score], 1).sort(dim=1, descending=True, stable=True)
    n_best = front.done_score.shape[1]
    done_score, ranks = done_score[:, :n_best], ranks[:, :n_best]
    now = torch.full_like(slot[:, :width], time)
    count = front.count + ended.sum(1)

    # At most one continuation of each slot stops, so that at least `width` of the 2·width go on; where the vocabulary
    # is too small for that many, places stay empty.
    going = stopped.byte().argsort(dim=1, stable=True)[:, :width]
    sums = totals.masked_fill(stopped, -torch.inf).gather(1, going)
    # Nothing running can enter the n best: what can be reached is no better than the worst of them. An empty place
    # among them counts −∞, and so does a row in which nothing runs.
    closed = front.closed | (count >= width) | (done_score[:, -1] >= sums[:, 0] / hope)
    return _Front(
        sums=sums,
        tokens=token.gather(1, going),
        parents=slot.gather(1, going),
        values=value.gather(1, going),
        done_score=done_score,
        done_sum=torch.cat([front.done_sum, totals[:, :width]], 1).gather(1, ranks),
        done_time=torch.cat([front.done_time, now], 1).gather(1, ranks),
        done_slot=torch.cat([front.done_slot, slot[:, :width]], 1).gather(1, ranks),
        count=count,
        closed=closed,
        width=width,
    )


def _reorder(parents: Tensor, rows: Tensor, kept: Tensor | None, slots: int, state: Any) -> tuple[Tensor, Any]:
    """The rows that go on (those `kept` of the running ones, or all), and their state in the new order."""
    places = torch.arange(rows.numel(), device=rows.device) if kept is None else kept
    going = rows[places]
    index = (places[:, None] * slots + parents[going]).flatten()
    same = index.device.type == "cpu" and slots == parents.shape[1] and kept is None
    if same and torch.equal(index, torch.arange(index.numel())):
        return going, state  # a copy of every cache saved, where looking costs no wait for the device
    return going, state.reorder(index)
