"""The plain form on CUDA in few launches: one product, one kernel that masks and normalises rows, a second product.

The kernel evaluates mask, bias and softcap pair by pair, so no mask tensor is computed from lengths, segments or
distances. For hard attention it also reads the value of the chosen key, so there is no second product. It serves calls
without gradients whose rows fit the registers of a program.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.core.backends import plain_form
from regard.core.backends.kernel_arguments import by_pairs, pairs_of
from regard.core.backends.result import Result, WithRequest
from regard.core.normalizers import Entmax, Hard, Sigmoid, Sparsemax
from regard.core.problem import HALF, Problem
from regard.core.requests import LogSumExp, Request, Top, returned
from regard.core.scores import Bilinear, Cosine, Dot, ScaledDot
from regard.kernels import availability, entmax_rows
from regard.kernels.availability import TRITON

KERNEL = "triton rows"
_LONGEST = 8192  # the longest row, in keys, that the kernel supports
_PROGRAMS = 65_535  # the largest number of thread blocks on the second axis of a CUDA kernel launch
_SCORES = (Dot, ScaledDot, Cosine, Bilinear)


def serves(problem: Problem) -> bool:
    """Return whether this module can compute the call and its requested weights."""
    if problem.device.type != "cuda" or not TRITON or problem.differentiated or not plain_form.serves(problem):
        return False
    if problem.query.ndim != 4 or problem.query.dtype not in (*HALF, torch.float32) or not by_pairs(problem):
        return False
    if problem.shape[-1] > _LONGEST or math.prod(problem.shape[:-2]) > _PROGRAMS:
        return False
    normalize = problem.normalize
    if type(problem.score) not in _SCORES or isinstance(problem.request, LogSumExp):
        return False
    if isinstance(normalize, Hard):
        return problem.request is None
    if normalize.is_softmax or isinstance(normalize, Sigmoid):
        return True
    return isinstance(normalize, (Entmax, Sparsemax)) and entmax_rows.climbs(normalize.alpha, problem.shape[-1])


def with_request(problem: Problem) -> WithRequest | None:
    """Return a function that computes output and requested weights of calls equal to `problem` but for the tensors'
    values; None if `serves` is False."""
    if not serves(problem):
        return None
    run = _chosen(problem) if isinstance(problem.normalize, Hard) else _weighed(problem)
    pairs_of_call = pairs_of(problem)

    def computed(
        query: Tensor, key: Tensor, value: Tensor, score: Any, mask: Any, bias: Any, request: Request | None
    ) -> tuple[Tensor, Tensor | Top | None, Tensor | None] | None:
        if query.device.index != availability.current_device():
            return None
        vectors = plain_form.vectors(score, query, key)
        scores = plain_form.product(*vectors, False, False)
        return run(scores, value, pairs_of_call(mask, bias, query.device), request)

    return computed


def attend(problem: Problem) -> Result | None:
    """Compute the call; return None if this module cannot, or if `plain_form` does so by one kernel."""
    run = None if plain_form.by_one_kernel(problem) else with_request(problem)
    if run is None:
        return None
    tensors = (problem.query, problem.key, problem.value)
    results = run(*tensors, problem.score, problem.mask, problem.bias, problem.request)
    return None if results is None else Result(*results)


def _softcap(problem: Problem) -> float | None:
    return problem.score.softcap if isinstance(problem.score, ScaledDot) else None


Run = Callable[[Tensor, Tensor, Any, Request | None], tuple[Tensor, Tensor | Top | None, Tensor | None]]


def _chosen(problem: Problem) -> Run:
    """Return a function of (scores, value, pairs, request) that computes hard attention without sampling."""
    from regard.kernels.triton.row_weights import chooser  # imported here: the module imports Triton

    assert isinstance(problem.normalize, Hard)
    b, h, q, k = problem.shape
    run = chooser((b, h, q, k), problem.value, cap=_softcap(problem), factor=problem.normalize.sharpness)

    def computed(scores: Tensor, value: Tensor, pairs: Any, _: Request | None) -> tuple[Tensor, None, Tensor]:
        output, log_prob = run(scores, value, pairs)
        return output, None, log_prob

    return computed


def _weighed(problem: Problem) -> Run:
    """Return a function of (scores, value, pairs, request) that computes output and requested weights."""
    from regard.kernels.triton.row_weights import weigher  # imported here: the module imports Triton

    normalize, dtype = problem.normalize, problem.query.dtype
    sparse = isinstance(normalize, (Entmax, Sparsemax)) and not normalize.is_softmax
    kind = "scores" if sparse else "sigmoid" if isinstance(normalize, Sigmoid) else "softmax"
    shift = normalize.bias if isinstance(normalize, Sigmoid) else 0.0
    masked = problem.mask is not None or (problem.bias is not None and problem.bias.may_mask)
    # Requested weights are computed from weights that are not rounded.
    exact = torch.float32 if problem.request is not None or sparse else dtype
    b, h, q, k = problem.shape
    run = weigher((b, h, q, k), kind, exact, masked, cap=_softcap(problem), shift=shift)
    as_they_are = sparse and not problem.masked and _softcap(problem) is None

    def computed(
        scores: Tensor, value: Tensor, pairs: Any, request: Request | None
    ) -> tuple[Tensor, Tensor | Top | None, None]:
        weights, allowed = (scores, None) if as_they_are else run(scores, pairs)
        if sparse:
            weights = normalize(weights)
        output = plain_form.weighted_sum(weights, value, allowed, False)
        return output, None if request is None else returned(request.of(weights), request, dtype), None

    return computed
