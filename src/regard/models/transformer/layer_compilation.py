"""Compilation of Transformer layers: once for each type of layer, not once for each layer."""

from typing import Any

from torch import nn

from regard.models.transformer.token_input import TokenInput
from regard.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compile every Transformer layer of a model in place, and the token embeddings.

    Equal layers share one compilation, so the compilation time does not grow with their number. `options` are passed
    to `torch.compile`. The code between layers is not compiled.
    """
    for part in model.modules():
        if isinstance(part, (TransformerEncoderLayer, TransformerDecoderLayer, TokenInput)):
            part.compile(**options)
