"""The step of a GRU: its definition, and implementations of it for loops with their own backward passes.

`step` is the definition. Every other implementation in this package must return the same state, the Triton kernels
included (`triton/gru_step.py`, `triton/gru_attention_step.py`). `forth` and `back` are for the CPU, where torch.compile
compiles each into one loop if that saves time. `in_place` and `in_place_back` write into given buffers, as a CUDA graph
requires. States and their gradients have the dtype of the state; matrix products and their gradients have the dtype of
the product, which is narrower under autocast.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels import compilation
from regard.kernels.compilation import compiled

_WORTH = 2**22  # from this number of gates over all steps, compiling `forth` and `back` saves time


def step(gates: Tensor, recurrent: Tensor, hidden: Tensor) -> Tensor:
    """Return the next state (1 − z) n + z h with n = tanh(x_n + r p_n), in torch's order of gates: r, z, n.

    `gates` are the input gates x (…, 3d), `recurrent` the products p of the state h with the matrix, (…, 3d), and
    `hidden` is h (…, d).
    """
    size = hidden.shape[-1]
    reset, update = torch.sigmoid(gates[..., : 2 * size] + recurrent[..., : 2 * size]).chunk(2, -1)
    new = torch.tanh(gates[..., 2 * size :] + reset * recurrent[..., 2 * size :])
    return new + update * (hidden - new)


class Forms(NamedTuple):
    """The functions `forth` and `back` of this module, either both compiled or both not."""

    forth: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], Tensor]
    back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def forms(inputs: Tensor) -> Forms:
    """Return `forth` and `back`, compiled if the input gates (t, b, 3d) have so many numbers that compiling saves time.

    They are not compiled in float64, for a single step or a single sequence, or without a C++ compiler.
    """
    if inputs.numel() < _WORTH or inputs.dtype == torch.float64 or min(inputs.shape) < 2 or not compilation.compiler():
        return Forms(forth, back)
    return Forms(compiled(forth), compiled(back))


def forth(
    inputs: Tensor, read: Tensor | None, product: Tensor, before: Tensor, gates: Tensor, hidden: Tensor
) -> Tensor:
    """Return the next state (b, d) from input gates (b, 3d), `product` = W_hh s + b, and the previous state `before`.

    `read`, if given, is added to the input gates. Columns of the product after the first 3d are ignored. For the
    backward pass r, z, n are written side by side to `gates` (b, 3d), and the part of the product that r multiplies to
    `hidden` (b, d).
    """
    size = before.shape[-1]
    inputs = inputs.to(before.dtype)
    if read is not None:
        inputs = inputs + read
    both = torch.sigmoid(inputs[:, : 2 * size] + product[:, : 2 * size])
    last = product[:, 2 * size : 3 * size].to(before.dtype)
    new = torch.tanh(inputs[:, 2 * size :] + both[:, :size] * last)
    gates.copy_(torch.cat((both, new), -1))
    hidden.copy_(last)
    return new + both[:, size:] * (before - new)


def back(
    gates: Tensor, hidden: Tensor, before: Tensor, dstate: Tensor, upstream: Tensor, dgates: Tensor, dproduct: Tensor
) -> Tensor:
    """Write the gradients of input gates and product, (b, 3d) each, and return a part of the previous state's gradient.

    The returned part is the gradient through the term z · `before` of the next state; the caller adds the gradient
    through the product.
    """
    size = before.shape[-1]
    reset, update, new = gates.split(size, -1)
    dstate = dstate + upstream
    share = dstate * update
    dnew = (dstate - share) * (1 - new * new)
    dreset = dnew * hidden * (reset * (1 - reset))
    dupdate = dstate * (before - new) * (update * (1 - update))
    dgates.copy_(torch.cat((dreset, dupdate, dnew), -1))
    dproduct.copy_(torch.cat((dreset, dupdate, dnew * reset), -1))
    return share


def in_place(gates: Tensor, hidden: Tensor, before: Tensor, mask: Tensor | None, after: Tensor) -> None:
    """Replace the input gates by r, z, n in place, and write the next state to `after`.

    `hidden` is W_hh s + b. Where `mask` is False, the next state of a row is its previous state.
    """
    size = before.shape[-1]
    gates[:, : 2 * size].add_(hidden[:, : 2 * size]).sigmoid_()
    gates[:, 2 * size :].addcmul_(gates[:, :size], hidden[:, 2 * size :]).tanh_()
    torch.lerp(gates[:, 2 * size :], before, gates[:, size : 2 * size], out=after)
    if mask is not None:
        torch.where(mask, after, before, out=after)


def in_place_back(
    gates: Tensor, hidden: Tensor, before: Tensor, mask: Tensor | None, dstate: Tensor, dgates: Tensor, dhidden: Tensor
) -> Tensor:
    """Write the gradients of input gates and `hidden`; return the part of the previous state's gradient that does not
    pass through `hidden`."""
    size = before.shape[-1]
    reset, update, new = gates.split(size, -1)
    here = dstate if mask is None else dstate * mask
    share = here * update
    dnew = (here - share) * (1 - new * new)
    dgates[:, 2 * size :] = dnew
    torch.mul(dnew, reset, out=dhidden[:, 2 * size :])
    slopes = gates[:, : 2 * size] * (1 - gates[:, : 2 * size])
    torch.mul(dnew * hidden[:, 2 * size :], slopes[:, :size], out=dgates[:, :size])
    torch.mul(here * (before - new), slopes[:, size:], out=dgates[:, size : 2 * size])
    dhidden[:, : 2 * size] = dgates[:, : 2 * size]
    return share if mask is None else share + dstate * ~mask
