"""Checkpoints in pieces: each worker writes its own rows of every tensor, and any number of workers can load them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.train.sharded_tensors import local_part


def piece_name(kind: str, rank: int, size: int) -> str:
    """Return the name of the file with a worker's rows: like a shard on the Hugging Face hub, but counted from 0.

    >>> piece_name("model", 1, 4)
    'model-00001-of-00004.safetensors'
    """
    return f"{kind}-{rank:05d}-of-{size:05d}.safetensors"


def pieces_of(folder: Path, kind: str) -> list[Path]:
    """Return the files of "model" or "optimizer", one for each worker; empty if one worker wrote all tensors whole."""
    return sorted(folder.glob(f"{kind}-*-of-*.safetensors"))


def my_rows(tensors: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return the rows that a worker writes: its shard of a sharded tensor, an equal share of any other tensor.

    The rows that all workers write, concatenated in the order of the ranks, are the whole tensor. A tensor without axes
    or without rows is written by the first worker.

    >>> my_rows({"a": torch.arange(5), "step": torch.tensor(3.0)}, 1, 2)
    {'a': tensor([3, 4])}
    """
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            part = local_part(tensor)
        else:
            rows = [tensor] if tensor.ndim == 0 else tensor.chunk(size)
            part = rows[rank] if rank < len(rows) else tensor[:0] if tensor.ndim else None
        if part is not None and (part.numel() or rank == 0):
            parts[name] = part.detach()
    return parts


class JoinedPieces(Mapping[str, Tensor]):
    """The tensors, by name, of a checkpoint of which each worker wrote its own rows (a piece).

    Each access to a tensor loads and concatenates the rows that the workers wrote. A worker that cuts its own shard
    from one tensor after another therefore needs memory for one whole tensor, not for all of them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._places: dict[str, list[Path]] = {}
        self.shared: dict[str, str] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    self.shared = json.loads((file.metadata() or {}).get("shared", "{}"))
                    for name in file.keys():  # noqa: SIM118
                        self._places.setdefault(name, []).append(path)
            except (SafetensorError, OSError, ValueError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        pieces = []
        for path in self._places[name]:
            with safe_open(path, framework="pt") as file:
                pieces.append(file.get_tensor(name))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Part(Mapping[str, Tensor]):
    """The tensors whose names begin with the prefix `part/`, without that prefix; each access loads one tensor.

    >>> dict(Part({"average/w": torch.tensor(2.0), "optimizer/w": torch.tensor(1.0)}, "average"))
    {'w': tensor(2.)}
    """

    def __init__(self, tensors: Mapping[str, Tensor], part: str) -> None:
        self._tensors, self._prefix = tensors, f"{part}/"

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._tensors if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
