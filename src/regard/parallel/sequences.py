"""The sharding of sequences: which positions each process holds, and functions to shard and unshard."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.core.spans import Stretch

Group = dist.ProcessGroup | None
_BUCKET = 2**22  # the largest number of gradient entries that are summed in one message


@dataclass(frozen=True)
class Layout:
    """The division of a sequence over `size` processes, as seen from process `rank`.

    If it is balanced, the sequence has 2 · size chunks, and process r holds chunks r and 2 · size − 1 − r. Under a
    causal mask late queries attend to more keys than early ones: this order of chunks balances the work of the
    processes.
    """

    size: int
    rank: int
    balanced: bool

    @property
    def parts(self) -> int:
        """Return the number of chunks that a process holds."""
        return 2 if self.balanced else 1

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the chunks that a process holds, in order."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    def chunks(self, length: int) -> list[Stretch]:
        """Return the ranges of positions of all chunks of a whole sequence."""
        chunk = length // (self.parts * self.size)
        return [Stretch(c * chunk, (c + 1) * chunk) for c in range(self.parts * self.size)]

    def check(self, length: int, name: str) -> None:
        """Raise unless a whole sequence of `length` positions can be sharded."""
        count = self.parts * self.size
        if length % count:
            way = f"2 chunks for each of {self.size} processes" if self.balanced else f"{self.size} processes"
            more = count - length % count
            raise ValueError(
                f"{name} has length {length}, which does not divide into {way}: pad it by {more} to "
                f"{length + more} and mask the padding with regard.padding(lengths)"
            )

    def check_part(self, length: int, name: str) -> None:
        """Raise unless a process can hold a part of `length` positions."""
        if length % self.parts:
            raise ValueError(
                f"{name} has {length} positions on this process: a balanced part is two chunks, an even number "
                "(regard.parallel.shard cuts such parts; balanced=False takes any)"
            )


def layout(group: Group, balanced: bool) -> Layout:
    """Return the layout of a group's sequences, or raise if there is no group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("regard.parallel needs a process group: call torch.distributed.init_process_group first")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed process group or None, got {type(group).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"this process (rank {dist.get_rank()}) is not in the group")
    if not isinstance(balanced, bool):
        raise TypeError(f"balanced must be True or False, got {balanced!r}")
    return Layout(dist.get_world_size(group), rank, balanced)


def shard(sequence: Tensor, group: Group = None, *, dim: int = 1, balanced: bool = True) -> Tensor:
    """Return this process's part of a sequence that every process holds, along `dim`: (b, n, …) → (b, n / size, …).

    `balanced` is for causal masks: of 2 · size chunks, process r gets chunks r and 2 · size − 1 − r. Calls over the
    parts must use the same `balanced`. Tokens, targets and segment ids are sharded in the same way.
    """
    where, dim = layout(group, balanced), _axis(sequence, dim)
    where.check(sequence.shape[dim], "sequence")
    chunks = where.chunks(sequence.shape[dim])
    mine = [sequence.narrow(dim, chunks[c].start, len(chunks[c])) for c in where.owned(where.rank)]
    return torch.cat(mine, dim)


def unshard(part: Tensor, group: Group = None, *, dim: int = 1, balanced: bool = True) -> Tensor:
    """Return the whole sequence, on every process, from the parts that `shard` returns.

    The function is differentiable: the gradient of a part is the gradient of the sum of all processes' losses.
    """
    where, dim = layout(group, balanced), _axis(part, dim)
    where.check_part(part.shape[dim], "part")
    return _Unshard.apply(part, group, where, dim)


def positions(
    length: int, group: Group = None, *, balanced: bool = True, device: torch.device | str | None = None
) -> Tensor:
    """Return the positions, in the whole sequence, of this process's part of `length` tokens: (length,)."""
    where = layout(group, balanced)
    where.check_part(length, "part")
    chunks = where.chunks(length * where.size)
    mine = [torch.arange(chunks[c].start, chunks[c].stop, device=device) for c in where.owned(where.rank)]
    return torch.cat(mine)


def reduce_gradients(parameters: nn.Module | Iterable[Tensor], group: Group = None) -> None:
    """Sum the gradients of parameters over the group, in place, many in each message.

    Every process computes, for each parameter, the part of the gradient that comes from its own positions. The sum is
    the gradient of the sum of the processes' losses. DistributedDataParallel over the same group takes the mean.
    """
    tensors = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    gradients = []
    for tensor in tensors:
        if tensor.requires_grad:
            if tensor.grad is None:  # every process takes part in every sum, even if it has no gradient
                tensor.grad = torch.zeros_like(tensor)
            gradients.append(tensor.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return groups of adjacent tensors of one dtype and device, up to `_BUCKET` entries, to send fewer messages."""
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        alike = buckets and buckets[-1][0].dtype == tensor.dtype and buckets[-1][0].device == tensor.device
        if not alike or tensor.numel() > room:
            buckets.append([])
            room = _BUCKET
        buckets[-1].append(tensor)
        room -= tensor.numel()
    return buckets


def gathered(part: Tensor, group: Group, where: Layout, dim: int) -> Tensor:
    """Return the whole sequence from all parts, without a gradient."""
    mine = part.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(where.size)]
    dist.all_gather(parts, mine, group=group)
    chunk = part.shape[dim] // where.parts
    ordered: dict[int, Tensor] = {}
    for rank, whole in enumerate(parts):
        for place, number in enumerate(where.owned(rank)):
            ordered[number] = whole.narrow(dim, place * chunk, chunk)
    return torch.cat([ordered[number] for number in sorted(ordered)], dim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, where: Layout, dim: int) -> Tensor:
        ctx.group, ctx.where, ctx.dim = group, where, dim
        return gathered(part, group, where, dim)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        whole = upstream[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        chunks = ctx.where.chunks(whole.shape[ctx.dim])
        mine = [whole.narrow(ctx.dim, chunks[c].start, len(chunks[c])) for c in ctx.where.owned(ctx.where.rank)]
        return torch.cat(mine, ctx.dim), None, None, None


def _axis(tensor: Tensor, dim: int) -> int:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a sequence must be a tensor, got {type(tensor).__name__}")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"dim {dim} is no axis of a sequence of shape {tuple(tensor.shape)}")
    return dim % tensor.ndim
