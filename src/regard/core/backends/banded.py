"""Attention of n queries within a window in O(n · width) time and memory, in training too.

Queries are cut into blocks of a fixed size. The keys that a block may attend form a range of fixed length, so the
ranges of all blocks are one overlapping view of the padded keys. The whole band is then a single call of a fused kernel
that receives the blocks as heads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.clauses import Clauses

Kernel = Callable[..., Tensor]

# Query rows of a block: with fewer rows, fewer masked pairs are computed; with more rows, the kernel is more efficient
# (docs/experiments.md).
_ROWS = 128


def worth_it(rules: Clauses | None, queries: int, keys: int) -> bool:
    """Return whether the mask is a band, possibly with lengths and segments, that is narrow enough to be computed block
    by block."""
    if rules is None or rules.low is None or rules.high is None or len(rules.dense) > 0:
        return False
    return not rules.by_head and queries > _ROWS and 2 * _stretch(rules) <= keys


def working_bytes(rules: Clauses, *, queries: int, keys: int, row_bytes: int) -> int:
    """Return the bytes of the blocks' masks, as bool and as float, and of the padded copies of keys and values."""
    return 5 * queries * _stretch(rules) + 2 * keys * row_bytes


def attend(
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b g k d"],
    value: Float[Tensor, "b g k d"],
    rules: Clauses,
    lead: torch.Size,
    kernel: Kernel,
) -> Float[Tensor, "b h q d"]:
    """Compute attention within the band by a function kernel(query, key, value, mask=) -> output of four-axis tensors.

    `lead` are the leading axes that were flattened into the batch axis; the tensors of the clauses still have them.
    """
    batch, heads, queries, _ = query.shape
    blocks = -(-queries // _ROWS)
    group = heads // key.shape[1]
    rows = F.pad(query, (0, 0, 0, blocks * _ROWS - queries)).unflatten(2, (blocks, _ROWS))
    # Query heads that share a key head are stacked as rows of the same block: (b, g, blocks, group · rows, d).
    rows = rows.unflatten(1, (-1, group)).transpose(2, 3).flatten(3, 4)
    keys, values = (_stretches(tensor, rules, blocks) for tensor in (key, value))
    band = _band(rules, queries, key.shape[2], blocks, query.device)
    slices = (
        [slice(None)] if rules.lengths is None and len(rules.segments) == 0 else [slice(b, b + 1) for b in range(batch)]
    )
    parts = []
    for part in slices:
        mask = _narrowed(band, rules, part, lead, blocks).unsqueeze(1).expand(-1, group, -1, -1).flatten(1, 2)
        tensors = (tensor[part].flatten(0, 1) for tensor in (rows, keys, values))
        parts.append(kernel(*tensors, mask=mask.unsqueeze(0)))
    output = torch.cat(parts).unflatten(0, (batch, -1)).unflatten(3, (group, _ROWS))
    return output.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, :queries]


def _stretch(rules: Clauses) -> int:
    """Return the number of keys that the rows of one block may attend."""
    assert rules.low is not None
    assert rules.high is not None
    return _ROWS + max(0, rules.high - rules.low)


def _stretches(tensor: Tensor, rules: Clauses, blocks: int) -> Tensor:
    """Return the keys that each block may attend, (b, g, k, d) → (b, g, blocks, range, d), as a view of padded keys."""
    return _padded(tensor, rules, blocks).unfold(2, _stretch(rules), _ROWS).mT


def _padded(tensor: Tensor, rules: Clauses, blocks: int) -> Tensor:
    """Return keys (…, k, d) padded (or cropped) so that the range of block r starts at position r · _ROWS."""
    low = rules.low or 0
    length = (blocks - 1) * _ROWS + _stretch(rules)
    return F.pad(tensor, (0, 0, -low, length + low - tensor.shape[-2]))


def _band(rules: Clauses, queries: int, keys: int, blocks: int, device: torch.device) -> Bool[Tensor, "blocks rows c"]:
    """Return whether row t of block r may attend to column c of the block's range, which is key r · _ROWS + low + c."""
    place, row = torch.arange(_stretch(rules), device=device), torch.arange(_ROWS, device=device)
    inside = (place >= row[:, None]) & (place <= row[:, None] + (rules.high or 0) - (rules.low or 0))
    key = torch.arange(blocks, device=device)[:, None, None] * _ROWS + (rules.low or 0) + place
    return inside & (key >= 0) & (key < keys)


def _narrowed(band: Tensor, rules: Clauses, part: slice, lead: torch.Size, blocks: int) -> Tensor:
    """Return the band's mask with lengths and segments applied, for the items of the batch that `part` selects."""
    if rules.lengths is not None:
        lengths = rules.lengths.expand(*lead, 1).reshape(-1)[part]
        key = torch.arange(blocks, device=band.device)[:, None] * _ROWS + (rules.low or 0)
        key = key + torch.arange(band.shape[-1], device=band.device)
        band = band & (key < lengths).unsqueeze(1)
    for query_ids, key_ids in rules.segments:
        rows = query_ids.expand(*lead, 1, -1).reshape(-1, query_ids.shape[-1])[part].squeeze(0)
        rows = F.pad(rows, (0, blocks * _ROWS - len(rows))).unflatten(0, (blocks, _ROWS))
        columns = key_ids.expand(*lead, 1, -1).reshape(-1, key_ids.shape[-1])[part].squeeze(0).unsqueeze(-1)
        columns = _padded(columns, rules, blocks).squeeze(-1).unfold(0, band.shape[-1], _ROWS)
        band = band & (rows.unsqueeze(-1) == columns.unsqueeze(-2))
    return band
