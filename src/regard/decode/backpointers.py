"""The backpointers of a beam search, and the hypotheses recovered from them."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.records import Hypothesis


class Trail:
    """The tokens, backpointers and log-probabilities of all steps of a beam search, and attention weights if given.

    A slot is a place in the beam. Backpointers connect the slots of successive steps, so that earlier steps are not
    copied when a beam is reordered.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._weights: list[Tensor] = []

    @property
    def length(self) -> int:
        return len(self._steps)

    def add(self, tokens: Tensor, parents: Tensor, values: Tensor, weights: Tensor | None) -> None:
        """Store a step: the token, the parent slot and log-probability of each slot (b, s), and the attention weights.

        The weights are those of the step that predicted the tokens, so they are indexed by the slots before this step.
        """
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
        """Return for each row the hypotheses that stopped at the steps `times`, continuing from `slots`, best first."""
        tokens, parents, values = (torch.stack(parts) for parts in zip(*self._steps, strict=True))
        weights = None
        # the first step had only one hypothesis for each row: its weights are repeated for all slots of the beam
        if self._weights:
            first, later = self._weights[0], self._weights[1:]
            width = later[0].shape[1] if later else 1
            weights = torch.stack([first.expand(-1, width, *first.shape[2:]), *later])
        return walk(tokens, parents, values, weights, scores, sums, times, slots)


def walk(
    tokens: Int[Tensor, "t b s"],
    parents: Int[Tensor, "t b s"],
    values: Float[Tensor, "t b s"],
    weights: Float[Tensor, "t b s2 ..."] | None,
    scores: Float[Tensor, "b n"],
    sums: Float[Tensor, "b n"],
    times: Int[Tensor, "b n"],
    slots: Int[Tensor, "b n"],
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each row, by following backpointers from the last step to the first.

    An entry whose score is −∞ holds no hypothesis. The backpointers are followed on the CPU, because this takes many
    short sequential steps.
    """
    until, slot, parent_of = times.cpu().numpy(), slots.cpu().numpy(), parents.cpu().numpy()
    # the slot (place in the beam) of each hypothesis after each step
    at = np.empty((parent_of.shape[0], *slot.shape), dtype=np.int64)
    before = np.zeros_like(at)  # the slot (place in the beam) of each hypothesis before each step
    for time in reversed(range(parent_of.shape[0])):
        at[time] = slot
        origin = np.take_along_axis(parent_of[time], slot, 1)
        slot = np.where(time < until, origin, slot)
        before[time] = np.where(time < until, origin, 0)
    index = torch.from_numpy(at)
    all_tokens = tokens.cpu().gather(2, index).permute(1, 2, 0).tolist()
    all_values = values.cpu().gather(2, index).permute(1, 2, 0)
    all_weights = None
    if weights is not None:
        index = torch.from_numpy(before).to(weights.device).clamp(max=weights.shape[2] - 1)
        index = index.view(*index.shape, *[1] * (weights.ndim - 3)).expand(*index.shape, *weights.shape[3:])
        all_weights = weights.gather(2, index).movedim(0, 2).cpu()
    lengths, totals = until.tolist(), sums.tolist()
    return [
        [
            Hypothesis(
                tokens=tuple(all_tokens[i][j][: lengths[i][j]]),
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
