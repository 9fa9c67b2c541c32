"""The specification: score, normalise, weighted sum, each in one line over the whole matrix.

Any score, normaliser, mask and bias; any float dtype (half precision computes in float32); differentiable twice.
Every other backend is compared with this one.
"""

import torch

from regard.core.backends.result import Result
from regard.core.hard import choose
from regard.core.nonfinite import cleaned
from regard.core.normalizers import Hard, log_sum_exp
from regard.core.problem import Problem
from regard.core.requests import Entropy, LogSumExp
from regard.core.spans import all_of

NAME = "reference"
SMALL = 32 * 2**20  # bytes of working memory up to which the plain form is the fastest


def refuses(problem: Problem) -> str | None:
    """Nothing: the reference serves every problem."""
    return None


def not_worth_it(problem: Problem) -> str | None:
    """Never: it is the last resort."""
    return None


def working_bytes(problem: Problem) -> int:
    """Scores, weights and what the score makes on the way, for every pair at once."""
    pairs = torch.Size(problem.shape).numel()
    floats = 3 + problem.score.floats(problem.query.shape[-1])
    return int(pairs * floats * problem.dtype.itemsize)


def kernel(problem: Problem) -> str:
    """Plain operations of torch."""
    return NAME


def attend(problem: Problem) -> Result:
    """softmax(score(Q, K) + bias) V, as written."""
    problem, marks = cleaned(problem)
    query, key, value = (t.to(problem.dtype) for t in (problem.query, problem.key, problem.value))
    rows, columns = all_of(problem.shape[-2]), all_of(problem.shape[-1])

    scores = problem.scores(query, problem.repeat(key), rows, columns)
    allowed = problem.open(scores, rows, columns)
    choice = None
    if isinstance(problem.normalize, Hard):
        choice = choose(problem.normalize, scores, allowed, problem.sample, problem.generator)
        weights = choice.weights
        entropy = isinstance(problem.request, Entropy)
        seen = problem.normalize.distribution(scores, allowed) if entropy else weights.detach()
    else:
        seen = weights = problem.normalize(scores, allowed)
    output = _drop(weights, problem) @ problem.repeat(value)

    if marks is not None:
        output = output + marks
    if isinstance(problem.request, LogSumExp):
        return Result(output.to(problem.query.dtype), log_sum_exp(scores, allowed))
    return Result(
        output.to(problem.query.dtype),
        problem.request.of(seen) if problem.request is not None else None,
        choice.log_prob if choice is not None else None,
        choice.index if choice is not None else None,
    )


def _drop(weights: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Dropout on the weights: kept ones grow by 1 / (1 − p) so that the expected sum stays."""
    if problem.dropout == 0.0:
        return weights
    if problem.dropout == 1.0:
        return weights * 0.0
    kept = torch.rand(weights.shape, generator=problem.generator, device=weights.device) >= problem.dropout
    return weights * kept / (1.0 - problem.dropout)
