"""`attention` (score, normalise, weighted sum) and `explain`, which reports how a call would be computed."""

import functools
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from regard.core import dispatch, recent_calls, recompute, sharding, torch_names
from regard.core.attended import Attended, with_output
from regard.core.backends.block_grid import grid, values_unavailable
from regard.core.biases import Bias
from regard.core.dispatch import BACKENDS, Backend, stored
from regard.core.fields import as_lines, as_table
from regard.core.masks import Mask
from regard.core.normalizers import Normalizer, Softmax
from regard.core.problem import Problem, build, rebuild
from regard.core.recent_calls import recall, remember
from regard.core.requests import Request, Top, returned
from regard.core.scores import ScaledDot, Score
from regard.core.signatures import signature
from regard.core.torch_names import Unknown
from regard.kernels import availability

AnyScore = Score | Callable[[Tensor, Tensor], Tensor]


Observer = Callable[[Problem, Callable[[], "Attended"]], "Attended"]
# Functions that observe every attention call. Each receives the `Problem` and a function that computes the result, and
# returns the result. There is usually no observer, and a call then only tests whether this tuple is empty.
observers: tuple[Observer, ...] = ()


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of `explain`: the backend of a call, why others were refused, operations, memory and the kernel.

    `refused` maps the names of backends to reasons: those that cannot compute the call, and those that are tried before
    the chosen one and would be slower; if the caller named a backend, all others. `flops` is an estimate of the
    multiplications and additions of the forward pass over the pairs that the mask allows. `bytes` is an estimate of the
    working memory without inputs, output and requested weights. `kernel` names the code of the backend that runs for
    these tensors, such as "flash", "triton window" or "exponential (compiled)".

    >>> explain(torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(5, 8), backend="sdpa")
    Plan
      backend  sdpa
      ...
      flops    640
      bytes    0
      ...
    """

    backend: str
    refused: dict[str, str]
    flops: int
    bytes: int
    kernel: str

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
    """Compute normalize(score(query, key) + bias) @ value: a weighted sum of the values for each query.

    query (…, h, q, d), key (…, g, k, d), value (…, g, k, e) → output (…, h, q, e). Leading axes broadcast; the head
    axis may be missing; h is a multiple of g, and query head i attends to key head i // (h / g). The output of a query
    that may attend to no key is zero.

    >>> out = attention(torch.tensor([[1.0, 0.0]]), torch.eye(2), torch.eye(2), score=lambda q, k: q @ k.mT)
    >>> out.output
    tensor([[0.7311, 0.2689]])
    """
    if unknown:
        torch_names.refuse("attention", attention, unknown, torch_names.CALL)
    if sharding.current is not None:
        return _sharded(sharding.current, query, key, value, score, normalize, mask, bias, dropout, weights, backend)
    described: Hashable | None = None
    if backend == "auto" and generator is None and not observers:
        route: dispatch.Route | None = None
        found: Any = None
        call = None if is_dynamo_compiling() else recent_calls.compiled_call
        if call is None:
            route = recall(query, key, value, score, normalize, mask, bias, dropout, weights)
        else:
            found = call(query, key, value, score, normalize, mask, bias, dropout, weights)
            if type(found) is Attended:
                return found
            route = found
        if route is None:
            described = signature(query, key, value, score, normalize, mask, bias, dropout, weights)
            # `described` is None under torch.compile, which must not trace the dictionary of stored `Route` objects:
            # each new entry would force a recompilation.
            route = None if described is None else stored(described)
            if route is not None:
                remember(query, key, value, score, normalize, mask, bias, dropout, weights, route)
        if route is not None:
            tried = route is found  # the compiled lookup has called the functions, which refused the values
            if route.with_request is not None and not tried:
                results = route.with_request(query, key, value, score, mask, bias, weights)
                if results is not None:
                    return Attended(*results)
            if route.direct is not None and not tried:
                output = route.direct(query, key, value, score, mask, bias)
                if output is not None:
                    return with_output(output)
            assert isinstance(score, Score)  # calls with a plain function as score are not cached
            problem = rebuild(query, key, value, score, normalize, mask, bias, dropout, weights)
            return _run(problem, route.choose(problem))
    if described is not None or not _autocasts(query):
        return _attend(query, key, value, score, normalize, mask, bias, dropout, weights, backend, generator, described)
    options: dict[str, Any] = {"normalize": normalize, "mask": mask, "bias": bias, "dropout": dropout}
    options |= {"weights": weights, "backend": backend, "generator": generator}
    if _is_cast(query, key, value, score):  # set_autocast_enabled is several times faster than torch.autocast
        torch.set_autocast_enabled(query.device.type, False)
        try:
            return attention(query, key, value, score=score, **options)
        finally:
            torch.set_autocast_enabled(query.device.type, True)
    with _prepared(query) as cast:
        query, key, value, score = cast(query, key, value, score)
        return attention(query, key, value, score=score, **options)


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, *, score: AnyScore, mask: Tensor, weights: Request
) -> Attended:
    """Compute `attention` where each query has n keys of its own: query (…, h, q, 1, d), key (…, h, q, n, d).

    Local attention (`regard.core.local`) calls this function with the keys around the centre of each query.
    """
    if sharding.current is not None:
        return attention(query, key, value, score=score, mask=mask, weights=weights)
    with _prepared(query) as cast:
        query, key, value, score = cast(query, key, value, score)
        problem = build(query, key, value, score, Softmax(), mask, None, 0.0, weights, None)
        problem = replace(problem, gathered=True)
        chosen = dispatch.choose(problem, "auto", {})
        return _observed(problem, chosen) if observers else _run(problem, chosen)


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
    """Return how `attention` would compute a call with the same arguments, without computing the call.

    >>> explain(torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(5, 8)).refused["additive"]
    'additive scores only, not scaled_dot'
    """
    if unknown:
        torch_names.refuse("explain", explain, unknown, torch_names.CALL)
    with _prepared(query) as cast:
        query, key, value, score = cast(query, key, value, score)
        problem = build(query, key, value, score, normalize, mask, bias, dropout, weights, generator)
    refused: dict[str, str] = {}
    chosen = dispatch.choose(problem, backend, refused)
    for name, other in BACKENDS.items():
        if other is chosen or name in refused:
            continue
        if backend != "auto":
            refused[name] = other.refuses(problem) or "another backend was asked for"
        elif reason := other.refuses_but_for_data(problem):
            refused[name] = reason
    flops, working_bytes = _flops(problem), chosen.working_bytes(problem)
    if problem.request is not None and not chosen.gives_weights(problem):  # the weights need a second pass
        rows, queries = recompute.rows_requested(problem), problem.shape[-2]
        flops += _flops(replace(problem, value=problem.value[..., :0])) * rows // max(1, queries)
        working_bytes = max(working_bytes, recompute.working_bytes(problem))
    return Plan(chosen.name, refused, flops, working_bytes, chosen.kernel(problem))


def _attend(
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
    generator: torch.Generator | None,
    described: Hashable | None,
) -> Attended:
    """Compute a call outside of autocast, with all checks, and cache its `Route` (the choice of a backend)."""
    problem = build(query, key, value, score, normalize, mask, bias, dropout, weights, generator)
    problem = problem if backend == "auto" else replace(problem, named=True)
    if described is None:
        chosen = dispatch.choose(problem, backend, {})
    else:
        given = problem.query is query and problem.key is key and problem.value is value
        route = dispatch.store(described, problem, given)
        # The first call with a signature must run the same kernel as later calls, so that a resumed training run gives
        # bit-identical results to a run that was not interrupted.
        if route.with_request is not None:
            results = route.with_request(query, key, value, score, mask, bias, weights)
            if results is not None:
                return Attended(*results)
        output = None if route.direct is None else route.direct(query, key, value, score, mask, bias)
        if output is not None:
            return Attended(output)
        chosen = route.choose(problem)
    return _observed(problem, chosen) if observers else _run(problem, chosen)


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
    """Compute the call over a process group in which each process holds a part of every sequence."""
    if observers:
        raise NotImplementedError("regard.watch does not see attention over a process group")
    with _prepared(query) as cast:
        query, key, value, score = cast(query, key, value, score)
        options = {"mask": mask, "bias": bias, "dropout": dropout, "weights": weights, "backend": backend}
        return over.attend(query, key, value, score=score, normalize=normalize, **options)


def _autocasts(query: object) -> bool:
    """Return whether autocast is enabled for the device of the query."""
    device = query.device.type if isinstance(query, Tensor) else "cpu"
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def _is_cast(query: Any, key: Any, value: Any, score: object) -> bool:
    """Return whether query, key and value of an eager call have autocast's dtype, and the score is a `Score` object."""
    if torch.compiler.is_compiling() or not isinstance(score, Score):
        return False
    if not isinstance(key, Tensor) or not isinstance(value, Tensor):
        return False
    return query.dtype == key.dtype == value.dtype == torch.get_autocast_dtype(query.device.type)


@contextmanager
def _prepared(query: object) -> Iterator[Callable[..., Any]]:
    """Disable autocast, and yield a function that casts tensors to autocast's dtype, as torch's own attention does.

    If autocast is not enabled, the function returns its arguments unchanged.
    """
    if not _autocasts(query):
        yield lambda *arguments: arguments
        return
    device = query.device.type if isinstance(query, Tensor) else "cpu"
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
    """Call the user's score function with autocast enabled, also when the backward pass recomputes the scores."""
    with torch.autocast(query.device.type, dtype):
        return score(query, key)


def _observed(problem: Problem, chosen: Backend) -> Attended:
    """Compute the call inside all `observers`, each of which wraps the previous one."""
    run = functools.partial(_run, problem, chosen)
    for observer in observers:
        run = functools.partial(observer, problem, run)
    return run()


def _run(problem: Problem, chosen: Backend) -> Attended:
    with availability.on(problem.device):
        result = dispatch.attend(problem, chosen)
    weights = result.weights
    if problem.request is not None and weights is None:
        weights = recompute.weights(problem, result.chosen, result.lse)
    output, log_prob = result.output, result.log_prob
    weights = returned(weights, problem.request, problem.query.dtype)
    if problem.headless:  # remove the head axis that was added to inputs without one
        output, log_prob = output.squeeze(0), None if log_prob is None else log_prob.squeeze(0)
        if isinstance(weights, Top):
            weights = Top(weights.values.squeeze(0), weights.indices.squeeze(0))
        elif weights is not None:
            weights = weights.squeeze(0)
    return Attended(output, weights, log_prob)


def _flops(problem: Problem) -> int:
    """Return the number of operations for the scores of all allowed pairs and for the weighted sums of the values."""
    size, value_size = problem.query.shape[-1], problem.value.shape[-1]
    pairs = math.prod(problem.shape) * _share(problem)
    return round(pairs * (problem.score.flops(size) + 2 * value_size))


def _share(problem: Problem) -> float:
    """Return the fraction of pairs that the mask allows; only blocks that are partly masked are evaluated by pair."""
    if problem.mask is None or math.prod(problem.shape) == 0 or values_unavailable(problem.mask, problem.device):
        return 1.0
    device = torch.device("cpu") if problem.device.type == "meta" else problem.device
    blocks = grid(problem, 256, 256)
    count = 0.0
    for rows, some, every in zip(blocks.rows, blocks.some, blocks.every, strict=True):
        for columns, any_seen, all_seen in zip(blocks.columns, some, every, strict=True):
            if all_seen:
                count += len(rows) * len(columns)
            elif any_seen:
                part = problem.mask.allowed(rows, columns, device)
                count += float(part.double().mean()) * len(rows) * len(columns)
    return count / (problem.shape[-2] * problem.shape[-1])
