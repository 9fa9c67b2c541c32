"""The output of cuDNN's attention kernel, with the incoming gradient copied to the layout of the output.

On CUDA torch caches cuDNN's backward graphs under the layout of query, key and value; the layout of the incoming
gradient is built into the graph but is not part of the cache key (torch 2.11). A second backward pass over inputs laid
out alike, with a gradient laid out otherwise, such as that of a mean over the queries, or of a compiled function beside
a plain one, is read as if it were laid out like the first: the gradients are wrong, silently. The output's layout
follows the query's, so a gradient laid out like the output always fits. Under vmap the layout cannot be controlled, so
the other kernels are used.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.core.transforms import transformed
from regard.kernels.dtypes import HALF

Hook = Callable[[Tensor], Tensor | None]


def fed_alike(output: Tensor) -> Tensor:
    """Return the output; if cuDNN computed it, the gradient that arrives at it gets its strides."""
    # The output's dtype decides, because autocast may have narrowed float32 inputs.
    if not output.requires_grad or output.dtype not in HALF:
        return output
    if torch.compiler.is_compiling() or transformed() or output.grad_fn is None:
        return returning_alike(output)
    node = output.grad_fn.name()  # the names of the other kernels' nodes
    return output if "FlashAttention" in node or "EfficientAttention" in node else returning_alike(output)


def returning_alike(output: Tensor) -> Tensor:
    """Return the same tensor; the gradient that arrives at it gets the tensor's strides.

    torch itself copies a gradient whose last axis is not contiguous, such as that of a sum.
    """
    if torch.compiler.is_compiling():
        return _ReturningAlike.apply(output)
    if output.grad_fn is None or transformed() or output._backward_hooks is not None:
        output.register_hook(returner(output.stride()))
    else:
        add_hook(output, returner(output.stride()))
    return output


class _Hooks(dict[int, Hook]):
    """The hooks of a tensor: ours, with number -1, runs after those of the caller, which may change the layout."""

    def __setitem__(self, number: int, hook: Hook) -> None:
        ours = self.pop(-1)
        super().__setitem__(number, hook)
        super().__setitem__(-1, ours)


def add_hook(output: Tensor, hook: Hook) -> None:
    """Do the two steps of register_hook: the handle that it returns takes ten times as long to make."""
    output._backward_hooks = _Hooks({-1: hook})
    output.grad_fn._register_hook_dict(output)  # pyrefly: ignore[missing-attribute]


def returner(strides: tuple[int, ...]) -> Hook:
    """Return a hook that gives gradients these strides."""

    def returned(grad: Tensor) -> Tensor | None:
        if grad.stride() == strides or grad.stride(-1) != 1:
            return None
        return grad.new_empty_strided(grad.shape, strides).copy_(grad)

    return returned


class _ReturningAlike(torch.autograd.Function):
    """The version for the compiler, which cannot trace a hook: the gradient is always copied."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return torch.empty_like(output).copy_(grads[0])
