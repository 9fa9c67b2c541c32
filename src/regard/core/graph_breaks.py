"""Graph breaks: what runs outside of a compiled caller's graph. Importing this imports the compiler."""

from dataclasses import replace

import torch

from regard.core import features, transforms
from regard.core.backends import blocked, reference
from regard.core.backends.result import Result
from regard.core.custom import Custom
from regard.core.problem import Problem, probed, samples


@torch.compiler.disable
def blocks(problem: Problem) -> Result:
    """Attention block by block, in loops that depend on the data."""
    if isinstance(problem.score, Custom):  # under the compiler its captured tensors could not be found
        probed(problem.score, problem.query, problem.key)
        problem = replace(problem, sample=samples(problem))
        if reason := blocked.refuses(problem):
            if problem.named:
                raise ValueError(f"backend {blocked.NAME!r} cannot serve this call: {reason}")
            return reference.attend(problem)
    return blocked.run(problem)


@torch.compiler.assume_constant_result
def kinds() -> str:
    """The transforms around a call, which a compiler traces with it."""
    return " ".join(transforms.kinds())


@torch.compiler.disable
def drawn(size: int, dtype: torch.dtype, device: torch.device) -> features.PerformerFeatures:
    """Features from a cache and a generator, neither of which is for compilers."""
    return features.drawn(size, dtype, device)
