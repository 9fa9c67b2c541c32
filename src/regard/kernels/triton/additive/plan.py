"""Tile sizes, shapes and slabs of the Triton kernels, and how they are launched."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.kernels import availability

SPAN = 32
PAD = 128  # rows of every buffer are padded to a multiple of this, so that tiles need no bounds checks


class Block(NamedTuple):
    """Tile sizes and launch options of one kernel."""

    rows: int
    columns: int
    depth: int = 64  # number of columns, features or rows that the kernel's loop processes per step
    warps: int = 4
    stages: int = 3
    registers: int | None = None  # limit of registers per thread, so that more programs fit a multiprocessor

    @property
    def options(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


class Tuning(NamedTuple):
    """Tile sizes of each kernel; benchmarks try other sizes."""

    exact_forward: Block = Block(128, 32, 8)
    exact_score: Block = Block(128, 32, 8)
    exact_feature: Block = Block(32, 32, 4)
    series_forward: Block = Block(128, 256, 64, warps=8, stages=4)
    series_wide: Block = Block(128, 128, 64, warps=8, stages=3)  # `series_forward` for values of more than 64 columns
    series_score: Block = Block(128, 128, 64, warps=8, stages=4)
    series_feature: Block = Block(128, 256, 64, warps=8, stages=3)
    pieces: int = 2  # number of parts in which `series_forward` processes the softmax of a tile
    slab_bytes: int = 64 << 20  # limit of the size of a slab of dS in bytes; larger for the series kernels
    programs: int = 1024  # number of programs that fill a device; smaller launches are split into segments


DEFAULT = Tuning()


def trait(x: Any) -> Any:
    """Return the properties of an argument that select the compiled kernel: all that Triton distinguishes, or more."""
    if x is None:
        return None
    kind = type(x)
    if kind is int:
        return (x == 1) + 2 * (x & 15 == 0) + 4 * (-(2**31) <= x < 2**31)
    if kind is Tensor:
        return x.dtype, x.data_ptr() & 15
    if isinstance(x, tuple):
        return tuple(map(trait, x))
    if kind is TensorDescriptor:
        return x.base.dtype, x.base.data_ptr() & 15, tuple(x.block_shape)
    return (x.dtype, x.data_ptr() & 15) if isinstance(x, Tensor) else kind


_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_compiled: dict[Any, Any] = {}
_MANY = 16384


def launcher(compiled: Any, args: tuple[Any, ...]) -> Callable[..., None]:
    """Return a function of a grid and all arguments that launches a kernel compiled for the current device.

    `args` are the arguments of the first launch; in later ones tensors and None are in the same places. The function
    skips two steps of Triton: `compiled[grid]` prepares a description of each launch for the hooks of profilers, which
    matters only if a hook is set; and the launch asks the driver about the address of each tensor, which takes longer
    than the launch itself, but not about addresses that are passed as integers.
    """
    hooks, device = triton.knobs.runtime, torch.cuda.current_device()
    before, after = (getattr(x, "calls", None) for x in (hooks.launch_enter_hook, hooks.launch_exit_hook))
    if before is None or after is None:
        return lambda grid, *args: compiled[grid](*args)
    places = [place for place, x in enumerate(args) if isinstance(x, Tensor)]
    records = [(place, [i for i, y in enumerate(x) if isinstance(y, Tensor)]) for place, x in enumerate(args)
               if isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x)]  # fmt: skip
    launch, options = _launch_of(compiled)

    def launched(grid: tuple[int, int, int], *args: Any) -> None:
        if before or after:
            compiled[grid](*args)
            return
        given = list(args)
        for place in places:
            if given[place].is_cuda:  # Triton refuses another tensor with an error
                given[place] = given[place].data_ptr()
        for place, inner in records:
            fields = list(given[place])
            for i in inner:
                if fields[i].is_cuda:
                    fields[i] = fields[i].data_ptr()
            given[place] = tuple(fields)
        launch(*grid, _stream(device), *options, *given)

    return launched


def _launch_of(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the function that launches a compiled kernel, and the arguments that follow grid and stream.

    In Triton 3.5 and 3.6 it is the C function that `compiled.run` calls, if the kernel needs no scratch memory.
    """
    run, described = compiled.run, (compiled.packed_metadata, None, None, None)
    if triton.__version__.startswith(("3.5.", "3.6.")) and run.global_scratch_size == run.profile_scratch_size == 0:
        return run.launch, (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *described)
    return run, (compiled.function, *described)


def launch(
    kernel: Any, grid: tuple[int, int, int], *args: Any, block: Block | None = None, known: Any = None, **constants: Any
) -> Any:
    """Launch kernel[grid](*args, **constants); a cached choice bypasses Triton's dispatcher, which costs 0.1 ms.

    `known` is a cache key for the properties of all arguments, if the caller can provide one. Return the compiled
    kernel, or None in Triton's interpreter.
    """
    options = {} if block is None else block.options
    if not isinstance(kernel, triton.runtime.JITFunction):  # Triton's interpreter runs the kernel
        kernel[grid](*args, **constants, **options)
        return None
    traits = tuple(map(trait, args)) if known is None else known
    key = (kernel, availability.current_device(), block, traits, *constants.values())
    found = _compiled.get(key)
    if found is None:
        if len(_compiled) >= _MANY:  # every new sequence length adds cache entries
            _compiled.clear()
        compiled = kernel[grid](*args, **constants, **options)
        _compiled[key] = compiled, launcher(compiled, args), tuple(kernel.arg_names[len(args) :])
    else:
        compiled, run, names = found
        run(grid, *args, *(constants[name] for name in names))
    return compiled


class Prepared:
    """A launch whose grid, numbers and constants are fixed: a call passes only tensors, or tuples of tensors.

    Triton's dispatcher inspects every argument, which takes 0.1 ms; this class inspects only the tensors.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], numbers: tuple[Any, ...], constants: dict[str, Any], block: Block
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants, self.block = kernel, grid, numbers, constants, block
        self.compiled: dict[Any, Any] = {}

    def __call__(self, *tensors: Tensor | tuple[Any, ...] | None, known: Any = None) -> None:
        """Launch the kernel; `known` is a cache key for the properties of all tensors, if the caller can provide it."""
        if not isinstance(self.kernel, triton.runtime.JITFunction):  # Triton's interpreter runs the kernel
            self.kernel[self.grid](*tensors, *self.numbers, **self.constants, **self.block.options)
            return
        if known is None:  # `trait` of a plain tensor, without a call for each
            known = [(x.dtype, x.data_ptr() & 15) if type(x) is Tensor else trait(x) for x in tensors]
        key = availability.current_device(), *known
        found = self.compiled.get(key)
        if found is None:
            compiled = launch(self.kernel, self.grid, *tensors, *self.numbers, **self.constants, block=self.block)
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self.compiled[key] = launcher(compiled, tensors), (*self.numbers, *(self.constants[name] for name in names))
        else:
            run, rest = found
            run(self.grid, *tensors, *rest)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


class Sizes(NamedTuple):
    """The sizes of a call's operands, and their padded sizes."""

    b: int
    h: int
    g: int
    q: int
    k: int
    f: int
    e: int
    q_pad: int
    k_pad: int
    f_pad: int
    e_block: int
    f_block: int


@functools.lru_cache(maxsize=1024)
def sizes_of(query: torch.Size, key: torch.Size, value: torch.Size, step: int) -> Sizes:
    """Return the sizes of a call, with the number of hidden units padded to a multiple of `step`."""
    (b, h, q, f), (_, g, k, _), e = query, key, value[3]
    wide = [max(16, 1 << (n - 1).bit_length()) for n in (e, f)]
    return Sizes(b, h, g, q, k, f, e, _up(q, PAD), _up(k, PAD), _up(f, step), wide[0], min(64, wide[1]))


@dataclass(frozen=True, eq=False)
class Inputs:
    """The operands of one call; weight is (f,) or (h, f)."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    lengths: Tensor | None
    activation: str  # tanh, gelu or abs, as `exact.even_part` supports

    @functools.cached_property
    def sizes(self) -> Sizes:
        # with a multiple of 32 hidden units, the number of feature columns of a series, 2 · harmonics · units, is a
        # multiple of 64
        step = 16 if self.query.dtype == torch.float32 else 32
        return sizes_of(self.query.shape, self.key.shape, self.value.shape, step)

    @functools.cached_property
    def traits(self) -> Any:
        """Return the properties of the operands that select the compiled kernels."""
        four = (self.query, self.key, self.value, self.weight)
        places = [(t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in four]
        return *places, trait(self.lengths), self.activation

    @property
    def weight_step(self) -> int:
        return self.weight.stride(0) if self.weight.dim() == 2 else 0

    @property
    def native(self) -> bool:
        """Return whether the kernels run on a GPU, which, unlike Triton's interpreter, has inline assembly and bfloat16
        products."""
        return self.query.is_cuda

    @property
    def factored(self) -> bool:
        """Return whether the exact kernels compute tanh(a + b) from factors e^{2a} and e^{2b}: for tanh in float32.

        In half precision, the sine series is used for sums within its range.
        """
        return self.activation == "tanh" and self.query.dtype == torch.float32

    @property
    def split(self) -> bool:
        """Return whether float32 products are computed as three TF32 products of operands split in two."""
        return self.native and self.value.dtype == torch.float32

    @property
    def precision(self) -> str:
        if not self.native:
            return "interpreted"
        return "three" if self.split else "ieee"

    @property
    def low_step(self) -> int:
        """Return the offset of the low parts of values that are split in two, or 0 if they are not split."""
        s = self.sizes
        return s.b * s.g * s.k_pad * s.e_block if self.split else 0


class Gradients(NamedTuple):
    """Gradients of the operands; those of weight, bias and table are summed in float32 to avoid rounding errors."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    bias: Tensor | None
    table: Tensor | None


class Slab(NamedTuple):
    """The pairs whose dS is stored at a time: some key heads, a range of queries, and the keys that the queries may
    attend."""

    first_unit: int
    units: int
    first_query: int
    last_query: int
    first_key: int
    last_key: int

    @property
    def rows(self) -> int:
        return _up(self.last_query - self.first_query, PAD)

    @property
    def columns(self) -> int:
        return _up(self.last_key - self.first_key, 2 * PAD)


def slabs(s: Sizes, low: int | None, high: int | None, most_pairs: int, among: range) -> Iterator[Slab]:
    """Yield slabs of the key heads `among`, each with at most `most_pairs` pairs unless one block of rows has more."""
    repeat, q_all = s.h // s.g, s.q_pad
    rows = q_all
    if low is not None and high is not None:  # with a window, most pairs of a slab of many rows are masked
        rows = min(rows, max(512, _up(high - low, PAD)))
    rows = min(rows, max(PAD, most_pairs // (repeat * s.k_pad) // PAD * PAD)) if rows == q_all else rows
    pieces = []
    for first in range(0, s.q, rows):
        last = min(first + rows, s.q)
        start = 0 if low is None else min(max(first + low, 0), s.k) // (2 * PAD) * 2 * PAD
        stop = s.k if high is None else min(s.k, last + high)
        if stop > start:
            pieces.append((first, last, start, stop))
    widest = max((_up(stop - start, 2 * PAD) for _, _, start, stop in pieces), default=1)
    units = max(1, min(len(among), most_pairs // (repeat * rows * widest)))
    for unit in among[::units]:
        for piece in pieces:
            yield Slab(unit, min(units, among.stop - unit), *piece)
