"""Linear attention with elu or Performer features: by kernels on CUDA, by blocks of matrix products on the CPU.

The module `linear` computes linear attention for every device and feature map, in torch operations.
"""

import functools
import math
import operator
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from regard.core import sharding
from regard.core.features import EluFeatures, Features, PerformerFeatures
from regard.core.linear_masks import allowed_keys, filled
from regard.core.normalizers import Softmax
from regard.core.problem import HALF, Problem
from regard.core.signatures import signature
from regard.core.transforms import transformed
from regard.kernels import availability, linear_blocks, linear_loops, performer_products
from regard.kernels.availability import TRITON

_SIZE = 128  # the largest size of queries, keys and values in the kernels, which hold the sum of φ(k) vᵀ in registers
_CHUNK, _SUMS = 32, 4 << 30  # positions in a causal chunk; largest number of bytes of the sums over all chunks
_WIDE = 220_000  # bytes of shared memory that a kernel for size 128 in float32 needs
_WIDEST = 2048  # the largest size of queries and values that is computed by torch's matrix products
_MANY = 1 << 18  # with fewer query rows over all heads, launching the many matrix products takes longer than they save
TRIAL = False  # whether matrix products are also used for calls for which their time has not been measured on a GPU
_PROGRAMS = 65_535  # the largest number of thread blocks on the second axis of a CUDA kernel launch
DEVICE = "cuda"  # tests set "cpu", to run the kernels in Triton's interpreter

# How a call is computed on CUDA: by the kernels for elu features in half precision without a causal mask, by torch's
# matrix products with kernels between them, or by the kernels for all other calls.
_Way = Literal["full", "products", "chunks"]
ways: dict[Hashable, _Way] = {}  # by the signature of calls without a mask, whose tensors need no other shape
_MANY_WAYS, _SOFTMAX = 4096, Softmax()


def repeated(query: Any, key: Any, value: Any, features: Any, causal: bool) -> tuple[Tensor | None, Hashable]:
    """Return the output of a call without a mask on CUDA if a call with the same signature was computed before.

    Also return the signature for `attend`, or None if the call has none.
    """
    if not isinstance(query, Tensor) or query.device.type != DEVICE or sharding.current is not None:
        return None, None
    if query.is_cuda and query.device.index != availability.current_device():
        return None, None
    described = signature(query, key, value, features, _SOFTMAX, None, None, 0.0, None)
    if described is None:
        return None, None
    described = described, causal
    way = ways.get(described)
    return None if way is None else _computed(way, query, key, value, None, features, causal), described


def serves(problem: Problem, features: Features, causal: bool) -> bool:
    """Return whether this call is computed on CUDA by the kernels, or by matrix products between kernels."""
    if problem.device.type != DEVICE or not TRITON or torch.compiler.is_compiling() or transformed():
        return False
    if problem.query.dtype not in (*HALF, torch.float32) or problem.empty or problem.value.shape[-1] == 0:
        return False
    heads, size = problem.query[..., 0, 0].numel(), problem.value.shape[-1]
    if heads > _PROGRAMS:
        return False
    if isinstance(features, PerformerFeatures):
        count = features.projection.shape[0]
        # In float32 the kernel of the gradients spills registers if vectors have more than 64 columns.
        wide = max(problem.query.shape[-1], size) > _SIZE // 2
        if features.projection.requires_grad or (problem.differentiated and wide and problem.query.dtype not in HALF):
            return False
    elif isinstance(features, EluFeatures):
        count = problem.query.shape[-1]
    else:
        return False
    if _fully(problem, features, causal) or _by_products(problem, features, causal):
        return True
    chunks = problem.shape[-1] // _CHUNK if causal else 0
    fits = heads * chunks * count * size * 4 <= _SUMS
    most = _SIZE if problem.query.dtype in HALF or _shared_memory(problem.device) >= _WIDE else _SIZE // 2
    return fits and max(problem.query.shape[-1], size) <= most


def _by_products(problem: Problem, features: Features, causal: bool) -> bool:
    """Return whether torch's matrix products are faster than the kernels, or the kernels do not support these sizes."""
    wide, dtype = max(problem.query.shape[-1], problem.value.shape[-1]), problem.query.dtype
    if isinstance(features, PerformerFeatures):
        rows = math.prod(problem.query.shape[:-1]) + math.prod(problem.key.shape[:-1])
        fits = rows * features.projection.shape[0] * 4 <= _SUMS  # the features of all rows are stored
        return TRIAL and fits and wide > _SIZE and not causal
    if not isinstance(features, EluFeatures) or wide > _WIDEST:
        return False
    # The kernels hold the sums in registers. In float32 their products also split each number into parts, which takes
    # too many registers at every size.
    if not causal and (dtype == torch.float32 or wide > _SIZE):
        return True
    if TRIAL and (wide > _SIZE or (dtype == torch.float32 and wide > _SIZE // 2)):
        return True
    many = math.prod(problem.query.shape[:-1]) >= _MANY
    return causal and dtype == torch.bfloat16 and _SIZE // 4 < wide <= _SIZE // 2 and many


@functools.cache
def _shared_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def attend(
    problem: Problem, given: tuple[Tensor, ...], features: Features, causal: bool, described: Hashable = None
) -> Tensor:
    """Return the output of linear attention on CUDA, (…, h, q, e).

    `described` is the signature of a call without a mask: if the kernels read the `given` query, key and value as they
    are, `repeated` will compute later calls with this signature in the same way.
    """
    if isinstance(features, PerformerFeatures):
        features.check(problem.query)
    query, key, value, keep = problem.query, problem.key, problem.value, allowed_keys(problem)
    way: _Way = "products" if _by_products(problem, features, causal) else "chunks"
    way = "full" if _fully(problem, features, causal) else way
    if problem.group > 1 and ((way == "products" and causal) or (keep is not None and keep.shape[-2] > 1)):
        key, value = problem.repeat(key), problem.repeat(value)
    if keep is not None:
        if way != "full":  # a query without allowed keys must not affect any result, even if it is NaN
            query = torch.where(filled(keep, query.shape[-2], causal).unsqueeze(-1), query, 0)
        keep = keep.expand(*key.shape[:-1]).reshape(-1, *key.shape[-3:-1])
    if causal and key.shape[-2] > query.shape[-2]:  # no query attends to the keys after the last query's position
        seen = query.shape[-2]
        key, value, keep = key[..., :seen, :], value[..., :seen, :], None if keep is None else keep[..., :seen]
    if described is not None and query.ndim == 4 and all(map(operator.is_, given, (query, key, value))):
        if len(ways) >= _MANY_WAYS:
            ways.clear()
        ways[described] = way
    rows, keys, values = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    with availability.on(problem.device):
        output = _computed(way, rows, keys, values, keep, features, causal)
    output = output.reshape(*problem.shape[:-1], value.shape[-1])
    return output.squeeze(0) if problem.headless else output


def _fully(problem: Problem, features: Features, causal: bool) -> bool:
    """Return whether the kernels of `regard.kernels.triton.linear.full` compute this call."""
    sizes = problem.query.shape[-1], problem.value.shape[-1]
    elu = isinstance(features, EluFeatures) and not causal and problem.query.dtype in HALF
    return elu and min(sizes) <= _SIZE and max(sizes) <= 2 * _SIZE


def _computed(
    way: _Way, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, features: Features, causal: bool
) -> Tensor:
    """Return the output for query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e)."""
    if way == "products":
        return _multiplied(query, key, value, keep, features, causal)
    # The modules are imported here, because they import Triton.
    if way == "full":
        from regard.kernels.triton.linear import full

        return full.linear_attention(query, key, value, keep)
    from regard.kernels.triton.linear import operator as chunks

    projection = features.projection if isinstance(features, PerformerFeatures) else None
    return chunks.linear_attention(query, key, value, keep, projection, causal)


def _multiplied(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, features: Features, causal: bool
) -> Tensor:
    """Return the output, computed by torch's matrix products, with Triton kernels before and after them."""
    from regard.kernels.triton.linear import causal_products, products  # imported here: the modules import Triton

    dtype, performer = query.dtype, features if isinstance(features, PerformerFeatures) else None
    # Sums over many keys exceed the range of float16, logarithms of features need float32, and the products without a
    # causal mask support only float32.
    if dtype == torch.float16 or (dtype in HALF and (performer or not causal)):
        query, key, value = query.float(), key.float(), value.float()
    if causal:
        return causal_products.linear_attention(query, key, value, keep).to(dtype)
    if keep is not None:  # a masked value may be NaN, and 0 · NaN is NaN
        value = torch.where(keep.unsqueeze(-1), value, 0)
        key = torch.where(keep.unsqueeze(-1), key, 0) if performer else key
    if performer is None:
        return products.linear_attention(query, key, value, keep).to(dtype)
    (b, h, q, d), g = query.shape, key.shape[1]
    flat = query.reshape(b * g, h // g * q, d), key.flatten(0, 1), value.flatten(0, 1)
    keep = None if keep is None else keep.flatten(0, 1)
    output = performer_products.linear_attention(performer.log_features, performer.projection, *flat, keep)
    return output.view(b, h, q, -1).to(dtype)


def blocks_serve(problem: Problem, given: tuple[Tensor, ...], features: Features, causal: bool) -> bool:
    """Return whether this call is computed on the CPU by blocks of matrix products."""
    if problem.device.type != "cpu" or problem.group > 1 or problem.empty:
        return False
    performer = isinstance(features, PerformerFeatures)
    if performer and (features.projection.requires_grad or problem.mask is not None):
        return False
    if not performer and not isinstance(features, EluFeatures):
        return False
    if torch.compiler.is_compiling() or transformed() or problem.value.shape[-1] == 0:
        return False
    queries, keys = problem.shape[-2:]
    own = all(
        t.numel() == whole.numel() for t, whole in zip(given, (problem.query, problem.key, problem.value), strict=True)
    )
    own = own and all(type(t) in (Tensor, torch.nn.Parameter) for t in given)
    # Fake tensors have no values to compute with.
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return own and not fake and (queries == keys or not causal)


def attend_in_blocks(
    problem: Problem, features: Features, chunk: int | None, rows: int, general: Callable[..., Tensor]
) -> Tensor | None:
    """Return the output (…, h, q, e), computed on the CPU in blocks, or None if numbers are too large or too small.

    With a `chunk` the attention is causal. Then the rows before the first number that is too large or too small are
    computed in blocks, and the later rows by `general`, so that later positions do not change a single bit of earlier
    outputs.
    """
    query, key, value, keep = problem.query, problem.key, problem.value, allowed_keys(problem)
    if keep is not None:  # the feature elu(−inf) + 1 is 0, so masked keys add nothing
        key, value = torch.where(keep.unsqueeze(-1), key, -torch.inf), torch.where(keep.unsqueeze(-1), value, 0)
    whole = all(t.is_contiguous() for t in (query, key, value))
    # If a tensor is not contiguous, batch and heads stay two axes (a view): the blocks copy a few sequences at a time.
    query, key, value = (t.reshape(-1, *t.shape[-2 if whole else -3 :]) for t in (query, key, value))
    # In half precision gradients would be inaccurate: the gradient of a query is a small difference of large numbers.
    if query.dtype == torch.float16 or (query.dtype in HALF and problem.differentiated):
        query, key, value = query.float(), key.float(), value.float()
    maps: linear_blocks.Map = linear_blocks.Elu(query.shape[-1])
    if isinstance(features, PerformerFeatures):
        features.check(query)
        maps = linear_blocks.Performer(features.projection, query.dtype)
    plan = _plan(problem, maps.count, chunk, rows)
    if keep is None and linear_loops.serves(query, key, value, maps.count):
        plan = plan._replace(native=True)
    output, divisor, sound = linear_blocks.linear_attention(maps, query, key, value, plan, general)
    if not sound:
        constants = query.detach(), key.detach(), value.detach(), divisor
        first = 0 if chunk is None else linear_blocks.sound_rows(maps, *constants)
        if first == 0:
            return None
        early = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1) < first
        rest = general(query, key, value)[..., first:, :]
        query, key, value = (torch.where(early, t, 0) for t in (query, key, value))
        output = linear_blocks.linear_attention(maps, query, key, value, plan, general)[0]
        output = torch.cat([output[..., :first, :], rest], -2)
    output = output.reshape(*problem.shape[:-1], value.shape[-1]).to(problem.query.dtype)
    return output.squeeze(0) if problem.headless else output


def _plan(problem: Problem, count: int, chunk: int | None, rows: int) -> linear_blocks.Plan:
    """Return a `Plan` (the sizes of the blocks) with about `rows` rows of 64 features in a block; with a `chunk`, for
    causal attention."""
    (*lead, queries, keys), size = problem.shape, problem.value.shape[-1]
    rows = max(1, rows * 64 // max(64, count))
    length = max(queries, keys)
    if chunk is not None and queries > chunk + 2 * count * size // (count + size):
        return linear_blocks.Plan(chunk, max(1, rows // (math.prod(lead) * chunk)) * chunk, max(1, rows // chunk))
    # Up to some length, causal attention over all pairs needs fewer multiplications than over chunks with sums of
    # features. The blocks then consist of whole sequences and are twice as large: on an idle machine the time is the
    # same, and on a busy machine fewer blocks have to wait for a core.
    pairs = None if chunk is None else max(1, queries)
    return linear_blocks.Plan(pairs, max(64, rows), max(1, 2 * rows // max(1, length)))
