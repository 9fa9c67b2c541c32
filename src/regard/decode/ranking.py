"""The largest entries of each row; on every device the lowest index wins a tie."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.decode.records import Bounds

CHUNK = 64
_KERNEL = (torch.bfloat16, torch.float16, torch.float32)
_LONGEST = 32  # the largest number of ranked tokens for which the Triton kernel is used


def ranked(
    logits: Float[Tensor, "n v"], limits: Bounds, time: Int[Tensor, " 1"], count: int, *, kernels: bool
) -> tuple[Float[Tensor, "n c"], Int[Tensor, "n c"], Float[Tensor, " n"]]:
    """Return log-probabilities and indices of the `count` best tokens that are not excluded, best first.

    The third result is the log-probability of the stop token, even while it is excluded.
    """
    if kernels and logits.dtype in _KERNEL and count <= _LONGEST:
        # imported only here, because the module needs Triton
        from regard.kernels.triton.token_ranking import rank

        return rank(logits, limits.never, time, stop=limits.stop, minimum=limits.minimum, count=count)
    log_probs, at_stop = limits.distribution(logits, time)
    values, tokens = best(log_probs, count)
    return values, tokens, at_stop


def best(values: Float[Tensor, "n v"], count: int) -> tuple[Float[Tensor, "n c"], Int[Tensor, "n c"]]:
    """Return the `count` largest entries of each row, largest first, and their indices; the lowest index wins a tie.

    `torch.topk` returns equal entries in unspecified order. If there may be ties, each row is therefore split into
    chunks. An entry among the `count` best lies in one of the `count` chunks with the largest maxima, where the first
    chunk wins a tie, because every chunk ahead of its own has an entry that ranks above it. One pass over the row
    computes the maxima, and a stable sort orders only the entries of these `count` chunks. If a row has fewer than
    `count` entries, the values after them are −∞.

    >>> best(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
    (tensor([[3., 3., 2.]]), tensor([[1, 2, 3]]))
    """
    rows, size = values.shape
    if count == 1 and size > 0:
        return values.amax(1, keepdim=True), values.argmax(1, keepdim=True)
    if values.device.type == "cpu" and size > count:
        # Without ties the result of topk is unique. Values are checked for ties only on the CPU, because on CUDA a
        # check would make the host wait for the device.
        largest, index = _largest(values, count + 1)
        if not bool((largest[:, 1:] == largest[:, :-1]).any()):
            return largest[:, :count], index[:, :count]
    if size < 2 * CHUNK * count:
        padded = F.pad(values, (0, max(0, count - size)), value=-torch.inf)
        largest, index = padded.sort(dim=1, descending=True, stable=True)
        return largest[:, :count], index[:, :count].clamp(max=max(0, size - 1))
    if size % CHUNK:
        values = F.pad(values, (0, CHUNK - size % CHUNK), value=-torch.inf)
    chunks = values.view(rows, -1, CHUNK)
    order = chunks.amax(-1).sort(dim=1, descending=True, stable=True).indices[:, :count]
    # the chunks are in ascending order, so that a stable sort keeps the order of equal entries
    order = order.sort(dim=1).values
    inside = chunks.gather(1, order[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    largest, place = inside.sort(dim=1, descending=True, stable=True)
    place = place[:, :count]
    index = order.gather(1, place // CHUNK) * CHUNK + place % CHUNK
    return largest[:, :count], index.clamp(max=size - 1)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest entries of each row and their indices; tied entries are in any order.

    Reading the maxima of the chunks, and then only the chunks with the largest maxima, reads a row once, while
    `torch.topk` copies it first.
    """
    rows, size = values.shape
    if size < 2 * CHUNK * count:
        return values.topk(count, dim=1)
    if size % CHUNK:
        values = F.pad(values, (0, CHUNK - size % CHUNK), value=-torch.inf)
    chunks = values.view(rows, -1, CHUNK)
    order = chunks.amax(-1).topk(count, dim=1).indices
    inside = chunks.gather(1, order[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    largest, place = inside.topk(count, dim=1)
    return largest, order.gather(1, place // CHUNK) * CHUNK + place % CHUNK
