"""Sampling: each next token is drawn from the model's distribution, or from its most likely part."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.generation_loop import follow
from regard.decode.ranking import best
from regard.decode.records import Hypothesis, StepFunction, bounds, grouped


@torch.no_grad()
def sample(
    step: StepFunction,
    state: Any,
    *,
    start: Int[Tensor, "b"],
    stop: int,
    limit: int | Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    minimum: int = 0,
    never: Sequence[int] = (),
    shrink: float | None = 0.25,
    generator: torch.Generator | None = None,
) -> list[Hypothesis]:
    """Return one hypothesis for each row, with tokens sampled by y_i ~ p(y | y_<i)^(1/temperature).

    `top_k` restricts each choice to the k most likely tokens. `top_p` restricts it to the smallest set of most likely
    tokens whose total probability reaches `top_p` (Holtzman et al. 2020, section 3.1). The log-probabilities in a
    hypothesis are those of the model without temperature, `top_k` and `top_p`. Every row has its own random numbers, so
    its samples do not depend on whether other rows have stopped. For several samples of each row, repeat the rows:
    `state.reorder(torch.arange(b).repeat_interleave(n))` and `start.repeat_interleave(n)`. The other arguments are
    those of `greedy`.

    >>> from types import SimpleNamespace as Step
    >>> def step(state, tokens):
    ...     return Step(logits=torch.tensor([[0.0, 0.0, -9e9]]), state=state, weights=None)
    >>> generator = torch.Generator().manual_seed(7)
    >>> [hypothesis] = sample(step, None, start=torch.tensor([0]), stop=2, limit=8, generator=generator)
    >>> set(hypothesis.tokens) == {0, 1}
    True
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be more than 0, got {temperature}: for the likeliest tokens use greedy")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 or more; got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1]; got {top_p}")
    limits = bounds(start, stop, limit, minimum, never)
    batch, device = start.shape[0], start.device

    def choose(log_probs: Tensor, rows: Tensor) -> Tensor:
        points = torch.rand(batch, dtype=torch.float64, device=device, generator=generator)[rows]
        return draw(log_probs, points, temperature=temperature, top_k=top_k, top_p=top_p)

    return follow(step, grouped(state), choose, limits, shrink)


def draw(
    log_probs: Float[Tensor, "r v"],
    points: Float[Tensor, "r"],
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Int[Tensor, "r"]:
    """Return for each row the token whose interval of the cumulative distribution contains the point in [0, 1)."""
    values: Tensor = log_probs
    index: Tensor | None = None
    if top_k is not None and top_k < values.shape[1]:
        values, index = best(values, top_k)
    elif top_p is not None:
        values, index = values.sort(dim=1, descending=True, stable=True)
    mass = (values.double() / temperature).softmax(1)
    if top_p is not None:
        mass = torch.where(mass.cumsum(1) - mass < top_p, mass, 0.0)
    ends = mass.cumsum(1)
    # The sampled token is the first one whose cumulative sum exceeds the target. A token of probability 0 has the same
    # sum as its predecessor, so it is never the first. The factor 1 − 2⁻⁴⁰ keeps the target below the last cumulative
    # sum after rounding.
    target = points[:, None] * ends[:, -1:] * (1 - 2.0**-40)
    # The index is clamped because a row with NaN gives one beyond the end; `refuse_broken` reports that row later.
    place = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[1] - 1)
    return (place if index is None else index.gather(1, place))[:, 0]
