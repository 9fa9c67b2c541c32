"""Finds queries and keys of hand-written attention, which are stored instead of a large matrix of weights.

The scores q kᵀ are tracked through operations that scale them, add a bias or mask them, up to their softmax. If only
such operations were applied, queries and keys are stored instead of the matrix of weights. First some rows of the
recomputed weights are compared with the matrix: if they differ, the matrix is stored.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.core.normalizers import Softmax
from regard.core.problem import build
from regard.core.scores import ScaledDot
from regard.look.attention_records import VersionedTensors
from regard.look.capture.captured_call import Done, four_axes
from regard.look.recomputed_weights import Pairs

LARGE = 2**20  # a matrix with fewer weights than this is stored, not replaced by its queries and keys

PRODUCT = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
SCALED = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__}
DIVIDED = {torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__}
ADDED = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
FILLED = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}
# `ROUNDED` are operations that change only the precision or the memory layout of the scores.
ROUNDED = {Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.contiguous}
FUNCTIONS = PRODUCT | SCALED | DIVIDED | ADDED | FILLED | ROUNDED


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores scale · query keyᵀ plus the tensors `added`, masked at the pairs where a tensor of `closed` is True."""

    query: Tensor
    key: Tensor
    versioned: VersionedTensors
    scale: float = 1.0
    added: tuple[Tensor, ...] = ()
    closed: tuple[Tensor, ...] = ()


def first(done: Done) -> Scores | None:
    """Return the scores if the finished call is a matrix product q kᵀ that is large enough to track; else None."""
    result = done.result
    if (
        done.function not in PRODUCT
        or len(done.args) < 2
        or not isinstance(result, Tensor)
        or result.ndim not in (3, 4)
    ):
        return None
    query, key = done.args[0], done.args[1].mT
    if query.shape[:-2] != key.shape[:-2] or not worth_it(result, query, key):
        return None
    query, key = query.detach(), key.detach()
    return Scores(query, key, VersionedTensors(query, key))


def worth_it(matrix: Tensor, query: Tensor, key: Tensor) -> bool:
    """Return whether the matrix of scores is large, and larger than its queries and keys together."""
    return matrix.numel() >= LARGE and matrix.numel() > query.numel() + key.numel()


def next_of(scores: Scores, done: Done) -> Scores | None:
    """Return the scores after one more operation; None if the operation is not one that is tracked."""
    function, args, kwargs, _ = done
    if function in ROUNDED:
        return scores
    other = args[1] if len(args) > 1 else None
    number = isinstance(other, (int, float)) and not isinstance(other, bool)
    if function in SCALED and number and not scores.added and not scores.closed:
        return replace(scores, scale=scores.scale * float(other))
    if function in DIVIDED and number and not scores.added and not scores.closed:
        return replace(scores, scale=scores.scale / float(other))
    if function in ADDED and isinstance(other, Tensor) and not kwargs and other.is_floating_point():
        return replace(scores, added=(*scores.added, other.detach()))
    if function in FILLED and isinstance(other, Tensor) and len(args) == 3 and _closes(args[2], scores.query.dtype):
        return replace(scores, closed=(*scores.closed, other))
    return None


def _closes(fill: Any, dtype: torch.dtype) -> bool:
    return isinstance(fill, (int, float)) and fill <= torch.finfo(dtype).min / 2


def source(scores: Scores, weights: Tensor, value: Tensor, heads: int | None) -> Pairs | None:
    """Return a `Source` that recomputes `weights` from queries and keys.

    None is returned if its shape or some compared rows differ from those of `weights`, or if a row is fully masked.
    """
    scores.versioned.check()
    query, key = four_axes(scores.query, heads), four_axes(scores.key, heads)
    shape = (*query.shape[:3], key.shape[2])
    if tuple(weights.shape) != shape:
        return None
    mask, bias = None, None
    for closed in scores.closed:
        opened = ~_fitting(closed, heads)
        mask = opened if mask is None else mask & opened
    for added in scores.added:
        bias = _fitting(added, heads) if bias is None else bias + _fitting(added, heads)
    if mask is not None and not bool(mask.any(-1).all()):
        return None  # implementations of attention differ in the weights of a fully masked row
    pairs = Pairs(
        build(query, key, value.to(query.dtype), ScaledDot(scores.scale), Softmax(), mask, bias, 0.0, None, None)
    )
    rows = torch.linspace(0, shape[2] - 1, min(shape[2], 4), device=query.device).long()
    error = (pairs.block(slice(None), range(shape[1]), rows) - weights.index_select(-2, rows)).abs().max()
    narrow = torch.float16 in (query.dtype, weights.dtype) or torch.bfloat16 in (query.dtype, weights.dtype)
    return pairs if math.isfinite(error) and float(error) < (1e-2 if narrow else 1e-5) else None


def _fitting(tensor: Tensor, heads: int | None) -> Tensor:
    """Return a mask or bias that broadcasts to (batch, heads, queries, keys); a joined axis batch · heads is split."""
    folded = tensor.ndim == 3 and heads is not None and tensor.shape[0] > 1 and tensor.shape[0] % heads == 0
    return four_axes(tensor, heads) if folded else tensor
