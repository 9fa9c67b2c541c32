"""The loop that greedy decoding and sampling share: it generates one hypothesis for each row, token by token."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.decode.records import Bounds, Hypothesis, StepFunction, check_step, refuse_broken

# choose(log_probs (r, v), rows (r,)) returns the next tokens (r,); `rows` are the indices of these rows in the batch.
Choose = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def follow(step: StepFunction, state: Any, choose: Choose, bounds: Bounds, shrink: float | None) -> list[Hypothesis]:
    """Return one hypothesis for each row, with the tokens that `choose` selects until the row stops.

    When a fraction `shrink` of the rows that the model processes has stopped, the stopped rows are removed from the
    state. The stored tokens have all rows until the end; `rows` are the indices of the rows that the model still
    processes.
    """
    batch = bounds.start.shape[0]
    if batch == 0:
        return []
    rows = torch.arange(batch, device=bounds.start.device)
    closed = torch.zeros(batch, dtype=torch.bool, device=rows.device)
    broken = closed.clone()
    last = bounds.start
    trail: list[tuple[Tensor, Tensor]] = []  # the tokens (b,) that each step selected, and their log-probabilities (b,)
    looked: list[Tensor] = []
    for time in range(bounds.longest + 1):
        produced = step(state, last[rows])
        if time == 0:
            check_step(produced, batch, bounds.stop)
        state = produced.state
        log_probs, at_stop = bounds.distribution(produced.logits, time)
        forced = time >= bounds.limit[rows]
        chosen = torch.where(forced, bounds.stop, choose(log_probs, rows))
        value = torch.where(forced, at_stop, log_probs.gather(1, chosen[:, None])[:, 0])
        broken[rows] |= at_stop.isnan() & ~closed[rows]
        last = torch.full_like(last, bounds.stop).index_copy_(0, rows, chosen)
        values = value.new_zeros(batch).index_copy_(0, rows, value)
        last, values = torch.where(closed, bounds.stop, last), torch.where(closed, 0.0, values)
        trail.append((last, values))
        if produced.weights is not None:
            looked.append(spread(produced.weights, rows, batch))
        closed = closed | (last == bounds.stop)
        if (time + 1) % bounds.patience == 0 and time < bounds.longest:
            refuse_broken(broken, time)
            running = (~closed[rows]).nonzero().flatten()
            if running.numel() == 0:
                break
            if shrink is not None and running.numel() <= (1 - shrink) * rows.numel():
                rows, state = rows[running], state.reorder(running)
    refuse_broken(broken, len(trail))
    return _hypotheses(trail, looked, bounds.stop)


def spread(values: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Return a tensor of `batch` rows that has `values` in the rows `rows`, and zeros in all other rows."""
    if rows.numel() == batch:
        return values
    return values.new_zeros((batch, *values.shape[1:])).index_copy_(0, rows, values)


def _hypotheses(trail: list[tuple[Tensor, Tensor]], looked: list[Tensor], stop: int) -> list[Hypothesis]:
    tokens = torch.stack([tokens for tokens, _ in trail], 1).cpu()
    log_probs = torch.stack([values for _, values in trail], 1).cpu()
    # Log-probabilities are summed in float64 from the first token to the last, as in beam search, so that greedy
    # decoding and beam search return the same bits.
    totals = log_probs.double().cumsum(1)[:, -1].tolist()
    weights = torch.stack(looked, 1).cpu() if looked else None
    lengths = (tokens != stop).sum(1).tolist()
    return [
        Hypothesis(
            tokens=tuple(tokens[i, :length].tolist()),
            score=total,
            log_probs=log_probs[i, :length].clone(),
            weights=None if weights is None else weights[i, :length].clone(),
            log_prob=total,
        )
        for i, (length, total) in enumerate(zip(lengths, totals, strict=True))
    ]
