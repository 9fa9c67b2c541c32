"""A band of the score matrix at the cost of the band: O(n · width) time and memory, in training too.

Queries are cut into blocks of a fixed size. The keys a block can see are a stretch of fixed length, so the stretches of
all blocks are one overlapping view of the padded keys, and the whole band is a single call of a fused kernel with the
blocks where the heads used to be.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.clauses import Clauses

Kernel = Callable[..., Tensor]

_ROWS = 128  # of a block: fewer waste less on masked pairs, more keep the kernel busy (docs/experiments.md)


def worth_it(found: Clauses | None, queries: int, keys: int) -> bool:
    """Is the mask a band, perhaps with lengths and segments, so narrow that its stretches are far from all keys?"""
    if found is None or found.low is None or found.high is None or len(found.dense) > 0:
        return False
    return not found.by_head and queries > _ROWS and 2 * _stretch(found) <= keys


def working_bytes(found: Clauses, *, queries: int, keys: int, row_bytes: int) -> int:
    """The mask of the stretches, as bool and as numbers, and the padded copies of keys and values."""
    return 5 * queries * _stretch(found) + 2 * keys * row_bytes


def attend(
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b g k d"],
    value: Float[Tensor, "b g k d"],
    found: Clauses,
    lead: torch.Size,
    kernel: Kernel,
) -> Float[Tensor, "b h q d"]:
    """Attention within the band, by a kernel (query, key, value, mask=) -> output over (batch, heads, …).

    `lead` are the axes that were flattened into the batch: the tensors of the clauses still have them.
    """
    batch, heads, queries, _ = query.shape
    blocks = -(-queries // _ROWS)
    group = heads // key.shape[1]
    rows = F.pad(query, (0, 0, 0, blocks * _ROWS - queries)).unflatten(2, (blocks, _ROWS))
    # Heads that share keys become further rows of the same block: (b, g, blocks, group · rows, d).
    rows = rows.unflatten(1, (-1, group)).transpose(2, 3).flatten(3, 4)
    keys, values = (_stretches(tensor, found, blocks) for tensor in (key, value))
    band = _band(found, queries, key.shape[2], blocks, query.device)
    each = (
        [slice(None)] if found.lengths is None and len(found.segments) == 0 else [slice(b, b + 1) for b in range(batch)]
    )
    parts = []
    for part in each:
        mask = _narrowed(band, found, part, lead, blocks).unsqueeze(1).expand(-1, group, -1, -1).flatten(1, 2)
        taken = (tensor[part].flatten(0, 1) for tensor in (rows, keys, values))
        parts.append(kernel(*taken, mask=mask.unsqueeze(0)))
    output = torch.cat(parts).unflatten(0, (batch, -1)).unflatten(3, (group, _ROWS))
    return output.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, :queries]


def _stretch(found: Clauses) -> int:
    """How many keys the rows of a block can see between them."""
    assert found.low is not None
    assert found.high is not None
    return _ROWS + max(0, found.high - found.low)


def _stretches(tensor: Tensor, found: Clauses, blocks: int) -> Tensor:
    """(b, g, k, d) to (b, g, blocks, stretch, d): what each block sees, as a view of one padded copy."""
    return _padded(tensor, found, blocks).unfold(2, _stretch(found), _ROWS).mT


def _padded(tensor: Tensor, found: Clauses, blocks: int) -> Tensor:
    """Keys (…, k, d) moved so that block r's stretch starts at r · rows; padding may be negative, which crops."""
    low = found.low or 0
    length = (blocks - 1) * _ROWS + _stretch(found)
    return F.pad(tensor, (0, 0, -low, length + low - tensor.shape[-2]))


def _band(found: Clauses, queries: int, keys: int, blocks: int, device: torch.device) -> Bool[Tensor, "blocks rows c"]:
    """May row t of a block attend place c of its stretch? Place c is key r · rows + low + c."""
    place, row = torch.arange(_stretch(found), device=device), torch.arange(_ROWS, device=device)
    inside = (place >= row[:, None]) & (place <= row[:, None] + (found.high or 0) - (found.low or 0))
    key = torch.arange(blocks, device=device)[:, None, None] * _ROWS + (found.low or 0) + place
    return inside & (key >= 0) & (key < keys)


def _narrowed(band: Tensor, found: Clauses, part: slice, lead: torch.Size, blocks: int) -> Tensor:
    """The band of one item of the batch (or of all), within its length and its segments."""
    if found.lengths is not None:
        lengths = found.lengths.expand(*lead, 1).reshape(-1)[part]
        key = torch.arange(blocks, device=band.device)[:, None] * _ROWS + (found.low or 0)
        key = key + torch.arange(band.shape[-1], device=band.device)
        band = band & (key < lengths).unsqueeze(1)
    for query_ids, key_ids in found.segments:
        rows = query_ids.expand(*lead, 1, -1).reshape(-1, query_ids.shape[-1])[part].squeeze(0)
        rows = F.pad(rows, (0, blocks * _ROWS - len(rows))).unflatten(0, (blocks, _ROWS))
        columns = key_ids.expand(*lead, 1, -1).reshape(-1, key_ids.shape[-1])[part].squeeze(0).unsqueeze(-1)
        columns = _padded(columns, found, blocks).squeeze(-1).unfold(0, band.shape[-1], _ROWS)
        band = band & (rows.unsqueeze(-1) == columns.unsqueeze(-2))
    return band
