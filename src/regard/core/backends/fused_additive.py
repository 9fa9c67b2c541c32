"""Additive attention without a tanh for each pair and without the hidden layer of all pairs in memory.

On the CPU the blocks of `blocked` with the score in its exponential form, compiled where there is a C++ compiler: any
normaliser, mask and bias. On CUDA one Triton kernel from rows to output.
"""

import math
from dataclasses import replace

import torch

from regard.core import recompute
from regard.core.backends import blocked
from regard.core.backends.additive import exponential
from regard.core.backends.result import Result
from regard.core.problem import Problem
from regard.core.scores import Additive

NAME = "additive"
_WORTH = 2**26  # pair-features from which a compiled loop earns its compilation


def refuses(problem: Problem) -> str | None:
    """Why this is not additive attention it knows."""
    score = problem.score
    if not isinstance(score, Additive):
        return f"additive scores only, not {score.name}"
    if problem.device.type != "cpu":
        return f"no kernel for {problem.device.type}"
    if score.activation != "tanh":
        return f"{score.activation} has no exponential form"
    return blocked.refuses(problem)


def not_worth_it(problem: Problem) -> str | None:
    """Where the plain form is as fast."""
    if isinstance(problem.score, Additive) and math.prod(problem.shape) * problem.query.shape[-1] < _WORTH:
        return "small: the plain form is the fastest"
    return None


def working_bytes(problem: Problem) -> int:
    """A block of scores, however many features."""
    return blocked.working_bytes(_exponential(problem))


def attend(problem: Problem) -> Result:
    """Attention by the exponential form."""
    problem = _exponential(problem)
    result = blocked.attend(problem)
    if problem.request is None:
        return result
    return result._replace(weights=recompute.weights(problem, result.chosen))


def _exponential(problem: Problem) -> Problem:
    assert isinstance(problem.score, Additive)
    compiled = exponential.compiler() and not torch.compiler.is_compiling()
    return replace(problem, score=exponential.Exponential(problem.score.weight, compiled))
