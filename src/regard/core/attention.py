"""The one call: score, normalise, weighted sum; and what would happen if it were made."""

import difflib
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import recompute, sharding, torch_names
from regard.core.backends import blocked, dot, flex, fused_additive, reference, sdpa, short
from regard.core.backends.blocks import grid, out_of_sight
from regard.core.biases import Bias
from regard.core.custom import Custom
from regard.core.fields import as_lines, as_table
from regard.core.hygiene import quickly_finite
from regard.core.masks import Band, Mask
from regard.core.normalizers import Normalizer, Softmax
from regard.core.problem import Problem, build
from regard.core.requests import Full, LogSumExp, Request, Top
from regard.core.scores import FLOATS, Additive, ScaledDot, Score
from regard.core.torch_names import Unknown
from regard.core.transforms import beyond_one_derivative, mapped, transformed

BACKENDS: dict[str, ModuleType] = {
    backend.NAME: backend for backend in (short, flex, sdpa, fused_additive, blocked, reference)
}
AnyScore = Score | Callable[[Tensor, Tensor], Tensor]


Listener = Callable[[Problem, Callable[[], "Attended"]], "Attended"]
# Who hears of every call: each gets the problem and what computes its result, and gives that result. Nearly always
# nobody, so that a call pays no more than a look at an empty tuple.
listeners: tuple[Listener, ...] = ()


@dataclass(frozen=True, eq=False)
class Attended:
    """What attention gives: `output` (…, h, q, e), the `weights` asked for, `log_prob` (…, h, q) of hard choices."""

    output: Float[Tensor, "... q e"]
    weights: Tensor | Top | None = None
    log_prob: Float[Tensor, "... q"] | None = None

    def __iter__(self) -> Iterator[object]:
        raise TypeError("Attended is no tuple: read its output, weights and log_prob by name")


@dataclass(frozen=True, repr=False)
class Plan:
    """How a call would be computed: the backend, why others were refused, the work and the memory.

    `flops` counts multiplications and additions of the forward pass over the pairs the mask leaves (estimated by
    blocks); `bytes` is the working memory beside inputs, output and requested weights.

    >>> explain(torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(5, 8))
    Plan
      backend  sdpa
      ...
      flops    640
      bytes    0
    """

    backend: str
    refused: dict[str, str]
    flops: int
    bytes: int

    def __repr__(self) -> str:
        return as_lines(self)

    def _repr_html_(self) -> str:
        return as_table(self)


def attention(
    query: Float[Tensor, "... q d"],
    key: Float[Tensor, "... k d2"],
    value: Float[Tensor, "... k e"],
    *,
    score: AnyScore = ScaledDot(),
    normalize: Normalizer = Softmax(),
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    dropout: float = 0.0,
    weights: Request | None = None,
    backend: str = "auto",
    generator: torch.Generator | None = None,
    **unknown: Unknown,
) -> Attended:
    """normalize(score(query, key) + bias) @ value: each query reads every value it may attend, by weight.

    query (…, h, q, d), key (…, g, k, d), value (…, g, k, e) → output (…, h, q, e). Leading axes broadcast; the head
    axis may be missing; h is a multiple of g, and query head i reads key head i // (h / g). A row with nothing to
    attend gives zeros.

    >>> out = attention(torch.tensor([[1.0, 0.0]]), torch.eye(2), torch.eye(2), score=lambda q, k: q @ k.mT)
    >>> out.output
    tensor([[0.7311, 0.2689]])
    """
    if unknown:
        torch_names.refuse("attention", attention, unknown, torch_names.CALL)
    if sharding.current is not None:
        return _sharded(sharding.current, query, key, value, score, normalize, mask, bias, dropout, weights, backend)
    plain = backend == "auto" and bias is None and weights is None and generator is None
    plain = plain and type(dropout) is float and dropout == 0.0
    if plain and not listeners:
        direct = _direct(query, key, value, score, normalize, mask)
        if direct is not None:
            return Attended(direct)
    with _prepared(query) as cast:
        query, key, value, score = cast(query, key, value, score)
        problem = build(query, key, value, score, normalize, mask, bias, dropout, weights, generator)
        name = _choose(problem, backend, {})
        return _heard(problem, name) if listeners else _run(problem, name)


def explain(
    query: Float[Tensor, "... q d"],
    key: Float[Tensor, "... k d2"],
    value: Float[Tensor, "... k e"],
    *,
    score: AnyScore = ScaledDot(),
    normalize: Normalizer = Softmax(),
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    dropout: float = 0.0,
    weights: Request | None = None,
    backend: str = "auto",
    generator: torch.Generator | None = None,
    **unknown: Unknown,
) -> Plan:
    """What `attention` would do with the same arguments, without doing it.

    >>> explain(torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(5, 8)).backend
    'sdpa'
    """
    if unknown:
        torch_names.refuse("explain", explain, unknown, torch_names.CALL)
    with _prepared(query) as cast:
        query, key, value, score = cast(query, key, value, score)
        problem = build(query, key, value, score, normalize, mask, bias, dropout, weights, generator)
    refused: dict[str, str] = {}
    name = _choose(problem, backend, refused)
    if backend != "auto":
        others = {other: _refuses(other, problem) for other in BACKENDS if other != backend}
        refused = {other: reason or "another backend was asked for" for other, reason in others.items()}
    flops, working_bytes = _flops(problem), BACKENDS[name].working_bytes(problem)
    if _second_pass(problem, name):
        rows, queries = recompute.rows_asked(problem), problem.shape[-2]
        flops += _flops(replace(problem, value=problem.value[..., :0])) * rows // max(1, queries)
        working_bytes = max(working_bytes, recompute.working_bytes(problem))
    return Plan(name, refused, flops, working_bytes)


def _second_pass(problem: Problem, name: str) -> bool:
    """Are the keys read again for what is requested? Some backends give the log-sum-exp with the output."""
    if problem.request is None or name == reference.NAME:
        return False
    if not isinstance(problem.request, LogSumExp):
        return True
    if problem.device.type != "cpu":
        return name != blocked.NAME
    return name == sdpa.NAME and problem.bias is not None


def _sharded(
    over: sharding.Sharding,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: AnyScore,
    normalize: Normalizer,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    dropout: float,
    weights: Request | None,
    backend: str,
) -> Attended:
    """The call over a process group, of which this process holds a part of the sequences."""
    if listeners:
        raise NotImplementedError("regard.watch does not see attention over a process group")
    with _prepared(query) as cast:
        query, key, value, score = cast(query, key, value, score)
        options = {"mask": mask, "bias": bias, "dropout": dropout, "weights": weights, "backend": backend}
        return over.attend(query, key, value, score=score, normalize=normalize, **options)


def _direct(query: Tensor, key: Tensor, value: Tensor, score: object, normalize: object, mask: object) -> Tensor | None:
    """The commonest calls, without ceremony: softmax, plain equal shapes, scaled dot with nothing or a band for a mask.

    On CUDA additive scores without a mask too. A call costs microseconds, and so would describing it; whatever is not
    plainly right goes the long way round.
    """
    if type(normalize) is not Softmax or not type(query) is type(key) is type(value) is Tensor or transformed():
        return None
    if not query.layout == key.layout == value.layout == torch.strided or query.is_nested or key.is_nested:
        return None
    if type(score) is Additive and mask is None and query.is_cuda:
        return fused_additive.directly(query, key, value, score)
    if type(score) is not ScaledDot or score.softcap is not None:
        return None
    if mask is not None and type(mask) is not Band:
        return None
    shape, keys = query.shape, key.shape
    if (
        len(shape) != 4
        or keys != value.shape
        or shape[:2] != keys[:2]
        or shape[3] != keys[3]
        or 0 in shape
        or 0 in keys
    ):
        return None
    if not query.dtype == key.dtype == value.dtype or query.dtype not in FLOATS:
        return None
    if not query.device == key.device == value.device:
        return None
    if query.is_cuda and short.many(query, keys[2]):
        return None
    if mask is None:
        if keys[2] < sdpa.FEW and not query.is_cuda and not _looked_at(query, key):
            return None
        return dot.attend(query, key, value, scale=score.scale)
    assert isinstance(mask, Band)  # whatever else has gone the long way
    if mask.low is None and mask.high == 0:
        if not query.is_cuda and not _looked_at(query, key, value):
            return None
        return dot.attend(query, key, value, is_causal=True, scale=score.scale)
    if mask.low is None or mask.high is None or shape != keys or not query.is_cuda:
        return None
    return flex.directly(query, key, value, mask.low, mask.high, score.scale)


def _looked_at(*tensors: Tensor) -> bool:
    """Can the numbers be looked at, and is none of them NaN or Inf, which a kernel might carry past a mask?"""
    if tensors[0].device.type != "cpu" or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False  # autocast would make other numbers of them
    return quickly_finite(*tensors)


@contextmanager
def _prepared(query: object) -> Iterator[Callable[..., Any]]:
    """Under autocast, tensors in its dtype, as torch casts for its own attention; inside, no further casts."""
    device = query.device.type if isinstance(query, Tensor) else "cpu"
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        yield lambda *arguments: arguments
        return
    dtype = torch.get_autocast_dtype(device)

    def cast(*arguments: object) -> tuple[object, ...]:
        *tensors, score = arguments
        wide = (
            score if isinstance(score, Score) or not callable(score) else functools.partial(_in_autocast, score, dtype)
        )
        return *(_narrowed(tensor, dtype) for tensor in tensors), wide

    with torch.autocast(device, enabled=False):
        yield cast


def _narrowed(thing: object, dtype: torch.dtype) -> object:
    floats = isinstance(thing, Tensor) and thing.is_floating_point() and thing.dtype != torch.float64
    return thing.to(dtype) if floats and isinstance(thing, Tensor) else thing


def _in_autocast(score: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, query: Tensor, key: Tensor) -> Tensor:
    """A score of the caller's own, as the caller meant it to run, in the backward pass too."""
    with torch.autocast(query.device.type, dtype):
        return score(query, key)


def _choose(problem: Problem, backend: str, refused: dict[str, str]) -> str:
    """The backend for a problem; `refused` is told why those before it were not taken."""
    if backend != "auto":
        if not isinstance(backend, str) or backend not in BACKENDS:
            near = difflib.get_close_matches(str(backend).lower(), BACKENDS, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"backend must be auto or one of {', '.join(BACKENDS)}, got {backend!r}{hint}")
        if reason := _refuses(backend, problem):
            raise ValueError(f"backend {backend!r} cannot serve this call: {reason}")
        return backend
    for name, module in BACKENDS.items():
        reason = _against(name, module, problem)
        if reason is None:
            return name
        refused[name] = reason
    raise AssertionError("the reference serves everything")


def _against(name: str, module: ModuleType, problem: Problem) -> str | None:
    """Why `auto` does not take a backend, if it does not."""
    if module is blocked and isinstance(problem.score, Custom):  # which is asked by calling it: last
        return _plain_is_best(name, problem) or module.not_worth_it(problem) or _refuses(name, problem)
    return _refuses(name, problem) or _plain_is_best(name, problem) or module.not_worth_it(problem)


def _refuses(name: str, problem: Problem) -> str | None:
    """Why a backend does not compute this, if it does not."""
    if name != reference.NAME and transformed():
        if name != sdpa.NAME:
            return "torch.func has no rules for its loops and kernels"
        if problem.request is not None:
            return "torch.func has no rules for weights that are computed again"
        if beyond_one_derivative():
            return "torch's kernels have the first derivative, backwards"
        if mapped() and problem.device.type != "cpu" and not sdpa.has_rules(problem):
            return "vmap has rules for its kernels in half precision, without a mask"
    return BACKENDS[name].refuses(problem)


def _plain_is_best(name: str, problem: Problem) -> str | None:
    """Where the reference beats every fused backend."""
    if name == reference.NAME:
        return None
    if problem.empty:
        return "nothing to compute: the plain form is the fastest"
    # All weights are a matrix of that size themselves: it is no loss to form them plainly, unless a score makes more.
    weights = math.prod(problem.shape) * problem.dtype.itemsize
    if isinstance(problem.request, Full) and reference.working_bytes(problem) <= 5 * weights:
        return "all weights are asked for: the plain form has them anyway"
    return None


def _heard(problem: Problem, name: str) -> Attended:
    """The call, told to whoever listens."""
    run = functools.partial(_run, problem, name)
    for listener in listeners:
        run = functools.partial(listener, problem, run)
    return run()


def _run(problem: Problem, name: str) -> Attended:
    with _on(problem.device):
        result = BACKENDS[reference.NAME if problem.empty else name].attend(problem)
    weights = result.weights
    if problem.request is not None and weights is None:
        weights = recompute.weights(problem, result.chosen)
    output, log_prob = result.output, result.log_prob
    if isinstance(weights, Top):
        weights = Top(weights.values.to(problem.query.dtype), weights.indices)
    elif weights is not None and not isinstance(problem.request, LogSumExp):  # which would lose its digits
        weights = weights.to(problem.query.dtype)
    if problem.headless:
        output, weights, log_prob = _drop_head(output), _drop_head(weights), _drop_head(log_prob)
    return Attended(output, weights, log_prob)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels of Triton run on the current device, which may be another GPU than the tensors'."""
    if device.type != "cuda" or torch.compiler.is_compiling() or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _drop_head(found):  # type: ignore[no-untyped-def]
    """Undo the head axis that was put before tensors given without one."""
    if isinstance(found, Top):
        return Top(found.values.squeeze(0), found.indices.squeeze(0))
    return None if found is None else found.squeeze(0)


def _flops(problem: Problem) -> int:
    """Operations of scoring and summing the pairs that the mask leaves."""
    size, value_size = problem.query.shape[-1], problem.value.shape[-1]
    pairs = math.prod(problem.shape) * _share(problem)
    return round(pairs * (problem.score.flops(size) + 2 * value_size))


def _share(problem: Problem) -> float:
    """The part of all pairs that the mask allows; only blocks it cuts through are looked at pair by pair."""
    if problem.mask is None or math.prod(problem.shape) == 0 or out_of_sight(problem.mask, problem.device):
        return 1.0
    device = torch.device("cpu") if problem.device.type == "meta" else problem.device
    found = grid(problem, 256, 256)
    count = 0.0
    for rows, some, every in zip(found.rows, found.some, found.every, strict=True):
        for columns, any_seen, all_seen in zip(found.columns, some, every, strict=True):
            if all_seen:
                count += len(rows) * len(columns)
            elif any_seen:
                part = problem.mask.allowed(rows, columns, device)
                count += float(part.double().mean()) * len(rows) * len(columns)
    return count / (problem.shape[-2] * problem.shape[-1])
