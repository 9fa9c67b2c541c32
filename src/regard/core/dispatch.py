"""Which code serves a call: one table of backends, asked from the top.

`auto` takes the first backend that does not refuse a call and is worth it there; a backend asked for by name serves or
raises. What a backend refuses whatever the shapes is in the table (devices, normalisers, kinds of scores); the rest is
in its module's `refuses` and `not_worth_it`, which give their reason in words. Reasons found in the data are in its
`refuses_data`: what the table says beside those is the same for all calls of one signature, so it is kept as a `Route`.
"""

import difflib
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType

from regard.core.backends import additive, blocked, flex, reference, sdpa, short
from regard.core.backends.result import Direct, Result
from regard.core.problem import Problem
from regard.core.requests import Full
from regard.core.scores import Additive
from regard.core.transforms import beyond_one_derivative, mapped, transformed


@dataclass(frozen=True)
class Backend:
    """A way to compute a call. `products` and `additive` name the only kind of scores it takes."""

    module: ModuleType
    serves: str
    devices: tuple[str, ...] = ()  # () is every device
    softmax: bool = False  # no other normaliser
    products: bool = False
    additive: bool = False

    @property
    def name(self) -> str:
        return self.module.NAME

    @property
    def working_bytes(self) -> Callable[[Problem], int]:
        """Memory beside inputs and output."""
        return self.module.working_bytes

    @property
    def attend(self) -> Callable[[Problem], Result]:
        return self.module.attend

    def kernel(self, problem: Problem) -> str:
        """The name of the code that would run."""
        return reference.NAME if problem.empty else self.module.kernel(problem)

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not compute this, if it does not."""
        return self.refuses_but_for_data(problem) or self.refuses_data(problem)

    def refuses_but_for_data(self, problem: Problem) -> str | None:
        """Why it computes no problem of this signature, if it does not."""
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
        """Why it does not compute these numbers, where it computes others of the same shapes."""
        return self.module.refuses_data(problem) if self.inspects else None

    @property
    def inspects(self) -> bool:
        """May it refuse data? Then the table may have to be asked further at each call."""
        return hasattr(self.module, "refuses_data")

    def _no_rules(self, problem: Problem) -> str | None:
        """Why torch.func does not follow it."""
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
        """Why another backend is faster, if one is."""
        if self.module is reference:
            return None
        if problem.empty:
            return "nothing to compute: the plain form is the fastest"
        # All weights are a matrix of that size themselves: it is no loss to form them plainly, unless a score makes
        # more.
        weights = math.prod(problem.shape) * problem.dtype.itemsize
        if isinstance(problem.request, Full) and reference.working_bytes(problem) <= 5 * weights:
            return "all weights are asked for: the plain form has them anyway"
        return self.module.not_worth_it(problem)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(short, "sequences of at most 64 in half precision", ("cuda",), softmax=True, products=True),
        Backend(flex, "windows, segments, softcaps and biases by distance", ("cuda",), softmax=True),
        Backend(sdpa, "dot products, by torch's fused kernels", softmax=True, products=True),
        Backend(additive, "additive scores, no hidden layer in memory", ("cpu", "cuda"), additive=True),
        Backend(blocked, "any score and normaliser, in blocks"),
        Backend(reference, "everything, as the specification"),
    )
}


@dataclass(frozen=True)
class Route:
    """How calls of one signature are computed.

    `backends` are those that serve them, in order; all but the last inspect the data first. `direct`, where there is
    one, is the kernel of the first for callers who need no `Problem`: it returns None for data that it does not take.
    """

    backends: tuple[Backend, ...]
    direct: Direct | None

    def choose(self, problem: Problem) -> Backend:
        """The backend for a problem of the signature."""
        return next((each for each in self.backends[:-1] if not each.refuses_data(problem)), self.backends[-1])


_ROUTES: dict[Hashable, Route] = {}
_MOST = 4096  # signatures that are kept


def known(signature: Hashable) -> Route | None:
    """The route of calls with this signature, if there was one before."""
    return _ROUTES.get(signature)


def keep(signature: Hashable, problem: Problem, given: bool) -> Route:
    """Keep the route of a problem; `given` says that its tensors are the caller's own, not views with other axes."""
    backends: list[Backend] = []
    for backend in BACKENDS.values():
        if backend.refuses_but_for_data(problem) is None and backend.not_worth_it(problem) is None:
            backends.append(backend)
            if not backend.inspects:
                break
    direct = getattr(backends[0].module, "direct", None)
    plain = given and not problem.empty and problem.request is None and problem.bias is None
    if len(_ROUTES) >= _MOST:
        _ROUTES.clear()
    route = Route(tuple(backends), direct(problem) if plain and direct is not None else None)
    _ROUTES[signature] = route
    return route


def choose(problem: Problem, name: str, refused: dict[str, str]) -> Backend:
    """The backend for a problem; the reasons of those before it are written to `refused`."""
    if name != "auto":
        return _named(problem, name)
    for backend in BACKENDS.values():
        reason = backend.refuses(problem) or backend.not_worth_it(problem)
        if reason is None:
            return backend
        refused[backend.name] = reason
    raise AssertionError("the reference serves everything")


def _named(problem: Problem, name: object) -> Backend:
    if not isinstance(name, str) or name not in BACKENDS:
        near = difflib.get_close_matches(str(name).lower(), BACKENDS, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend must be auto or one of {', '.join(BACKENDS)}, got {name!r}{hint}")
    if reason := BACKENDS[name].refuses(problem):
        raise ValueError(f"backend {name!r} cannot serve this call: {reason}")
    return BACKENDS[name]
