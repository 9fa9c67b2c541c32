"""One call as a record: the computation, its sizes, and the conditions of the measurement."""

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["attention", "linear", "local", "multihead", "block"]
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
# The Python code of the arguments of `regard.attention`, by their names in `Case`.
SCORES = {
    "scaled_dot": "regard.ScaledDot()",
    "softcap": "regard.ScaledDot(softcap=30.0)",
    "dot": "regard.Dot()",
    "cosine": "regard.Cosine(scale=10.0)",
    "bilinear": "regard.Bilinear(weight)",
    "additive": "regard.Additive(weight)",
}
NORMALIZERS = {
    "softmax": "regard.Softmax()",
    "sparsemax": "regard.Sparsemax()",
    "entmax": "regard.Entmax(1.5)",
    "sigmoid": "regard.Sigmoid()",
    "hard": "regard.Hard()",
}
MASKS = {
    "none": "None",
    "causal": "regard.causal()",
    "cache": "regard.causal(offset={offset})",
    "window": "regard.window({before}, 0)",
    "padding": "regard.padding(lengths)",
    "segments": "regard.segments(ids, ids)",
    "documents": "regard.segments(ids, ids) & regard.causal()",
    "causal_padding": "regard.causal() & regard.padding(lengths)",
    "dense": "allowed",
}
BIASES = {"none": "None", "alibi": "regard.alibi(slopes)", "relative": "regard.relative(table)", "tensor": "bias"}
REQUESTS = {
    "none": "None",
    "full": "regard.full()",
    "rows": "regard.rows([0, -1])",
    "top": "regard.top(8)",
    "received": "regard.received()",
    "entropy": "regard.entropy()",
    "logsumexp": "regard.logsumexp()",
}


@dataclass(frozen=True)
class Case:
    """One call. Layers have `heads` heads of `size`, so their width is `heads · size`."""

    seed: int | None  # None for a call of the fixed list in `ordinary`
    index: int
    device: str
    kind: Kind = "attention"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    queries: int = 1
    keys: int = 1
    size: int = 64
    value_size: int = 64
    dtype: str = "float32"
    score: str = "scaled_dot"
    normalizer: str = "softmax"
    mask: str = "none"
    bias: str = "none"
    request: str = "none"
    features: str = "elu"  # feature map of linear attention: elu or performer
    before: int = 0  # number of keys before the query in a window, or to either side in local attention
    pre_norm: bool = True  # whether a Transformer block is pre-norm
    gradients: bool = False
    new_mask: bool = False  # whether the mask is built in every call
    cold: bool = False  # processor caches are overwritten before each call
    tokens_first: bool = False  # whether inputs are laid out in memory as (batch, tokens, heads, size)
    compiled: bool = False  # whether peers that use torch.compile are measured

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def width(self) -> int:
        """Return the number of features of a layer's input."""
        return self.heads * self.size

    @property
    def pairs(self) -> int:
        """Return the number of pairs of a query and a key, over batch and heads."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def repeat(self) -> str:
        """Return the command that repeats this case."""
        cases = "--ordinary" if self.seed is None else f"--seed {self.seed}"
        return f"regard bench sweep --device {self.device} {cases} --case {self.index}"

    @property
    def call(self) -> str:
        """Return the call as a line of Python.

        >>> Case(0, 0, "cpu", mask="window", before=9, request="top").call
        'regard.attention(query, key, value, mask=regard.window(9, 0), weights=regard.top(8))'
        """
        mask = MASKS[self.mask].format(offset=self.keys - self.queries, before=self.before)
        masked = "" if self.mask == "none" else f", mask={mask}"
        if self.kind == "linear":
            causal = ", causal=True" if self.mask == "causal" else ""
            name = "EluFeatures()" if self.features == "elu" else "PerformerFeatures(projection)"
            return f"regard.linear_attention(query, key, value, features=regard.{name}{causal})"
        if self.kind == "local":
            return f"local_attention(query, key, value, centre, reach={self.before})"
        if self.kind == "multihead":
            grouped = "" if self.kv_heads == self.heads else f", kv_heads={self.kv_heads}"
            return f"regard.nn.MultiHeadAttention({self.width}, {self.heads}{grouped})(x{masked})"
        if self.kind == "block":
            norm = "pre" if self.pre_norm else "post"
            parts = f"MultiHeadAttention({self.width}, {self.heads}), FeedForward({self.width})"
            return f'regard.nn.TransformerEncoderLayer({parts}, norm="{norm}")(x{masked})'
        arguments = [
            f", {name}={code}"
            for name, code, usual in (
                ("score", SCORES[self.score], "regard.ScaledDot()"),
                ("normalize", NORMALIZERS[self.normalizer], "regard.Softmax()"),
                ("mask", mask, "None"),
                ("bias", BIASES[self.bias], "None"),
                ("weights", REQUESTS[self.request], "None"),
            )
            if code != usual
        ]
        return f"regard.attention(query, key, value{''.join(arguments)})"

    @property
    def what(self) -> str:
        """Return the sizes of the call and the conditions of its measurement in a few words.

        >>> Case(0, 0, "cpu", batch=2, heads=4, kv_heads=2, queries=3, keys=5, gradients=True).what
        'B2 H4/2 n3 m5 d64 float32, gradients'
        """
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}/{self.kv_heads}"
        keys = "" if self.keys == self.queries else f" m{self.keys}"
        value = "" if self.value_size == self.size else f" value {self.value_size}"
        notes = {
            "gradients": self.gradients,
            "new mask": self.new_mask,
            "cold": self.cold,
            "tokens first": self.tokens_first,
        }
        said = "".join(f", {name}" for name, holds in notes.items() if holds)
        return f"B{self.batch} {heads} n{self.queries}{keys} d{self.size}{value} {self.dtype}{said}"
