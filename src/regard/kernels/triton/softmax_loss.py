"""Cross-entropy of rows of logits and its gradient, in one kernel.

The kernel loads the logits once for the loss. For the gradient, it loads them a second time and overwrites them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _overwrite(
    logits,
    target,
    losses,
    vocabulary,
    ignore,
    on_target,
    on_every,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(target + row)
    real = label != ignore

    # The largest logit and the sum of exponentials are updated together (online softmax), so one pass suffices.
    high = -float("inf")
    total = 0.0
    plain = 0.0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        z = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(z, 0))
        total = total * tl.exp(high - higher) + tl.sum(tl.exp(z - higher), 0)
        plain += tl.sum(tl.where(inside, z, 0.0), 0)
        high = higher
    lse = high + tl.log(total)

    known = (label >= 0) & (label < vocabulary)
    chosen = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(real, lse - on_target * chosen - on_every * plain, 0.0))

    if GRADIENT:
        tl.debug_barrier()  # the target's logit must be loaded before it is overwritten
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            z = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(z - lse) - on_every - tl.where(column == label, on_target, 0.0)
            tl.store(logits + column, tl.where(real, gradient, 0.0).to(logits.dtype.element_ty), mask=inside)


def overwrite(logits: Tensor, target: Tensor, smoothing: float, ignore: int, gradient: bool) -> tuple[Tensor, Tensor]:
    """Return the loss of each row in float32, and the logits, which hold their gradient if `gradient` is true.

    Reference implementation: `regard.kernels.cross_entropy._losses`.
    """
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    settings = (vocabulary, ignore, 1.0 - smoothing, smoothing / vocabulary)
    _overwrite[(rows,)](logits, target, losses, *settings, GRADIENT=gradient, BLOCK=_BLOCK, num_warps=8)
    return losses, logits
