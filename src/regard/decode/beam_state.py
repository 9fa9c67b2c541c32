"""The state of a beam search, and its update when every hypothesis is extended by one token."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.records import Bounds


@dataclass(frozen=True, eq=False)
class Front:
    """The state of a beam search: the running hypotheses of each row, in s slots, and its n best finished ones."""

    sums: Float[Tensor, "b s"]  # log-probability of each hypothesis; −∞ marks an empty slot
    tokens: Int[Tensor, "b s"]
    parents: Int[Tensor, "b s"]  # the slot, before the last step, of the hypothesis that each hypothesis continues
    values: Float[Tensor, "b s"]  # log-probability of the last token of each hypothesis
    done_score: Float[Tensor, "b n"]
    done_sum: Float[Tensor, "b n"]
    done_time: Int[Tensor, "b n"]
    done_slot: Int[Tensor, "b n"]  # the slot (place in the beam) of each finished hypothesis before it stopped
    count: Int[Tensor, "b"]  # the number of finished hypotheses of each row
    closed: Bool[Tensor, "b"]  # whether the search of a row has ended
    width: int

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of this state that the kernel `regard.kernels.triton.beam_update` changes in place.

        The tensors have the order of the kernel's arguments.
        """
        going = (self.sums, self.tokens, self.parents)
        return *going, self.done_score, self.done_sum, self.done_time, self.done_slot, self.count, self.closed

    @staticmethod
    def fresh(limits: Bounds, width: int, n_best: int, slots: int = 1) -> "Front":
        """Return the state of a beam search before the first token: each row has one hypothesis, in the first slot."""
        batch, device = limits.start.shape[0], limits.start.device
        nothing = torch.zeros(batch, slots, dtype=torch.long, device=device)
        zeros = torch.zeros(batch, slots, dtype=torch.float64, device=device)
        sums = zeros.clone()
        sums[:, 1:] = -torch.inf
        none = zeros.new_full((batch, n_best), -torch.inf)
        start, times = limits.start[:, None].expand(-1, slots), nothing[:, :1].expand(-1, n_best)
        return Front(
            *(sums, start, nothing, zeros, none, none, times, times, nothing[:, 0], nothing[:, 0] > 0), width=width
        )


def advance(
    front: Front,
    values: Tensor,
    tokens: Tensor,
    at_stop: Tensor,
    limits: Bounds,
    time: int | Tensor,
    divisor: Tensor,
    hope: Tensor,
) -> Front:
    """Return the state of the beam search after one more token of each hypothesis.

    `tokens` (b, s, c) are the c best next tokens of each slot, and `values` their log-probabilities. `at_stop` (b, s)
    is the log-probability of the stop token. `time` is an int, or a tensor on the device. `divisor` is the length
    penalty of a hypothesis that stops now. `hope` (b,) is the largest length penalty that a running hypothesis can
    still get.
    """
    width, rank = front.width, values.shape[-1]
    forced = (time >= limits.limit)[:, None, None]
    first = torch.arange(rank, device=values.device) == 0
    values = torch.where(forced, torch.where(first, at_stop[:, :, None], -torch.inf), values)
    tokens = torch.where(forced & first, limits.stop, tokens)
    # Log-probabilities are summed in float64, so that rounding does not create ties.
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
    now = torch.zeros_like(slot[:, :width]) + time
    count = front.count + ended.sum(1)

    # At most one continuation of each slot is the stop token, so at least `width` of the 2·width best continue. With a
    # vocabulary too small for 2·width continuations, some slots stay empty.
    going = stopped.byte().argsort(dim=1, stable=True)[:, :width]
    sums = totals.masked_fill(stopped, -torch.inf).gather(1, going)
    # A row ends if no running hypothesis can become one of the n best: the upper bound of its score, sums / hope, is
    # not above the worst of the n best scores. An empty slot has the sum −∞.
    closed = front.closed | (count >= width) | (done_score[:, -1] >= sums[:, 0] / hope)
    return Front(
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
