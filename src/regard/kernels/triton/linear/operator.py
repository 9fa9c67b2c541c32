"""Linear attention with elu or Performer features, full or causal, as a differentiable function of tensors.

With weights a_ij = φ(q_i)·φ(k_j) and sums over the keys j that query i may attend,

    n_i = Σ_j a_ij v_j    d_i = Σ_j a_ij    output_i = n_i / d_i

Positions are divided into chunks. The keys before a query's chunk enter as their sums S = Σ φ(k_j) v_jᵀ and z = Σ
φ(k_j), the keys of the chunk itself pair by pair. In the backward pass, with the output's gradient do_i and δ_i = do_i
· output_i, the queries after a chunk of keys enter as T = Σ φ(q_i)/d_i do_iᵀ and t = −Σ φ(q_i)/d_i δ_i. Each pass
computes the features again, a block of them at a time, and never stores them. Sums are in float32. The results must
equal `regard.core.linear.linear_attention`.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.linear.backward import key_gradients, query_gradients
from regard.kernels.triton.linear.forward import Places, chunk_sums, read
from regard.kernels.triton.linear.log_features import running_sums


class Tuning(NamedTuple):
    """Tile sizes and precisions of the kernels; benchmarks try others.

    The columns of `causal` are the positions of a causal chunk. Tiles of pairs have 32 rows: for 64 and more, Triton
    3.6 uses Hopper's asynchronous matrix products, and some results are wrong, for example with sizes 64 and 48 in
    bfloat16.
    """

    causal: Block = Block(32, 32, warps=4, stages=2)
    full: Block = Block(128, 64, warps=8, stages=2)
    wide: Block = Block(64, 64, warps=4, stages=2)  # `full` in float32 for sizes above 64: less shared memory
    sums: Block = Block(32, 64, warps=2, stages=1)
    gradient: Block = Block(32, 32, warps=4, stages=2)
    features: int = 64  # number of features that a step of a loop processes
    paired_features: int = 32  # used in place of `features` with a causal mask, because pairs need registers too
    project: str = "split"  # precision of products of half-precision inputs and Performer's random directions
    whole: str = "dot"  # precision of products of half-precision features and float32 sums


TUNING = Tuning()
SUMS = 4 << 30  # largest size in bytes of the sums of all chunks in a forward pass without gradients


class _Signature(NamedTuple):
    """The properties of a call that determine its kernel launches."""

    query: torch.Size
    value: torch.Size
    strides: tuple[tuple[int, ...], ...]  # strides of query, key and value
    keep: tuple[int, ...] | None  # strides of the mask of keys
    dtype: torch.dtype
    cuda: bool  # whether the kernels run on a GPU, not in Triton's interpreter
    directions: int | None  # number of Performer's directions; None for elu features
    causal: bool
    tuning: Tuning


_SUMS = ("PERFORMER", "PROJECT", "DOT", "PRECISION", "M", "SIZE", "E", "D", "EB", "MB", "NF")


class _Plan:
    """The prepared kernel launches of all calls with the same signature."""

    def __init__(self, call: _Signature) -> None:
        self.call = call
        (b, h, q, d), (_, g, k, e), tuning = call.query, call.value, call.tuning
        features = call.directions or d
        self.constants = _constants(call, features)
        causal, self.gradient = tuning.causal, tuning.gradient
        # Without a causal mask, up to 64 large chunks suffice to keep the device busy.
        self.chunk = causal.columns if call.causal else max(256, -(-k // 64 // 64) * 64)
        self.chunks = -(-k // self.chunk)
        self.bytes = b * g * (self.chunks + 1) * features * e * 4  # size in bytes of the sums of all chunks
        self.places = Places(
            *call.strides[0][:3], *call.strides[1][:3], *call.strides[2][:3], *(call.keep or (0, 0)), h, h // g, q, k,
            self.chunk, self.chunks, self.chunks + 1, b * g * (self.chunks + 1) * features, d**-0.25 / math.log(2),
            0.5 / math.sqrt(d) / math.log(2),
        )  # fmt: skip
        pairs = self.chunk if call.causal else 16  # number of keys of a causal chunk; otherwise unused
        self.options = {"CAUSAL": call.causal, "KEEP": call.keep is not None, **self.constants, "BC": pairs}
        self.sums = self._summed(False, k, call.strides[1], call.strides[2])
        block = causal if call.causal else tuning.full
        if not call.causal and call.dtype == torch.float32 and max(d, e) > 64:
            block = tuning.wide
        grid = (-(-q // block.rows), b * h, 1)
        self.read = Prepared(read, grid, (self.places,), self._tiled(block), block)
        # The launches of the backward pass are cached by the strides of the output's gradient.
        self.gradients = functools.lru_cache(maxsize=16)(self._gradients)

    def rooms(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return two empty tensors for the sums of each chunk and of all chunks.

        The first tensor is for the matrices of the sums; the second tensor is for the totals, the shifts and the
        logarithms of each chunk's first key.
        """
        m, e = self.constants["M"], self.constants["E"]
        shape = (self.call.value[0] * self.call.value[1], -(-length // self.chunk) + 1)
        return torch.empty(*shape, m, e, device=device), torch.empty(3, *shape, m, device=device)

    def _tiled(self, block: Block) -> dict[str, Any]:
        return {**self.options, "BM": block.rows}

    def _summed(self, queries: bool, n: int, x: tuple[int, ...], y: tuple[int, ...]) -> tuple[Prepared, Prepared]:
        """Return two launches that sum over the keys before each chunk or, with `queries`, over the queries after it.

        The first launch sums each chunk; the second adds up the chunks, and stores the sum of all after the last one.
        """
        block, constants = self.call.tuning.sums, self.constants
        chunks, heads = -(-n // self.chunk), self.call.value[0] * self.call.value[1]
        m, e, wide = constants["M"], constants["E"], constants["EB"]
        slots = (chunks, chunks + 1, heads * (chunks + 1) * m)
        names = {name: constants[name] for name in _SUMS}
        keep = self.call.keep is not None and not queries
        options = {"QUERIES": queries, "CAUSAL": self.call.causal, "KEEP": keep, **names}
        options["BN"] = min(block.rows, self.chunk)
        grid = (chunks * constants["NF"], heads, 1)
        each = Prepared(chunk_sums, grid, (self.places, *x[:3], *y[:3], n, *slots), options, block)
        few = max(1, min(16, 512 // wide))
        sizes = {"ALL": self.call.causal, "M": m, "E": e, "EB": wide, "RB": few}
        numbers = (slots[2], *slots[:2])
        running = Block(few, wide, warps=1, stages=1)
        return each, Prepared(running_sums, (-(-m // few), heads, 1), numbers, sizes, running)

    def _gradients(self, change: tuple[int, ...]) -> tuple[Prepared, tuple[Prepared, Prepared], Prepared]:
        """Return the launches of the backward pass; `change` are the strides of the output's gradient."""
        (b, h, q, _), (_, g, k, _), block = self.call.query, self.call.value, self.gradient
        options, chunks = self._tiled(block), -(-q // self.chunk)
        first = Prepared(query_gradients, (-(-q // block.rows), b * h, 1), (self.places, *change), options, block)
        numbers = (self.places, *change, chunks, chunks + 1, b * g * (chunks + 1) * self.constants["M"])
        last = Prepared(key_gradients, (-(-k // block.rows), b * g, 1), numbers, options, block)
        return first, self._summed(True, q, self.call.strides[0], change), last


def _constants(call: _Signature, features: int) -> dict[str, Any]:
    dot, precision, project, whole = tl.float32, "three", "three", "three"
    if not call.cuda:
        precision = project = whole = "interpreted"
    elif call.dtype != torch.float32:
        # Features need the range of float32 even for half-precision inputs; bfloat16 has it, float16 has not.
        dot, precision = (tl.bfloat16, "ieee") if call.dtype == torch.bfloat16 else (tl.float32, "tf32")
        project, whole = call.tuning.project, call.tuning.whole
    size, value_size, performer = call.query[-1], call.value[-1], call.directions is not None
    wide = [max(16, 1 << (n - 1).bit_length()) for n in (size, value_size, features)]
    most = call.tuning.paired_features if call.causal else call.tuning.features
    block = min(most, wide[2]) if performer else wide[0]
    return {
        "PERFORMER": performer, "PROJECT": project, "DOT": dot, "PRECISION": precision, "WHOLE": whole, "M": features,
        "SIZE": size, "E": value_size, "D": wide[0], "EB": wide[1], "MB": block, "NF": -(-features // block),
        "MP": wide[2],
    }  # fmt: skip


_plan = functools.lru_cache(maxsize=512)(_Plan)


def _forward(plan: _Plan, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, projection: Tensor | None,
             output: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    """Write the output; return the exponents and divisors of its rows, and the sums of the keys before each chunk."""
    random, hidden = query if projection is None else projection, key if keep is None else keep
    peaks = torch.empty(2, *output.shape[:-1], device=query.device)
    sums, rows = plan.rooms(key.shape[2], query.device)
    plan.sums[0](key, value, hidden, random, output, peaks, sums, rows)
    plan.sums[1](sums, rows)
    plan.read(query, key, value, hidden, random, sums, rows, output, peaks)
    return peaks, sums, rows


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, projection: Tensor | None,
                plan: _Plan) -> Tensor:  # fmt: skip
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        rest = _forward(plan, query, key, value, keep, projection, output)
        ctx.save_for_backward(query, key, value, keep, projection, output, *rest)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep, projection, output, peaks, sums, rows = ctx.saved_tensors
        plan: _Plan = ctx.plan
        change = change if change.stride(-1) == 1 else change.contiguous()
        random, hidden = query if projection is None else projection, key if keep is None else keep
        grads = [torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (query, key, value)]
        given = (query, key, value, hidden, random, change, output, peaks, sums, rows)
        first, (each, running), last = plan.gradients(change.stride()[:3])
        first(*given, grads[0])
        later, later_rows = plan.rooms(query.shape[2], query.device)
        each(query, change, query, random, output, peaks, later, later_rows)
        running(later, later_rows)
        last(*given, later, later_rows, *grads[1:])
        return *grads, None, None, None


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, projection: Tensor | None, causal: bool
) -> Tensor:
    """Return φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1) for query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e).

    φ is elu + 1, or Performer's features with the random directions `projection` (m, d). `keep` (b, g, k) masks keys
    where it is False. With `causal`, query i attends to the keys j ≤ i, and there are no more keys than queries.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    projection = None if projection is None else projection.detach().contiguous()
    keep = None if keep is None else keep.contiguous().view(torch.uint8)
    plan = _plan_of(query, key, value, keep, projection, causal)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Linear.apply(query, key, value, keep, projection, plan)
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    if plan.bytes <= SUMS:
        _forward(plan, query, key, value, keep, projection, output)
        return output
    few = max(1, query.shape[0] * SUMS // plan.bytes)
    for at in range(0, query.shape[0], few):  # only the sums of a few sequences are in memory at a time
        part = slice(at, at + few)
        some = query[part], key[part], value[part], None if keep is None else keep[part], projection
        _forward(_plan_of(*some, causal), *some, output[part])
    return output


def _plan_of(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, projection: Tensor | None,
             causal: bool) -> _Plan:  # fmt: skip
    return _plan(
        _Signature(
            query.shape, value.shape, (query.stride(), key.stride(), value.stride()),
            None if keep is None else keep.stride()[:2], query.dtype, query.is_cuda,
            None if projection is None else projection.shape[0], causal, TUNING,
        )
    )  # fmt: skip
