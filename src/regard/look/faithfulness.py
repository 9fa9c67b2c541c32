"""Faithfulness of an importance map: the model's score without the inputs it ranks highest, or with only those inputs.

A map of attention weights does not show whether the model's result depends on the inputs with large weights. Two curves
measure it (DeYoung et al. 2020, section 4; Petsiuk et al. 2018, section 3.2):

    deletion(f)    = score without the fraction f of the inputs that the map ranks highest: should decrease fast
    sufficiency(f) = score with only that fraction of the inputs: should rise fast

Both curves are compared with those of random orderings of the inputs, and of other rankings such as gradient × input.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Score = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Curve:
    """The model's scores when increasing fractions of its inputs are removed (deletion) or present (sufficiency).

    If `scores` are means over several orderings of the inputs, `low` and `high` are the minimum and the maximum.
    """

    fractions: tuple[float, ...]
    scores: tuple[float, ...]
    low: tuple[float, ...] = field(default=())
    high: tuple[float, ...] = field(default=())

    @property
    def area(self) -> float:
        """Return the area under the curve by the trapezoid rule, which is its mean score: fractions run from 0 to 1.

        >>> Curve((0.0, 0.5, 1.0), (4.0, 2.0, 0.0)).area
        2.0
        """
        pairs = zip(self.fractions, self.fractions[1:], self.scores, self.scores[1:], strict=False)
        return sum((right - left) * (first + second) / 2 for left, right, first, second in pairs)


@dataclass(frozen=True)
class Faithfulness:
    """Deletion and sufficiency curves for each ordering of the inputs: "map", "random" and the names of baselines."""

    deletion: dict[str, Curve]
    sufficiency: dict[str, Curve]

    def gain(self, over: str = "random") -> float:
        """Return how much better the map is than the ordering `over`: the sum of the differences of both areas.

        The area of the deletion curve should be small and that of the sufficiency curve large. 0 means that the map is
        as good as `over`, a negative number that it is worse.
        """
        if over not in self.deletion:
            raise ValueError(f"over must be one of {sorted(self.deletion)}, got {over!r}")
        removed = self.deletion[over].area - self.deletion["map"].area
        return removed + self.sufficiency["map"].area - self.sufficiency[over].area


def faithfulness(
    score: Score,
    importance: Float[Tensor, "k"],
    *,
    baselines: Mapping[str, Tensor] | None = None,
    steps: int = 10,
    orderings: int = 16,
    block: int = 256,
    generator: torch.Generator | None = None,
) -> Faithfulness:
    """Return the deletion and sufficiency curves of an importance map over k inputs.

    `score(kept)` runs the model: it takes a Bool tensor (n, k), True where an input is present, and returns n numbers,
    such as log-probabilities of the model's output. It is called on at most `block` rows at a time. `baselines` are
    other rankings (k,) by name. `steps` is the number of steps of each curve and `orderings` the number of random
    orderings. Inputs of equal importance are ranked in their order. Without a `generator` the random orderings are the
    same on every call.

    >>> weight = torch.tensor([3.0, 0.0, 1.0])
    >>> curves = faithfulness(lambda kept: kept.float() @ weight, torch.tensor([0.7, 0.1, 0.2]), steps=3)
    >>> [round(score, 2) for score in curves.deletion["map"].scores], round(curves.deletion["map"].area, 2)
    ([4.0, 1.0, 0.0, 0.0], 1.0)
    >>> curves.gain() > 0
    True
    """
    rankings = {"map": importance, **(baselines or {})}
    _check(rankings, steps, orderings, block)
    if generator is None:
        generator = torch.Generator().manual_seed(2018)
    inputs = importance.shape[0]
    counts = sorted({round(inputs * step / steps) for step in range(steps + 1)})
    shuffled = torch.stack([torch.randperm(inputs, generator=generator) for _ in range(orderings)])
    orders = {
        name: ranking.detach().cpu().argsort(descending=True, stable=True)[None] for name, ranking in rankings.items()
    }
    orders["random"] = shuffled
    device = importance.device
    deletion = {name: _curve(score, order, counts, False, block, device) for name, order in orders.items()}
    sufficiency = {name: _curve(score, order, counts, True, block, device) for name, order in orders.items()}
    return Faithfulness(deletion, sufficiency)


def gradient_times_input(function: Callable[[Tensor], Tensor], inputs: Float[Tensor, "k d"]) -> Float[Tensor, "k"]:
    """Return Σ_d x · ∂function/∂x for each of k input vectors, a common baseline (Shrikumar et al. 2016).

    `function(inputs)` returns one number. For a linear function the result is exactly what each input adds to it.

    >>> gradient_times_input(lambda x: (x * torch.tensor([2.0, -1.0])).sum(), torch.tensor([[1.0, 1.0], [3.0, 0.0]]))
    tensor([1., 6.])
    """
    with torch.enable_grad():
        leaf = inputs.detach().clone().requires_grad_()
        result = function(leaf)
        if result.numel() != 1:
            raise ValueError(f"function must give one number, got a tensor of shape {tuple(result.shape)}")
        (gradient,) = torch.autograd.grad(result.reshape(()), leaf)
    return (gradient * leaf.detach()).sum(-1)


def _check(rankings: Mapping[str, Tensor], steps: int, orderings: int, block: int) -> None:
    inputs = rankings["map"].shape[0]
    if inputs == 0:
        raise ValueError("importance must have at least one input, got none")
    for name, ranking in rankings.items():
        label = "importance" if name == "map" else f"baselines[{name!r}]"
        if ranking.shape != (inputs,):
            raise ValueError(f"{label} must have shape ({inputs},), got {tuple(ranking.shape)}")
        if not bool(torch.isfinite(ranking).all()):
            raise ValueError(f"{label} must be finite, got {int((~torch.isfinite(ranking)).sum())} other numbers")
    if "random" in rankings:
        raise ValueError('baselines must not be called "random": the random orderings have that name')
    for name, number in {"steps": steps, "orderings": orderings, "block": block}.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def _curve(
    score: Score, orders: Int[Tensor, "o k"], counts: list[int], keep: bool, block: int, device: torch.device
) -> Curve:
    inputs = orders.shape[1]
    # masks of the inputs, (counts · orders, k): one for each number of inputs and each ordering
    masks = torch.cat([_masks(orders, count, keep) for count in counts])
    scores = torch.cat([_scored(score, part.to(device)) for part in masks.split(block)])
    table = scores.reshape(len(counts), -1)
    fractions = tuple(count / inputs for count in counts)
    mean = tuple(table.mean(1).tolist())
    if orders.shape[0] == 1:
        return Curve(fractions, mean)
    return Curve(fractions, mean, tuple(table.amin(1).tolist()), tuple(table.amax(1).tolist()))


def _masks(orders: Int[Tensor, "o k"], count: int, keep: bool) -> Bool[Tensor, "o k"]:
    """Return masks that are `keep` at the first `count` inputs of each ordering and `not keep` at all others."""
    masks = torch.full(orders.shape, not keep)
    return masks.scatter(1, orders[:, :count], keep)


def _scored(score: Score, masks: Bool[Tensor, "n k"]) -> Float[Tensor, "n"]:
    with torch.no_grad():
        scores = score(masks)
    if scores.shape != masks.shape[:1]:
        raise ValueError(
            f"score must give {masks.shape[0]} numbers for {masks.shape[0]} rows, got {tuple(scores.shape)}"
        )
    return scores.detach().double().cpu()
