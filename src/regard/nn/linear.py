"""Self-attention in linear time, with a decoding step of constant cost."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core import torch_names
from regard.core.attended import Attended
from regard.core.biases import Bias
from regard.core.features import Features, LogFeatures, PerformerFeatures
from regard.core.linear import LinearState, linear_attention, linear_step
from regard.core.masks import And, Band, Mask, as_mask
from regard.core.problem import said
from regard.core.requests import Request
from regard.core.torch_names import Unknown
from regard.nn.argument_checks import check_input, check_sizes
from regard.nn.cache import KeyValueCache
from regard.nn.projection import HeadProjection


class LinearAttention(nn.Module):
    """Multi-head linear attention, φ(Q) (φ(K)ᵀ V), each row divided by φ(Q) (φ(K)ᵀ 1), in O(n) (Performer, Choromanski
    et al. 2021).

    The layer can replace `MultiHeadAttention`: the call and the parameter names are the same. `features` is
    `PerformerFeatures` (sampled here if None, stored in the state_dict, resampled by `redraw`), `EluFeatures`, or any
    map to numbers ≥ 0. A mask may be `padding`, `causal()`, or both; with `causal=True` the layer is always causal.
    Weights are computed only on request.

    >>> layer = LinearAttention(16, heads=4, causal=True)
    >>> x = torch.randn(2, 7, 16)
    >>> first, state = layer.step(x[:, :5])
    >>> rest, state = layer.step(x[:, 5:], state)
    >>> torch.allclose(torch.cat([first, rest], 1), layer(x).output, atol=1e-5)
    True
    """

    @torch_names.made_with(torch_names.LAYER)
    def __init__(
        self, size: int, heads: int, *, features: Features | None = None, causal: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        check_sizes(size=size)
        if heads < 1 or size % heads:
            raise ValueError(f"size must be a multiple of heads, got {size} and {heads}")
        if not isinstance(causal, bool):
            raise TypeError(f"causal must be True or False, got {said(causal)}")
        self.size, self.heads, self.causal = size, heads, causal
        features = PerformerFeatures.draw(size // heads) if features is None else features
        self.given: Features | None = None
        self.directions: Tensor | None
        if isinstance(features, PerformerFeatures):
            if features.projection.shape[1] != size // heads:
                raise ValueError(
                    f"features are drawn for vectors of size {features.projection.shape[1]}, "
                    f"heads have size {size // heads}"
                )
            self.orthogonal = features.orthogonal
            self.register_buffer("directions", features.projection.clone())
        else:
            self.given = features
            self.register_buffer("directions", None)
        self.projection = HeadProjection(size, size, size, heads, heads, size // heads, bias)
        self.output = nn.Linear(size, size, bias=bias)
        nn.init.xavier_uniform_(self.output.weight)
        if bias:
            nn.init.zeros_(self.output.bias)

    @property
    def features(self) -> Features:
        """Return the feature map φ of the layer."""
        if self.directions is not None:
            return PerformerFeatures(self.directions, self.orthogonal)
        assert self.given is not None
        return self.given

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Resample the random directions, so that training does not adapt to one sample (Choromanski et al. 2021)."""
        if self.directions is None:
            raise ValueError(f"only PerformerFeatures can be drawn anew, this layer has {type(self.given).__name__}")
        self.directions.copy_(PerformerFeatures(self.directions, self.orthogonal).redraw(generator).projection)

    def forward(
        self,
        query: Float[Tensor, "b q d"],
        key: Float[Tensor, "b k d"] | None = None,
        value: Float[Tensor, "b k d"] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        cache: KeyValueCache | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
        **unknown: Unknown,
    ) -> Attended:
        """Return the output of each query, (b, q, size). Requested weights, (b, h, q, k), cost O(n²)."""
        if unknown:
            torch_names.refuse("LinearAttention", self.forward, unknown, torch_names.LAYER_CALL)
        if bias is not None:
            raise ValueError("bias must be None: in linear attention no score stands alone to add it to")
        if cache is not None:
            raise ValueError("cache must be None: linear attention keeps a LinearState, see LinearAttention.step")
        self._check(query, key, value)
        if key is None:
            queries, keys, values = self.projection(query).split(self.heads, 1)
        else:
            queries, keys, values = self.projection.cross(query, key, key if value is None else value)
        causal, rest = (self.causal, None) if mask is None else _parted(as_mask(mask))
        causal = causal or self.causal
        outputs = linear_attention(queries, keys, values, features=self.features, causal=causal, mask=rest)
        requested = None
        if weights is not None:
            weights.check(query.shape[1])
            requested = weights.of(implied_weights(queries, keys, self.features, causal, rest).to(outputs.dtype))
        return Attended(self._joined(outputs), requested)

    def step(
        self, x: Float[Tensor, "b n d"], state: LinearState | None = None
    ) -> tuple[Float[Tensor, "b n d"], LinearState]:
        """Process one or several new positions of a causal sequence; return their output and the state for later
        positions."""
        if not self.causal:
            raise ValueError("step needs causal=True: without it every position reads those still to come")
        self._check(x, None, None)
        queries, keys, values = self.projection(x).split(self.heads, 1)
        outputs, state = linear_step(state, queries, keys, values, self.features)
        return self._joined(outputs), state

    def _joined(self, outputs: Float[Tensor, "b h q e"]) -> Float[Tensor, "b q d"]:
        return self.output(outputs.transpose(1, 2).flatten(-2))

    def _check(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        if value is not None and key is None:
            raise ValueError("value was given without key: self attention takes query alone, any other takes key")
        for name, source in (("query", query), ("key", key), ("value", value)):
            if source is not None:
                check_input(source, name, self.size)


def _parted(mask: Mask) -> tuple[bool, Mask | None]:
    """Return whether the mask includes `causal()`, and the mask without `causal()` (None if nothing remains)."""
    match mask:
        case Band(low=None, high=0):
            return True, None
        case And(left, right):
            (left_causal, first), (right_causal, second) = _parted(left), _parted(right)
            return left_causal or right_causal, second if first is None else first if second is None else first & second
    return False, mask


def implied_weights(
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b h k d"],
    features: Features,
    causal: bool = False,
    mask: Mask | None = None,
) -> Float[Tensor, "b h q k"]:
    """Return φ(q_i)·φ(k_j) / Σ_j φ(q_i)·φ(k_j) in float64, the weights that linear attention itself never computes."""
    shape = (*query.shape[:-1], key.shape[-2])
    allowed = _allowed(shape, causal, mask, query.device)
    seen = allowed.any(-2).unsqueeze(-1)
    query, key = query.double(), torch.where(seen, key.double(), 0)
    if isinstance(features, LogFeatures):
        # Key features are divided by their largest value, and query features multiplied by it, so that no exponential
        # overflows.
        queries, keys = features.log_features(query), features.log_features(key)
        shift = keys.detach().amax(-2, keepdim=True) if shape[-1] else keys.new_zeros(())
        queries = queries + shift
        queries, keys = (queries - queries.detach().amax(-1, keepdim=True)).exp(), (keys - shift).exp()
    else:
        queries, keys = features(query), features(key)
    products = torch.where(allowed, queries @ keys.mT, 0)
    total = products.sum(-1, keepdim=True)
    return products / torch.where(total > 0, total, 1)


def _allowed(shape: tuple[int, ...], causal: bool, mask: Mask | None, device: torch.device) -> Bool[Tensor, "b h q k"]:
    rows, columns = range(shape[-2]), range(shape[-1])
    allowed = torch.ones((), dtype=torch.bool, device=device).expand(shape)
    if causal:
        allowed = allowed & Band(None, 0).allowed(rows, columns, device)
    return allowed if mask is None else allowed & mask.aligned(shape).allowed(rows, columns, device)
