"""Local attention by the kernels of `local_windows`: tile sizes, prepared launches, and the sort of the queries."""

import functools
import operator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.kernels.memory_order import dense_strides
from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.local_windows import local_forward, local_keys, local_rows

_LAYOUTS = 64  # backward launches are cached for at most this many strides of the output's gradient
# Queries are sorted by centre if there are at least four times as many keys as a program visits for sorted queries, and
# if the work, b · h · q · k · (d + e), is at least _SORTED: for less work, sorting takes longer than it saves. The work
# is multiplied by _LEARNING if gradients are required, and by _EXACT in float32, where a matrix product is six products
# of bfloat16.
_SORTED, _LEARNING, _EXACT = 2**33, 3, 4


class Tuning(NamedTuple):
    """The tile sizes of the forward kernel and of the two backward kernels.

    A tile of vectors has at most `depth` columns: longer vectors are in two tiles.
    """

    forward: Block
    rows: Block
    keys: Block


# Tile sizes by the larger of the sizes of key and value, for half precision and for float32, where a matrix product is
# computed as six products of bfloat16. In half precision, and for sizes above 128, tiles have 32 rows: for 64 and more,
# Triton 3.6 uses Hopper's asynchronous matrix products, and some results were wrong (docs/experiments.md).
HALF = {
    128: Tuning(Block(32, 64, 256, stages=2), Block(32, 32, 256, stages=2), Block(32, 32, 256, stages=2)),
    256: Tuning(
        Block(32, 32, 256, stages=2), Block(32, 32, 256, warps=8, stages=1), Block(32, 32, 256, warps=8, stages=1)
    ),
}
SINGLE = {
    128: Tuning(Block(64, 32, 64, stages=1), Block(64, 32, 64, stages=1), Block(32, 64, 64, stages=1)),
    256: Tuning(
        Block(32, 32, 256, warps=8, stages=1), Block(32, 32, 256, warps=8, stages=1),
        Block(32, 32, 256, warps=8, stages=1),
    ),
}  # fmt: skip


def _columns(size: int, depth: int) -> tuple[int, int]:
    """Return the widths of the two tiles that hold vectors of a size: powers of two, of which the second may be 0.

    Two tiles need fewer registers than one, and between two powers of two they hold fewer zeros.
    """
    width = max(16, triton.next_power_of_2(size))
    return (width, 0) if width <= depth else (depth, max(16, triton.next_power_of_2(size - depth)))


def _unit(*strides: tuple[int, ...]) -> int:
    """Return the largest of 16, 8, 4, 2 and 1 that divides the strides of rows, heads and sequences of all tensors."""
    joined = functools.reduce(operator.or_, (step for stride in strides for step in stride[:3]))
    return min(16, joined & -joined) or 16  # `joined` is 0 if every stride is 0 (broadcast tensors)


def _known(
    query: Tensor, key: Tensor, value: Tensor, centre: Tensor, lengths: Tensor | None, order: Tensor | None, more: Any
) -> tuple[Any, ...] | None:
    """Return a cache key for the properties of the tensors that select the compiled kernel, and `more`.

    Return None if the launch must inspect the tensors: if `lengths` is given, or a tensor is not aligned to 16 bytes.
    """
    if (query.data_ptr() | key.data_ptr() | value.data_ptr() | centre.data_ptr()) & 15 or lengths is not None:
        return None
    return order is None, more


class Launches:
    """The prepared launches for query (b, h, q, d), key (b, h, k, d), value (b, h, k, e) and centre (b, h, q).

    One object runs all calls whose tensors have the shapes, strides and dtypes of the given tensors. `ordered`
    determines whether the queries are sorted by centre; by default, they are sorted if that is likely to save time.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, centre: Tensor, reach: int, scale: float, gaussian: bool,
        ordered: bool | None = None,
    ) -> None:  # fmt: skip
        (b, h, q, d), (k, e) = query.shape, value.shape[2:]
        native, single = query.is_cuda, query.dtype == torch.float32
        self.tuning = (SINGLE if single else HALF)[128 if max(d, e) <= 128 else 256]
        self.constants = {
            "D": d, "E": e, "GAUSSIAN": gaussian, "NATIVE": native,
            "PRECISION": ("six" if single else "ieee") if native else "interpreted",
        }  # fmt: skip
        self.strides = (query.stride(), key.stride(), value.stride(), centre.stride())
        self.shapes, self.dtype = (query.shape, key.shape, value.shape), query.dtype
        self.output, self.window, self.rows = (b, h, q, e), (b, h, q, 2 * reach + 1), (b, h, q)
        self.grads = [dense_strides(*pair) for pair in zip(self.shapes, self.strides, strict=False)]
        self.output_strides = dense_strides(self.output, query.stride() if d == e else (0,) * 4)
        self.numbers, self.slices = (h, q, k, 2 * reach + 1, float(scale), float(reach)), b * h
        block = self.tuning.forward
        near = 2 * reach + 1 + block.rows * k // q
        self.ordered = ordered
        self.work = b * h * q * k * (d + e) * (_EXACT if single else 1) if k >= 4 * near else 0
        width = max(16, min(64, triton.next_power_of_2(2 * reach + 1)))
        self.launch = self._prepared(local_forward, block, (self.output_strides,), -(-q // block.rows), BW=width)
        self.backward: dict[tuple[int, ...], tuple[Prepared, Prepared]] = {}

    def _prepared(
        self, kernel: Any, block: Block, places: tuple[tuple[int, ...], ...], tiles: int, **constants: int
    ) -> Prepared:
        """Return the launch of a kernel; `places` are the strides of its tensors after query, key, value and centre."""
        *given, centre = self.strides
        # Strides are passed in a unit that is a constant of the kernel, so that Triton knows which loads are aligned.
        unit = _unit(*given, *places)
        steps = [[step // unit for step in place[:3]] for place in (*given, *places)]
        numbers = (*steps[0], *steps[1], *steps[2], *centre, *(step for place in steps[3:] for step in place))
        d1, d2 = _columns(self.constants["D"], block.depth)
        e1, e2 = _columns(self.constants["E"], block.depth)
        widths = {"D1": d1, "D2": d2, "E1": e1, "E2": e2, "BM": block.rows, "BN": block.columns}
        constants = {**self.constants, **widths, "UNIT": unit, **constants}
        return Prepared(kernel, (tiles, self.slices, 1), (*numbers, *self.numbers), constants, block)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, centre: Tensor, lengths: Tensor | None, learning: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return output, weights, and the tensors that `gradients` needs besides the inputs."""
        device = query.device
        output = torch.empty_strided(self.output, self.output_strides, dtype=self.dtype, device=device)
        weights = torch.empty(self.window, dtype=self.dtype, device=device)
        lse = torch.empty(self.rows, dtype=torch.float32, device=device) if learning else None
        far = self.work * (_LEARNING if learning else 1) >= _SORTED if self.ordered is None else self.ordered
        order = torch.sort(centre.detach(), -1).indices if far else None
        known = _known(query, key, value, centre, lengths, order, learning)
        self.launch(query, key, value, centre, lengths, order, output, weights, lse, known=known)
        if lse is None:
            return output, weights, ()
        return output, weights, (lse, output if self.dtype == torch.float32 else None, order)

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, centre: Tensor, lengths: Tensor | None, change: Tensor,
        lse: Tensor, output: Tensor | None, order: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Return the gradients of query, key, value and, with a Gaussian, centre (otherwise None)."""
        heads, queries = self.output[1:3]
        if change.stride(-1) != 1 or max(heads * change.stride(1), queries * change.stride(2)) >= 2**31:
            change = change.contiguous()
        if output is not None and output.stride() != self.output_strides:  # a hook of saved tensors may change them
            output = torch.empty_strided(self.output, self.output_strides, dtype=self.dtype, device=query.device).copy_(
                output
            )
        rows, keys = self.backward.get(change.stride()) or self._backward(change.stride())
        query_grad, key_grad, value_grad = (
            torch.empty_strided(shape, place, dtype=self.dtype, device=query.device)
            for shape, place in zip(self.shapes, self.grads, strict=True)
        )
        delta = torch.empty_like(lse)
        slopes = torch.empty_like(lse) if self.constants["GAUSSIAN"] else None
        known = _known(query, key, value, centre, lengths, order, change.data_ptr() & 15)
        rows(query, key, value, centre, lengths, order, output, change, lse, delta, query_grad, slopes, known=known)
        keys(query, key, value, centre, lengths, order, change, lse, delta, key_grad, value_grad, known=known)
        return query_grad, key_grad, value_grad, slopes

    def _backward(self, change: tuple[int, ...]) -> tuple[Prepared, Prepared]:
        """Return the launches of the two backward kernels; `change` has the strides of the output's gradient."""
        (_, rows, keys), (_, queries, places, *_), to = self.tuning, self.numbers, self.grads
        by_rows = self._prepared(local_rows, rows, (self.output_strides, change, to[0]), -(-queries // rows.rows))
        by_keys = self._prepared(local_keys, keys, (change, to[1], to[2]), -(-places // keys.columns))
        if len(self.backward) >= _LAYOUTS:
            self.backward.clear()
        self.backward[change] = by_rows, by_keys
        return by_rows, by_keys
