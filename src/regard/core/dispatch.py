"""Dispatch: the choice of the backend that computes a call, from one table of backends that are tried in order.

`backend="auto"` chooses the first backend of the table that supports the call and that no other backend is expected to
beat. A backend that the caller names is used, or raises an error. Conditions on devices, normalisers and kinds of
scores are in the table. The other conditions are in the functions `refuses` and `not_worth_it` of the backend's module,
which return their reason as a sentence. Conditions on the values of tensors are in `refuses_data`. Apart from
conditions on values, calls with the same signature (the cache key of all arguments but tensor values) are computed
alike, so the choice of their backend is cached as a `Route`.
"""

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from types import ModuleType

from regard.core import summaries
from regard.core.backends import additive, blocked, dot_loops, flex, plain_form, reference, row_form, sdpa, short
from regard.core.backends.plain_form import asks, by_one_kernel
from regard.core.backends.result import Direct, Result, WithRequest
from regard.core.problem import Problem
from regard.core.requests import Full, Rows, TopWeights
from regard.core.scores import Additive, Dot, ScaledDot
from regard.core.transforms import beyond_one_derivative, mapped, transformed

# If `reference` needs at most so many bytes of working memory, by device, it returns requested weights sooner than a
# backend that computes them in a second pass over the keys.
_FEW_BYTES = defaultdict(int, cpu=2**21, cuda=2**25)
_FEW_KEYS, _FEW_PAIRS = 64, 2**20  # limits of `_learned_top`
_NOT_FINITE = "NaN or Inf in query, key, value, bias or their products"


@dataclass(frozen=True)
class Backend:
    """An entry of the table of backends: the module, and conditions on the calls that it supports.

    If `products` is True, the backend supports only scores that can be written as dot products; if `additive` is True,
    only additive scores.
    """

    module: ModuleType
    serves: str
    devices: tuple[str, ...] = ()  # the device types that the backend supports; empty: all
    # The device types on which requested weights do not change whether the backend is worthwhile, because it computes
    # most kinds of requests together with the output.
    with_weights: tuple[str, ...] = ()
    # Whether the backend finds NaN and Inf only while it computes. If it finds any, its `attend` returns None, and so
    # do the functions that its `direct` and `with_request` return.
    late: bool = False
    softmax: bool = False  # whether softmax is the only supported normaliser
    products: bool = False
    additive: bool = False

    @property
    def name(self) -> str:
        return self.module.NAME

    @property
    def working_bytes(self) -> Callable[[Problem], int]:
        """Return the function that estimates the bytes of working memory, without inputs and output."""
        return self.module.working_bytes

    @property
    def attend(self) -> Callable[[Problem], Result | None]:
        """Return the function that computes a call; its result is None if it finds values that it cannot compute."""
        return self.module.attend

    def gives_weights(self, problem: Problem) -> bool:
        """Return whether the requested weights are computed together with the output, without a second pass."""
        gives = getattr(self.module, "gives_weights", None)
        return gives is not None and gives(problem)

    def kernel(self, problem: Problem) -> str:
        """Return the name of the kernel, or of the other code, that would compute the call."""
        return reference.NAME if problem.empty else self.module.kernel(problem)

    def refuses(self, problem: Problem) -> str | None:
        """Return the reason why the backend cannot compute the call, or None."""
        return self.refuses_but_for_data(problem) or self.refuses_data(problem)

    def refuses_but_for_data(self, problem: Problem) -> str | None:
        """Return the reason why the backend cannot compute the call whatever its tensor values, or None."""
        if self.module is not reference and transformed() and (reason := self._no_rules(problem)):
            return reason
        if self.additive and not isinstance(problem.score, Additive):
            return f"additive scores only, not {problem.score.name}"
        if self.devices and problem.device.type not in self.devices:
            return "runs on CUDA only" if self.devices == ("cuda",) else f"no kernel for {problem.device.type}"
        if self.products and (reason := problem.score.why_no_product()):
            return reason
        if self.softmax and not problem.normalize.is_softmax:
            return f"softmax only, not {problem.normalize.name}"
        return self.module.refuses(problem)

    def refuses_data(self, problem: Problem) -> str | None:
        """Return the reason why the backend cannot compute a call with these tensor values, or None."""
        refuses = getattr(self.module, "refuses_data", None)
        return None if refuses is None else refuses(problem)

    @property
    def inspects(self) -> bool:
        """Return whether the backend may refuse a call because of its tensor values, so that other backends must be
        tried next."""
        return self.late or hasattr(self.module, "refuses_data")

    def _no_rules(self, problem: Problem) -> str | None:
        """Return the reason why the backend cannot run inside torch.func, or None."""
        if self.module is not sdpa:
            return "torch.func has no rules for its loops and kernels"
        if problem.request is not None:
            return "torch.func has no rules for weights that are computed again"
        if beyond_one_derivative():
            return "torch's kernels have the first derivative, backwards"
        if mapped() and problem.device.type != "cpu" and not sdpa.has_rules(problem):
            return "vmap has rules for its kernels in half precision, without a mask"
        return None

    def not_worth_it(self, problem: Problem) -> str | None:
        """Return the reason why another backend is faster, or None."""
        if self.module is reference:
            return None
        if problem.empty:
            return "nothing to compute: the plain form is the fastest"
        if problem.device.type in self.with_weights:
            return self.module.not_worth_it(problem)
        # If all weights are requested, a matrix of queries × keys is allocated by each backend, so `reference` needs no
        # more memory than the others unless the score needs intermediate tensors.
        weights = math.prod(problem.shape) * problem.dtype.itemsize
        written = self.module is not blocked and not by_one_kernel(problem) and summaries.writes(problem)
        if isinstance(problem.request, Full) and not written and reference.working_bytes(problem) <= 5 * weights:
            return "all weights are asked for: the plain form has them anyway"
        few = isinstance(problem.request, Rows) or (
            problem.device.type == "cuda" and (asks(problem) or _by_rows(problem) or _learned_top(problem))
        )
        if few and reference.working_bytes(problem) <= _FEW_BYTES[problem.device.type]:
            return "small, and weights are asked for: the plain form has them anyway"
        return self.module.not_worth_it(problem)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(short, "sequences of at most 64 in half precision", ("cuda",), softmax=True, products=True),
        Backend(flex, "windows, segments, softcaps, biases and sigmoid", ("cuda",)),
        Backend(dot_loops, "dot products, by compiled loops", ("cpu",), ("cpu",), late=True),
        Backend(sdpa, "dot products, by torch's fused kernels", softmax=True, products=True),
        Backend(additive, "additive scores, no hidden layer in memory", ("cpu", "cuda"), ("cpu",), additive=True),
        Backend(blocked, "any score and normaliser, in blocks"),
        Backend(reference, "everything, as the specification"),
    )
}


@dataclass(frozen=True)
class Route:
    """The backends and functions that compute calls which differ in tensor values alone.

    `backends` are the backends that support these calls, in the order in which they are tried; all but the last may
    refuse the values of a call. `direct` is a function that runs the kernel of the first backend without building a
    `Problem`. It returns None if it refuses the values of the call. `with_request` is a function for calls that request
    weights, that choose one key (hard attention), or that have no `direct`, and it does not build a `Problem` either.
    Where no such function exists, `direct` or `with_request` is None.
    """

    backends: tuple[Backend, ...]
    direct: Direct | None
    with_request: WithRequest | None = None

    def choose(self, problem: Problem) -> Backend:
        """Return the backend that computes this call, for which `direct` and `with_request` returned None: the first
        backend that does not refuse the values of its tensors."""
        tried = self.backends[0].late and (self.direct is not None or self.with_request is not None)
        left = self.backends[1:] if tried else self.backends
        return next((backend for backend in left[:-1] if not backend.refuses_data(problem)), left[-1])


_ROUTES: dict[Hashable, Route] = {}
_MOST = 4096  # the largest number of stored `Route` objects
# A function that returns the stored `Route` of a signature (the cache key of a call), or None.
stored: Callable[[Hashable], Route | None] = _ROUTES.get


def store(signature: Hashable, problem: Problem, given: bool) -> Route:
    """Store and return the `Route` of a call: the backends and functions that can compute it.

    `given` is whether query, key and value in `problem` are the caller's own tensors, not views of them.
    """
    backends: list[Backend] = []
    for backend in BACKENDS.values():
        if backend.refuses_but_for_data(problem) is None and backend.not_worth_it(problem) is None:
            backends.append(backend)
            if not backend.inspects:
                break
    first, direct, with_request = backends[0], None, None
    if given and not problem.empty and problem.request is None:
        of_backend = getattr(first.module, "direct", None)
        direct = None if of_backend is None else of_backend(problem)
    if given and (problem.request is not None or direct is None):
        of_backend = getattr(first.module, "with_request", None)
        with_request = None if of_backend is None else of_backend(problem)
        if with_request is None and problem.request is not None:
            with_request = _with_request(problem, first)
    if len(_ROUTES) >= _MOST:
        _ROUTES.clear()
    route = Route(tuple(backends), direct, with_request)
    _ROUTES[signature] = route
    return route


def _by_rows(problem: Problem) -> bool:
    """Return whether `row_form` computes the requested weights, and a kernel of `summaries` is not faster."""
    if problem.request is None or not row_form.serves(problem):
        return False
    return type(problem.score) not in (Dot, ScaledDot) or not summaries.serves(problem)


def _learned_top(problem: Problem) -> bool:
    """Return whether the largest weights of few keys are requested with gradients.

    The plain form computes them in fewer operations than a backend that computes the weights again in each pass.
    """
    if not isinstance(problem.request, TopWeights) or not problem.differentiated or not plain_form.serves(problem):
        return False
    return problem.shape[-1] <= _FEW_KEYS and math.prod(problem.shape) <= _FEW_PAIRS


def _with_request(problem: Problem, backend: Backend) -> WithRequest | None:
    """Return a function that computes output and requested weights of calls equal to `problem` but for tensor values.

    The output is computed by the kernel of the backend, and the weights by a kernel for weights. The result is None if
    either kernel does not support the call.
    """
    if problem.differentiated or not summaries.serves(problem):
        return None
    plain, of_backend = replace(problem, request=None), getattr(backend.module, "direct", None)
    run = None if of_backend is None else of_backend(plain)
    return summaries.with_request(problem, run, sdpa.with_lse(plain) if backend.module is sdpa else None)


def choose(problem: Problem, name: str, refused: dict[str, str]) -> Backend:
    """Return the backend for a call, and add to `refused` why the backends before that one were not chosen.

    Backends that are in `refused` when the function is called are not tried.
    """
    if name != "auto":
        return _named(problem, name)
    for backend in BACKENDS.values():
        if backend.name in refused:
            continue
        reason = backend.refuses(problem) or backend.not_worth_it(problem)
        if reason is None:
            return backend
        refused[backend.name] = reason
    raise AssertionError("the reference serves everything")


def attend(problem: Problem, chosen: Backend) -> Result:
    """Compute a call by the chosen backend.

    If that backend finds values that it cannot compute, such as a score that overflows, it raises if the caller named
    it; otherwise the next backend that supports the call computes it.
    """
    if problem.empty:
        return reference.attend(problem)
    refused: dict[str, str] = {}
    result = chosen.attend(problem)
    while result is None:
        if problem.named:
            raise ValueError(f"backend {chosen.name!r} cannot serve this call: {_NOT_FINITE}")
        refused[chosen.name] = _NOT_FINITE
        chosen = choose(problem, "auto", refused)
        result = chosen.attend(problem)
    return result


def _named(problem: Problem, name: object) -> Backend:
    if not isinstance(name, str) or name not in BACKENDS:
        near = difflib.get_close_matches(str(name).lower(), BACKENDS, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend must be auto or one of {', '.join(BACKENDS)}, got {name!r}{hint}")
    if reason := BACKENDS[name].refuses(problem):
        raise ValueError(f"backend {name!r} cannot serve this call: {reason}")
    return BACKENDS[name]
