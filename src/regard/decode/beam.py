"""Beam search, which at every step extends several hypotheses of each row; all rows are searched in one batch."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.decode.backpointers import Trail
from regard.decode.beam_state import Front, advance
from regard.decode.generation_loop import spread
from regard.decode.graph_search import Captures, captured_search
from regard.decode.penalties import GNMT, LengthPenalty, best_divisors, divisors
from regard.decode.ranking import best
from regard.decode.records import Bounds, Hypothesis, StepFunction, bounds, check_step, grouped, refuse_broken

# In a grouped state, which stores the hypotheses of a row as one group, every hypothesis computes scores with the keys
# of all hypotheses of its row, and most of these scores are masked. For beams wider than this number, a separate cache
# for each hypothesis is faster.
GROUPED_WIDTH = 16


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
    captures: Captures | None = None,
) -> list[list[Hypothesis]]:
    """Return for each row the `n_best` hypotheses by log p(y) / penalty(length), best first; fewer if fewer exist.

    At every step the `width` best hypotheses of a row continue. A hypothesis that is among the best when it stops is
    finished. A row ends when `width` hypotheses are finished, or earlier when no running hypothesis can become one of
    the n best. Ending a row early changes no result: the log-probability of a hypothesis only decreases, so its current
    value divided by the largest penalty within the limit is an upper bound of its final score. Ties go to the
    hypothesis that ranked higher, then to the lower token.

    `state` has one row for each token of `start`. After the first step it is reordered to `width` rows for each token,
    or stores the hypotheses as one group if it has `grouped`. On CUDA a whole step with a grouped state can be captured
    as one graph; searches that share `captures` capture it once. The other arguments are those of `greedy`.

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
    return searched(step, state, limits, table, width=width, n_best=n_best, shrink=shrink, captures=captures)


@torch.no_grad()
def searched(
    step: StepFunction,
    state: Any,
    limits: Bounds,
    table: Tensor,
    *,
    width: int,
    n_best: int,
    shrink: float | None,
    captures: Captures | None,
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each row, by a search with fixed shapes if the state supports it, else by `_search`."""
    if limits.start.shape[0] == 0:
        return []
    if width <= GROUPED_WIDTH:
        state = grouped(state)
        hypotheses = captured_search(step, state, limits, table, width=width, n_best=n_best, captures=captures)
        if hypotheses is not None:
            return hypotheses
    return _search(step, state, limits, Front.fresh(limits, width, n_best), table, shrink)


def _search(
    step: StepFunction, state: Any, limits: Bounds, front: Front, table: Tensor, shrink: float | None
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each row, by a loop over the tokens.

    The search state `front` has all rows of the batch until the end; `rows` are the indices of the rows that the model
    still processes.
    """
    batch, width = limits.start.shape[0], front.width
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
        front = advance(front, by_row[0], by_row[1], by_row[2], limits, time, table[time + 1], hope[:, time])
        weights = None if produced.weights is None else produced.weights.unflatten(0, (-1, slots))
        trail.add(front.tokens, front.parents, front.values, None if weights is None else spread(weights, rows, batch))
        if time == limits.longest:
            break
        running = None
        if (time + 1) % limits.patience == 0:
            refuse_broken(broken, time)
            running = (~front.closed[rows]).nonzero().flatten()
            if running.numel() == 0:
                break
            if shrink is None or running.numel() > (1 - shrink) * rows.numel():
                running = None
        rows, state = _reorder(front.parents, rows, running, slots, state)
    refuse_broken(broken, trail.length)
    return trail.hypotheses(front.done_score, front.done_sum, front.done_time, front.done_slot)


def _reorder(parents: Tensor, rows: Tensor, running: Tensor | None, slots: int, state: Any) -> tuple[Tensor, Any]:
    """Return the indices of the batch rows that continue, and the decoder's state, reordered by `parents`.

    `running` are indices into `rows`, of the rows that continue; None: all continue.
    """
    places = torch.arange(rows.numel(), device=rows.device) if running is None else running
    going = rows[places]
    if hasattr(state, "regroup"):
        return going, state.regroup(parents[going], running)
    index = (places[:, None] * slots + parents[going]).flatten()
    same = index.device.type == "cpu" and slots == parents.shape[1] and running is None
    if same and torch.equal(index, torch.arange(index.numel())):
        # The order of the hypotheses is unchanged, so the caches are not copied. On CUDA the order is not compared,
        # because the comparison would make the host wait for the device.
        return going, state
    return going, state.reorder(index)
