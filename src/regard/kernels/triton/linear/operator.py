"""Linear attention with elu or Performer features, full and causal, as a differentiable function of tensors.

With weights a_ij = φ(q_i)·φ(k_j) and sums over the keys that query i may attend,

    n_i = Σ_j a_ij v_j    d_i = Σ_j a_ij    output_i = n_i / d_i

The keys before a chunk enter as their sum S = Σ φ(k_j) v_jᵀ, z = Σ φ(k_j); those of the chunk itself pair by pair. In
the backward pass, with δ_i = do_i · output_i, the queries after a chunk of keys enter as T = Σ φ(q_i)/d_i do_iᵀ and
t = −Σ φ(q_i)/d_i δ_i. Features are recomputed in each pass, a block of them at a time, and never stored. Sums are in
float32. Must equal `regard.core.linear.linear_attention`.
"""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.triton.additive.plan import Block, launch
from regard.kernels.triton.linear.backward import key_gradients, query_gradients
from regard.kernels.triton.linear.forward import Places, chunk_sums, read
from regard.kernels.triton.linear.log_features import running_sums


class Tuning(NamedTuple):
    """Tile sizes of the kernels; benchmarks try others. A causal chunk has as many positions as a tile has rows.

    Tiles with pairs have 32 rows: from 64 rows on Triton 3.6 uses Hopper's asynchronous products, and the results of
    small head sizes are then wrong.
    """

    causal: Block = Block(32, 32, warps=4, stages=2)
    full: Block = Block(128, 64, warps=8, stages=2)
    wide: Block = Block(64, 64, warps=4, stages=2)  # a full pass for sizes above 64 in float32: shared memory
    sums: Block = Block(32, 64, warps=2, stages=1)
    gradient: Block = Block(32, 32, warps=4, stages=2)
    features: int = 64  # number of features per step
    paired_features: int = 32  # number of features per step in a causal pass, whose pairs take registers too
    project: str = "split"  # how half-precision inputs are multiplied by the directions
    whole: str = "dot"  # how half-precision features are multiplied by float32 sums


TUNING = Tuning()


class _Call(NamedTuple):
    """One call: its lengths, strides and compile-time constants."""

    places: Places
    constants: dict[str, Any]
    causal: bool
    chunk: int
    batch: int
    groups: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, projection: Tensor | None,
           causal: bool) -> "_Call":  # fmt: skip
        (b, h, q, d), (_, g, k, e) = query.shape, value.shape
        # Without a causal mask there are a few large chunks, enough to keep the device busy.
        chunk = TUNING.causal.rows if causal else max(256, -(-k // 64 // 64) * 64)
        chunks, features = -(-k // chunk), d if projection is None else projection.shape[0]
        steps = (0, 0) if keep is None else keep.stride()[:2]
        places = Places(
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *steps, h, h // g, q, k, chunk, chunks,
            chunks + 1, b * g * (chunks + 1) * features, d**-0.25 / math.log(2), 0.5 / math.sqrt(d) / math.log(2),
        )  # fmt: skip
        return cls(places, _constants(query, features, d, e, projection is not None, causal), causal, chunk, b, g)

    def rooms(self, chunks: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the sums of chunks, and one more; totals, shifts and logarithms of first keys."""
        m, e = self.constants["M"], self.constants["E"]
        shape = (self.batch * self.groups, chunks + 1)
        return torch.empty(*shape, m, e, device=like.device), torch.empty(3, *shape, m, device=like.device)

    def only(self, *names: str) -> dict[str, Any]:
        return {name: self.constants[name] for name in names}


def _constants(
    query: Tensor, features: int, size: int, value_size: int, performer: bool, causal: bool
) -> dict[str, Any]:
    dot, precision, project, whole = tl.float32, "three", "three", "three"
    if not query.is_cuda:
        precision = project = whole = "interpreted"
    elif query.dtype != torch.float32:
        # Features of half precision need the range of float32, which float16 lacks.
        dot, precision = (tl.bfloat16, "ieee") if query.dtype == torch.bfloat16 else (tl.float32, "tf32")
        project, whole = TUNING.project, TUNING.whole
    wide = [max(16, 1 << (n - 1).bit_length()) for n in (size, value_size, features)]
    most = TUNING.paired_features if causal else TUNING.features
    block = min(most, wide[2]) if performer else wide[0]
    return {
        "PERFORMER": performer, "PROJECT": project, "DOT": dot, "PRECISION": precision, "WHOLE": whole, "M": features,
        "SIZE": size, "E": value_size, "D": wide[0], "EB": wide[1], "MB": block, "NF": -(-features // block),
        "MP": wide[2],
    }  # fmt: skip


_SUMS = ("PERFORMER", "PROJECT", "DOT", "PRECISION", "M", "SIZE", "E", "D", "EB", "MB", "NF")


def _summed(call: _Call, queries: bool, x: Tensor, y: Tensor, keep: Tensor | None, projection: Tensor,
            output: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute sums over the keys before each chunk, or over the queries after it; the total follows the last."""
    block = TUNING.sums
    n = x.shape[2]
    chunks, heads = -(-n // call.chunk), call.batch * call.groups
    sums, rows = call.rooms(chunks, x)
    tile = min(block.rows, call.chunk)
    launch(
        chunk_sums, (chunks * call.constants["NF"], heads, 1), x, y, x if keep is None else keep, projection, output,
        peaks, sums, rows, call.places, *x.stride()[:3], *y.stride()[:3], n, chunks, chunks + 1, rows[0].numel(),
        QUERIES=queries, CAUSAL=call.causal, KEEP=keep is not None, **call.only(*_SUMS), BN=tile, block=block,
    )  # fmt: skip
    m, e, wide = call.constants["M"], call.constants["E"], call.constants["EB"]
    few = max(1, min(16, 512 // wide))
    launch(
        running_sums, (-(-m // few), heads, 1), sums, rows, rows[0].numel(), chunks, chunks + 1, ALL=call.causal,
        M=m, E=e, EB=wide, RB=few, block=Block(few, wide, warps=1, stages=1),
    )  # fmt: skip
    return sums, rows


def _full_block(query: Tensor, value: Tensor) -> Block:
    wide = query.dtype == torch.float32 and max(query.shape[-1], value.shape[-1]) > 64
    return TUNING.wide if wide else TUNING.full


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, projection: Tensor | None,
                causal: bool) -> Tensor:  # fmt: skip
        call = _Call.of(query, key, value, keep, projection, causal)
        block = TUNING.causal if causal else _full_block(query, value)
        (b, h, q, _), e = query.shape, value.shape[-1]
        random = query if projection is None else projection
        output = torch.empty(b, h, q, e, device=query.device, dtype=query.dtype)
        peaks = torch.empty(2, b, h, q, device=query.device)
        sums, rows = _summed(call, False, key, value, keep, random, output, peaks)
        launch(
            read, (-(-q // block.rows), b * h, 1), query, key, value, key if keep is None else keep, random, sums, rows,
            output, peaks, call.places, CAUSAL=causal, KEEP=keep is not None, **call.constants, BM=block.rows,
            block=block,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, keep, projection, output, peaks, sums, rows)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep, projection, output, peaks, sums, rows = ctx.saved_tensors
        call: _Call = ctx.call
        (b, h, q, _), g, k = query.shape, call.groups, key.shape[2]
        block = TUNING.gradient._replace(rows=call.chunk) if call.causal else TUNING.gradient
        change = change if change.stride(-1) == 1 else change.contiguous()
        random, hidden = query if projection is None else projection, key if keep is None else keep
        grads = [torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (query, key, value)]
        given = (query, key, value, hidden, random, change, output, peaks, sums, rows)
        options = {"CAUSAL": call.causal, "KEEP": keep is not None, **call.constants, "BM": block.rows}
        steps = change.stride()[:3]
        launch(
            query_gradients, (-(-q // block.rows), b * h, 1), *given, grads[0], call.places, *steps, **options,
            block=block,
        )  # fmt: skip
        later, later_rows = _summed(call, True, query, change, None, random, output, peaks)
        slots = later.shape[1]
        launch(
            key_gradients, (-(-k // block.rows), b * g, 1), *given, later, later_rows, *grads[1:], call.places, *steps,
            slots - 1, slots, later_rows[0].numel(), **options, block=block,
        )  # fmt: skip
        return *grads, None, None, None


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, projection: Tensor | None, causal: bool
) -> Tensor:
    """Return φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1): query (b, h, q, d), key (b, g, k, d), value (b, g, k, e).

    φ is elu + 1, or with `projection` (m, d) Performer's. `keep` (b, g, k) masks keys where it is False; with
    `causal`, query i attends keys j ≤ i, and there are no more keys than queries.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    projection = None if projection is None else projection.detach().contiguous()
    keep = None if keep is None else keep.contiguous().view(torch.uint8)
    return _Linear.apply(query, key, value, keep, projection, causal)
