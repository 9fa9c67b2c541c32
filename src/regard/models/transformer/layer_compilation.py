"""One compilation for each kind of Transformer layer, however many there are."""

from typing import Any

from torch import nn

from regard.models.transformer.token_input import TokenInput
from regard.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compile every Transformer layer of a model in place, and the token embeddings.

    Equal layers share one compilation, so it takes seconds however many there are. Options are those of
    `torch.compile`. The little code between layers is not compiled.
    """
    for part in model.modules():
        if isinstance(part, (TransformerEncoderLayer, TransformerDecoderLayer, TokenInput)):
            part.compile(**options)
