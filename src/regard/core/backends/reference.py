"""The specification of attention: score, normalise, weighted sum, each in one line over the whole score matrix.

This backend supports any score, normaliser, mask, bias and float dtype (half precision computes in float32) and is
twice differentiable. Every other backend is compared with this one.
"""

import torch
from torch import Tensor

from regard.core.backends import plain_form, row_form
from regard.core.backends.result import Direct, Result, WithRequest
from regard.core.custom import Custom
from regard.core.hard import choose
from regard.core.nonfinite import cleaned
from regard.core.normalizers import Hard, log_sum_exp, of_the_caller
from regard.core.problem import Problem
from regard.core.requests import Entropy, Full, LogSumExp
from regard.core.scores import Dot, ScaledDot
from regard.core.spans import all_of
from regard.kernels.device_memory import affordable

NAME = "reference"
SMALL = 32 * 2**20  # bytes of working memory up to which this backend is the fastest on a CPU
_BFLOAT16_BYTES = 64 * 2**20  # `SMALL` for calls in bfloat16 on a CPU with instructions for products of bfloat16
_SHARE = 32  # on a GPU a call is small if its working memory is at most this fraction (1/32) of the memory


def refuses(problem: Problem) -> str | None:
    """Return None: this backend can compute every call."""
    return None


def not_worth_it(problem: Problem) -> str | None:
    """Return None: this backend is the last of the table, so no other can be faster."""
    return None


def gives_weights(problem: Problem) -> bool:
    """Return whether requested weights are computed together with the output."""
    return True


def working_bytes(problem: Problem) -> int:
    """Return the bytes of scores, weights and intermediate tensors of all pairs at once."""
    pairs = torch.Size(problem.shape).numel()
    if plain_form.by_one_kernel(problem):
        if isinstance(problem.request, Full):  # the backward pass stores the gradients of the scores
            return pairs * problem.query.element_size() if problem.differentiated else 0
        return pairs * problem.dtype.itemsize
    floats = 3 + problem.score.floats(problem.query.shape[-1])
    if of_the_caller(problem.normalize) and (problem.masked or isinstance(problem.score, Custom)):
        floats += 2  # `normalized` copies the scores and the weights
    return int(pairs * floats * problem.dtype.itemsize)


def small(problem: Problem) -> bool:
    """Return whether this backend needs little memory, or no more than query, key and value take."""
    if in_bfloat16(problem):
        return True
    given = sum(t.numel() for t in (problem.query, problem.key, problem.value)) * problem.query.element_size()
    return working_bytes(problem) <= max(affordable(problem.device, SMALL, _SHARE), given)


def in_bfloat16(problem: Problem) -> bool:
    """Return whether the call is in bfloat16 on a CPU with products of bfloat16, where this backend is the fastest."""
    if problem.device.type != "cpu" or problem.query.dtype != torch.bfloat16 or not plain_form.in_half(problem.query):
        return False
    return plain_form.serves(problem) and working_bytes(problem) <= _BFLOAT16_BYTES


def kernel(problem: Problem) -> str:
    """Return the name of the code that runs: torch operations, one kernel for output and weights, or one for rows."""
    if plain_form.by_one_kernel(problem):
        return "triton weights"
    return row_form.KERNEL if row_form.serves(problem) else NAME


def direct(problem: Problem) -> Direct | None:
    """Return a function that only computes normalize(score(Q, K)) V, for calls like `problem` with other values; or
    None.

    The result is None if the calls need more than the formula, such as a mask.
    """
    if problem.mask is not None or problem.bias is not None or problem.dropout > 0.0 or problem.group > 1:
        return None
    normalize = problem.normalize
    if problem.query.ndim < 3 or isinstance(normalize, Hard) or row_form.serves(problem):
        return None
    if in_bfloat16(problem) and normalize.is_softmax and type(problem.score) in (Dot, ScaledDot):
        return _in_bfloat16(problem)
    if problem.query.dtype != problem.dtype:
        return None
    return lambda query, key, value, score, mask, bias: normalize(score(query, key)) @ value


def with_request(problem: Problem) -> WithRequest | None:
    """Return a function that computes output and requested weights, if any, of calls like `problem` with other values.

    The result is None if neither `plain_form` nor `row_form` supports these calls.
    """
    return plain_form.with_request(problem) or row_form.with_request(problem)


def _in_bfloat16(problem: Problem) -> Direct | None:
    """Return a function that computes softmax attention of dot products in bfloat16; None for a softcap."""
    score, learning = problem.score, problem.differentiated
    if isinstance(score, ScaledDot) and score.softcap is not None:
        return None
    scale = score.factor(problem.query.shape[-1]) if isinstance(score, ScaledDot) else 1.0

    def attended(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        weights = torch.softmax(plain_form.product(query, key, scale, False, learning), -1)
        return plain_form.weighted_sum(weights, value, None, learning)

    return attended


def attend(problem: Problem) -> Result:
    """Compute normalize(score(Q, K) + bias) V as written, or by `row_form` or `plain_form` if one supports it."""
    if plain_form.serves(problem):
        result = row_form.attend(problem) or plain_form.attend(problem)
        if result is not None:
            return result
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
        seen = weights = problem.weights(scores, allowed)
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
    """Return the weights after dropout; weights that are not dropped are scaled by 1 / (1 − p), which keeps the
    expected sum."""
    if problem.dropout == 0.0:
        return weights
    if problem.dropout == 1.0:
        return weights * 0.0
    kept = torch.rand(weights.shape, generator=problem.generator, device=weights.device) >= problem.dropout
    return weights * kept / (1.0 - problem.dropout)
