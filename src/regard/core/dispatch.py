"""Dispatch: one table of backends, tried in order, decides which code computes a call.

`auto` takes the first backend that supports the call and is likely to be the fastest; a backend chosen by name runs or
raises. Conditions that do not depend on shapes (devices, normalisers, kinds of scores) are in the table; the others are
in the backend's `refuses` and `not_worth_it`, which return their reason as a sentence. `plain` is a shortcut for the
most frequent calls, for which building a `Problem` would take longer than the kernel; it runs the kernel that the table
would choose (a test checks this).
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from regard.core.backends import additive, blocked, flex, ranges, reference, sdpa, short, torch_sdpa
from regard.core.backends.result import Result
from regard.core.masks import And, Band, Mask, Padding, Segments
from regard.core.nonfinite import quickly_finite
from regard.core.normalizers import Softmax
from regard.core.problem import Problem
from regard.core.requests import Full
from regard.core.scores import FLOATS, Additive, ScaledDot
from regard.core.transforms import beyond_one_derivative, mapped, transformed


@dataclass(frozen=True)
class Backend:
    """A backend. `products` and `additive` restrict it to one kind of scores."""

    module: ModuleType
    serves: str
    devices: tuple[str, ...] = ()  # empty: every device
    softmax: bool = False  # whether softmax is the only supported normaliser
    products: bool = False
    additive: bool = False

    @property
    def name(self) -> str:
        return self.module.NAME

    @property
    def working_bytes(self) -> Callable[[Problem], int]:
        """Return the bytes of working memory beside inputs and output."""
        return self.module.working_bytes

    @property
    def attend(self) -> Callable[[Problem], Result]:
        return self.module.attend

    def kernel(self, problem: Problem) -> str:
        """Return the name of the code that would run."""
        return reference.NAME if problem.empty else self.module.kernel(problem)

    def refuses(self, problem: Problem) -> str | None:
        """Return the reason why the backend cannot compute the problem, or None."""
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
        # If all weights are requested, a matrix of that size is allocated in any case, so the reference costs no more
        # memory unless the score needs intermediate tensors.
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


def choose(problem: Problem, name: str, refused: dict[str, str]) -> Backend:
    """Return the backend for a problem; the reasons of refused backends are added to `refused`."""
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


def plain(query: Tensor, key: Tensor, value: Tensor, score: object, normalize: object, mask: object) -> Tensor | None:
    """Return the output of a simple call by the kernel that the table would choose; None where the table must decide.

    A simple call is softmax of scaled dot products with equal shapes and no mask or a band; on CUDA also with lengths
    and segments, and additive scores without a mask.
    """
    if type(normalize) is not Softmax or not type(query) is type(key) is type(value) is Tensor or transformed():
        return None
    if not query.layout == key.layout == value.layout == torch.strided or query.is_nested or key.is_nested:
        return None
    if type(score) is Additive and mask is None and query.is_cuda:
        return additive.directly(query, key, value, score)
    if type(score) is not ScaledDot or score.softcap is not None:
        return None
    if mask is not None and type(mask) is not Band and not (query.is_cuda and type(mask) in (And, Padding, Segments)):
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
        if keys[2] < sdpa.FEW and not query.is_cuda and not _finite(query, key):
            return None
        return torch_sdpa.attend(query, key, value, scale=score.scale)
    if not isinstance(mask, Band):
        assert isinstance(mask, Mask)
        return ranges.directly(query, key, value, mask, score.scale)
    if mask.low is None and mask.high == 0:
        if not query.is_cuda and not _finite(query, key, value):
            return None
        return torch_sdpa.attend(query, key, value, is_causal=True, scale=score.scale)
    if mask.low is None or mask.high is None or shape != keys or not query.is_cuda:
        return None
    return flex.directly(query, key, value, mask.low, mask.high, score.scale)


def _finite(*tensors: Tensor) -> bool:
    """Return whether the values can be inspected and hold no NaN or Inf, which a kernel might carry past a mask."""
    if tensors[0].device.type != "cpu" or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False  # autocast would change the values
    return quickly_finite(*tensors)
