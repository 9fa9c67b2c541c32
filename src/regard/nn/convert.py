"""Conversion of weights and masks between this library's multi-head attention and torch's `nn.MultiheadAttention`."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.nn.projection import HeadProjection

# Attribute names under which a projection may hold the maps of queries, keys and values.
_PLACES = (("weight", "query_weight"), ("weight", "memory_weight", "key_weight"),
           ("weight", "memory_weight", "value_weight"))  # fmt: skip

_EXTRA_KEY = "a learned extra key has no place in this layer"
_LAYOUT = "layers of regard take (batch, length, size)"


class TorchMasks(NamedTuple):
    """The masks of torch as this library's arguments: `mask` is True where a query may attend, `bias` is added to the
    scores."""

    mask: Tensor | None
    bias: Tensor | None


def torch_masks(attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, heads: int) -> TorchMasks:
    """Return the masks of a call of `nn.MultiheadAttention` as `mask` and `bias` of a call of `MultiHeadAttention`.

    In torch, True in a bool mask means *masked*, and a float mask is added to the scores. `attn_mask` is (q, k) or
    (b · heads, q, k), `key_padding_mask` is (b, k).

    >>> torch_masks(torch.tensor([[False, True], [False, False]]), heads=2).mask
    tensor([[ True, False],
            [ True,  True]])
    """
    pairs = attn_mask.unflatten(0, (-1, heads)) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
    keys = None if key_padding_mask is None else key_padding_mask[:, None, None]
    masks = [part for part in (pairs, keys) if part is not None]
    dropped = [part for part in masks if part.dtype == torch.bool]
    added = [part for part in masks if part.dtype != torch.bool]
    mask = None if not dropped else ~dropped[0] if len(dropped) == 1 else ~(dropped[0] | dropped[1])
    bias = None if not added else added[0] if len(added) == 1 else added[0] + added[1]
    return TorchMasks(mask, bias)


def refuse(source: nn.MultiheadAttention, batch_first: bool | None) -> None:
    """Raise for options of torch's module without a counterpart, and for a layout that the caller has not confirmed."""
    if not isinstance(source, nn.MultiheadAttention):
        raise TypeError(f"from_torch takes a torch.nn.MultiheadAttention, got {type(source).__name__}")
    if source.bias_k is not None or source.bias_v is not None:
        raise ValueError(f"from_torch cannot take add_bias_kv=True: {_EXTRA_KEY}")
    if source.add_zero_attn:
        raise ValueError("from_torch cannot take add_zero_attn=True: an extra key of zeros has no place in this layer")
    if batch_first not in (None, True):
        raise ValueError(f"batch_first of from_torch must be True or left out, got {batch_first!r}: {_LAYOUT}")
    if not source.batch_first and batch_first is None:
        raise ValueError(
            "from_torch was given a layer with batch_first=False (torch's default), which takes (length, batch, size): "
            f"{_LAYOUT}; write from_torch(layer, batch_first=True) and give the new layer x.transpose(0, 1)"
        )


@torch.no_grad()
def load(source: nn.MultiheadAttention, projection: HeadProjection, output: nn.Linear) -> None:
    """Copy torch's weights into the layer; frozen weights stay frozen."""
    if source.in_proj_weight is not None:
        theirs = source.in_proj_weight.chunk(3)
        learned = [source.in_proj_weight.requires_grad] * 3
    else:
        theirs = (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight)
        learned = [their is not None and their.requires_grad for their in theirs]
    for own, their in zip(projection.parts(), theirs, strict=True):
        assert their is not None
        own.copy_(their)
    projection.requires_grad_(False)
    for learns, names in zip(learned, _PLACES, strict=True):
        for stored in (getattr(projection, name) for name in names):
            if stored is not None and learns:  # a shared matrix is trained if one of its parts was trained
                stored.requires_grad_(True)
    pairs = [(output.weight, source.out_proj.weight)]
    if projection.bias is not None:
        pairs += [(projection.bias, source.in_proj_bias), (output.bias, source.out_proj.bias)]
    for own, their in pairs:
        own.copy_(their)
        own.requires_grad_(their.requires_grad)


def renamed(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Rename the entries of an `nn.MultiheadAttention` in a state dict to those of `MultiHeadAttention`.

    This function is a pre-hook of `load_state_dict`, so that a checkpoint of a model with `nn.MultiheadAttention` loads
    after the attention was replaced by `MultiHeadAttention`.
    """
    if f"{prefix}out_proj.weight" not in state:
        return
    extra = [name for name in ("bias_k", "bias_v") if prefix + name in state]
    if extra:
        raise ValueError(f"{prefix}{extra[0]}: a layer made with add_bias_kv=True cannot be loaded: {_EXTRA_KEY}")
    simple = {"out_proj.weight": "output.weight", "out_proj.bias": "output.bias",
              "in_proj_weight": "projection.weight", "in_proj_bias": "projection.bias"}  # fmt: skip
    for theirs, ours in simple.items():
        if prefix + theirs in state:
            state[prefix + ours] = state.pop(prefix + theirs)
    parts = [f"{prefix}{letter}_proj_weight" for letter in "qkv"]
    if not all(name in state for name in parts):
        return
    projection = module.projection
    assert isinstance(projection, HeadProjection)
    key_size, value_size = (state[name].shape[-1] for name in parts[1:])
    if (key_size, value_size) != projection.sizes[1:]:
        raise ValueError(
            f"{parts[0]}: the checkpoint is of a layer with key_size={key_size} and value_size={value_size}, this "
            f"layer has {projection.sizes[1]} and {projection.sizes[2]}: give it key_size= and value_size="
        )
    query, key, value = (state.pop(name) for name in parts)
    state[f"{prefix}projection.query_weight"] = query
    if projection.memory_weight is not None:
        state[f"{prefix}projection.memory_weight"] = torch.cat([key, value])
    else:
        state[f"{prefix}projection.key_weight"], state[f"{prefix}projection.value_weight"] = key, value


@torch.no_grad()
def store(projection: HeadProjection, output: nn.Linear, target: nn.MultiheadAttention) -> None:
    """Copy the layer's weights into torch's module."""
    own = projection.parts()
    if target.in_proj_weight is not None:
        target.in_proj_weight.copy_(torch.cat(own))
    else:
        for their, part in zip((target.q_proj_weight, target.k_proj_weight, target.v_proj_weight), own, strict=True):
            assert their is not None
            their.copy_(part)
    target.out_proj.weight.copy_(output.weight)
    if projection.bias is not None:
        target.in_proj_bias.copy_(projection.bias)
        target.out_proj.bias.copy_(output.bias)
