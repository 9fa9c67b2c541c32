"""The layer for multi-head attention."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import sharding, torch_names
from regard.core.attended import Attended, with_output
from regard.core.attention import AnyScore, attention
from regard.core.biases import Bias, as_bias
from regard.core.masks import Mask
from regard.core.normalizers import Normalizer, Softmax
from regard.core.problem import check_dropout, check_normalizer
from regard.core.requests import Request
from regard.core.scores import ScaledDot, Score
from regard.core.spans import all_of
from regard.core.torch_names import Unknown
from regard.nn import convert
from regard.nn.argument_checks import check_input, check_sizes
from regard.nn.cache import KeyValueCache, later_bias, later_mask
from regard.nn.positions import Alibi, RelativePositions, Rotary
from regard.nn.projection import HeadProjection, OwnedScore, applied, own, settled


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_h) W_o with head_i = attention(Q W_i, K W_i, V W_i) (Vaswani et al. 2017, section 3.2.2).

    Without `key` the layer computes self-attention, with `key` cross-attention. Any score is supported, with learned
    weights per head; `kv_heads` fewer than `heads` are shared (Ainslie et al. 2023); `positions` is a Rotary, an Alibi
    or RelativePositions. `key_size` and `value_size` are the sizes of the key and value inputs: `size` and `key_size`
    unless given. A `KeyValueCache` stores earlier keys and values: positions, causal masks and windows then count from
    its length. A cache given with `key` is filled at the first call and read-only after it. Hard attention samples in
    training, and if a generator is given. `load_state_dict` accepts the parameter names of `nn.MultiheadAttention` too;
    `from_torch` copies an `nn.MultiheadAttention`.

    >>> layer = MultiHeadAttention(8, heads=2)
    >>> out = layer(torch.randn(3, 5, 8))
    >>> out.output.shape, out.weights
    (torch.Size([3, 5, 8]), None)
    """

    @torch_names.made_with(torch_names.LAYER)
    def __init__(
        self,
        size: int,
        heads: int,
        *,
        key_size: int | None = None,
        value_size: int | None = None,
        kv_heads: int | None = None,
        head_size: int | None = None,
        score: str | AnyScore = "scaled_dot",
        normalize: Normalizer = Softmax(),
        bias: bool = True,
        dropout: float = 0.0,
        positions: Rotary | Alibi | RelativePositions | None = None,
    ) -> None:
        super().__init__()
        check_sizes(size=size, key_size=key_size, value_size=value_size, head_size=head_size)
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1:
            raise ValueError(f"heads and kv_heads must be 1 or more, got {heads} and {kv_heads}")
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if head_size is None and size % heads:
            raise ValueError(f"size must be a multiple of heads, got {size} and {heads}: or give head_size")
        head_size = size // heads if head_size is None else head_size
        self.size = size
        self.key_size = size if key_size is None else key_size
        self.value_size = self.key_size if value_size is None else value_size
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        self.normalize = check_normalizer(normalize)
        self.dropout = check_dropout(dropout)
        self.positions = positions
        self.projection = HeadProjection(size, self.key_size, self.value_size, heads, kv_heads, head_size, bias)
        self.score = OwnedScore(score, head_size, heads)
        self.output = nn.Linear(heads * head_size, size, bias=bias)
        _check_positions(positions, heads, head_size, self.score())
        self.register_load_state_dict_pre_hook(convert.renamed)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the output projection by Xavier uniform, and its bias by zeros."""
        nn.init.xavier_uniform_(self.output.weight)
        if self.output.bias is not None:
            nn.init.zeros_(self.output.bias)

    @classmethod
    def from_torch(cls, source: nn.MultiheadAttention, *, batch_first: bool | None = None) -> "MultiHeadAttention":
        """Return a layer equal to torch's, with a copy of its weights; `torch_masks` converts masks.

        The inputs of this layer are (batch, length, size). Inputs of a torch module made with batch_first=False are
        (length, batch, size), so its callers have to change: `batch_first=True` confirms that they do.
        """
        convert.refuse(source, batch_first)
        like = source.out_proj.weight
        with torch.device(like.device):
            layer = cls(
                source.embed_dim,
                source.num_heads,
                key_size=source.kdim,
                value_size=source.vdim,
                bias=source.in_proj_bias is not None,
                dropout=source.dropout,
            )
        layer = layer.to(like.dtype).train(source.training)
        convert.load(source, layer.projection, layer.output)
        return layer

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """Return torch's own module with a copy of the weights; raise if torch has no such layer."""
        score, usual = self.score(), ScaledDot().factor(self.head_size)
        if not isinstance(score, ScaledDot):
            raise ValueError(f"to_torch needs score scaled_dot, got {getattr(score, 'name', type(score).__name__)}")
        if score.softcap is not None or not math.isclose(score.factor(self.head_size), usual):
            raise ValueError(f"to_torch needs scaled_dot with scale 1/√{self.head_size} and no softcap, got {score}")
        if not self.normalize.is_softmax:
            raise ValueError(f"to_torch needs softmax, got {self.normalize.name}")
        if self.positions is not None:
            raise ValueError(f"to_torch needs a layer without positions, got {type(self.positions).__name__}")
        if self.kv_heads != self.heads or self.heads * self.head_size != self.size:
            raise ValueError(
                f"to_torch needs as many kv_heads as heads and size = heads · head_size, got size {self.size}, "
                f"{self.heads} heads of size {self.head_size}, {self.kv_heads} kv_heads"
            )
        target = nn.MultiheadAttention(
            self.size,
            self.heads,
            dropout=self.dropout,
            bias=self.output.bias is not None,
            kdim=self.key_size,
            vdim=self.value_size,
            batch_first=batch_first,
            device=self.output.weight.device,
            dtype=self.output.weight.dtype,
        ).train(self.training)
        convert.store(self.projection, self.output, target)
        return target

    def forward(
        self,
        query: Float[Tensor, "b q d"],
        key: Float[Tensor, "b k dk"] | None = None,
        value: Float[Tensor, "b k dv"] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        cache: KeyValueCache | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
        **unknown: Unknown,
    ) -> Attended:
        """Return the output of each query, (b, q, size), and the requested weights, (b, h, q, k) with `weights=full()`.

        `mask` and `bias` are `Mask` and `Bias` objects, or tensors that broadcast to the scores (b, h, q, k); True =
        may attend. With a cache, k counts all keys so far: the layer shifts `Mask` and `Bias` objects by the cache's
        length, and uses tensors unchanged.
        """
        if unknown:
            torch_names.refuse("MultiHeadAttention", self.forward, unknown, torch_names.LAYER_CALL)
        self._check(query, key, value, cache)
        if cache is not None:
            sharding.refuse("a cache")
        offset: int | Tensor = 0
        if cache is not None and cache.is_fixed:
            queries, (keys, values) = self.projection.queries(query), cache.read()
        elif key is None or (key is query and (value is None or value is query)):
            offset = 0 if cache is None else cache.offset
            queries, keys, values = self._itself(query, offset)
            if cache is not None:
                mask, bias = self._later(query, offset, cache, mask, bias)
                keys, values = cache.update(keys, values)
        else:
            queries, keys, values = self.projection.cross(query, key, key if value is None else value)
            if cache is not None:
                keys, values = cache.fixed(keys, values)
            elif isinstance(self.positions, Rotary):
                queries, keys = self.positions(queries), self.positions(keys)
        attended = self._attend(queries, keys, values, offset, mask, bias, weights, generator)
        joined = applied(own(self, "output"), attended.output.transpose(1, 2).flatten(-2))
        if attended.weights is None and attended.log_prob is None and not torch.compiler.is_compiling():
            return with_output(joined)
        return Attended(joined, attended.weights, attended.log_prob)

    def _itself(self, x: Tensor, offset: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of self-attention.

        Rotary positions are applied to queries and keys while both are one concatenated tensor.
        """
        if isinstance(self.positions, Rotary):
            turned, value = own(self, "projection").apart(x, (self.heads + self.kv_heads, self.kv_heads))
            query, key = self.positions(turned, offset=offset).split([self.heads, self.kv_heads], 1)
        else:
            query, key, value = own(self, "projection").apart(x)
        return query, key, value

    def _later(
        self,
        query: Tensor,
        offset: int | Tensor,
        cache: KeyValueCache,
        mask: Mask | Tensor | None,
        bias: Bias | Tensor | None,
    ) -> tuple[Mask | None, Bias | None]:
        """Return mask and bias for queries that follow the keys in a cache; both are checked before the cache is
        changed."""
        batch, count, _ = query.shape
        keys = count + offset if isinstance(offset, int) and cache.room is None else cache.room
        assert isinstance(keys, int)
        shape = (batch, self.heads, count, keys)
        late_mask = later_mask(mask, offset, count, keys, query.device)
        late_bias = later_bias(bias, offset, query, keys)
        for part in (late_mask, late_bias):
            if part is not None:
                _check_late(part, shape)
        return late_mask, late_bias

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offset: int | Tensor,
        mask: Mask | Tensor | None,
        bias: Bias | Tensor | None,
        weights: Request | None,
        generator: torch.Generator | None,
    ) -> Attended:
        owned = own(self, "score")
        score = owned() if owned.learned else owned.record
        normalize = settled(self.normalize, self.training or generator is not None)
        dropout = self.dropout if self.training else 0.0
        if self.positions is None:
            pass
        elif isinstance(self.positions, RelativePositions) and isinstance(score, Score):
            return self.positions.attend(
                query,
                key,
                value,
                score=score,
                normalize=normalize,
                mask=mask,
                bias=bias,
                dropout=dropout,
                weights=weights,
                generator=generator,
                offset=offset,
            )
        elif isinstance(self.positions, Alibi):
            slopes = later_bias(self.positions.bias(), offset, query, key.shape[-2])
            bias = slopes if bias is None else _sum(slopes, bias, query, key.shape[-2])
        return attention(
            query,
            key,
            value,
            score=score,
            normalize=normalize,
            mask=mask,
            bias=bias,
            dropout=dropout,
            weights=weights,
            generator=generator,
        )

    def _check(self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KeyValueCache | None) -> None:
        """Raise if an input does not fit the layer, or a filled cache does not fit the inputs."""
        if value is not None and key is None:
            raise ValueError("value was given without key: self attention takes query alone, any other takes key")
        if key is None and cache is None and self.size == self.key_size == self.value_size:
            check_input(query, "query", self.size)
            return
        sources = {"query": (query, self.size), "key": (key, self.key_size), "value": (value, self.value_size)}
        if key is None and not (cache is not None and cache.is_fixed):
            sources |= {"key": (query, self.key_size), "value": (query, self.value_size)}
        elif value is None:
            sources["value"] = (key, self.value_size)
        for name, (source, size) in sources.items():
            if source is None:
                continue
            check_input(source, name, size)
            if source.shape[0] != query.shape[0]:
                raise ValueError(f"query has a batch of {query.shape[0]}, {name} of {source.shape[0]}")
        if cache is None or not cache.is_fixed:
            if key is not None and cache is not None and self.positions is not None and key is not query:
                raise ValueError("a cached memory has no positions: this layer's positions are for self attention")
            return
        batch, _, length, _ = cache.read()[0].shape
        if batch != query.shape[0]:
            raise ValueError(f"query has a batch of {query.shape[0]}, the cache holds a batch of {batch}")
        if key is not None and key.shape[1] != length:
            raise ValueError(f"the cache was filled with {length} positions, key has {key.shape[1]}: not the same")


def _check_late(part: Mask | Bias, shape: tuple[int, int, int, int]) -> None:
    """Raise if a mask or bias of a call with a cache does not broadcast to scores of this shape."""
    try:
        part.aligned(shape)
    except ValueError as error:
        said = f"with a cache, a tensor is for the new queries, {shape[-2]}, and all keys so far, {shape[-1]}"
        raise ValueError(f"{error}; {said}") from None


def _sum(slopes: Bias | None, bias: Bias | Tensor, query: Tensor, keys: int) -> Tensor:
    """Return the sum of two biases as a tensor."""
    assert slopes is not None
    dtype = torch.promote_types(query.dtype, torch.float32)
    parts = (slopes, as_bias(bias).aligned((*query.shape[:-1], keys)))
    first, second = (part.values(all_of(query.shape[-2]), all_of(keys), dtype) for part in parts)
    return first + second


def _check_positions(
    positions: Rotary | Alibi | RelativePositions | None, heads: int, head_size: int, score: AnyScore
) -> None:
    if isinstance(positions, Alibi) and positions.heads != heads:
        raise ValueError(f"positions are for {positions.heads} heads, the layer has {heads}")
    if isinstance(positions, (Rotary, RelativePositions)) and positions.head_size != head_size:
        raise ValueError(f"positions are for heads of size {positions.head_size}, the layer's have {head_size}")
    if isinstance(positions, RelativePositions):
        positions.factor(score)
