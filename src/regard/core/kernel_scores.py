"""Additive scores by a CUDA kernel, for code that stores rows of scores: requested weights, blockwise normalisers."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.problem import HALF, Problem
from regard.core.scores import Additive
from regard.core.transforms import transformed
from regard.kernels.availability import TRITON


@dataclass(frozen=True, eq=False)
class PairKernel(Additive):
    """The score w · tanh(q + k), computed by a Triton kernel that has a backward pass of its own."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        from regard.kernels.triton.additive.score_operator import scores  # imported here: the module imports Triton

        weight = self.weight.to(query.dtype)
        return scores(query, key, weight.squeeze(0) if weight.ndim == 2 and len(weight) == 1 else weight)

    def floats(self, size: int) -> float:
        return 1.0  # the kernel never stores the hidden layer, only the scores


def by_kernel(problem: Problem) -> Problem:
    """Return the problem with its additive score computed by the kernel, or unchanged if the kernel is unsuitable."""
    score = problem.score
    if type(score) is not Additive or score.activation != "tanh" or problem.empty:
        return problem
    if problem.device.type != "cuda" or not TRITON or problem.query.dtype not in (*HALF, torch.float32):
        return problem
    if torch.compiler.is_compiling() or transformed():
        return problem
    return replace(problem, score=PairKernel(score.weight))
