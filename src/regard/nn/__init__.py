"""Layers: parameters around `regard.core`, one for every attention mechanism. This package imports `core` and
`kernels`.

- `attention`: one head with learned projections; `multihead`: several heads; `projection`: the linear maps to queries,
keys and values;
- `local`, `location`, `coverage`, `monotonic`: attention that depends on positions or on earlier weights;
  `alignment_steps`: code shared by layers that process one query at a time;
- `linear`: attention in linear time; `relative`, `positions`: encodings of positions; `cache`: keys and values of
  earlier steps;
- `transformer`, `feedforward`: Transformer layers, and their feed-forward network;
- `channel`, `spatial`, `temporal`, `saliency`, `glimpse`: images and video;
- `logmel`, `spec_augment`: features of sound;
- `cross_entropy`, `losses`: losses and penalties;
- `convert`: weights and masks of torch's own layers; `protocol`: the interface of a layer that a decoder can use;
- `argument_checks`: errors about sizes and inputs.

The public names are imported at first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

# Every public name and its module.
_HOME = {
    "Attention": "regard.nn.attention",
    "SelfAttention": "regard.nn.attention",
    "MultiHeadAttention": "regard.nn.multihead",
    "KeyValueCache": "regard.nn.cache",
    "SinusoidalPositions": "regard.nn.positions",
    "LearnedPositions": "regard.nn.positions",
    "RelativePositions": "regard.nn.positions",
    "Rotary": "regard.nn.positions",
    "Alibi": "regard.nn.positions",
    "TransformerEncoderLayer": "regard.nn.transformer",
    "TransformerDecoderLayer": "regard.nn.transformer",
    "FeedForward": "regard.nn.feedforward",
    "LocalAttention": "regard.nn.local",
    "LinearAttention": "regard.nn.linear",
    "ChannelAttention": "regard.nn.channel",
    "SpatialAttention": "regard.nn.spatial",
    "TemporalAttention": "regard.nn.temporal",
    "MaxSaliency": "regard.nn.saliency",
    "Gate": "regard.nn.saliency",
    "Glimpse": "regard.nn.glimpse",
    "MonotonicAttention": "regard.nn.monotonic",
    "LocationAttention": "regard.nn.location",
    "CoverageAttention": "regard.nn.coverage",
    "torch_masks": "regard.nn.convert",
    "Smooth": "regard.nn.location",
    "linear_cross_entropy": "regard.nn.cross_entropy",
    "Layered": "regard.nn.transformer",
    "Projected": "regard.nn.protocol",
    "Attends": "regard.nn.protocol",
}

_MODULES = ("losses",)  # the submodules that are imported at first use

__all__ = [*_HOME]

if TYPE_CHECKING:  # the public names are listed again for type checkers and editors
    from regard.nn import losses as losses
    from regard.nn.attention import Attention as Attention
    from regard.nn.attention import SelfAttention as SelfAttention
    from regard.nn.cache import KeyValueCache as KeyValueCache
    from regard.nn.channel import ChannelAttention as ChannelAttention
    from regard.nn.convert import torch_masks as torch_masks
    from regard.nn.coverage import CoverageAttention as CoverageAttention
    from regard.nn.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from regard.nn.feedforward import FeedForward as FeedForward
    from regard.nn.glimpse import Glimpse as Glimpse
    from regard.nn.linear import LinearAttention as LinearAttention
    from regard.nn.local import LocalAttention as LocalAttention
    from regard.nn.location import LocationAttention as LocationAttention
    from regard.nn.location import Smooth as Smooth
    from regard.nn.monotonic import MonotonicAttention as MonotonicAttention
    from regard.nn.multihead import MultiHeadAttention as MultiHeadAttention
    from regard.nn.positions import Alibi as Alibi
    from regard.nn.positions import LearnedPositions as LearnedPositions
    from regard.nn.positions import RelativePositions as RelativePositions
    from regard.nn.positions import Rotary as Rotary
    from regard.nn.positions import SinusoidalPositions as SinusoidalPositions
    from regard.nn.protocol import Attends as Attends
    from regard.nn.protocol import Projected as Projected
    from regard.nn.saliency import Gate as Gate
    from regard.nn.saliency import MaxSaliency as MaxSaliency
    from regard.nn.spatial import SpatialAttention as SpatialAttention
    from regard.nn.temporal import TemporalAttention as TemporalAttention
    from regard.nn.transformer import Layered as Layered
    from regard.nn.transformer import TransformerDecoderLayer as TransformerDecoderLayer
    from regard.nn.transformer import TransformerEncoderLayer as TransformerEncoderLayer
else:  # not defined for type checkers, which would accept every name because of __getattr__

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"regard.nn.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'regard.nn' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
