"""Linear attention with elu features in half precision, where every query attends to all keys: plans and launches."""

import functools
import operator
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from regard.kernels.derivatives import once_only
from regard.kernels.memory_order import dense_strides
from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.linear.full_kernels import join, key_gradients, key_sums, query_gradients, read


class Tuning(NamedTuple):
    """Tile sizes, and the numbers of chunks into which each pass divides its positions; benchmarks try others.

    `sums` and `rows` are the numbers of programs of a pass that stores sums and of one that does not. A pass has at
    least `least` positions per chunk. Sums of up to `few` chunks are added by each program that reads them, of more
    chunks by a kernel.
    """

    keys: Block = Block(64, 0, warps=4, stages=3)
    read: Block = Block(64, 0, warps=4, stages=3)
    of_queries: Block = Block(64, 0, warps=4, stages=3)
    of_keys: Block = Block(64, 0, warps=4, stages=2)
    sums: int = 528
    rows: int = 1056
    least: int = 256
    few: int = 4


# The tile sizes by the larger of the sizes of key and value.
TUNING = {
    64: Tuning(),
    128: Tuning(
        Block(64, 0, warps=8, stages=3), Block(64, 0, warps=8, stages=3), Block(64, 0, warps=8, stages=2),
        Block(64, 0, warps=8, stages=2),
    ),
    256: Tuning(
        Block(64, 0, warps=8, stages=2), Block(64, 0, warps=8, stages=2), Block(64, 0, warps=8, stages=2),
        Block(64, 0, warps=8, stages=2),
    ),
}  # fmt: skip
_LAYOUTS = 64  # a `Plan` caches backward launches for at most this many strides of the output's gradient


class Signature(NamedTuple):
    """The properties of a call that determine its kernel launches; query, key and value have four axes."""

    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    keep: tuple[int, ...] | None  # strides of the mask of keys
    dtype: torch.dtype
    native: bool  # whether the kernels run on a GPU, not in Triton's interpreter


def _unit(*strides: tuple[int, ...]) -> int:
    """Return the largest of 8, 4, 2 and 1 that divides the strides of rows, heads and sequences of all tensors."""
    joined = functools.reduce(operator.or_, (step for stride in strides for step in stride[:3]))
    return min(8, joined & -joined) or 8  # `joined` is 0 if every stride is 0 (broadcast tensors)


def _near(tensor: Tensor) -> bool:
    """Return whether the kernels can address the rows of each head, which they do with 32 bits."""
    return tensor.shape[2] * tensor.stride(2) + tensor.shape[3] * tensor.stride(3) < 2**31


class Plan:
    """The prepared kernel launches of all calls with the same signature."""

    def __init__(self, call: Signature) -> None:
        (b, h, q, d), (_, g, k, _), (*_, e) = call.shapes
        self.call, sizes = call, [max(64, 1 << (n - 1).bit_length()) for n in (d, e)]
        self.tuning = tuning = TUNING[max(sizes)]
        self.length = sizes[0] * sizes[1] + sizes[0]  # numbers of a stored state: a matrix and a total for each feature
        self.places = [
            dense_strides((*call.shapes[0][:3], e), call.strides[0]),
            *(dense_strides(shape, given) for shape, given in zip(call.shapes, call.strides, strict=True)),
        ]
        # In Triton's interpreter, products of float32 operands are exact.
        precision = "ieee" if call.native else "interpreted"
        dot = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(call.dtype, tl.float32)
        self.constants = {"SIZE": d, "E": e, "D": sizes[0], "EB": sizes[1], "DOT": dot, "PRECISION": precision}
        self.masked = {"KEEP": call.keep is not None, **self.constants}
        self.chunk, self.chunks = self._chunks(k, b * g, tuning.sums, tuning.keys)
        query, key, value = call.strides
        self.keep = call.keep or (0, 0, 0)
        numbers = key[3], value[3], *self.keep, g, k, self.chunk
        narrow = {"NARROW": call.dtype == torch.float16, **self.masked}
        self.sum = self._prepared(
            key_sums, tuning.keys, (self.chunks, b * g), (key, value), numbers, {"BN": tuning.keys.rows, **narrow}
        )
        self.few = self.chunks <= tuning.few
        self.count = self.chunks if self.few else 1
        self.join = self._joined(self.chunks)
        rows, parts = self._chunks(q, b * h, tuning.rows, tuning.read)
        numbers = query[3], h, h // g, q, rows, self.count
        self.read = self._prepared(
            read, tuning.read, (parts, b * h), (query, self.places[0]), numbers,
            {"BM": tuning.read.rows, **self.constants},
        )  # fmt: skip
        self.backward: dict[tuple[int, ...], tuple[Prepared, Prepared]] = {}
        # The backward pass over the queries sums them too.
        self.later_chunk, chunks = self._chunks(q, b * h, tuning.sums, tuning.of_queries)
        self.later_chunks = chunks * (h // g)
        self.later_few = self.later_chunks <= tuning.few
        self.later_count = self.later_chunks if self.later_few else 1
        self.later_join = self._joined(self.later_chunks)

    def _chunks(self, n: int, heads: int, programs: int, block: Block) -> tuple[int, int]:
        """Return the length and the number of chunks of n positions, for about this many programs over all heads."""
        chunk = max(self.tuning.least, -(-n // max(1, programs // heads)))
        chunk = -(-min(n, chunk) // block.rows) * block.rows
        return chunk, -(-n // chunk)

    def _prepared(
        self, kernel: Any, block: Block, grid: tuple[int, int], places: tuple[tuple[int, ...], ...],
        numbers: tuple[int, ...], constants: dict[str, Any],
    ) -> Prepared:  # fmt: skip
        unit = _unit(*places)
        steps = [step // unit for place in places for step in place[:3]]
        return Prepared(kernel, (*grid, 1), (*steps, *numbers), {"UNIT": unit, **constants}, block)

    def _joined(self, count: int) -> Prepared:
        b, g = self.call.shapes[1][:2]
        width, step = 256, min(32, 1 << (count - 1).bit_length())
        constants = {"LENGTH": self.length, "STEP": step, "WIDTH": width}
        return Prepared(join, (-(-self.length // width), b * g, 1), (count,), constants, Block(1, 1, warps=4, stages=1))

    def _room(self, count: int, device: torch.device) -> Tensor:
        b, g = self.call.shapes[1][:2]
        return torch.empty(b * g * count * self.length, dtype=torch.float32, device=device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and the sums of the keys."""
        device = query.device
        # New tensors are aligned to 16 bytes. If the others are too, no property of a tensor needs to be inspected.
        known = None if (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15 or keep is not None else ()
        sums = self._room(self.chunks, device)
        self.sum(key, value, key if keep is None else keep, sums, known=known)
        if not self.few:
            parts, sums = sums, self._room(1, device)
            self.join(parts, sums, known=())
        shape = (*self.call.shapes[0][:3], self.call.shapes[2][3])
        output = torch.empty_strided(shape, self.places[0], dtype=query.dtype, device=device)
        self.read(query, sums, output, known=known)
        return output, sums

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, sums: Tensor, change: Tensor
    ) -> list[Tensor]:
        """Return the gradients of query, key and value."""
        of_queries, of_keys = self.backward.get(change.stride()) or self._backward(change.stride())
        grads = [
            torch.empty_strided(shape, place, dtype=query.dtype, device=query.device)
            for shape, place in zip(self.call.shapes, self.places[1:], strict=True)
        ]
        unaligned = (query.data_ptr() | key.data_ptr() | value.data_ptr() | change.data_ptr()) & 15
        known = None if unaligned or keep is not None else ()
        later = self._room(self.later_chunks, query.device)
        of_queries(query, change, sums, grads[0], later, known=known)
        if not self.later_few:
            parts, later = later, self._room(1, query.device)
            self.later_join(parts, later, known=())
        of_keys(key, value, key if keep is None else keep, sums, later, *grads[1:], known=known)
        return grads

    def _backward(self, change: tuple[int, ...]) -> tuple[Prepared, Prepared]:
        """Return the launches for the gradients of the queries and of the keys and values; `change` are the strides of
        the output's gradient."""
        (b, h, q, _), (_, g, k, _), tuning = self.call.shapes[0], self.call.shapes[1], self.tuning
        query, key, value = self.call.strides
        numbers = query[3], change[3], h, h // g, q, self.later_chunk, self.count
        block = tuning.of_queries
        first = self._prepared(
            query_gradients, block, (self.later_chunks // (h // g), b * h), (query, change, self.places[1]), numbers,
            {"BM": block.rows, **self.constants},
        )  # fmt: skip
        block = tuning.of_keys
        chunk, chunks = self._chunks(k, b * g, tuning.rows, block)
        numbers = key[3], value[3], *self.keep, g, k, chunk, self.count, self.later_count
        last = self._prepared(
            key_gradients, block, (chunks, b * g), (key, value, *self.places[2:]), numbers,
            {"BN": block.rows, **self.masked},
        )  # fmt: skip
        if len(self.backward) >= _LAYOUTS:
            self.backward.clear()
        self.backward[change] = first, last
        return first, last


_plan = functools.lru_cache(maxsize=1024)(Plan)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, plan: Plan) -> Tensor:
        output, sums = plan.forward(query, key, value, keep)
        ctx.save_for_backward(query, key, value, keep, sums)
        ctx.plan = plan
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        once_only("linear attention on CUDA")
        (change,) = upstream
        query, key, value, keep, sums = ctx.saved_tensors
        if change.stride() == (0, 0, 0, 0):  # the gradient of a sum: one row in memory can be loaded as vectors
            change = change[:1, :1, :1].contiguous().expand(change.shape)
        elif change.stride(3) == 0 or not _near(change):
            change = change.contiguous()
        return *ctx.plan.gradients(query, key, value, keep, sums, change), None, None


def linear_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    """Return φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1) for query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e).

    φ is elu + 1; d and e are at most 256, one of them at most 128. `keep` (b, g, k) masks keys where it is False. The
    results must equal `regard.core.linear.linear_attention`.
    """
    query, key, value = (t if _near(t) else t.contiguous() for t in (query, key, value))
    keep = None if keep is None else keep.view(torch.uint8)
    call = Signature(
        (query.shape, key.shape, value.shape), (query.stride(), key.stride(), value.stride()),
        None if keep is None else keep.stride(), query.dtype, query.is_cuda,
    )  # fmt: skip
    plan = _plan(call)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Full.apply(query, key, value, keep, plan)
    return plan.forward(query, key, value, keep)[0]
