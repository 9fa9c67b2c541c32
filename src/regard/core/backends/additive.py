"""Additive attention without a tanh for each pair and without the hidden layer of all pairs in memory.

On the CPU the blocks of `blocked` with the score in its exponential form, compiled where there is a C++ compiler: any
normaliser, mask and bias; where that would not be worth compiling, the logistic form. On CUDA Triton kernels from rows
to output, for softmax: the exponential form in float32, a sine series on the tensor cores in half precision.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.core import recompute
from regard.core.backends import blocked, decoding_step, reference
from regard.core.backends.result import Result
from regard.core.biases import DenseBias, Relative, Rule
from regard.core.clauses import clauses
from regard.core.problem import HALF, Problem
from regard.core.scores import Additive
from regard.kernels import compilation
from regard.kernels.additive import exponential, logistic
from regard.kernels.availability import TRITON

NAME = "additive"
_WORTH = 2**26  # pair-features from which a compiled loop earns its compilation
_WORTH_LEARNING = 2**24  # the same where gradients are wanted: there more is gained, and calls are many
_SOME = 2**17  # pair-features from which the logistic form is faster than tanh


@dataclass(frozen=True, eq=False)
class Exponential(Additive):
    """w · tanh(q + k) by exponentials of rows, with gradients of its own."""

    build: bool = False  # compile its loops

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return exponential.scores(query, key, self.weight.to(query.dtype), self.build)

    def floats(self, size: int) -> float:
        return 1.0  # the hidden layer is never in memory, only one matrix the size of the scores


@dataclass(frozen=True, eq=False)
class Logistic(Additive):
    """w · tanh(q + k) by the logistic function."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return logistic.scores(query, key, self.weight.to(query.dtype))


def refuses(problem: Problem) -> str | None:
    """Why this is not additive attention it knows."""
    if problem.device.type == "cuda":
        return _kernels_refuse(problem)
    assert isinstance(problem.score, Additive)
    if problem.score.activation != "tanh":
        return f"{problem.score.activation} has no exponential form"
    return blocked.refuses(problem)


def _kernels_refuse(problem: Problem) -> str | None:
    """Why the Triton kernels do not compute this, if they do not."""
    if not TRITON:
        return "Triton is not installed"
    if not problem.normalize.is_softmax:
        return f"softmax only on CUDA, not {problem.normalize.name}"
    if problem.query.dtype not in (*HALF, torch.float32):
        return f"its kernels do not compute in {problem.query.dtype}"
    if problem.bias is not None and not isinstance(problem.bias, (DenseBias, Rule)):
        return "its kernels take a bias as a tensor or as a rule of distance"
    found = clauses(problem.mask, *problem.shape[-2:])
    if found is None:
        return "its kernels take masks without | and ~"
    if found.by_head or len(found.segments) > 1:
        return "its kernels take one length and one list of segments for all heads"
    return None


def not_worth_it(problem: Problem) -> str | None:
    """Where the plain form is as fast."""
    if problem.device.type != "cpu" or _features(problem) >= _worth(problem) or _logistic_serves(problem):
        return None
    return "small: the plain form is the fastest"


def working_bytes(problem: Problem) -> int:
    """On the CPU a block of scores, however many features (the logistic form: all of few); on CUDA rows' features."""
    if problem.device.type == "cpu":
        if _logistic_serves(problem):
            return (reference if blocked.not_worth_it(problem) else blocked).working_bytes(problem)
        return blocked.working_bytes(_exponential(problem))
    columns = 32 if problem.query.dtype in HALF else 2  # of each hidden unit: sines and cosines of 16 harmonics
    return (problem.query.numel() + problem.key.numel()) * columns * problem.query.element_size()


def kernel(problem: Problem) -> str:
    """A form of `regard.kernels.additive` on the CPU, a kernel of `regard.kernels.triton` on CUDA."""
    if problem.device.type == "cuda":
        return "triton decode" if _is_step(problem) else "triton additive"
    score = quicker(problem).score
    if isinstance(score, Exponential):  # numbers too large for exponentials go by tanh in any case
        built = score.build and exponential.worth_building(problem.dtype, *problem.shape[-2:])
        return "exponential (compiled)" if built else "exponential"
    return "logistic" if isinstance(score, Logistic) else "tanh"


def attend(problem: Problem) -> Result:
    """Attention by the logistic or the exponential form, or by the kernels."""
    if problem.device.type == "cuda":
        return _by_kernels(problem)
    plain = _logistic_serves(problem) and blocked.not_worth_it(problem)
    backend: Any = reference if plain else blocked
    problem = quicker(problem)
    result = backend.attend(problem)
    if problem.request is None or result.weights is not None:
        return result
    return result._replace(weights=recompute.weights(problem, result.chosen))


def quicker(problem: Problem) -> Problem:
    """The problem on the CPU with its score in the logistic or in the exponential form."""
    if not _logistic_serves(problem):
        return _exponential(problem)
    assert isinstance(problem.score, Additive)
    weight = problem.score.weight
    exact = logistic.exact_enough(problem.query, problem.key, weight)
    return replace(problem, score=Logistic(weight)) if exact else problem


def _features(problem: Problem) -> int:
    """Pairs times hidden units."""
    return math.prod(problem.shape) * problem.query.shape[-1]


def _worth(problem: Problem) -> int:
    return _WORTH_LEARNING if problem.differentiated else _WORTH


def _logistic_serves(problem: Problem) -> bool:
    """Is this too little to compile, and enough to gain by the logistic form? It looks at the data."""
    if torch.compiler.is_compiling() or problem.dtype != torch.float32:
        return False
    return _SOME <= _features(problem) < _worth(problem)


def _exponential(problem: Problem) -> Problem:
    assert isinstance(problem.score, Additive)
    build = not torch.compiler.is_compiling() and compilation.compiler()
    return replace(problem, score=Exponential(problem.score.weight, build=build))


def directly(query: Tensor, key: Tensor, value: Tensor, score: Additive) -> Tensor | None:
    """The commonest call without describing it first, where `attend` would take the same kernels; None elsewhere.

    The tensors are on CUDA, and nothing is masked.
    """
    weight, shape = score.weight, query.shape
    if (
        not query.dim() == key.dim() == value.dim() == 4
        or shape[:2] != key.shape[:2]
        or key.shape[:3] != value.shape[:3]
    ):
        return None
    if shape[3] != key.shape[3] or weight.shape not in (shape[3:], (shape[1], shape[3])):
        return None
    if 0 in shape or 0 in key.shape or value.shape[3] == 0 or shape[2] <= decoding_step.MOST:
        return None
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (*HALF, torch.float32):
        return None
    if not query.device == key.device == value.device == weight.device:
        return None
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda") or not TRITON:
        return None
    if query.device.index != torch.cuda.current_device():
        return None
    from regard.kernels.additive.fused import additive_attention  # imports Triton: only where it is used

    return additive_attention(query, key, value, weight, activation=score.activation)[0]


def _is_step(problem: Problem) -> bool:
    return isinstance(problem.score, Additive) and problem.score.activation == "tanh" and decoding_step.serves(problem)


def _by_kernels(problem: Problem) -> Result:
    from regard.kernels.additive.fused import additive_attention  # imports Triton: only where it is used

    assert isinstance(problem.score, Additive)
    lead, weight = problem.query.shape[:-3], problem.score.weight
    weight = weight.squeeze(0) if weight.ndim == 2 and len(weight) == 1 else weight
    if _is_step(problem):
        return Result(decoding_step.attend(problem, problem.query, problem.key, weight, 1.0))
    query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (problem.query, problem.key, problem.value))
    output, _ = additive_attention(
        query,
        key,
        value,
        weight,
        activation=problem.score.activation,
        dropout=problem.dropout,
        seed=blocked.seed(problem),
        **_pairs(problem, lead),
        **_numbers(problem, lead),
    )
    return Result(output.reshape(*lead, *output.shape[-3:]))


def _pairs(problem: Problem, lead: torch.Size) -> dict[str, Any]:
    """The mask as the kernels take it."""
    found = clauses(problem.mask, *problem.shape[-2:])
    assert found is not None  # refuses() has said so
    pairs: dict[str, Any] = {"band": (found.low, found.high)}
    if found.lengths is not None:
        pairs["lengths"] = found.lengths.expand(*lead, 1).reshape(-1)
    if found.segments:
        ids = (t.expand(*lead, 1, -1).reshape(-1, t.shape[-1]) for t in found.segments[0])
        pairs["query_ids"], pairs["key_ids"] = ids
    if found.dense:
        pairs["mask"] = _four_axes(functools.reduce(torch.logical_and, found.dense), lead)
    return pairs


def _numbers(problem: Problem, lead: torch.Size) -> dict[str, Any]:
    """The bias as the kernels take it."""
    heads, bias = problem.shape[-3], problem.bias
    if isinstance(bias, DenseBias):
        return {"bias": _four_axes(bias.tensor, lead)}
    if bias is None or (isinstance(bias, Relative) and bias.offset == 0):
        return {} if bias is None else {"relative": bias.table.expand(heads, -1)}
    assert isinstance(bias, Rule)  # refuses() has said so
    # A rule as a table of all distances j - i that matter: as long as the sequences, not as large as their pairs.
    reach = bias.reach if isinstance(bias, Relative) else max(problem.shape[-2:])
    far = reach + abs(bias.offset)
    table = bias.values(range(1), range(-far, far + 1), torch.float32).squeeze(-2)
    return {"relative": table.expand(heads, -1)}


def _four_axes(tensor: Tensor, lead: torch.Size) -> Tensor:
    """(batch, heads, queries, keys), with ones where the tensor broadcasts."""
    if len(lead) < 2:
        return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
    return tensor.expand(*lead, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])
