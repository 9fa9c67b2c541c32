"""The tensors of a case, the same in every run, and its masks and biases as dense tensors."""

import hashlib
import math

import torch
from torch import Tensor

from regard.bench.sweep.cases import Case
from regard.core.features import PerformerFeatures

Tensors = dict[str, Tensor]
BATCHED = ("query", "key", "value", "centre", "lengths", "ids", "x")  # tensors whose first axis is the batch
LEARNED = ("query", "key", "value", "centre", "weight", "table", "bias", "x")  # tensors whose gradients are computed
REACH = 128  # largest relative position in the learned table


def make(case: Case) -> Tensors:
    """Return the inputs of a case by name; the parameters of a layer are not among them."""
    name = f"{case.seed} {case.index}".encode()
    source = torch.Generator(case.device).manual_seed(int(hashlib.sha256(name).hexdigest()[:12], 16))
    if case.kind in ("multihead", "block"):
        inputs = {"x": _normal(case, source, case.batch, case.queries, case.width)}
    else:
        query = _heads(case, source, case.heads, case.queries, case.size)
        if case.score == "dot":  # scaled inputs, because otherwise softmax selects a single key
            query = query / math.sqrt(case.size)
        inputs = {
            "query": query,
            "key": _heads(case, source, case.kv_heads, case.keys, case.size),
            "value": _heads(case, source, case.kv_heads, case.keys, case.value_size),
        }
    inputs |= _parameters(case, source) | _positions(case, source)
    if case.gradients:
        for name in inputs:
            if name in LEARNED:
                inputs[name].requires_grad_()
    return inputs


def _normal(case: Case, source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=source, device=case.device, dtype=case.torch_dtype)


def _heads(case: Case, source: torch.Generator, heads: int, length: int, size: int) -> Tensor:
    if case.tokens_first:
        return _normal(case, source, case.batch, length, heads, size).transpose(1, 2)
    return _normal(case, source, case.batch, heads, length, size)


def _parameters(case: Case, source: torch.Generator) -> Tensors:
    parameters: Tensors = {}
    if case.score == "additive":
        parameters["weight"] = _normal(case, source, case.size) / math.sqrt(case.size)
    if case.score == "bilinear":
        parameters["weight"] = _normal(case, source, case.size, case.size) / case.size
    if case.bias == "alibi":
        parameters["slopes"] = 2.0 ** (-8.0 * torch.arange(1, case.heads + 1, device=case.device) / case.heads)
    if case.bias == "relative":
        parameters["table"] = _normal(case, source, case.heads, 2 * REACH + 1)
    if case.bias == "tensor":
        parameters["bias"] = _normal(case, source, case.heads, case.queries, case.keys)
    if case.kind == "linear" and case.features == "performer":
        performer = PerformerFeatures.draw(case.size, generator=torch.Generator().manual_seed(case.index))
        parameters["projection"] = performer.projection.to(case.device, case.torch_dtype)
    return parameters


def _positions(case: Case, source: torch.Generator) -> Tensors:
    device, batch, keys = case.device, case.batch, case.keys
    positions: Tensors = {}
    if "padding" in case.mask:
        positions["lengths"] = torch.randint(max(1, keys // 4), keys + 1, (batch,), generator=source, device=device)
    if case.mask in ("segments", "documents"):
        starts = torch.rand(batch, keys, generator=source, device=device) < min(0.5, 8 / keys)
        positions["ids"] = starts.cumsum(-1)
    if case.mask == "dense":
        allowed = torch.rand(case.queries, keys, generator=source, device=device) < 0.8
        allowed[:, 0] = True  # every query has a visible key, because eager softmax over masked keys only gives NaN
        positions["allowed"] = allowed
    if case.kind == "local":
        positions["centre"] = keys * torch.rand(batch, case.heads, case.queries, generator=source, device=device)
    return positions


def example(case: Case, inputs: Tensors, dtype: torch.dtype, *, gradients: bool) -> Tensors:
    """Return copies of the first sequence's tensors in another dtype."""
    copies: Tensors = {}
    for name, tensor in inputs.items():
        part = (tensor[:1] if name in BATCHED else tensor).detach()
        copies[name] = part.to(dtype) if part.is_floating_point() else part
        if gradients and inputs[name].requires_grad:
            copies[name] = copies[name].clone().requires_grad_()
    return copies


def blocked(case: Case, inputs: Tensors, rows: Tensor | None = None) -> Tensor | None:
    """Return a bool tensor that is True at masked pairs of a query and a key, broadcastable to (batch, heads, rows,
    keys); None without a mask."""
    if case.mask == "none":
        return None
    device = torch.device(case.device)
    row = (torch.arange(case.queries, device=device) if rows is None else rows)[:, None]
    column = torch.arange(case.keys, device=device)
    if case.mask == "dense":
        allowed = inputs["allowed"] if rows is None else inputs["allowed"][rows]
        return ~allowed
    later = column > row + (case.keys - case.queries if case.mask == "cache" else 0)
    if case.mask in ("causal", "cache"):
        return later
    if case.mask == "window":
        return later | (column < row - case.before)
    if case.mask == "padding":
        return column >= inputs["lengths"][:, None, None, None]
    if case.mask == "causal_padding":
        return later | (column >= inputs["lengths"][:, None, None, None])
    ids = inputs["ids"]
    apart = (ids if rows is None else ids[:, rows])[:, None, :, None] != ids[:, None, None, :]
    return apart if case.mask == "segments" else apart | later


def bias(case: Case, inputs: Tensors, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor | None:
    """Return the bias of a case as a tensor (heads, rows, keys); None without a bias."""
    if case.bias == "none":
        return None
    if case.bias == "tensor":
        return inputs["bias"] if rows is None else inputs["bias"][:, rows]
    device = torch.device(case.device)
    row = (torch.arange(case.queries, device=device) if rows is None else rows)[:, None]
    distance = torch.arange(case.keys, device=device) - row
    if case.bias == "alibi":
        slopes = inputs["slopes"]
        return (-slopes[:, None, None] * distance.abs().to(slopes.dtype)).to(dtype)
    return inputs["table"][:, distance.clamp(-REACH, REACH) + REACH]
