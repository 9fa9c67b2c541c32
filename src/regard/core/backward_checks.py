"""Checks in a backward pass: the inputs are unchanged since the forward pass, and no second derivative is computed."""

import torch
from torch import Tensor

from regard.core.problem import Problem
from regard.kernels.derivatives import REFERENCE
from regard.kernels.derivatives import once_only as differentiable_once


class Unchanged:
    """The tensors of a call with their version counters, to check that none is changed before the backward pass.

    If a tensor were changed in between, a backward pass that recomputes the scores from it would give wrong gradients.
    """

    def __init__(self, problem: Problem, *, value: bool = True) -> None:
        named = [("query", problem.query), ("key", problem.key), *([("value", problem.value)] if value else [])]
        named += [("score", tensor) for tensor in problem.score.tensors()]
        for name, part in (("mask", problem.mask), ("bias", problem.bias)):
            named += [(name, tensor) for tensor in (part.tensors() if part is not None else ())]
        # torch.compile does not support version counters.
        compiling = torch.compiler.is_compiling()
        self._seen = [] if compiling else [(name, tensor, _version(tensor)) for name, tensor in named]

    def check(self) -> None:
        """Raise if one of the tensors was changed in place since this object was created."""
        if torch.compiler.is_compiling():
            return
        for name, tensor, before in self._seen:
            if _version(tensor) != before:
                raise RuntimeError(
                    f"{name} (shape {tuple(tensor.shape)}) was changed in place between a call of attention and its "
                    "backward pass, which needs it as it was: change a clone instead"
                )


def once_only(backend: str) -> None:
    """Raise if the backward pass of a backend is itself being differentiated."""
    differentiable_once(f"backend {backend!r}", REFERENCE)


def _version(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor; a tensor made in inference mode has no counter."""
    return 0 if tensor.is_inference() else tensor._version
