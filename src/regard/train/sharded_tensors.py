"""Tensors that are sharded among workers: gathered when they are saved, sharded again when they are loaded."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered on every worker (a collective); any other tensor unchanged."""
    gathered: Any = tensor
    return gathered.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this worker's shard of a tensor, sharded as `like` is; the tensor itself if `like` is not sharded."""
    divided: Any = like
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor

    mesh, placements = divided.device_mesh, divided.placements
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise NotImplementedError(f"expected tensors sharded by their first axis, got {placements} over {mesh}")
    rows = tensor.chunk(mesh.size())
    rank = mesh.get_local_rank()
    # Cloned: a view of the whole tensor would hold all of it in memory.
    mine = rows[rank].to(like.device).clone() if rank < len(rows) else tensor[:0].to(like.device)
    return DTensor.from_local(
        mine, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a tensor."""
    divided: Any = tensor
    return divided.to_local() if hasattr(tensor, "to_local") else tensor


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return tensors gathered one after another, on the CPU; if `keep` is false they are discarded."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        divided = hasattr(tensor, "full_tensor")
        one = whole(tensor)
        if keep:
            found[name] = one.cpu() if divided else one
    return found
