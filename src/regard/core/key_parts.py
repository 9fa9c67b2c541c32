"""Softmax attention over a part of the keys, forward and backward, for callers that join the parts themselves.

Neither pass builds a graph: the caller computes gradients later, from the output and log-sum-exp over all keys.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.core.backends import additive, blocked, flash, flash_cuda
from regard.core.problem import Problem
from regard.core.scores import Additive


class Part(NamedTuple):
    """The output over some keys and the log-sum-exp of their scores, in at least float32."""

    output: Float[Tensor, "*lead q e"]
    logsumexp: Float[Tensor, "*lead q"]


def forward(problem: Problem) -> Part:
    """Compute attention over the keys of the problem."""
    for kernel in (flash_cuda, flash):
        if kernel.serves(problem):
            return Part(*kernel.part_forward(problem))
    return Part(*blocked.part_forward(_quicker(problem)))


def backward(problem: Problem, whole: Part, doutput: Tensor, dtotal: Tensor | None) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and learned tensors for these keys; `whole` is over all keys.

    `dtotal` is the incoming gradient of the log-sum-exp; None if it was not requested.
    """
    for kernel in (flash_cuda, flash):
        if dtotal is None and kernel.serves(problem):
            return kernel.part_backward(problem, *whole, doutput)
    return blocked.part_backward(_quicker(problem), *whole, doutput, dtotal)


def _quicker(problem: Problem) -> Problem:
    """Return the problem with an additive score in its faster form, where that saves time."""
    if not isinstance(problem.score, Additive) or problem.device.type != "cpu":
        return problem
    served = additive.refuses(problem) is None and additive.not_worth_it(problem) is None
    return additive.quicker(problem) if served else problem
