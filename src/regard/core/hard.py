"""Hard attention samples one key for each query; `reinforce` learns from the samples (Xu et al. 2015, section 4.1)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core.normalizers import Hard, gumbel_like, masked, masked_softmax, one_hot
from regard.core.scores import finite, float_tensor


class Choice(NamedTuple):
    """One-hot weights with the gradient of the estimator, the index of the chosen key, and its log-probability.

    A query that uses the expected value Σ p_j v_j over all keys j instead of a sample has the probabilities p as
    weights and the log-probability 0; its index is meaningless.
    """

    weights: Float[Tensor, "*lead q k"]
    index: Int[Tensor, "*lead q"]
    log_prob: Float[Tensor, "*lead q"]


def choose(
    hard: Hard, scores: Tensor, allowed: Tensor | None, sample: bool, generator: torch.Generator | None
) -> Choice:
    """Sample a key for each row of scores, or choose the key of the largest score if `sample` is False."""
    if scores.shape[-1] == 0:
        nothing = scores.sum(-1)
        return Choice(scores, torch.zeros_like(nothing, dtype=torch.long), nothing)
    scores = scores * hard.sharpness
    filled = None
    if allowed is not None:
        scores, filled = masked(scores, allowed)
    noisy = scores + gumbel_like(scores, generator) if sample else scores
    index = noisy.detach().argmax(-1)
    weights = one_hot(index, scores.detach(), allowed)
    if sample and hard.estimator != "reinforce":
        logits = noisy / hard.temperature if hard.estimator == "gumbel" else scores
        soft = masked_softmax(logits, allowed)
        weights = weights + (soft - soft.detach())
    log_prob = torch.log_softmax(scores, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    log_prob = log_prob if filled is None else torch.where(filled.squeeze(-1), log_prob, 0)
    if sample and hard.mixes:
        mean = read_expected(hard, index, generator)
        weights = torch.where(mean.unsqueeze(-1), masked_softmax(scores, allowed), weights)
        log_prob = torch.where(mean, 0, log_prob)
    return Choice(weights, index, log_prob)


def read_expected(hard: Hard, rows: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return which queries use the expected value Σ p_j v_j (see `Choice`), as a bool tensor in the shape of `rows`.

    If `hard.expected` is a probability, random numbers are compared with it on the device, without a synchronisation.
    """
    if isinstance(hard.expected, Tensor) and hard.expected.dtype == torch.bool:
        return hard.expected.expand(rows.shape)
    return torch.rand(rows.shape, generator=generator, device=rows.device) < hard.expected


class Reinforced(NamedTuple):
    """The loss to minimise and the baseline to pass to the next call of `reinforce`."""

    loss: Float[Tensor, ""]
    baseline: Float[Tensor, ""]


def reinforce(
    log_prob: Float[Tensor, "b *rest"],
    reward: Float[Tensor, "b *same"],
    *,
    baseline: Float[Tensor, ""] | float | None = None,
    entropy: Float[Tensor, "*any"] | None = None,
    mask: Bool[Tensor, "b *same"] | None = None,
    decay: float = 0.9,
    reward_weight: float = 1.0,
    entropy_weight: float = 0.01,
) -> Reinforced:
    """Return the loss whose gradient is REINFORCE with a moving-average baseline and an entropy term.

    For batch items b, loss = −reward_weight · mean_b[(reward_b − baseline) · Σ log_prob_b] − entropy_weight ·
    mean(entropy), and the returned baseline is decay · baseline + (1 − decay) · mean(reward). If no baseline is given,
    it is the mean reward. `log_prob` is `Attended.log_prob`, batch first: it is summed over all axes after the batch
    axis. A `reward` in the shape of `log_prob` is a reward for each choice: then the mean is over all choices, and
    nothing is summed. A `mask` in the shape of `reward` is True for the entries that count; entries where it is False
    enter neither the loss nor the baseline.

    >>> out = reinforce(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, 1.0]))
    >>> out.loss, out.baseline
    (tensor(-0.5000), tensor(2.))
    """
    if log_prob is None:
        raise TypeError("log_prob must be a float tensor, got None: attention with normalize=Hard(…) gives one")
    float_tensor(log_prob, "log_prob")
    float_tensor(reward, "reward")
    if entropy is not None:
        float_tensor(entropy, "entropy")
    if log_prob.ndim < 1 or reward.shape not in (log_prob.shape, log_prob.shape[:1]):
        raise ValueError(
            f"reward must be {tuple(log_prob.shape[:1])}, one for each item of log_prob, or {tuple(log_prob.shape)}, "
            f"one for each choice, got {tuple(reward.shape)}"
        )
    if not 0.0 <= finite(decay, "decay") <= 1.0:
        raise ValueError(f"decay must be between 0 and 1, got {decay}")
    if isinstance(baseline, Tensor) and baseline.numel() != 1:
        raise ValueError(f"baseline must be one number, as the last call gave it, got shape {tuple(baseline.shape)}")
    if baseline is not None and not isinstance(baseline, Tensor):
        finite(baseline, "baseline")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != reward.shape):
        raise ValueError(
            f"mask must be a bool tensor in the shape of reward, {tuple(reward.shape)}, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    reward = reward.detach()
    mean = masked_mean(reward, mask)
    current = mean if baseline is None else torch.as_tensor(baseline, dtype=mean.dtype, device=mean.device).reshape(())
    summed = log_prob if reward.ndim > 1 else log_prob.reshape(len(log_prob), -1).sum(1)
    loss = -reward_weight * masked_mean((reward - current) * summed, mask)
    if entropy is not None:
        loss = loss - entropy_weight * entropy.mean()
    return Reinforced(loss, decay * current + (1 - decay) * mean)


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of the values at which the mask is True, of all without a mask; 0 if the mask is all False."""
    if mask is None:
        return values.mean()
    return torch.where(mask, values, 0).sum() / mask.sum().clamp_min(1)
