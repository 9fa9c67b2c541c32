"""Detection of torch.func transforms (vmap, grad, jvp and others) around a call."""

import torch
from torch.autograd import forward_ad

# Returns the innermost torch.func transform around the call, or None outside of all transforms.
peek = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


def transformed() -> bool:
    """Return whether a call is inside a torch.func transform.

    The loops and kernels of this library have no rules for transforms, and under vmap values cannot be read.
    """
    if torch.compiler.is_compiling():
        return len(_kinds()) > 0
    return peek() is not None or forward_ad._current_level >= 0


def eager(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether the memory of the tensors holds their values, so that compiled code can read it.

    The memory does not hold the values under torch.compile, torch.func, tracing and dispatch modes, nor for tensor
    subclasses.
    """
    if torch.compiler.is_compiling() or transformed():
        return False
    if torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return False
    return all(
        type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided and not t.is_neg() for t in tensors
    )


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its negative bit is set (`torch.Tensor.is_neg`), because kernels read memory."""
    if torch.compiler.is_compiling() or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor
    return tensor.resolve_neg()


def forwards() -> bool:
    """Return whether forward-mode derivatives are computed: jvp, jacfwd, linearize, dual numbers."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def beyond_one_derivative() -> bool:
    """Return whether forward-mode or second derivatives are computed by torch.func.

    torch's fused kernels only support first derivatives in reverse mode.
    """
    return forwards() or "Jvp" in _kinds() or twice()


def twice() -> bool:
    """Return whether reverse-mode derivatives are nested, as in torch.func.grad of torch.func.grad."""
    return _kinds().count("Grad") > 1


def mapped() -> bool:
    """Return whether a call is inside vmap."""
    return "Vmap" in _kinds()


def _kinds() -> list[str]:
    if torch.compiler.is_compiling():
        from regard.core import graph_breaks  # imported here: the module imports torch's compiler, which takes a second

        return graph_breaks.kinds().split()
    return kinds()


def kinds() -> list[str]:
    """Return the names of the torch.func transforms around a call, outermost first."""
    levels = getattr(torch._C._functorch, "get_interpreter_stack", None)
    return [level.key().name for level in (levels() if levels else None) or ()]
