"""Keywords of PyTorch's own attention are refused with this library's equivalents."""

from collections.abc import Callable

import pytest
import torch

import regard
from regard import nn

X = torch.randn(2, 5, 8)
CALLS: dict[str, Callable[..., object]] = {
    "attention": lambda **given: regard.attention(X, X, X, **given),
    "explain": lambda **given: regard.explain(X, X, X, **given),
    "linear_attention": lambda **given: regard.linear_attention(X, X, X, **given),
    "MultiHeadAttention": lambda **given: nn.MultiHeadAttention(8, 2)(X, X, X, **given),
    "LinearAttention": lambda **given: nn.LinearAttention(8, 2)(X, X, X, **given),
    "TransformerEncoderLayer": lambda **given: nn.TransformerEncoderLayer(
        nn.MultiHeadAttention(8, 2), nn.FeedForward(8)
    )(X, **given),
    "TransformerDecoderLayer": lambda **given: nn.TransformerDecoderLayer(
        nn.MultiHeadAttention(8, 2), nn.MultiHeadAttention(8, 2), nn.FeedForward(8)
    )(X, X, **given),
}
WORDS = [
    *[
        (call, word, hint)
        for call in ("attention", "explain", "MultiHeadAttention", "LinearAttention")
        for word, hint in {
            "is_causal": "mask=regard.causal()",
            "attn_mask": "mask=",
            "key_padding_mask": "mask=",
            "need_weights": "weights=regard.full()",
            "average_attn_weights": "weights=regard.full()",
            "dropout_p": "dropout=",
            "scale": "score=regard.ScaledDot(scale)",
            "enable_gqa": "fewer key heads",
        }.items()
    ],
    ("linear_attention", "is_causal", "causal=True"),
    ("TransformerEncoderLayer", "src_key_padding_mask", "regard.padding(lengths)"),
    ("TransformerEncoderLayer", "is_causal", "mask=regard.causal()"),
    ("TransformerDecoderLayer", "tgt_mask", "mask=regard.causal()"),
    ("TransformerDecoderLayer", "memory_key_padding_mask", "memory_mask="),
    ("attention", "maks", "did you mean mask?"),
    ("MultiHeadAttention", "weight", "did you mean weights?"),
]


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(("call", "word", "hint"), WORDS)
def test_a_keyword_of_torchs_call_is_named_as_it_is_here(call: str, word: str, hint: str) -> None:
    with pytest.raises(TypeError) as refusal:
        CALLS[call](**{word: None})
    assert str(refusal.value).startswith(f"{call}() has no {word}: ")
    assert hint in str(refusal.value)


MADE = [
    (nn.MultiHeadAttention, {"embed_dim": 8, "num_heads": 2}, "embed_dim: write size="),
    (nn.MultiHeadAttention, {"size": 8, "num_heads": 2}, "num_heads: write heads="),
    (nn.MultiHeadAttention, {"size": 8, "heads": 2, "kdim": 3}, "kdim: write key_size="),
    (nn.MultiHeadAttention, {"size": 8, "heads": 2, "vdim": 3}, "vdim: write value_size="),
    (nn.MultiHeadAttention, {"size": 8, "heads": 2, "batch_first": True}, "batch_first: layers of regard take"),
    (nn.MultiHeadAttention, {"size": 8, "heads": 2, "device": "cpu"}, "device: write layer.to(device)"),
    (nn.MultiHeadAttention, {"size": 8, "head": 2}, "head: did you mean heads?"),
    (nn.LinearAttention, {"embed_dim": 8, "num_heads": 2}, "embed_dim: write size="),
]


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(("layer", "given", "hint"), MADE)
def test_a_keyword_of_torchs_constructor_is_named_as_it_is_here(
    layer: type, given: dict[str, object], hint: str
) -> None:
    with pytest.raises(TypeError) as refusal:
        layer(**given)
    assert f"{layer.__name__}() has no {hint}" in str(refusal.value)
