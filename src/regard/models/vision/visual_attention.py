"""Recurrent visual attention: a model that classifies an image from glimpses, whose locations REINFORCE trains."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.nn.glimpse import Glimpse


@dataclass(frozen=True, eq=False)
class Looked:
    """The result of the model: class logits, and the locations of its glimpses, in order.

    The first location is fixed, the others are sampled. `log_prob` and `baseline` have an entry for each sampled
    location: entry i belongs to the move from location i to location i + 1. `step_logits` are the class logits after
    each glimpse; `logits` are those after the last glimpse.
    """

    logits: Float[Tensor, "b classes"]
    locations: Float[Tensor, "b steps 2"]
    log_prob: Float[Tensor, "b moves"]
    baseline: Float[Tensor, "b moves"]
    step_logits: Float[Tensor, "b steps classes"] | None = None


@dataclass(frozen=True, eq=False)
class LookedLoss:
    """A loss: the total to minimise, and the three terms of which the total is the weighted sum."""

    total: Float[Tensor, ""]
    classification: Float[Tensor, ""]
    reinforce: Float[Tensor, ""]
    baseline: Float[Tensor, ""]


class RecurrentVisualAttention(nn.Module):
    """Classifies an image from a few glimpses; earlier glimpses determine the location of the next (Mnih et al. 2014).

    ρ(x, l) are the patches of the image x at location l, at several scales. The model consists of:

    - glimpse network: g_t = relu(W₁ relu(W_ρ ρ(x, l_{t−1})) + W₂ relu(W_l l_{t−1}));
    - core: h_t = relu(W_h h_{t−1} + W_g g_t), section 4;
    - location network: l_t ~ N(tanh(W_m h_t), deviation²), clamped to the image; in evaluation it is the mean;
    - action network: logits = W_a h_T; baseline: b_t = W_b h_t.

    Locations are (x, y) in [−1, 1]², and the first location is the middle of the image. No gradient passes through
    sampled locations, so the location network is trained by a reward: see `looked_loss` and `stepwise_loss`.

    With `cell="gru"` the core is a gated recurrent unit. `saccade` is a number of hidden units; if it is not 0, the
    patches are another input of the location network, and the next location is relative to the current one: the mean of
    l_t is l_{t−1} + tanh(W_m relu(W_s [h_t, ρ(x, l_{t−1})])). The same distance to a dark or bright spot in the coarse
    patches then leads to the same move at every location, so that a good policy is learned from much less reward.

    >>> model = RecurrentVisualAttention(10, glimpse=Glimpse(4, scales=2), steps=3).eval()
    >>> looked = model(torch.zeros(2, 1, 12, 12))
    >>> looked.logits.shape, looked.locations.shape, looked.log_prob.shape
    (torch.Size([2, 10]), torch.Size([2, 3, 2]), torch.Size([2, 2]))
    """

    def __init__(
        self,
        classes: int,
        *,
        glimpse: Glimpse,
        channels: int = 1,
        steps: int = 6,
        size: int = 256,
        hidden_size: int = 128,
        deviation: float = 0.2,
        cell: Literal["relu", "gru"] = "relu",
        saccade: int = 0,
    ) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if not (deviation > 0 and math.isfinite(deviation)):
            raise ValueError(f"deviation must be a finite number above 0, got {deviation}")
        self.glimpse = glimpse
        self.steps, self.size, self.deviation = steps, size, deviation
        if cell not in ("relu", "gru"):
            raise ValueError(f"cell must be relu or gru, got {cell!r}")
        seen = glimpse.scales * channels * glimpse.size**2
        self.what = nn.Linear(seen, hidden_size)
        self.where = nn.Linear(2, hidden_size)
        self.from_what = nn.Linear(hidden_size, size)
        self.from_where = nn.Linear(hidden_size, size)
        self.core: nn.GRUCell | None = nn.GRUCell(size, size) if cell == "gru" else None
        if self.core is None:
            self.recurrent = nn.Linear(size, size)
            self.input = nn.Linear(size, size)
        self.saccade = nn.Linear(size + seen, saccade) if saccade else None
        self.location = nn.Linear(saccade or size, 2)
        self.baseline = nn.Linear(size, 1)
        self.action = nn.Linear(size, classes)

    def forward(
        self,
        images: Float[Tensor, "b c height width"],
        *,
        places: Float[Tensor, "b steps 2"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Looked:
        """Return class logits and the locations of the glimpses.

        In training, locations are sampled with `generator`; in evaluation they are the means. If `places` is given,
        the glimpses are at these locations, and nothing is sampled.
        """
        if places is not None and places.shape[1] != self.steps:
            raise ValueError(f"places must be {self.steps} for each image, got {places.shape[1]}")
        place = images.new_zeros(len(images), 2) if places is None else places[:, 0]
        hidden = images.new_zeros(len(images), self.size)
        visited = [place]
        answers: list[Tensor] = []
        log_probs: list[Tensor] = []
        baselines: list[Tensor] = []
        for step in range(self.steps):
            patches = self.glimpse(images, place).output.flatten(1)
            hidden = self._seen(patches, place, hidden)
            answers.append(self.action(hidden))
            if step + 1 == self.steps:
                break
            if places is None:
                # The hidden state is detached: neither the reward of the location network nor the error of the
                # baseline gives the core a gradient (Mnih et al. 2014, section 4).
                known = hidden.detach()
                place, log_prob = self._move(known, patches, place, generator)
                log_probs.append(log_prob)
                baselines.append(self.baseline(known).float().squeeze(-1))
            else:
                place = places[:, step + 1]
            visited.append(place)
        none = answers[-1].new_zeros(len(images), 0, dtype=torch.float32)
        return Looked(
            answers[-1],
            torch.stack(visited, 1),
            torch.stack(log_probs, 1) if log_probs else none,
            torch.stack(baselines, 1) if baselines else none,
            torch.stack(answers, 1),
        )

    def look(
        self, images: Float[Tensor, "b c height width"], place: Float[Tensor, "b 2"], hidden: Float[Tensor, "b d"]
    ) -> Float[Tensor, "b d"]:
        """Return the hidden state of the core after a glimpse at one location of each image."""
        return self._seen(self.glimpse(images, place).output.flatten(1), place, hidden)

    def _seen(self, patches: Tensor, place: Tensor, hidden: Tensor) -> Tensor:
        seen = F.relu(self.from_what(F.relu(self.what(patches))) + self.from_where(F.relu(self.where(place))))
        if self.core is not None:
            return self.core(seen, hidden)
        return F.relu(self.recurrent(hidden) + self.input(seen))

    def _move(
        self, known: Tensor, patches: Tensor, place: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Return the next location, clamped to the image, and the log-probability of the sample before clamping."""
        if self.saccade is None:
            mean = torch.tanh(self.location(known)).float()
        else:
            hidden = F.relu(self.saccade(torch.cat([known, patches], -1)))
            moved = place.float() + torch.tanh(self.location(hidden)).float()
            # The mean is clamped to the image, but gets the gradient of the unclamped mean. The gradient of the clamped
            # mean is 0 outside the image, and no reward could move such a mean back.
            mean = moved + (moved.clamp(-1, 1) - moved).detach()
        sampled = mean.detach()
        if self.training:
            noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
            sampled = sampled + self.deviation * noise
        distance = ((sampled - mean) / self.deviation).square().sum(-1)
        log_prob = -0.5 * distance - 2 * math.log(self.deviation) - math.log(2 * math.pi)
        return sampled.clamp(-1, 1).to(place.dtype), log_prob


def looked_loss(
    looked: Looked, target: Int[Tensor, "b"], *, reinforce_weight: float = 1.0, baseline_weight: float = 1.0
) -> LookedLoss:
    """Return the weighted sum of cross-entropy, REINFORCE term and squared error of the baseline (Mnih et al. 2014).

    The reward R is 1 if the predicted class is right, else 0, and is the same for every move. The REINFORCE term is the
    batch mean of −Σ_t (R − b_t) log π(l_t), with the baseline b_t as a constant and the probability π(l_t) of the
    sampled location l_t. The squared error trains b_t to predict R.

    >>> looked = Looked(torch.tensor([[0.0, 0.0]]), torch.zeros(1, 2, 2), torch.tensor([[-2.0]]), torch.tensor([[0.5]]))
    >>> loss = looked_loss(looked, torch.tensor([0]))
    >>> loss.reinforce, loss.baseline
    (tensor(1.), tensor(0.2500))
    """
    reward = (looked.logits.detach().argmax(-1) == target).to(looked.log_prob.dtype).unsqueeze(-1)
    classification = F.cross_entropy(looked.logits.float(), target)
    reinforce = -((reward - looked.baseline.detach()) * looked.log_prob).sum(1).mean()
    # A model of one glimpse makes no moves, and the mean over no moves would be NaN.
    baseline = (looked.baseline - reward).square().sum() / max(looked.baseline.numel(), 1)
    total = classification + reinforce_weight * reinforce + baseline_weight * baseline
    return LookedLoss(total, classification, reinforce, baseline)


def stepwise_loss(
    looked: Looked,
    target: Int[Tensor, "b"],
    *,
    samples: int = 1,
    reward: Literal["log_probability", "right"] = "log_probability",
    reinforce_weight: float = 1.0,
    baseline_weight: float = 1.0,
    counted: Bool[Tensor, "b"] | None = None,
) -> LookedLoss:
    """Return a loss like that of `looked_loss`, but with a classification and a reward after every glimpse.

    The classification term is the mean cross-entropy of the logits after each glimpse. The reward of a glimpse is the
    log-probability of the right class (Ba et al. 2015, section 3: a bound of the likelihood), or with reward="right" 1
    for a right prediction and 0 for a wrong one. The return of a move is the mean reward of the glimpses after it.

    `samples` is the number of successive rows that are different sequences of glimpses at the same image. From the
    advantage of each of these rows, the mean advantage of the other rows is subtracted. This mean depends on the image
    and not on the row's own locations, so it reduces the variance of the gradient without changing its expectation.
    Rows where `counted` is False are excluded from the loss.

    >>> step_logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]]])
    >>> places, log_prob = torch.zeros(1, 2, 2), torch.tensor([[-2.0]])
    >>> looked = Looked(step_logits[:, -1], places, log_prob, torch.zeros(1, 1), step_logits)
    >>> loss = stepwise_loss(looked, torch.tensor([0]))
    >>> loss.classification, loss.reinforce  # ln 2, and −(−ln 2) · (−2)
    (tensor(0.6931), tensor(-1.3863))
    """
    if looked.step_logits is None:
        raise ValueError("stepwise_loss needs the answers after each glimpse: Looked.step_logits is None")
    if samples < 1 or len(target) % samples:
        raise ValueError(f"samples must divide the number of rows: got {samples} and {len(target)} rows")
    steps, moves = looked.step_logits.shape[1], looked.log_prob.shape[1]
    wanted = target.unsqueeze(-1).expand(-1, steps)
    losses = F.cross_entropy(looked.step_logits.float().flatten(0, 1), wanted.flatten(), reduction="none")
    losses = losses.view(-1, steps)
    rewards = -losses.detach()
    if reward == "right":
        rewards = (looked.step_logits.argmax(-1) == wanted).to(losses.dtype)
    # Column i of `returns` is the mean reward of glimpse i and all later ones. Glimpse i + 1 follows move i, so the
    # first column is dropped.
    returns = rewards.flip(1).cumsum(1).flip(1) / torch.arange(steps, 0, -1, device=target.device)
    returns = returns[:, steps - moves :]
    advantage = returns - looked.baseline.detach()
    if samples > 1:
        paths = advantage.unflatten(0, (-1, samples))
        others = (paths.sum(1, keepdim=True) - paths) / (samples - 1)
        advantage = (paths - others).flatten(0, 1)
    shares = torch.ones_like(losses[:, 0]) if counted is None else counted.to(losses.dtype)
    shares = shares / shares.sum().clamp_min(1)
    classification = (losses.mean(1) * shares).sum()
    reinforce = -((advantage * looked.log_prob).sum(1) * shares).sum()
    baseline = ((looked.baseline - returns).square().sum(1) * shares).sum() / max(moves, 1)
    total = classification + reinforce_weight * reinforce + baseline_weight * baseline
    return LookedLoss(total, classification, reinforce, baseline)
