"""What attention layers own: the maps to queries, keys and values, and what a score learns."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.attention import AnyScore
from regard.core.normalizers import Hard, Normalizer
from regard.core.scores import Additive, Bilinear, Cosine, Dot, ScaledDot, Score

_PLAIN: dict[str, Score] = {"dot": Dot(), "scaled_dot": ScaledDot(), "cosine": Cosine()}
SCORES = (*_PLAIN, "bilinear", "additive")


class OwnedScore(nn.Module):
    """A score with the tensors it learns as parameters: `forward` gives the record to attend with.

    A name makes a score for vectors of `size`, with a weight for each of `heads` where it learns one. A record or a
    function of the caller's is taken as it is; the tensor a record holds belongs to this module from then on.
    """

    def __init__(self, score: str | AnyScore, size: int, heads: int | None = None) -> None:
        super().__init__()
        lead = () if heads is None else (heads,)
        made = score if not isinstance(score, str) else _by_name(score, size, lead)
        held = made.tensors() if isinstance(made, Score) else ()
        self.record: AnyScore = made
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
        """Uniform within ±1/√size, as a linear map to one number."""
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
        # The record is made again with the parameter as it is now: functional calls and loads exchange it.
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
    """Queries, keys and values of all heads, by as few matrix products as their sources allow.

    The rows of one weight are queries, keys, values: a sequence that attends itself takes one product, a query and a
    memory take two. Sources of different sizes have weights of their own. x W + b goes to (b, heads, n, head size).
    """

    def __init__(
        self, size: int, key_size: int, value_size: int, heads: int, kv_heads: int, head_size: int, bias: bool
    ) -> None:
        super().__init__()
        self.sizes = (size, key_size, value_size)
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        rows, kv_rows = heads * head_size, kv_heads * head_size
        packed, paired = size == key_size == value_size, key_size == value_size
        self.weight = _made(rows + 2 * kv_rows, size) if packed else None
        self.query_weight = None if packed else _made(rows, size)
        self.memory_weight = _made(2 * kv_rows, key_size) if paired and not packed else None
        self.key_weight = None if paired else _made(kv_rows, key_size)
        self.value_weight = None if paired else _made(kv_rows, value_size)
        self.bias = _made(rows + 2 * kv_rows) if bias else None
        self.reset_parameters()

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of the weight for queries, keys and values."""
        return self.heads * self.head_size, self.kv_heads * self.head_size, self.kv_heads * self.head_size

    def extra_repr(self) -> str:
        shared = "" if self.heads == self.kv_heads else f", {self.kv_heads} key heads"
        return f"{self.heads} heads of size {self.head_size}{shared}, bias={self.bias is not None}"

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of queries, keys and values, as views of what is stored."""
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
        """Xavier uniform for each of the three maps, smaller by √2 as torch's packed weight is; biases 0."""
        for part in self.parts():
            nn.init.xavier_uniform_(part, gain=1 / math.sqrt(2))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b heads n e"]:
        """Queries, keys and values of a sequence that attends itself, behind each other on the axis of heads."""
        if self.weight is None:
            raise ValueError(
                f"query, key and value have sizes {self.sizes}: a sequence that attends itself has one size"
            )
        return self._split(F.linear(x, self.weight, self.bias))

    def queries(self, x: Float[Tensor, "b q d"]) -> Float[Tensor, "b h q e"]:
        """Queries of all heads."""
        (weight, bias), _ = self._query_and_memory()
        return self._split(F.linear(x, weight, bias))

    def cross(
        self, query: Float[Tensor, "b q d"], key: Float[Tensor, "b k dk"], value: Float[Tensor, "b k dv"]
    ) -> tuple[Float[Tensor, "b h q e"], Float[Tensor, "b g k e"], Float[Tensor, "b g k e"]]:
        """Queries of one source; keys and values of another, by one product where that is one tensor."""
        (weight, bias), (both, both_bias) = self._query_and_memory()
        queries = self._split(F.linear(query, weight, bias))
        return queries, *self._memories(key, value, both, both_bias)

    def memories(
        self, key: Float[Tensor, "b k dk"], value: Float[Tensor, "b k dv"]
    ) -> tuple[Float[Tensor, "b g k e"], Float[Tensor, "b g k e"]]:
        """Keys and values of a source, by one product where that is one tensor."""
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
        """Weight and bias of the queries, and of keys and values together (None where those have two sources)."""
        rows, kv_rows, _ = self.rows
        bias, both_bias = (None, None) if self.bias is None else self.bias.split([rows, 2 * kv_rows])
        if self.weight is not None:  # cut once, so that the gradient is put together once
            query, both = self.weight.split([rows, 2 * kv_rows])
            return (query, bias), (both, both_bias)
        assert self.query_weight is not None
        return (self.query_weight, bias), (self.memory_weight, both_bias)

    def _split(self, x: Tensor) -> Tensor:
        """(b, n, heads · size) seen as (b, heads, n, size)."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def settled(normalize: Normalizer, sample: bool) -> Normalizer:
    """The normaliser with hard choices drawn or taken at their best; one that says so itself stays as it is."""
    return replace(normalize, sample=sample) if isinstance(normalize, Hard) and normalize.sample is None else normalize


def _made(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))
