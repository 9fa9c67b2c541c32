"""Matrix products on the CPU, with a matrix packed once for oneDNN where that is faster than torch's own choice.

torch computes float32 products by MKL. On an AMD processor with AVX-512, MKL reached 86 to 98 GFLOP/s per core, and
less with few rows; oneDNN with a packed matrix reached 105 to 113. torch computes bfloat16 products by oneDNN, but
packs the matrix again at every call. On Intel's processors this module leaves float32 products to MKL. On every
processor it leaves the gradients of matrices (sums of products over rows) to torch: for these gradients oneDNN needs
one operand transposed, and is no faster.
"""

import functools
import pathlib
import platform
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# The number of multiplications over all uses of a matrix from which oneDNN is faster: oneDNN generates code for each
# new shape, which takes about a millisecond, and batches of sentences have many shapes.
LEAST = 2**28
_OFTEN = 16  # the number of products with a matrix from which packing it saves time


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix W (n, k) to multiply rows with; `ready` is W packed or contiguous for oneDNN, or None for torch."""

    weight: Float[Tensor, "n k"]
    ready: Tensor | None

    def times(self, rows: Float[Tensor, "m k"], add: Tensor | None = None) -> Float[Tensor, "m n"]:
        """Return rows Wᵀ + add, where add is (n,) or (m, n), without gradients.

        The result has the dtype to which torch promotes those of the product and of `add`.
        """
        if add is not None and add.dtype != self.weight.dtype:
            return add + self.times(rows)
        if self.ready is None:
            return rows @ self.weight.t() if add is None else torch.addmm(add, rows, self.weight.t())
        if add is not None and add.ndim == 2:
            return torch.ops.mkldnn._linear_pointwise.binary(rows, add.contiguous(), self.ready, None, "add")
        return torch.ops.mkldnn._linear_pointwise(rows, self.ready, add, "none", [], "")

    def into(self, out: Float[Tensor, "m n"], rows: Float[Tensor, "m k"], add: Tensor | None = None) -> None:
        """Write rows Wᵀ + add into `out`."""
        if self.ready is not None:
            out.copy_(self.times(rows, add))
        elif add is None:
            torch.mm(rows, self.weight.t(), out=out)
        else:
            torch.addmm(add, rows, self.weight.t(), out=out)


def matrix(weight: Float[Tensor, "n k"], rows: int, *, uses: int) -> Matrix:
    """Return the matrix (of any strides) prepared for `uses` products with about `rows` rows each.

    The reference implementation of a product with this matrix is `torch.nn.functional.linear`.
    """
    weight = weight.detach()
    if not serves(weight) or rows * uses * weight.numel() < LEAST:
        return Matrix(weight, None)
    if uses >= _OFTEN:
        return Matrix(weight, torch.ops.mkldnn._reorder_linear_weight(weight, rows))
    # oneDNN is slow if neither the matrix nor its transpose is contiguous.
    dense = weight.is_contiguous() or weight.t().is_contiguous()
    return Matrix(weight, weight if dense else weight.contiguous())


def linear(
    rows: Float[Tensor, "*b k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, "n"] | None = None
) -> Float[Tensor, "*b n"]:
    """Return `F.linear(rows, weight, bias)`, by oneDNN forward and backward where that is faster; autocast applies."""
    device = rows.device.type
    few = rows.numel() * len(weight) < LEAST
    plain = torch.is_autocast_enabled(device) or rows.dtype != torch.float32 or few
    if plain or not serves(rows) or forward_ad._current_level >= 0:
        return F.linear(rows, weight, bias)
    output = cast(Tensor, _Linear.apply(rows.reshape(-1, rows.shape[-1]), weight, bias))
    return output.reshape(*rows.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return matrix(weight, len(rows), uses=1).times(rows, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        [upstream_rows] = upstream
        to_rows, to_weight, to_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for second derivatives, because autograd can differentiate torch's own products
            products = (upstream_rows @ weight, upstream_rows.t() @ rows, upstream_rows.sum(0))
            return tuple(
                product if wanted else None for product, wanted in zip(products, ctx.needs_input_grad, strict=True)
            )
        return (
            matrix(weight.t(), len(rows), uses=1).times(upstream_rows) if to_rows else None,
            upstream_rows.t() @ rows if to_weight else None,
            upstream_rows.sum(0) if to_bias else None,
        )


def serves(tensor: Tensor) -> bool:
    """Return whether oneDNN multiplies this tensor: on the CPU, not under torch.compile, in a dtype it speeds up."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or not torch.backends.mkldnn.is_available():
        return False
    return bool(getattr(torch.backends.mkldnn, "enabled", True)) and tensor.dtype in _dtypes()


@functools.cache
def _dtypes() -> tuple[torch.dtype, ...]:
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    if not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return ()
    dtypes: list[torch.dtype] = []
    if _amd() and torch.backends.cpu.get_cpu_capability() == "AVX512":
        dtypes.append(torch.float32)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.append(torch.bfloat16)
    return tuple(dtypes)


def _amd() -> bool:
    """Return whether the processor is made by AMD."""
    try:
        return "AuthenticAMD" in pathlib.Path("/proc/cpuinfo").read_text()[:4096]
    except OSError:
        return "AuthenticAMD" in platform.processor()
