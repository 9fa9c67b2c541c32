"""A hook for outputs of cuDNN's attention kernel that copies the incoming gradient to the memory layout of the output.

torch caches cuDNN's backward graphs under the strides of query, key and value. The strides of the incoming gradient are
built into the graph, but are not part of the cache key (torch 2.11). In a second backward pass with equal strides of
the inputs but other strides of the gradient (as that of a mean over the queries, or of a compiled function beside an
eager one), cuDNN reads the gradient with the strides of the first pass, and returns wrong gradients without an error.
The output's strides follow the query's, so a gradient with the strides of the output always fits the cached graph.
Under vmap the layout cannot be controlled, so other kernels are used there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.core.transforms import transformed
from regard.kernels.dtypes import HALF

Hook = Callable[[Tensor], Tensor | None]


def fed_alike(output: Tensor) -> Tensor:
    """Return the output; if cuDNN computed it, its incoming gradient is copied to the output's strides."""
    # The dtype of the output is tested and not that of the inputs, which autocast may have cast from float32.
    if not output.requires_grad or output.dtype not in HALF:
        return output
    if torch.compiler.is_compiling() or transformed() or output.grad_fn is None:
        return returning_alike(output)
    node = output.grad_fn.name()  # contains the kernel's name; only cuDNN's output needs the hook
    return output if "FlashAttention" in node or "EfficientAttention" in node else returning_alike(output)


def returning_alike(output: Tensor) -> Tensor:
    """Return the same tensor with a hook that copies its incoming gradient to the tensor's own strides.

    A gradient whose last axis is not contiguous, such as that of a sum, is copied by torch itself.
    """
    if torch.compiler.is_compiling():
        return _ReturningAlike.apply(output)
    if output.grad_fn is None or transformed() or output._backward_hooks is not None:
        output.register_hook(returner(output.stride()))
    else:
        add_hook(output, returner(output.stride()))
    return output


class _Hooks(dict[int, Hook]):
    """The hooks of a tensor. This module's hook (key -1) stays last, as the caller's hooks may change the layout."""

    def __setitem__(self, number: int, hook: Hook) -> None:
        ours = self.pop(-1)
        super().__setitem__(number, hook)
        super().__setitem__(-1, ours)


def add_hook(output: Tensor, hook: Hook) -> None:
    """Register a hook without the handle that `register_hook` returns, whose creation takes ten times as long."""
    output._backward_hooks = _Hooks({-1: hook})
    output.grad_fn._register_hook_dict(output)  # pyrefly: ignore[missing-attribute]


def returner(strides: tuple[int, ...]) -> Hook:
    """Return a hook that copies gradients to these strides, unless the last axis of the gradient is not contiguous."""

    def returned(grad: Tensor) -> Tensor | None:
        if grad.stride() == strides or grad.stride(-1) != 1:
            return None
        return grad.new_empty_strided(grad.shape, strides).copy_(grad)

    return returned


class _ReturningAlike(torch.autograd.Function):
    """The form of the hook for torch.compile, which cannot trace hooks: the gradient is always copied."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return torch.empty_like(output).copy_(grads[0])
