"""Penalties on attention weights and estimators of hard attention: the same for every task."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from regard.core.hard import masked_mean, reinforce
from regard.core.normalizers import Entmax, Hard, Normalizer, Sigmoid, Softmax, Sparsemax
from regard.nn.losses import doubly_stochastic, entropy_penalty, weight_penalty
from regard.tasks.config import LearningSettings
from regard.tasks.task import Outcome
from regard.train.updates import Loss

NormalizerName = Literal["softmax", "sparsemax", "entmax", "sigmoid", "hard"]


class MovingBaseline(nn.Module):
    """The moving average of the reward; a buffer of the network, so that every checkpoint holds it."""

    value: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))


def hard(settings: LearningSettings) -> Hard:
    """The normaliser of hard attention with the estimator chosen."""
    expected = settings.expected if settings.estimator == "reinforce" else 0.0
    return Hard(settings.estimator, temperature=settings.temperature, expected=expected)


def normalizer(name: NormalizerName, settings: LearningSettings, *, alpha: float = 1.5) -> Normalizer:
    """The normaliser of that name; `alpha` is of entmax."""
    if name == "hard":
        return hard(settings)
    soft = {"softmax": Softmax(), "sparsemax": Sparsemax(), "entmax": Entmax(alpha), "sigmoid": Sigmoid()}
    return soft[name]


def with_baseline(network: nn.Module, settings: LearningSettings, *, is_hard: bool) -> nn.Module:
    """The network; where hard attention learns by REINFORCE, with a baseline of its own."""
    if is_hard and settings.estimator == "reinforce":
        network.add_module("baseline", MovingBaseline())
    return network


def asks_attention(network: nn.Module, settings: LearningSettings) -> bool:
    """Whether the loss needs weights or choices beside the answer."""
    return settings.penalty != "none" or _baseline(network) is not None


def loss_of(outcome: Outcome, network: nn.Module, settings: LearningSettings, *, acts: bool | Tensor = True) -> Loss:
    """The loss of a batch with what is added to it: all of it summed over the batch, as the task's own loss is.

    `acts` says whether the penalty counts already: a tensor where it changes between the replays of a CUDA graph.
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
    """The mean over maps of the penalty; p(α|x) of a row is exp Σ_j α_j ln α_j, from the weights themselves."""
    found = []
    for weights in maps:
        if settings.penalty == "doubly_stochastic":
            found.append(doubly_stochastic(weights, mask))
        elif settings.penalty == "entropy":
            found.append(entropy_penalty(weights, mask))
        else:
            wide = weights.float()
            log_prob = torch.xlogy(wide, wide).sum(-1)
            found.append(weight_penalty(weights, log_prob, mask=mask))
    return torch.stack(found).mean()


def _reinforced(outcome: Outcome, baseline: MovingBaseline, settings: LearningSettings) -> Tensor:
    """REINFORCE over single choices. The entropy is rewarded too: E[−ln p] is it, and so is the mean of samples.

    A query that read the expected value has the log-probability 0 and no gradient here; its reward counts in the
    baseline, as in Xu et al. (2015).
    """
    assert outcome.log_prob is not None
    assert outcome.reward is not None
    reward = outcome.reward.detach() - settings.entropy_weight * outcome.log_prob.detach()
    found = reinforce(
        outcome.log_prob,
        reward,
        baseline=torch.where(baseline.seen, baseline.value, masked_mean(reward, outcome.choices).to(baseline.value)),
        mask=outcome.choices,
        reward_weight=settings.reward_weight,
    )
    with torch.no_grad():
        baseline.value.copy_(found.baseline)
        baseline.seen.fill_(True)
    return found.loss


def _baseline(network: nn.Module) -> MovingBaseline | None:
    plain = getattr(network, "_orig_mod", network)
    found = getattr(plain, "baseline", None)
    return found if isinstance(found, MovingBaseline) else None
