"""Recurrent visual attention: look at an image a glimpse at a time, and learn where to look by reward."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.glimpse import Glimpse


@dataclass(frozen=True, eq=False)
class Looked:
    """What was seen, and where the gaze went: the first place is given, the others are choices.

    `log_prob` and `baseline` belong to the choices: entry i is of the move from place i to place i + 1.
    """

    logits: Float[Tensor, "b classes"]
    locations: Float[Tensor, "b steps 2"]
    log_prob: Float[Tensor, "b moves"]
    baseline: Float[Tensor, "b moves"]


@dataclass(frozen=True, eq=False)
class LookedLoss:
    """The sum to minimise and its three parts."""

    total: Float[Tensor, ""]
    classification: Float[Tensor, ""]
    reinforce: Float[Tensor, ""]
    baseline: Float[Tensor, ""]


class RecurrentVisualAttention(nn.Module):
    """Classify an image from a few glimpses, each placed by what the ones before it showed (Mnih et al. 2014).

    With patches ρ(x, l) of the image x at place l:

    - glimpse network: g_t = relu(W₁ relu(W_ρ ρ(x, l_{t−1})) + W₂ relu(W_l l_{t−1}));
    - core: h_t = relu(W_h h_{t−1} + W_g g_t), section 4;
    - location network: l_t ~ N(tanh(W_m h_t), deviation²), kept inside the image; in evaluation it is the mean;
    - action network: logits = W_a h_T; baseline: b_t = W_b h_t.

    Locations are (x, y) in [−1, 1]², the first one is the middle. The draw cuts the gradient: the location network
    learns by reward, see `looked_loss`.

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
    ) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if not (deviation > 0 and math.isfinite(deviation)):
            raise ValueError(f"deviation must be a finite number above 0, got {deviation}")
        self.glimpse = glimpse
        self.steps, self.size, self.deviation = steps, size, deviation
        self.what = nn.Linear(glimpse.scales * channels * glimpse.size**2, hidden_size)
        self.where = nn.Linear(2, hidden_size)
        self.from_what = nn.Linear(hidden_size, size)
        self.from_where = nn.Linear(hidden_size, size)
        self.recurrent = nn.Linear(size, size)
        self.input = nn.Linear(size, size)
        self.location = nn.Linear(size, 2)
        self.baseline = nn.Linear(size, 1)
        self.action = nn.Linear(size, classes)

    def forward(self, images: Float[Tensor, "b c height width"], *, generator: torch.Generator | None = None) -> Looked:
        """Where it looked and what it takes the image for; in training the gaze is drawn, with `generator` if given."""
        place = images.new_zeros(len(images), 2)
        hidden = images.new_zeros(len(images), self.size)
        places = [place]
        log_probs: list[Tensor] = []
        baselines: list[Tensor] = []
        for step in range(self.steps):
            hidden = self.look(images, place, hidden)
            if step + 1 < self.steps:
                # The state is not to learn from the location network's reward, nor from the baseline's error (sec. 4).
                known = hidden.detach()
                place, log_prob = self._move(known, generator)
                places.append(place)
                log_probs.append(log_prob)
                baselines.append(self.baseline(known).float().squeeze(-1))
        logits = self.action(hidden)
        none = logits.new_zeros(len(images), 0, dtype=torch.float32)
        return Looked(
            logits,
            torch.stack(places, 1),
            torch.stack(log_probs, 1) if log_probs else none,
            torch.stack(baselines, 1) if baselines else none,
        )

    def look(
        self, images: Float[Tensor, "b c height width"], place: Float[Tensor, "b 2"], hidden: Float[Tensor, "b d"]
    ) -> Float[Tensor, "b d"]:
        """The state after a glimpse of one place."""
        patches = self.glimpse(images, place).output.flatten(1)
        seen = self.from_what(F.relu(self.what(patches))) + self.from_where(F.relu(self.where(place)))
        return F.relu(self.recurrent(hidden) + self.input(F.relu(seen)))

    def _move(self, known: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The next place and the log-probability of the draw, before it was kept inside the image."""
        mean = torch.tanh(self.location(known)).float()
        drawn = mean.detach()
        if self.training:
            noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
            drawn = drawn + self.deviation * noise
        distance = ((drawn - mean) / self.deviation).square().sum(-1)
        log_prob = -0.5 * distance - 2 * math.log(self.deviation) - math.log(2 * math.pi)
        return drawn.clamp(-1, 1).to(known.dtype), log_prob


def looked_loss(
    looked: Looked, target: Int[Tensor, "b"], *, reinforce_weight: float = 1.0, baseline_weight: float = 1.0
) -> LookedLoss:
    """Cross-entropy + λ_r · REINFORCE + λ_b · squared error of the baseline (Mnih et al. 2014, section 3.2).

    The reward R is 1 for a right answer, else 0, and belongs to every move before it: the REINFORCE term is
    −mean_b Σ_t (R − b_t) log π(l_t), in which the baseline b_t is a constant; b_t itself learns to foretell R.

    >>> looked = Looked(torch.tensor([[0.0, 0.0]]), torch.zeros(1, 2, 2), torch.tensor([[-2.0]]), torch.tensor([[0.5]]))
    >>> loss = looked_loss(looked, torch.tensor([0]))
    >>> loss.reinforce, loss.baseline
    (tensor(1.), tensor(0.2500))
    """
    reward = (looked.logits.detach().argmax(-1) == target).to(looked.log_prob.dtype).unsqueeze(-1)
    classification = F.cross_entropy(looked.logits.float(), target)
    reinforce = -((reward - looked.baseline.detach()) * looked.log_prob).sum(1).mean()
    # A model of one step has no moves: the mean of nothing would be NaN.
    baseline = (looked.baseline - reward).square().sum() / max(looked.baseline.numel(), 1)
    total = classification + reinforce_weight * reinforce + baseline_weight * baseline
    return LookedLoss(total, classification, reinforce, baseline)
