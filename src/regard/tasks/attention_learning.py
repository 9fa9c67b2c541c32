"""Penalties on attention weights, and gradient estimators of hard attention, which the training of every task uses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from regard.core.hard import reinforce
from regard.core.normalizers import Entmax, Hard, Normalizer, Sigmoid, Softmax, Sparsemax
from regard.nn.losses import doubly_stochastic, entropy_penalty, weight_penalty
from regard.tasks.config import LearningSettings
from regard.tasks.task import Outcome
from regard.train.updates import Loss

NormalizerName = Literal["softmax", "sparsemax", "entmax", "sigmoid", "hard"]


class MovingBaseline(nn.Module):
    """The baseline of REINFORCE: a moving average of the reward, in a buffer, so that every checkpoint contains it.

    With `kinds`, a number, each kind of sample has its own average. If the kind of a sample is the word that it was
    drawn for, the reward of an easy word is then not compared with that of a difficult word.
    """

    value: Tensor
    seen: Tensor

    def __init__(self, kinds: int | None = None) -> None:
        super().__init__()
        shape = () if kinds is None else (kinds,)
        self.register_buffer("value", torch.zeros(shape))
        self.register_buffer("seen", torch.zeros(shape, dtype=torch.bool))

    @torch.no_grad()
    def follow(self, reward: Tensor, kinds: Tensor | None, mask: Tensor | None, *, decay: float = 0.9) -> Tensor:
        """Return the baseline of each reward, then update the averages with the rewards that `mask` selects.

        In the first batch with rewards of a kind, the baseline of this kind is the mean of these rewards.
        """
        counted = torch.ones_like(reward) if mask is None else mask.to(reward.dtype)
        place = torch.zeros_like(reward, dtype=torch.long) if kinds is None or self.value.ndim == 0 else kinds
        flat = place.flatten()
        empty = torch.zeros_like(self.value.reshape(-1), dtype=reward.dtype)
        count = empty.index_add(0, flat, counted.flatten())
        mean = empty.index_add(0, flat, (counted * reward).flatten()) / count.clamp_min(1)
        present = count > 0
        old, seen = self.value.reshape(-1), self.seen.reshape(-1)
        before = torch.where(seen, old, mean.to(old))
        after = torch.where(present, decay * before + (1 - decay) * mean.to(old), old)
        self.value.copy_(after.reshape(self.value.shape))
        self.seen.copy_((seen | present).reshape(self.seen.shape))
        return before[place].to(reward.dtype)


def hard(settings: LearningSettings) -> Hard:
    """Return the normaliser of hard attention with the configured estimator."""
    expected = settings.expected if settings.estimator == "reinforce" else 0.0
    return Hard(settings.estimator, temperature=settings.temperature, expected=expected)


def normalizer(name: NormalizerName, settings: LearningSettings, *, alpha: float = 1.5) -> Normalizer:
    """Return the normaliser of attention scores called `name`; `alpha` is the parameter α of entmax."""
    if name == "hard":
        return hard(settings)
    soft = {"softmax": Softmax(), "sparsemax": Sparsemax(), "entmax": Entmax(alpha), "sigmoid": Sigmoid()}
    return soft[name]


def with_baseline(
    network: nn.Module, settings: LearningSettings, *, is_hard: bool, kinds: int | None = None
) -> nn.Module:
    """Return the network, with a `MovingBaseline` as its module `baseline` if REINFORCE trains hard attention."""
    if is_hard and settings.estimator == "reinforce":
        network.add_module("baseline", MovingBaseline(kinds))
    return network


def softened(network: nn.Module, expected: Tensor) -> None:
    """Make each hard attention module of the network compute soft attention with the probability `expected`.

    `expected` is a tensor of shape (), so that its value may change between training steps, also with CUDA graphs.
    """
    for module in network.modules():
        normalize = getattr(module, "normalize", None)
        if isinstance(normalize, Hard):
            vars(module)["normalize"] = replace(normalize, expected=expected)


def asks_attention(network: nn.Module, settings: LearningSettings) -> bool:
    """Return whether the training loss uses attention weights (a penalty) or samples of hard attention (REINFORCE)."""
    return settings.penalty != "none" or _baseline(network) is not None


def loss_of(outcome: Outcome, network: nn.Module, settings: LearningSettings, *, acts: bool | Tensor = True) -> Loss:
    """Return the task's loss of a batch plus the penalty and, in training, the REINFORCE term, summed over the batch.

    `acts` is 1 if the penalty is active, else 0. It may be a tensor, whose value may change between the replays of a
    CUDA graph.
    """
    total = outcome.total
    if settings.penalty != "none" and outcome.weights and acts is not False:
        beta = settings.beta if acts is True else settings.beta * acts
        total = total + beta * _penalty(outcome.weights, outcome.mask, settings) * outcome.count
    baseline = _baseline(network)
    if baseline is not None and outcome.log_prob is not None and network.training:
        total = total + _reinforced(outcome, baseline, settings) * outcome.count
    return Loss(total, outcome.count)


def _penalty(maps: Sequence[Tensor], mask: Tensor | None, settings: LearningSettings) -> Tensor:
    """Return the configured penalty, averaged over several attention maps (…, q, k).

    The penalty "squares" needs ln p(α|x) of each row of weights α, which is Σ_j α_j ln α_j over the keys j.
    """
    penalties = []
    for weights in maps:
        if settings.penalty == "doubly_stochastic":
            penalties.append(doubly_stochastic(weights, mask))
        elif settings.penalty == "entropy":
            penalties.append(entropy_penalty(weights, mask))
        else:
            wide = weights.float()
            log_prob = torch.xlogy(wide, wide).sum(-1)
            penalties.append(weight_penalty(weights, log_prob, mask=mask))
    return torch.stack(penalties).mean()


def _reinforced(outcome: Outcome, baseline: MovingBaseline, settings: LearningSettings) -> Tensor:
    """Return the REINFORCE loss of hard attention with one sample for each query.

    The reward includes −ln p of the sample, multiplied by `entropy_weight`: the mean of −ln p over samples is the
    entropy of the attention weights.

    A query with soft attention (setting `expected`) has a log-probability of 0, so it has no gradient in this loss. The
    reward of such a query does not enter the baseline (in Xu et al. 2015 it does): soft attention gets higher rewards
    than sampled attention, so most samples would have rewards below a mean over both kinds of queries.
    """
    assert outcome.log_prob is not None
    assert outcome.reward is not None
    reward = outcome.reward.detach() - settings.entropy_weight * outcome.log_prob.detach()
    sampled = outcome.log_prob.detach() != 0
    chosen = sampled if outcome.choices is None else sampled & outcome.choices
    above = reward - baseline.follow(reward, outcome.kinds, chosen)
    return reinforce(
        outcome.log_prob, above, baseline=0.0, mask=outcome.choices, reward_weight=settings.reward_weight
    ).loss


def _baseline(network: nn.Module) -> MovingBaseline | None:
    plain = getattr(network, "_orig_mod", network)
    baseline = getattr(plain, "baseline", None)
    return baseline if isinstance(baseline, MovingBaseline) else None
