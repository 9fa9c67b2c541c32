"""The cases of `regard bench attention`: each builds its inputs and the contenders that compute over them."""

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.bench import attention_peers
from regard.bench.attention_peers import Run
from regard.kernels import cuda_graphs
from regard.kernels.additive import pair_loops

Make = Callable[[], Run]  # a function that prepares a contender, or raises an error if it cannot run
ROWS = slice(-64, None)  # the queries whose outputs are compared with float64: the last ones attend to the most keys


@dataclass(frozen=True)
class Field:
    """The contenders of a case (the implementations that are compared), which compute over the same inputs; regard is
    the first. `truth` returns the rows ROWS of the output, computed in float64.
    """

    contenders: dict[str, Make]
    truth: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Case:
    """One comparison of regard with other libraries. `build` creates the inputs, so that the inputs of only one case
    are in memory.
    """

    name: str
    what: str
    device: str
    build: Callable[[], Field]
    work: float | None = None  # amount of work of one call, from which a rate per second is computed
    unit: str = "pair-features"
    threads: int | None = None
    memory: bool = True  # whether peak memory is measured


@dataclass(frozen=True)
class Sizes:
    """The sequence lengths of the cases, and the head sizes of the cases with dot products. The QUICK lengths and sizes
    are too small for meaningful times and only show that everything runs.
    """

    additive: int
    dot: tuple[int, ...]
    dot_sizes: tuple[int, ...]
    window: int
    sparse: int
    long: int = 32_768
    layer: int = 4096


CPU = Sizes(additive=512, dot=(1024, 4096), dot_sizes=(64, 128), window=8192, sparse=4096)
CUDA = Sizes(additive=4096, dot=(1024, 2048, 4096, 8192, 16384), dot_sizes=(64, 128), window=16384, sparse=4096)
QUICK = Sizes(additive=48, dot=(64,), dot_sizes=(16,), window=512, sparse=64, long=512, layer=128)


def cases(device: str, quick: bool = False) -> list[Case]:
    """Return every case for a device, in the order of measurement."""
    sizes = QUICK if quick else CUDA if device == "cuda" else CPU
    dtypes = (torch.bfloat16, torch.float32) if device == "cuda" else (torch.float32,)
    all_cases = [_overhead(), _decode(device)]
    for train in (False, True):
        all_cases += [_additive(device, sizes.additive, dtype, train) for dtype in dtypes]
    for size in sizes.dot_sizes:
        all_cases += [_dot(device, length, size, causal) for length in sizes.dot for causal in (False, True)]
    all_cases += [_window(device, sizes.window, train) for train in ((False, True) if device == "cuda" else (True,))]
    all_cases += [_sparse(device, sizes.sparse, name) for name in ("sparsemax", "entmax15")]
    if device == "cuda":
        all_cases += [_long(sizes.long), _layer(sizes.layer)]
    return all_cases


def _overhead() -> Case:
    def build() -> Field:
        inputs = _three("cpu", torch.float32, (1, 4, 16, 32))
        return Field(
            {
                "regard": lambda: _forward(lambda: regard.attention(*inputs).output),
                "SDPA": lambda: _forward(lambda: F.scaled_dot_product_attention(*inputs)),
            },
            lambda: _rows(*inputs),
        )

    what = "the cost of a call itself: scaled dot, B1 H4 n16 d32, float32, one thread, no gradients"
    return Case("overhead", what, "cpu", build, threads=1, memory=False)


def _decode(device: str, batch: int = 64, memory: int = 64, size: int = 512) -> Case:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def build() -> Field:
        query = _draw(device, dtype, (batch, 1, 1, size))
        key, value, _ = _three(device, dtype, (batch, 1, memory, size))
        weight = _draw(device, dtype, (size,)) / math.sqrt(size)
        wrap = _graphed if device == "cuda" else _forward
        score = regard.Additive(weight)
        compiled = torch.compile(plain_fusible, dynamic=False)
        return Field(
            {
                "regard": lambda: wrap(lambda: regard.attention(query, key, value, score=score).output),
                "PyTorch eager": lambda: wrap(lambda: plain(query, key, value, weight)),
                "torch.compile": lambda: wrap(lambda: compiled(query, key, value, weight)),
            },
            lambda: _additive_rows(query, key, value, weight),
        )

    graph = ", inside a CUDA graph" if device == "cuda" else ""
    what = f"additive decode step: {batch} queries, each over {memory} keys, h{size}, {_short(dtype)}{graph}"
    return Case("additive-decode", what, device, build, work=float(batch * memory * size), memory=False)


def _additive(device: str, length: int, dtype: torch.dtype, train: bool, heads: int = 8, size: int = 64) -> Case:
    def build() -> Field:
        query, key, value = _three(device, dtype, (1, heads, length, size))
        leaves = (query, key, value, _draw(device, dtype, (size,)) / math.sqrt(size))
        wrap = functools.partial(_both, leaves) if train else _forward

        def ours() -> Tensor:
            return regard.attention(*leaves[:3], score=regard.Additive(leaves[3])).output

        def without_compiler() -> Tensor:
            with _no_compiler():
                return ours()

        compiled = torch.compile(plain_fusible, dynamic=False)
        contenders: dict[str, Make] = {
            "regard": lambda: wrap(ours),
            "PyTorch eager": lambda: wrap(lambda: plain(*leaves)),
            "torch.compile": lambda: wrap(lambda: compiled(*leaves)),
            "Keras AdditiveAttention": lambda: wrap(attention_peers.keras_additive(*leaves)),
        }
        if device == "cpu":
            contenders["regard, no compiler"] = lambda: wrap(without_compiler)
        elif not train:
            contenders["regard, in a CUDA graph"] = lambda: _graphed(ours)
        return Field(contenders, lambda: _additive_rows(*leaves))

    passes = "forward and backward" if train else "forward"
    what = f"additive, {passes}, B1 H{heads} n{length} h{size} value {size}, {_short(dtype)}"
    name = f"additive-{'training' if train else 'forward'}-{_short(dtype)}"
    return Case(name, what, device, build, work=float(heads * length**2 * size))


def _long(length: int, heads: int = 8, size: int = 64) -> Case:
    def build() -> Field:
        query, key, value = _three("cuda", torch.bfloat16, (1, heads, length, size))
        leaves = (query, key, value, _draw("cuda", torch.bfloat16, (size,)) / math.sqrt(size))

        def ours() -> Tensor:
            return regard.attention(*leaves[:3], score=regard.Additive(leaves[3])).output

        return Field({"regard": lambda: _both(leaves, ours)})

    what = f"additive, forward and backward, B1 H{heads} n{length} h{size}, bfloat16: the plain form would not fit"
    return Case("additive-long", what, "cuda", build, work=float(heads * length**2 * size))


def _dot(device: str, length: int, size: int, causal: bool, heads: int = 16) -> Case:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = heads if device == "cuda" else heads // 2
    batch = max(1, 16384 // length) if device == "cuda" else 1

    def build() -> Field:
        inputs = _three(device, dtype, (batch, heads, length, size))
        mask = regard.causal() if causal else None
        raw = functools.partial(F.scaled_dot_product_attention, *inputs, is_causal=causal)
        contenders: dict[str, Make] = {
            "regard": lambda: _forward(lambda: regard.attention(*inputs, mask=mask).output),
            "SDPA": lambda: _forward(raw),
        }
        if device == "cuda":
            for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
                label = f"SDPA {name.removesuffix('_ATTENTION').lower()}"
                contenders[label] = lambda name=name: _forward(attention_peers.sdpa_backend(name, raw))
        contenders["xFormers"] = lambda: _forward(attention_peers.xformers_attention(*inputs, causal=causal))
        contenders["x-transformers"] = lambda: _forward(attention_peers.x_transformers(*inputs, causal=causal))
        return Field(contenders, lambda: _rows(*inputs, before=length if causal else None))

    shape = "causal" if causal else "full"
    what = f"scaled dot, {shape}, forward, B{batch} H{heads} n{length} d{size}, {_short(dtype)}"
    return Case(f"dot-{shape}-n{length}-d{size}", what, device, build)


def _window(device: str, length: int, train: bool, before: int = 256) -> Case:
    dtype, heads, size = (torch.bfloat16, 16, 128) if device == "cuda" else (torch.float32, 8, 64)

    def build() -> Field:
        leaves = _three(device, dtype, (1, heads, length, size))
        wrap = functools.partial(_both, leaves) if train else _forward
        mask = regard.window(before, 0)

        def dense() -> Run:
            place = torch.arange(length, device=device)
            back = place[:, None] - place
            allowed = (back >= 0) & (back <= before)
            return wrap(lambda: F.scaled_dot_product_attention(*leaves, attn_mask=allowed))

        contenders: dict[str, Make] = {
            "regard": lambda: wrap(lambda: regard.attention(*leaves, mask=mask).output),
            "SDPA, dense mask": dense,
        }
        if device == "cuda":
            contenders["FlexAttention"] = lambda: wrap(attention_peers.flex(*leaves, before=before))
        return Field(contenders, lambda: _rows(*leaves, before=before))

    passes = "forward and backward" if train else "forward"
    what = f"scaled dot in a causal window of {before}, {passes}, B1 H{heads} n{length} d{size}, {_short(dtype)}"
    return Case(f"window-{'training' if train else 'forward'}", what, device, build)


def _sparse(device: str, length: int, name: str, heads: int = 8, size: int = 64) -> Case:
    normalize = regard.Sparsemax() if name == "sparsemax" else regard.Entmax(1.5)

    def build() -> Field:
        leaves = _three(device, torch.float32, (1, heads, length, size))

        def package(k: int | None = None) -> Run:
            entmax = importlib.import_module("entmax")

            weigh = functools.partial(getattr(entmax, name), dim=-1, k=k)
            query, key, value = leaves
            return _both(leaves, lambda: weigh(query @ key.mT / math.sqrt(size)) @ value)

        contenders: dict[str, Make] = {
            "regard": lambda: _both(leaves, lambda: regard.attention(*leaves, normalize=normalize).output),
            "entmax package": package,
        }
        if length > 100:
            contenders["entmax package, k=100"] = lambda: package(100)
        return Field(contenders, lambda: _rows(*leaves, normalize))

    what = f"scaled dot with {normalize.name}, forward and backward, B1 H{heads} n{length} d{size}, float32"
    return Case(name, what, device, build)


def _layer(length: int, size: int = 512, heads: int = 8) -> Case:
    def build() -> Field:
        torch.manual_seed(0)
        maps = nn.ModuleList(nn.Linear(size, size) for _ in range(4)).to("cuda", torch.bfloat16)
        x = _draw("cuda", torch.bfloat16, (1, length, size))
        weight = _draw("cuda", torch.bfloat16, (heads, size // heads)) / math.sqrt(size // heads)

        def layer(**options: Any) -> Tensor:
            split = [to(x).unflatten(-1, (heads, -1)).transpose(1, 2) for to in list(maps)[:3]]
            return maps[3](regard.attention(*split, **options).output.transpose(1, 2).flatten(-2))

        leaves = (x, weight, *maps.parameters())
        return Field(
            {
                "regard, additive": lambda: _both(leaves, lambda: layer(score=regard.Additive(weight))),
                "regard, scaled dot": lambda: _both(leaves, layer),
            }
        )

    what = f"a layer with its projections, forward and backward, {heads} heads, size {size}, n{length}, bfloat16"
    return Case("layer", what, "cuda", build)


def plain(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Compute additive attention with the sum over features as a matrix product, which is fastest in eager mode."""
    scores = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ weight
    return torch.softmax(scores, -1) @ value


def plain_fusible(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Compute additive attention with a sum over features that torch.compile fuses with the tanh. A matrix product
    would be a library call, which it cannot fuse."""
    scores = (torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) * weight).sum(-1)
    return torch.softmax(scores, -1) @ value


def _draw(device: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    source = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=source, device=device, dtype=dtype).requires_grad_()


def _three(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query, a key and a value."""
    return _draw(device, dtype, shape, 1), _draw(device, dtype, shape, 2), _draw(device, dtype, shape, 3)


def _forward(attend: Run) -> Run:
    return torch.no_grad()(attend)


def _both(leaves: tuple[Tensor, ...], attend: Run) -> Run:
    """Return a function that makes the call and computes the gradients of its leaf tensors."""

    def run() -> Tensor:
        output = attend()
        torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
        return output.detach()

    return run


def _graphed(attend: Run) -> Run:
    """Return a function that replays the call as one CUDA graph, as a decoding loop does."""
    attend = torch.no_grad()(attend)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(3):
            attend()
    torch.cuda.synchronize()
    graph, output = cuda_graphs.capture(attend, torch.device("cuda", torch.cuda.current_device()))

    def run() -> Tensor:
        graph.replay()
        return output

    return run


@contextmanager
def _no_compiler() -> Iterator[None]:
    """Run regard's call without its loops compiled from C, as on a machine without a C compiler."""
    original = pair_loops.available
    pair_loops.available = lambda: False
    try:
        yield
    finally:
        pair_loops.available = original


def _additive_rows(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    return plain(*(t.detach().double() for t in (query[..., ROWS, :], key, value, weight)))


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    normalize: Callable[[Tensor], Tensor] | None = None,
    before: int | None = None,
) -> Tensor:
    """Compute scaled dot-product attention of the last queries; with `before`, causal with this number of earlier
    keys."""
    query, key, value = (t.detach().double() for t in (query[..., ROWS, :], key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if before is not None:
        place = torch.arange(key.shape[-2], device=key.device)
        back = place[-query.shape[-2] :, None] - place
        scores = scores.masked_fill((back < 0) | (back > before), -math.inf)
    return (torch.softmax(scores, -1) if normalize is None else normalize(scores)) @ value


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
