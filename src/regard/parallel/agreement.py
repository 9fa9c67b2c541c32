"""Agreement of processes: all make the same call, or all raise.

If only some processes raised, the others would hang in a collective operation.
"""

import hashlib
import json

import torch
import torch.distributed as dist
from torch import Tensor

from regard.parallel.sequences import Group, Layout

_REFUSED = -1  # the number that a process with an error sends instead of a digest of its call; digests are not negative


def agree(group: Group, where: Layout, device: torch.device, call: dict[str, str], error: Exception | None) -> None:
    """Raise on every process if one of them has an `error`, or if the descriptions of their calls differ.

    If all calls agree, this needs one all-gather of 8 bytes.
    """
    if where.size == 1:
        if error is not None:
            raise error
        return
    text = str(error).replace("\n", " ") if error is not None else json.dumps(call)
    mine = _REFUSED if error is not None else _digest(text)
    digests = [int(t) for t in _gather(torch.tensor([mine], device=device), group, where)]
    if error is None and all(digest == mine for digest in digests):
        return
    texts = _texts(text, group, where, device)
    if error is not None:
        raise error
    for rank, digest in enumerate(digests):
        if digest == _REFUSED:
            raise ValueError(f"rank {rank} refused its call of attention: {texts[rank]}")
    raise ValueError(_difference([json.loads(each) for each in texts]))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _difference(calls: list[dict[str, str]]) -> str:
    """Return the first difference between the calls of two processes."""
    first = calls[0]
    for rank, call in enumerate(calls):
        for name in first:
            if call.get(name) != first[name]:
                return f"processes differ in {name}: rank 0 has {first[name]}, rank {rank} has {call.get(name)}"
    return "processes made different calls of attention"


def _texts(text: str, group: Group, where: Layout, device: torch.device) -> list[str]:
    """Return the text that each process passes, in the order of ranks."""
    data = text.encode()
    lengths = [int(t) for t in _gather(torch.tensor([len(data)], device=device), group, where)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device=device)
    parts = _gather(padded, group, where)
    return [bytes(t[:n].tolist()).decode() for t, n in zip(parts, lengths, strict=True)]


def _gather(mine: Tensor, group: Group, where: Layout) -> list[Tensor]:
    parts = [torch.empty_like(mine) for _ in range(where.size)]
    dist.all_gather(parts, mine, group=group)
    return parts
