"""Softmax attention over a part of the keys, forward and backward, for callers that join the parts themselves.

Neither builds a graph: the caller has the output and the log-sum-exp over all keys when the gradients are computed.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.core.backends import additive, blocked, flash
from regard.core.problem import Problem
from regard.core.scores import Additive


class Part(NamedTuple):
    """The output over some keys, and the log-sum-exp of their scores, in the plain dtype."""

    output: Float[Tensor, "*lead q e"]
    logsumexp: Float[Tensor, "*lead q"]


def forward(problem: Problem) -> Part:
    """Attention over the keys of the problem."""
    if flash.serves(problem):
        return Part(*flash.part_forward(problem))
    return Part(*blocked.part_forward(_quicker(problem)))


def backward(problem: Problem, whole: Part, doutput: Tensor, dtotal: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and what is learned, by the keys of the problem; `whole` is over all keys.

    `dtotal` is the gradient that arrives at the log-sum-exp; None where it was not requested.
    """
    if dtotal is None and flash.serves(problem):
        return flash.part_backward(problem, *whole, doutput)
    return blocked.part_backward(_quicker(problem), *whole, doutput, dtotal)


def _quicker(problem: Problem) -> Problem:
    """The problem with an additive score in its quicker form, where that is worth it."""
    if not isinstance(problem.score, Additive) or problem.device.type != "cpu":
        return problem
    served = additive.refuses(problem) is None and additive.not_worth_it(problem) is None
    return additive.quicker(problem) if served else problem
