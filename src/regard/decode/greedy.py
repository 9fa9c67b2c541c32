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
    """Return one hypothesis for each row, with tokens y_i = argmax p(y | y_<i).

    The lowest token wins a tie. The result is that of `beam` with width 1. A row gets at most `limit` tokens (one
    number, or one for each row), and then must stop. It gets at least `minimum` tokens, unless its limit is lower.
    Tokens in `never` are excluded. A state with a capacity needs limit + 1 positions, because `start` is processed too.
    When a fraction `shrink` of the running rows has stopped, these rows are removed with `state.reorder`; with None
    they are never removed, so that shapes stay the same for a captured step. `captures` is as in `beam`.

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
    hypotheses = captured_search(step, state, limits, table, width=1, n_best=1, captures=captures)
    # If a row has reached its limit but its stop token has probability 0, beam search returns no hypothesis for this
    # row. The loop below then returns a hypothesis with probability 0.
    if hypotheses is not None and all(hypotheses):
        return [hypothesis for [hypothesis] in hypotheses]
    return follow(step, state, lambda log_probs, rows: log_probs.argmax(1), limits, shrink)
