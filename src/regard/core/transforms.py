"""torch.func (vmap, grad, jvp and others): is a call inside one, and which?"""

import torch
from torch.autograd import forward_ad


def transformed() -> bool:
    """Is a call inside one? The loops and kernels here have no rules for them, and vmap hides the numbers."""
    if torch.compiler.is_compiling():
        return len(_kinds()) > 0
    levels = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return (levels is not None and levels() is not None) or forwards()


def forwards() -> bool:
    """Are derivatives taken along with the values: jvp, jacfwd, linearize, dual numbers?"""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def beyond_one_derivative() -> bool:
    """Are derivatives taken forwards, or more than once? torch's own kernels have the first, backwards."""
    return forwards() or "Jvp" in _kinds() or twice()


def twice() -> bool:
    """Are derivatives of derivatives taken, backwards?"""
    return _kinds().count("Grad") > 1


def mapped() -> bool:
    """Is a call inside vmap?"""
    return "Vmap" in _kinds()


def _kinds() -> list[str]:
    if torch.compiler.is_compiling():
        from regard.core import graph_breaks  # imports the compiler: a second, so only here

        return graph_breaks.kinds().split()
    return kinds()


def kinds() -> list[str]:
    """The transforms around a call, the outermost first."""
    levels = getattr(torch._C._functorch, "get_interpreter_stack", None)
    return [level.key().name for level in (levels() if levels else None) or ()]
