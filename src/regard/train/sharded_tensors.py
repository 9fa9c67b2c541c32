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
    from torch.distributed.tensor import distribute_tensor

    here = tensor.to(like.device)
    return distribute_tensor(here, divided.device_mesh, divided.placements, src_data_rank=None)


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
