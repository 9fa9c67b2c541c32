"""Local attention (Luong et al. 2015, section 3.2): each query attends to a window of keys around a centre position.

The centre may be learned, and may differ for every query. Only the keys in the window are scored, so time and memory
are O(q · window), independent of the number of keys. For dot products there are kernels (`backends/local_kernels`). For
scores that are not dot products the keys of each window are gathered; with few keys on the CPU all pairs are scored
instead, which takes less time than copying the windows.
"""

import functools
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core import attention, sharding
from regard.core.attended import Attended
from regard.core.attention import AnyScore, gathered_attention
from regard.core.backends import local_kernels
from regard.core.nonfinite import finite, harmless
from regard.core.normalizers import filled_with
from regard.core.requests import full
from regard.core.scores import Additive, Bilinear, Dot, ScaledDot, Score
from regard.core.spans import all_of, positions
from regard.core.tensor_arguments import check_lengths, extent
from regard.core.transforms import transformed


def local_attention(
    query: Float[Tensor, "*lead h q d"],
    key: Float[Tensor, "*lead h k d2"],
    value: Float[Tensor, "*lead h k e"],
    centre: Float[Tensor, "*#lead #h q"],
    *,
    reach: int,
    score: AnyScore = ScaledDot(),
    lengths: Int[Tensor, "*lead"] | None = None,
    gaussian: bool = True,
) -> Attended:
    """Compute softmax attention over the keys within `reach` of each query's centre p, weighted by a Gaussian.

    The softmax weight of the key at position s is multiplied by exp(−(s − p)² / 2σ²), σ = reach / 2. As in Luong et al.
    (2015), the products are not renormalised. The centre gets its gradient through the Gaussian. `gaussian=False` with
    centre = position is their monotonic alignment (local-m). The weights are (…, h, q, 2 · reach + 1), for key
    positions ⌈p − reach⌉ onwards; weights for positions outside of the window or without a key are 0.

    >>> x = torch.eye(5)[None]
    >>> near = local_attention(x, x, x, torch.arange(5.0)[None], reach=1, gaussian=False)
    >>> near.weights.shape, near.output[0, 0, 3:]
    (torch.Size([1, 5, 3]), tensor([0., 0.]))
    """
    sharding.refuse("local attention")
    call = local_kernels.signature(query, key, value, centre, reach, score, gaussian)
    plan = local_kernels.known(call)
    if not plan:
        _check(query, key, value, reach, score)
    if lengths is not None:
        check_lengths(extent(lengths), key.shape[-2], "lengths of local_attention()")
        # Lengths on a GPU are not inspected, so they are limited to the number of keys instead.
        lengths = lengths.clamp_max(key.shape[-2])
    centre = centre if centre.shape == query.shape[:-1] else centre.expand(query.shape[:-1])
    if plan is None and isinstance(score, (Dot, ScaledDot)):
        plan = local_kernels.planned(call, query, key, value, centre, reach, score, gaussian)
    plain = functools.partial(_plain, reach=reach, score=score, gaussian=gaussian)
    pair = local_kernels.attend(plan, query, key, value, centre, lengths, plain) if plan else None
    return Attended(*(plain(query, key, value, centre, lengths) if pair is None else pair))


def _check(query: Tensor, key: Tensor, value: Tensor, reach: int, score: AnyScore) -> None:
    """Raise if the arguments are inconsistent."""
    if reach < 1:
        raise ValueError(f"reach must be at least 1, got {reach}")
    if key.shape[:-1] != value.shape[:-1] or query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            "query, key and value must have equal leading axes and heads: "
            f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if isinstance(score, (Additive, Bilinear)) and score.weight.ndim == (3 if isinstance(score, Bilinear) else 2):
        shape = tuple(score.weight.shape)
        raise ValueError(f"local_attention() needs a {score.name} score with one weight for all heads, got {shape}")


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
    *,
    reach: int,
    score: AnyScore,
    gaussian: bool,
) -> tuple[Tensor, Tensor]:
    """Return output and weights, computed in torch operations; this function is the specification of the kernels."""
    keys = key.shape[-2]
    if isinstance(score, Score) and _dense_is_faster(query, key, value, centre, reach, score):
        return _dense(query, key, value, centre, lengths, reach, score, gaussian)
    position = _window(centre, reach)
    end = _end(lengths, keys, position.ndim)
    allowed = (position >= 0) & (position < end) & (position <= centre.detach().unsqueeze(-1) + reach)
    inside = position.clamp(0, max(0, keys - 1))
    near_key, near_value = (_gathered(tensor, inside) for tensor in (key, value))
    # Each query has its own keys after the gather: queries are (…, h, q, 1, d), keys (…, h, q, window, d).
    attended = gathered_attention(
        query.unsqueeze(-2), near_key, near_value, score=score, mask=allowed.unsqueeze(-2), weights=full()
    )
    weights = attended.weights
    assert isinstance(weights, Tensor)
    weights = weights.squeeze(-2)
    if gaussian:
        weights = weights * torch.exp((position - centre.unsqueeze(-1)).square() * (-2.0 / reach**2)).to(weights.dtype)
    safe = torch.where(allowed.unsqueeze(-1), near_value, 0)  # 0 · NaN is NaN, so values outside of the window become 0
    return (weights.unsqueeze(-2) @ safe).squeeze(-2), weights


def _window(centre: Tensor, reach: int) -> Tensor:
    """Return the key positions in the window of each query, (…, h, q, 2 · reach + 1)."""
    first = torch.ceil(centre.detach() - reach).long()
    return first.unsqueeze(-1) + positions(all_of(2 * reach + 1), centre.device)


def _end(lengths: Tensor | None, keys: int, axes: int) -> Tensor | int:
    """Return the number of keys, or the lengths with axes of size 1 appended until there are `axes` axes."""
    return keys if lengths is None else lengths.reshape(*lengths.shape, *(1,) * (axes - lengths.ndim))


def _dense_is_faster(query: Tensor, key: Tensor, value: Tensor, centre: Tensor, reach: int, score: Score) -> bool:
    """Return whether, on the CPU, scoring all pairs is faster than copying keys and values for each query.

    The result is False if a value is NaN or Inf: the product over all keys would spread it to other windows (0 · NaN).
    """
    plain = type(query) is type(key) is type(value) is Tensor and query.device.type == "cpu"
    if not plain or attention.observers or torch.compiler.is_compiling() or transformed():
        return False
    if torch.is_autocast_enabled(query.device.type) or 0 in (*query.shape, *key.shape, *value.shape):
        return False
    window, keys, size = 2 * reach + 1, key.shape[-2], min(query.shape[-1], value.shape[-1])
    near = 4 * window if score.why_no_product() else window * size // 2
    return keys <= near and finite(centre) and harmless(query, key, value, torch.is_grad_enabled())


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centre: Tensor,
    lengths: Tensor | None,
    reach: int,
    score: Score,
    gaussian: bool,
) -> tuple[Tensor, Tensor]:
    """Return output and weights, computed from the scores of all pairs; scores outside of each query's window are
    masked."""
    score.check(query, key)
    place, middle = positions(all_of(key.shape[-2]), key.device), centre.unsqueeze(-1)
    near = (place >= middle.detach() - reach) & (place <= middle.detach() + reach)
    near = near if lengths is None else near & (place < _end(lengths, 0, near.ndim))
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = filled_with(score(query.to(exact), key.to(exact)), near, -math.inf)
    weights = filled_with(torch.softmax(scores, -1), near, 0.0)
    if gaussian:
        weights = weights * torch.exp((place - middle).square() * (-2.0 / reach**2)).to(exact)
    output = (weights @ value.to(exact)).to(value.dtype)
    position = _window(centre, reach)
    inside = position.clamp(0, key.shape[-2] - 1)
    return output, filled_with(weights.gather(-1, inside), position == inside, 0.0).to(value.dtype)


def _gathered(tensor: Tensor, position: Tensor) -> Tensor:
    """Gather (…, k, d) at positions (…, q, window) into (…, q, window, d)."""
    index = (
        position.flatten(-2)
        .unsqueeze(-1)
        .expand(*position.shape[:-2], math.prod(position.shape[-2:]), tensor.shape[-1])
    )
    return tensor.gather(-2, index).unflatten(-2, position.shape[-2:])
