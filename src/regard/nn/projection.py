"""Parameters of attention layers: the projections to queries, keys and values, and the parameters of a score."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.attention import AnyScore
from regard.core.normalizers import Hard, Normalizer
from regard.core.scores import Additive, Bilinear, Cosine, Dot, ScaledDot, Score

_PLAIN: dict[str, Score] = {"dot": Dot(), "scaled_dot": ScaledDot(), "cosine": Cosine()}
SCORES = (*_PLAIN, "bilinear", "additive")
# torch's dictionaries of hooks on all modules; torch has no public function that reports whether such hooks exist.
_GLOBAL_HOOKS: tuple[Any, ...] = tuple(
    getattr(nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)


def own(module: nn.Module, name: str) -> Any:
    """Return a parameter or submodule by name, faster than `module.name`, which takes half a microsecond.

    Parametrised weights and wrapped modules are not in the module's dictionaries, so they are read as attributes.
    """
    member = module._modules.get(name)
    if member is None:
        member = module._parameters.get(name)
    return getattr(module, name) if member is None else member


def applied(layer: nn.Module, x: Tensor) -> Tensor:
    """Return `layer(x)`, computed without the call of a module for a plain `nn.Linear` or `nn.LayerNorm` without hooks.

    The call of a module takes two microseconds.
    """
    if type(layer) not in (nn.Linear, nn.LayerNorm) or torch.compiler.is_compiling() or "forward" in layer.__dict__:
        return layer(x)
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    weight = layer._parameters.get("weight")
    if hooks or weight is None or layer._compiled_call_impl is not None or any(_GLOBAL_HOOKS):
        return layer(x)
    bias = layer._parameters["bias"]
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)
    return F.linear(x, weight, bias)


class OwnedScore(nn.Module):
    """A module that holds the learned tensors of a score as parameters: `forward` returns the `Score` object.

    The name of a score creates a score for vectors of `size`; if the score has a weight, each of `heads` has its own. A
    `Score` object or a function given by the caller is used unchanged; if a `Score` object holds an `nn.Parameter`, it
    becomes a parameter of this module, and any other tensor a buffer.
    """

    def __init__(self, score: str | AnyScore, size: int, heads: int | None = None) -> None:
        super().__init__()
        lead = () if heads is None else (heads,)
        record = score if not isinstance(score, str) else _by_name(score, size, lead)
        held = record.tensors() if isinstance(record, Score) else ()
        self.record: AnyScore = record
        self.learned = bool(held)
        self.weight: Tensor | None
        if not held:
            self.register_parameter("weight", None)
        elif isinstance(held[0], nn.Parameter):
            self.weight = held[0]
        else:
            self.register_buffer("weight", held[0])
        if isinstance(score, str):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise uniformly within ±1/√size, as a linear map to one number."""
        if isinstance(self.weight, nn.Parameter):
            bound = 1 / math.sqrt(self.weight.shape[-1])
            nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        shape = "" if self.weight is None else f", weight {tuple(self.weight.shape)}"
        record = self.record
        named = record.name if isinstance(record, Score) else getattr(record, "__name__", type(record).__name__)
        return f"{named}{shape}"

    def forward(self) -> AnyScore:
        weight = self.weight
        if weight is None or not isinstance(self.record, Score):
            return self.record
        # The `Score` object is created anew from the current parameter, because functional calls and loading replace
        # the parameter.
        return self.record.holding(lambda _: weight)


def _by_name(name: str, size: int, lead: tuple[int, ...]) -> Score:
    if name in _PLAIN:
        return _PLAIN[name]
    if name == "additive":
        return Additive(nn.Parameter(torch.empty(*lead, size)))
    if name == "bilinear":
        return Bilinear(nn.Parameter(torch.empty(*lead, size, size)))
    raise ValueError(f"score must be one of {', '.join(SCORES)}, a regard score or a function, got {name!r}")


class HeadProjection(nn.Module):
    """The projections to queries, keys and values of all heads, by as few matrix products as possible.

    One weight matrix holds the rows for queries, keys and values: self-attention needs one matrix product,
    cross-attention two. Inputs of different sizes have separate weights. Results are (batch, heads, length, head size).
    """

    def __init__(
        self, size: int, key_size: int, value_size: int, heads: int, kv_heads: int, head_size: int, bias: bool
    ) -> None:
        super().__init__()
        self.sizes = (size, key_size, value_size)
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        rows, kv_rows = heads * head_size, kv_heads * head_size
        packed, paired = size == key_size == value_size, key_size == value_size
        self.weight = _parameter(rows + 2 * kv_rows, size) if packed else None
        self.query_weight = None if packed else _parameter(rows, size)
        self.memory_weight = _parameter(2 * kv_rows, key_size) if paired and not packed else None
        self.key_weight = None if paired else _parameter(kv_rows, key_size)
        self.value_weight = None if paired else _parameter(kv_rows, value_size)
        self.bias = _parameter(rows + 2 * kv_rows) if bias else None
        self.reset_parameters()

    @property
    def rows(self) -> tuple[int, int, int]:
        """Return the numbers of rows of the weight matrix that belong to queries, keys and values."""
        return self.heads * self.head_size, self.kv_heads * self.head_size, self.kv_heads * self.head_size

    def extra_repr(self) -> str:
        shared = "" if self.heads == self.kv_heads else f", {self.kv_heads} key heads"
        return f"{self.heads} heads of size {self.head_size}{shared}, bias={self.bias is not None}"

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weight matrices of queries, keys and values, as views of the stored matrices."""
        if self.weight is not None:
            query, key, value = self.weight.split(self.rows)
            return query, key, value
        assert self.query_weight is not None
        if self.memory_weight is not None:
            key, value = self.memory_weight.chunk(2)
            return self.query_weight, key, value
        assert self.key_weight is not None
        assert self.value_weight is not None
        return self.query_weight, self.key_weight, self.value_weight

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the three maps by Xavier uniform, smaller by √2 as torch's packed weight is; biases are 0."""
        for part in self.parts():
            nn.init.xavier_uniform_(part, gain=1 / math.sqrt(2))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b heads n e"]:
        """Return queries, keys and values of self-attention, concatenated on the axis of heads."""
        return self._split(self._of_itself(x))

    def apart(
        self, x: Float[Tensor, "b n d"], counts: tuple[int, ...] | None = None
    ) -> tuple[Float[Tensor, "b heads n e"], ...]:
        """Return queries, keys and values of self-attention, or any slices of the projected tensor with the given
        numbers of heads.

        Queries, keys and values are split before the axes are transposed, so that the backward pass concatenates their
        gradients in the layout of the product.
        """
        packed, counts = self._of_itself(x), counts or (self.heads, self.kv_heads, self.kv_heads)
        batch, length, _ = packed.shape
        if counts[0] == counts[-1] and not packed.requires_grad:  # a single view is faster than a split
            return packed.view(batch, length, len(counts), counts[0], self.head_size).permute(2, 0, 3, 1, 4).unbind()
        parts = packed.view(batch, length, sum(counts), self.head_size).split_with_sizes(counts, 2)
        return tuple([part.transpose(1, 2) for part in parts])

    def _of_itself(self, x: Tensor) -> Tensor:
        """Return queries, keys and values of all heads, concatenated along the last axis."""
        weight, bias = own(self, "weight"), own(self, "bias")
        if weight is None:
            raise ValueError(
                f"query, key and value have sizes {self.sizes}: a sequence that attends itself has one size"
            )
        return F.linear(x, weight, bias)

    def queries(self, x: Float[Tensor, "b q d"]) -> Float[Tensor, "b h q e"]:
        """Return queries of all heads."""
        (weight, bias), _ = self._query_and_memory()
        return self._split(F.linear(x, weight, bias))

    def cross(
        self, query: Float[Tensor, "b q d"], key: Float[Tensor, "b k dk"], value: Float[Tensor, "b k dv"]
    ) -> tuple[Float[Tensor, "b h q e"], Float[Tensor, "b g k e"], Float[Tensor, "b g k e"]]:
        """Return queries of one input, and keys and values of another, by one matrix product if the weights of keys and
        values are one tensor."""
        (weight, bias), (both, both_bias) = self._query_and_memory()
        queries = self._split(F.linear(query, weight, bias))
        return queries, *self._memories(key, value, both, both_bias)

    def memories(
        self, key: Float[Tensor, "b k dk"], value: Float[Tensor, "b k dv"]
    ) -> tuple[Float[Tensor, "b g k e"], Float[Tensor, "b g k e"]]:
        """Return keys and values of an input, by one matrix product if the weights of keys and values are one
        tensor."""
        return self._memories(key, value, *self._query_and_memory()[1])

    def _memories(
        self, key: Tensor, value: Tensor, both: Tensor | None, both_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if key is value and both is not None:
            keys, values = self._split(F.linear(key, both, both_bias)).split(self.kv_heads, 1)
            return keys, values
        key_weight, value_weight = (self.key_weight, self.value_weight) if both is None else both.chunk(2)
        assert key_weight is not None
        assert value_weight is not None
        key_bias, value_bias = (None, None) if both_bias is None else both_bias.chunk(2)
        keys, values = F.linear(key, key_weight, key_bias), F.linear(value, value_weight, value_bias)
        return self._split(keys), self._split(values)

    def _query_and_memory(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor | None, Tensor | None]]:
        """Return weight and bias of the queries, and of keys and values together; this second weight is None if keys
        and values have separate weights."""
        rows, kv_rows, _ = self.rows
        bias, both_bias = (None, None) if self.bias is None else self.bias.split([rows, 2 * kv_rows])
        if self.weight is not None:  # a single split, so that the backward pass is one concatenation
            query, both = self.weight.split([rows, 2 * kv_rows])
            return (query, bias), (both, both_bias)
        assert self.query_weight is not None
        return (self.query_weight, bias), (self.memory_weight, both_bias)

    def _split(self, x: Tensor) -> Tensor:
        """View (b, n, heads · size) as (b, heads, n, size)."""
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_size, self.head_size).transpose(1, 2)


def settled(normalize: Normalizer, sample: bool) -> Normalizer:
    """Return the normaliser; `Hard` with `sample=None` gets the given `sample`, any other normaliser is returned
    unchanged."""
    return replace(normalize, sample=sample) if isinstance(normalize, Hard) and normalize.sample is None else normalize


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))
