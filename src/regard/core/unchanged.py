"""What the way back reads again must be what the call read: changed meanwhile, it would give wrong gradients."""

import torch

from regard.core.custom import Custom
from regard.core.listening import version
from regard.core.problem import Problem


class Unchanged:
    """The tensors of a call, and how often each had been changed by then."""

    def __init__(self, problem: Problem, *, value: bool = True) -> None:
        named = [("query", problem.query), ("key", problem.key), *([("value", problem.value)] if value else [])]
        named += [("score", tensor) for tensor in problem.score.reads()]
        for name, part in (("mask", problem.mask), ("bias", problem.bias)):
            named += [(name, tensor) for tensor in (part.tensors() if part is not None else ())]
        self._score = problem.score
        compiling = torch.compiler.is_compiling()  # which does not say how often
        self._seen = [] if compiling else [(name, tensor, version(tensor)) for name, tensor in named]

    def check(self) -> None:
        """Raise if one of them is not what it was."""
        if torch.compiler.is_compiling():  # which does not say either
            return
        for name, tensor, before in self._seen:
            if version(tensor) != before:
                raise RuntimeError(
                    f"{name} (shape {tuple(tensor.shape)}) was changed in place between a call of attention and its "
                    "backward pass, which needs it as it was: change a clone instead"
                )
        if isinstance(self._score, Custom):
            self._score.check_unchanged()
