"""Compilation of Transformer layers: once for each kind of layer, whatever the depth."""

from typing import Any

from torch import nn

from regard.models.transformer.token_input import TokenInput
from regard.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compile every Transformer layer of a model in place, and the token embeddings.

    Equal layers share one compilation, so the time does not grow with their number. Options are those of
    `torch.compile`. The little code between layers is not compiled.
    """
    for part in model.modules():
        if isinstance(part, (TransformerEncoderLayer, TransformerDecoderLayer, TokenInput)):
            part.compile(**options)
