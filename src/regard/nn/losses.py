"""Losses and penalties: each function of outputs or attention weights returns one number; a model's loss is a sum of
them.

Weights are (…, q, k) as `weights=full()` gives them. `mask` selects entries (True): a bool tensor that broadcasts to
them, (b, 1, k) to exclude padded keys, (b, q, 1) to exclude padded queries, or both. A row without selected entries is
excluded from means; if nothing is selected, a loss is 0. Half precision is computed in float32.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core.problem import HALF
from regard.core.requests import Entropy

_LEAST = 1e-8  # the smallest weight in a logarithm: a gold link of weight 0 adds 18 nats to the loss, not infinity


def cross_entropy(
    logits: Float[Tensor, "*lead v"], target: Int[Tensor, "*lead"], *, smoothing: float = 0.0, ignore: int = -100
) -> Float[Tensor, ""]:
    """Return −Σ_c t_c ln softmax(logits)_c, the mean over targets that are not `ignore`; t is the smoothed one-hot
    vector of a target, and c a class.

    Label smoothing ε (Szegedy et al. 2016, section 7): t = (1 − ε) · one-hot + ε / v for v classes.

    >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, -100]))  # ln 4
    tensor(1.3863)
    """
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"smoothing must be between 0 and 1, got {smoothing}")
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"target must have the shape of logits without the last axis, {tuple(logits.shape[:-1])}, "
            f"got {tuple(target.shape)}"
        )
    rows, wanted = _wide(logits.reshape(-1, logits.shape[-1])), target.reshape(-1).long()
    total = F.cross_entropy(rows, wanted, ignore_index=ignore, label_smoothing=smoothing, reduction="sum")
    return total / (wanted != ignore).sum().clamp_min(1)


def squared_error(
    output: Float[Tensor, "*shape"], target: Float[Tensor, "*shape"], mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, ""]:
    """Return (output − target)², the mean over selected entries; `mask` broadcasts to the output.

    >>> squared_error(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 0.0]), torch.tensor([True, False]))
    tensor(4.)
    """
    if output.shape != target.shape:
        raise ValueError(f"target must have the output's shape {tuple(output.shape)}, got {tuple(target.shape)}")
    counts = _counts(output, mask, "output")
    error = torch.where(counts, _wide(output) - _wide(target), 0)
    return error.square().sum() / counts.sum().clamp_min(1)


def doubly_stochastic(
    weights: Float[Tensor, "*lead q k"], mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, ""]:
    """Return Σ_j (1 − Σ_i α_ij)²: every key should get a total weight of 1 (Xu et al. 2015, section 4.2.1).

    The loss is summed over keys and averaged over leading axes (batch, heads).

    >>> doubly_stochastic(torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]))
    tensor(0.5000)
    """
    counts = _counts(weights, mask)
    received = torch.where(counts, _wide(weights), 0).sum(-2)
    return torch.where(counts.any(-2), 1 - received, 0).square().sum(-1).mean()


def weight_penalty(
    weights: Float[Tensor, "*lead q k"],
    log_prob: Float[Tensor, "*lead q"] | None = None,
    beta: float = 1.0,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, ""]:
    """Return −β ln p(α|x) Σ_j α_ij², the mean over queries; without `log_prob`, β Σ_j α_ij².

    `log_prob` is ln p(α|x), of hard choices (`Attended.log_prob`) or of the model's outputs: rows with a low
    probability get a larger penalty for sharp weights.

    >>> weight_penalty(torch.tensor([[0.5, 0.5]]), torch.tensor([-2.0]), beta=0.1)
    tensor(0.1000)
    """
    counts = _counts(weights, mask)
    if log_prob is not None and log_prob.shape != weights.shape[:-1]:
        raise ValueError(
            f"log_prob must have one number for each query, {tuple(weights.shape[:-1])}, got {tuple(log_prob.shape)}"
        )
    rows = torch.where(counts, _wide(weights), 0).square().sum(-1)
    if log_prob is not None:
        rows = rows * -torch.where(counts.any(-1), _wide(log_prob), 0)
    return beta * _row_mean(rows, counts)


def entropy_penalty(weights: Float[Tensor, "*lead q k"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, ""]:
    """Return −Σ_j α_ij ln α_ij, the mean over queries. Adding it sharpens the weights, subtracting it flattens them.

    >>> entropy_penalty(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))  # (ln 2 + 0) / 2
    tensor(0.3466)
    """
    counts = _counts(weights, mask)
    rows = Entropy().of(torch.where(counts, _wide(weights), 0))
    assert isinstance(rows, Tensor)
    return _row_mean(rows, counts)


def guided_alignment(
    weights: Float[Tensor, "*lead q k"], gold: Float[Tensor, "*lead q k"], mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, ""]:
    """Return −Σ_j g_ij ln α_ij, the mean over queries that have a known alignment (Chen et al. 2016).

    Each row of `gold`, the known alignment of a query, is divided by its sum, so it may be given as zeros and ones.

    >>> guided_alignment(torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))  # ln 4
    tensor(1.3863)
    """
    if gold.shape != weights.shape:
        raise ValueError(f"gold must have the shape of weights {tuple(weights.shape)}, got {tuple(gold.shape)}")
    counts = _counts(weights, mask)
    gold = torch.where(counts, _wide(gold), 0)
    total = gold.sum(-1, keepdim=True)
    taught = total > 0
    gold = gold / torch.where(taught, total, 1)
    logs = torch.where(counts, _wide(weights), 1).clamp_min(_LEAST).log()
    return _row_mean(-(gold * logs).sum(-1), taught)


def coverage_penalty(
    weights: Float[Tensor, "*lead q k"],
    mask: Bool[Tensor, "..."] | None = None,
    *,
    coverage: Float[Tensor, "*lead k"] | None = None,
) -> Float[Tensor, ""]:
    """Return Σ_j min(α_ij, c_ij), c_i = Σ_{t<i} α_t, the mean over queries: it penalises repetition (See et al. 2017).

    `coverage` is the sum of the weights of queries before the first one of `weights`.

    >>> coverage_penalty(torch.tensor([[1.0, 0.0], [0.75, 0.25]]))  # (0 + 0.75) / 2
    tensor(0.3750)
    """
    counts = _counts(weights, mask)
    wide = torch.where(counts, _wide(weights), 0)
    before = wide.cumsum(-2) - wide
    if coverage is not None:
        before = before + coverage.unsqueeze(-2)
    return _row_mean(torch.minimum(wide, before).sum(-1), counts)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _counts(x: Tensor, mask: Tensor | None, name: str = "weights") -> Bool[Tensor, "..."]:
    """Return the mask expanded to the shape of x; all True without a mask."""
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=x.device).expand(x.shape)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor (True = counts), got {mask.dtype}")
    try:
        return mask.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}: it does not broadcast to the {name} {tuple(x.shape)}"
        ) from None


def _row_mean(rows: Float[Tensor, "*lead q"], counts: Bool[Tensor, "*lead q k"]) -> Float[Tensor, ""]:
    """Return the mean over rows with selected entries; rows without selected entries are already 0."""
    return rows.sum() / counts.any(-1).sum().clamp_min(1)
