"""The steps of a beam search, and the way back through them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.records import Hypothesis


class Trail:
    """What every step did, in the order of its slots: nothing is copied when a beam is reordered.

    A hypothesis is read off at the end, from its last slot back to the first: each slot knows the one it came from.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._weights: list[Tensor] = []

    @property
    def length(self) -> int:
        return len(self._steps)

    def add(self, tokens: Tensor, parents: Tensor, values: Tensor, weights: Tensor | None) -> None:
        """A step: token, parent and log-probability of each slot (b, s); weights by the slots before it."""
        self._steps.append((tokens, parents, values))
        if weights is not None:
            self._weights.append(weights)

    def hypotheses(
        self,
        scores: Float[Tensor, "b n"],
        sums: Float[Tensor, "b n"],
        times: Int[Tensor, "b n"],
        slots: Int[Tensor, "b n"],
    ) -> list[list[Hypothesis]]:
        """The hypotheses that stopped at these steps, coming from these slots; those with score −∞ do not exist."""
        tokens: list[Tensor] = []
        values: list[Tensor] = []
        looked: list[Tensor] = []
        for time in reversed(range(self.length)):
            before = time < times
            token, parent, value = (part.gather(1, slots.clamp(max=part.shape[1] - 1)) for part in self._steps[time])
            tokens.append(token)
            values.append(value)
            if self._weights:
                weights = self._weights[time]
                index = torch.where(before, parent, 0).clamp(max=weights.shape[1] - 1)
                looked.append(weights[torch.arange(weights.shape[0], device=index.device)[:, None], index])
            slots = torch.where(before, parent, slots)
        all_tokens = torch.stack(tokens[::-1], 2).cpu()
        all_values = torch.stack(values[::-1], 2).cpu()
        all_weights = torch.stack(looked[::-1], 2).cpu() if looked else None
        lengths, totals = times.tolist(), sums.tolist()
        return [
            [
                Hypothesis(
                    tokens=tuple(all_tokens[i, j, : lengths[i][j]].tolist()),
                    score=score,
                    log_probs=all_values[i, j, : lengths[i][j]].clone(),
                    weights=None if all_weights is None else all_weights[i, j, : lengths[i][j]].clone(),
                    log_prob=totals[i][j],
                )
                for j, score in enumerate(row)
                if score > -torch.inf
            ]
            for i, row in enumerate(scores.tolist())
        ]
