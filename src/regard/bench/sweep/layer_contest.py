"""Multi-head attention and Transformer blocks compared with torch's layers and with the same layers written in torch
operations."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard.nn
from regard.bench.sweep import tensors
from regard.bench.sweep.attention_contest import mask
from regard.bench.sweep.cases import Case
from regard.bench.sweep.contests import Call, Contender, Contest, Make, compiled, leaves, room
from regard.bench.sweep.plain_forms import Outcome
from regard.bench.sweep.tensors import Tensors

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # query, key, value, masked pairs


def contest(case: Case) -> Contest:
    """Return the contenders of a case of kind "multihead" or "block"."""
    torch.manual_seed(case.index)
    theirs = _torch_layer(case)
    layer = _our_layer(case, theirs)
    inputs = tensors.make(case)
    x, cached_mask = inputs["x"], mask(case, inputs)
    inputs = {**inputs, **dict(layer.named_parameters())}

    def ours() -> Outcome:
        return layer(x, mask=mask(case, inputs) if case.new_mask else cached_mask).output, None

    peers: dict[str, Make] = {
        "written by hand, SDPA": lambda: _by_hand(case, inputs),
        "written by hand, eager": lambda: _by_hand(case, inputs, eager=True),
    }
    if theirs is not None:
        peers["torch.nn"] = lambda: _torch(case, inputs, theirs)
    if case.compiled:
        peers["written by hand, torch.compile"] = lambda: _by_hand(case, inputs, compile=True)
    return Contest(
        inputs,
        Contender(ours, leaves(inputs)),
        peers,
        lambda some, rows: (forward(case, some, tensors.blocked(case, some, rows), _softmax, rows), None),
    )


def _torch_layer(case: Case) -> nn.MultiheadAttention | nn.TransformerEncoderLayer | None:
    """Return torch's own layer; None for grouped heads, which torch's layers do not support."""
    options: dict[str, Any] = {"batch_first": True, "device": case.device, "dtype": case.torch_dtype}
    if case.kind == "block":
        wide = 4 * case.width
        layer = nn.TransformerEncoderLayer(
            case.width, case.heads, wide, dropout=0.0, norm_first=case.pre_norm, **options
        )
    elif case.heads == case.kv_heads:
        layer = nn.MultiheadAttention(case.width, case.heads, **options)
    else:
        return None
    layer.train(case.gradients).requires_grad_(case.gradients)
    return layer


def _our_layer(case: Case, theirs: nn.MultiheadAttention | nn.TransformerEncoderLayer | None) -> nn.Module:
    """Return regard's layer, with the parameters of torch's layer if torch has such a layer."""
    if isinstance(theirs, nn.TransformerEncoderLayer):
        layer: nn.Module = regard.nn.TransformerEncoderLayer.from_torch(theirs)
    elif theirs is not None:
        layer = regard.nn.MultiHeadAttention.from_torch(theirs)
    else:
        layer = regard.nn.MultiHeadAttention(case.width, case.heads, kv_heads=case.kv_heads)
    layer = layer.to(case.device, case.torch_dtype).train(case.gradients)
    return layer.requires_grad_(case.gradients)


def _torch(case: Case, inputs: Tensors, layer: nn.MultiheadAttention | nn.TransformerEncoderLayer) -> Contender:
    """Return torch's layer as a contender, with masks in its convention: True at masked keys."""
    x = inputs["x"]
    causal = case.mask == "causal"

    def masks() -> tuple[Tensor | None, Tensor | None]:
        blocked = tensors.blocked(case, inputs)
        return (blocked, None) if causal else (None, None if blocked is None else blocked[:, 0, 0])

    cached_masks = masks()

    def run() -> Outcome:
        pairs, keys = masks() if case.new_mask else cached_masks
        if isinstance(layer, nn.TransformerEncoderLayer):
            return layer(x, src_mask=pairs, src_key_padding_mask=keys, is_causal=causal), None
        options: dict[str, Any] = {"attn_mask": pairs, "key_padding_mask": keys, "is_causal": causal}
        return layer(x, x, x, need_weights=False, **options)[0], None

    return Contender(run, tuple(p for p in (x, *layer.parameters()) if p.requires_grad))


def _by_hand(case: Case, inputs: Tensors, *, eager: bool = False, compile: bool = False) -> Contender:
    if eager:
        room(case, case.pairs)
    causal = case.mask == "causal" and not eager
    cached_mask = None if causal or case.new_mask else tensors.blocked(case, inputs)

    def sdpa(query: Tensor, key: Tensor, value: Tensor, blocked: Tensor | None) -> Tensor:
        allowed = None if blocked is None else ~blocked
        grouped = case.heads != case.kv_heads
        return F.scaled_dot_product_attention(query, key, value, allowed, is_causal=causal, enable_gqa=grouped)

    def form(inputs: Tensors, blocked: Tensor | None) -> Outcome:
        if case.new_mask and not causal:
            blocked = tensors.blocked(case, inputs)
        return forward(case, inputs, blocked, _softmax if eager else sdpa), None

    call = compiled(form) if compile else form
    run: Call = lambda: call(inputs, cached_mask)  # noqa: E731
    return Contender(run, leaves(inputs))


def _softmax(query: Tensor, key: Tensor, value: Tensor, blocked: Tensor | None) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (x if group == 1 else x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores if blocked is None else scores.masked_fill(blocked, -torch.inf)).softmax(-1) @ value


def forward(case: Case, inputs: Tensors, blocked: Tensor | None, attend: Attend, rows: Tensor | None = None) -> Tensor:
    """Compute the layer in torch operations from its named parameters, for all positions or only for `rows`."""
    x = inputs["x"]
    if case.kind == "multihead":
        return _heads(case, inputs, x, blocked, attend, rows, "")
    stream = x if rows is None else x[:, rows]
    read = _norm(inputs, "around_attention", x) if case.pre_norm else x
    stream = stream + _heads(case, inputs, read, blocked, attend, rows, "attention.")
    if not case.pre_norm:
        stream = _norm(inputs, "around_attention", stream)
    read = _norm(inputs, "around_feed_forward", stream) if case.pre_norm else stream
    hidden = F.relu(F.linear(read, inputs["feed_forward.inner.weight"], inputs["feed_forward.inner.bias"]))
    stream = stream + F.linear(hidden, inputs["feed_forward.outer.weight"], inputs["feed_forward.outer.bias"])
    return stream if case.pre_norm else _norm(inputs, "around_feed_forward", stream)


def _norm(inputs: Tensors, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], inputs[f"{name}.norm.weight"], inputs[f"{name}.norm.bias"])


def _heads(
    case: Case, inputs: Tensors, x: Tensor, blocked: Tensor | None, attend: Attend, rows: Tensor | None, prefix: str
) -> Tensor:
    packed = F.linear(x, inputs[f"{prefix}projection.weight"], inputs[f"{prefix}projection.bias"])
    parts = packed.split([case.heads * case.size, case.kv_heads * case.size, case.kv_heads * case.size], -1)
    query, key, value = (part.unflatten(-1, (-1, case.size)).transpose(1, 2) for part in parts)
    if rows is not None:
        query = query[:, :, rows]
    output = attend(query, key, value, blocked).transpose(1, 2).flatten(-2)
    return F.linear(output, inputs[f"{prefix}output.weight"], inputs[f"{prefix}output.bias"])
