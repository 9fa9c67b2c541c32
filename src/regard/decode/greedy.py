"""Greedy decoding: the most likely token at each step."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.decode.generation_loop import follow
from regard.decode.graph_search import Captures, captured_search
from regard.decode.penalties import divisors
from regard.decode.records import Hypothesis, StepFunction, bounds, grouped


@torch.no_grad()
def greedy(
    step: StepFunction,
    state: Any,
    *,
    start: Int[Tensor, "b"],
    stop: int,
    limit: int | Tensor,
    minimum: int = 0,
    never: Sequence[int] = (),
    shrink: float | None = 0.25,
    captures: Captures | None = None,
) -> list[Hypothesis]:
    """Return for each row y_i = argmax p(y | y_<i); the lowest token on a tie. The same as a beam of width 1.

    A row has at most `limit` tokens (one number, or one for each row); then it must stop. It has at least `minimum`,
    unless its limit is lower. Tokens in `never` are excluded. A state with a capacity needs limit + 1 positions,
    because `start` is processed too. When a fraction `shrink` of the running rows has stopped, they are removed with
    `state.reorder`; None keeps shapes fixed, for a captured step. `captures` is as in `beam`.

    >>> from types import SimpleNamespace as Step
    >>> table = torch.eye(4).roll(1, 1)  # after token i comes i + 1
    >>> def step(state, tokens):
    ...     return Step(logits=table[tokens], state=state, weights=None)
    >>> [hypothesis] = greedy(step, None, start=torch.tensor([0]), stop=3, limit=5)
    >>> hypothesis.tokens
    (1, 2)
    """
    limits = bounds(start, stop, limit, minimum, never)
    state = grouped(state)
    table = divisors(None, limits.longest + 1, start.device)
    found = captured_search(step, state, limits, table, width=1, n_best=1, captures=captures)
    # A row that must stop but may not has no hypothesis in beam search; greedy decoding returns one with probability 0.
    if found is not None and all(found):
        return [one for [one] in found]
    return follow(step, state, lambda log_probs, rows: log_probs.argmax(1), limits, shrink)
