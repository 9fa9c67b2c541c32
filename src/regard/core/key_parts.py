"""Softmax attention over a part of the keys, forward and backward, for callers that merge the results of all parts.

Neither `forward` nor `backward` builds an autograd graph: the caller calls `backward` with the output and log-sum-exp
over all keys.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.core.backends import additive, blocked, flash, flash_cuda
from regard.core.problem import Problem
from regard.core.scores import Additive


class Part(NamedTuple):
    """The output of attention over a part of the keys and the log-sum-exp of their scores, in at least float32."""

    output: Float[Tensor, "*lead q e"]
    logsumexp: Float[Tensor, "*lead q"]


def forward(problem: Problem) -> Part:
    """Return output and log-sum-exp of attention over the keys of the problem, which are a part of all keys."""
    for kernel in (flash_cuda, flash):
        if kernel.serves(problem):
            return Part(*kernel.part_forward(problem))
    return Part(*blocked.part_forward(_quicker(problem)))


def backward(problem: Problem, whole: Part, doutput: Tensor, dtotal: Tensor | None) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and learned tensors for the part of the keys that `problem` holds.

    `whole` holds output and log-sum-exp over all keys, not over this part. `doutput` and `dtotal` are their incoming
    gradients; `dtotal` is None if the log-sum-exp was not requested.
    """
    for kernel in (flash_cuda, flash):
        if dtotal is None and kernel.serves(problem):
            return kernel.part_backward(problem, *whole, doutput)
    return blocked.part_backward(_quicker(problem), *whole, doutput, dtotal)


def _quicker(problem: Problem) -> Problem:
    """Return the problem with an additive score replaced by the implementation (exponential or logistic) that the
    additive backend would use."""
    if not isinstance(problem.score, Additive) or problem.device.type != "cpu":
        return problem
    served = additive.refuses(problem) is None and additive.not_worth_it(problem) is None
    return additive.quicker(problem) if served else problem
