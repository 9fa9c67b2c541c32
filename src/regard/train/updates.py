"""One update of the parameters: gradients of one or several batches, averaged over all their tokens."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.train.sharded_tensors import whole


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss summed over a batch, and the number of summands, such as tokens; training minimises total / count."""

    total: Tensor
    count: int | Tensor


# loss(model, batch) moves the batch to the device, runs the model, and returns the loss summed over the batch.
LossFunction = Callable[[nn.Module, Any], Loss]


@dataclass(frozen=True)
class Gradients:
    """The total loss and the number of summands (count) of an update's batches, and the norm of the mean gradient."""

    total: float
    count: float
    norm: float
    # further numbers, summed over the workers, that the callback `reduce` appended to total and count
    extra: tuple[float, ...] = ()

    def trouble(self) -> str | None:
        """Return an error message if the loss or the norm of the gradient is not finite, else None."""
        if not math.isfinite(self.total):
            return f"the loss is {self.total}"
        if not math.isfinite(self.norm):
            return f"the norm of the gradient is {self.norm}"
        return None


def differentiated(
    loss: LossFunction, model: nn.Module, batch: Any, precision: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return a batch's total loss and number of summands, on the device; add its gradients to parameters' `grad`."""
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        result = loss(model, batch)
    if result.total.ndim:
        raise ValueError(f"loss must give a total of one number; got shape {tuple(result.total.shape)}")
    result.total.backward()
    return result.total.detach(), torch.as_tensor(result.count, device=device)


def gather(
    model: nn.Module,
    batches: Iterable[Any],
    device: torch.device,
    differentiate: Callable[[Iterable[Any]], Iterable[tuple[Tensor, Tensor]]],
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Gradients | None:
    """Run the backward passes of an update, and return total loss, count and gradient norm; None without batches.

    `differentiate(batches)` adds the gradients of each batch's total to the parameters' `grad`, and yields the batch's
    total and count. The gradients are those of Σ total; `settle` divides them by Σ count. The result is therefore
    independent of how tokens are divided into batches, and batches among workers. `reduce` sums total and count over
    the workers, and may append further numbers. All numbers that the caller needs are copied from the device at once,
    because each copy waits for the device.
    """
    sums = list(differentiate(batches))
    if not sums:
        return None
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        raise ValueError("loss gave a total that no parameter of the model has a part in")
    exact = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    totals, counts = (torch.stack([number.to(exact) for number in column]).sum() for column in zip(*sums, strict=True))
    norm = whole(torch.nn.utils.get_total_norm(gradients))
    total, count, *more, length = torch.cat([reduce(torch.stack([totals, counts])), norm.to(exact)[None]]).tolist()
    if not count > 0:
        raise ValueError(f"loss must give a count of more than 0 for the batches of an update; got {count}")
    return Gradients(total, count, length / count, tuple(more))


@torch.no_grad()
def settle(model: nn.Module, gradients: Gradients, clip: float | None) -> None:
    """Divide the summed gradients by the number of summands of the loss; limit the norm of the result to `clip`."""
    scale = 1.0 / gradients.count
    if clip is not None and gradients.norm > clip:
        scale *= clip / gradients.norm
    torch._foreach_mul_([parameter.grad for parameter in model.parameters() if parameter.grad is not None], scale)
