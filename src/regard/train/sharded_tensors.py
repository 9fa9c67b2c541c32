"""Tensors that are sharded among workers: they are gathered for saving, and sharded again after loading."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as a whole one on every worker (a collective); return any other tensor unchanged."""
    gathered: Any = tensor
    return gathered.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor as a DTensor sharded like `like`; return it unchanged if `like` is not sharded."""
    divided: Any = like
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor

    mesh, placements = divided.device_mesh, divided.placements
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise NotImplementedError(f"expected tensors sharded by their first axis, got {placements} over {mesh}")
    rows = tensor.chunk(mesh.size())
    rank = mesh.get_local_rank()
    # This worker's shard is cloned, because a view would keep the whole tensor in memory.
    mine = rows[rank].to(like.device).clone() if rank < len(rows) else tensor[:0].to(like.device)
    return DTensor.from_local(
        mine, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a sharded tensor as a plain tensor; return any other tensor unchanged."""
    divided: Any = tensor
    return divided.to_local() if hasattr(tensor, "to_local") else tensor


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return all tensors whole, gathered one after another; those that were sharded are copied to the CPU.

    Gathering is a collective, so every worker must call this function. A worker that does not need the tensors passes
    `keep=False`; then each tensor is discarded at once, and the result is empty.
    """
    full_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        divided = hasattr(tensor, "full_tensor")
        full = whole(tensor)
        if keep:
            full_tensors[name] = full.cpu() if divided else full
    return full_tensors
