"""Functions that torch.compile does not trace: they break the graph. Importing this module imports torch's compiler."""

from dataclasses import replace

import torch

from regard.core import features, transforms
from regard.core.backends import blocked, reference
from regard.core.backends.result import Result
from regard.core.custom import Custom
from regard.core.problem import Problem, probed, samples


@torch.compiler.disable
def blocks(problem: Problem) -> Result:
    """Compute attention block by block outside of the graph, because the loops depend on the data."""
    if isinstance(problem.score, Custom):  # torch.compile does not trace `probed`, so it is called here
        probed(problem.score, problem.query, problem.key)
        problem = replace(problem, sample=samples(problem))
        if reason := blocked.refuses(problem):
            if problem.named:
                raise ValueError(f"backend {blocked.NAME!r} cannot serve this call: {reason}")
            return reference.attend(problem)
    return blocked.run(problem)


@torch.compiler.assume_constant_result
def kinds() -> str:
    """Return the names of the torch.func transforms around a call, which torch.compile cannot trace."""
    return " ".join(transforms.kinds())


@torch.compiler.disable
def sampled(size: int, dtype: torch.dtype, device: torch.device) -> features.PerformerFeatures:
    """Return the default features of linear attention; torch.compile can trace neither their cache nor generator."""
    return features.sampled(size, dtype, device)
