"""Tensors that are divided among workers: gathered where they are saved, divided again where they are loaded."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is divided among the workers, gathered on each of them (a collective); any other as it is."""
    gathered: Any = tensor
    return gathered.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This worker's part of a tensor, divided as `like` is; the tensor itself where `like` is whole."""
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
    """What this worker holds of a tensor."""
    divided: Any = tensor
    return divided.to_local() if hasattr(tensor, "to_local") else tensor


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Tensors made whole, one after another and on the CPU; nothing is kept where they are not wanted."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        divided = hasattr(tensor, "full_tensor")
        one = whole(tensor)
        if keep:
            found[name] = one.cpu() if divided else one
    return found
