"""Metrics of driving: collisions and progress in simulated drives, agreement with the expert, pointing accuracy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.data.worlds.traffic import Recorded, drive, expert_policy, idle_policy, random_policy
from regard.data.worlds.traffic_roads import road
from regard.tasks.deletion_test import deletion
from regard.tasks.driving.config import DrivingConfig
from regard.tasks.driving.material import Example, gathered
from regard.tasks.driving.predictor import DrivingPredictor
from regard.tasks.task import Judged

_EXPLAINED = 100  # number of forced decisions whose faithfulness is measured
_DRIVEN = 500_000  # the model drives on roads from this number on; examples are from roads with smaller numbers


def agreement(chances: NDArray[Any], recorded: Recorded) -> float:
    """Return the fraction of scenes in which the model's most probable action equals the recorded action."""
    return float((chances.argmax(1) == recorded.decisions.action).mean())


def pointing(weights: NDArray[Any], recorded: Recorded) -> tuple[float, int] | None:
    """Return the pointing accuracy, and the number of forced decisions from which it was computed.

    Pointing accuracy is the fraction of the forced decisions (those forced by an object) in which such an object has
    the largest attention weight. The result is None if no decision is forced.
    """
    forced = recorded.decisions.forced
    judged = forced.any(1)
    if not judged.any():
        return None
    largest = np.where(recorded.scenes.present, weights, -1.0).argmax(1)
    inside = np.take_along_axis(forced, largest[:, None], 1)[judged]
    return float(inside.mean()), int(judged.sum())


def closed_loop(predictor: DrivingPredictor, config: DrivingConfig) -> dict[str, Any]:
    """Return metrics of simulated drives of the model, the expert, a random and an idle policy on the same roads."""
    data = config.data
    roads = [road(data.seed, number) for number in range(_DRIVEN, _DRIVEN + data.drives)]
    seen = predictor.codec.objects
    policies = {
        "": predictor.policy,
        "expert_": expert_policy,
        "random_": random_policy(data.seed),
        "idle_": idle_policy,
    }
    metrics: dict[str, Any] = {}
    for name, policy in policies.items():
        figures = drive(roads, policy, seen=seen).figures()
        metrics |= {f"{name}{key}": value for key, value in figures.items()}
    return metrics


def judge(predictor: DrivingPredictor, examples: Sequence[Example], config: DrivingConfig, explain: bool) -> Judged:
    """Return agreement, steering error, pointing accuracy, and, if `Example.world` is true, `closed_loop` metrics."""
    recorded = gathered(examples)
    chances, steering, weights = predictor.decide(recorded.scenes)
    metrics: dict[str, Any] = closed_loop(predictor, config) if examples[0].world else {}
    error = float(np.square(steering - recorded.decisions.steering).mean())
    metrics |= {"agreement": round(agreement(chances, recorded), 4), "steering_error": round(error**0.5, 4)}
    metrics["scenes"] = len(examples)
    share = None if weights is None else pointing(weights, recorded)
    if share is None:
        return Judged(metrics)
    lost: dict[str, float] = {}
    if explain and weights is not None:
        rows = np.flatnonzero(recorded.decisions.forced.any(1))[:_EXPLAINED]
        answers = []
        for row in rows:
            scene = recorded.scenes.take(np.array([row]))
            own = torch.from_numpy(weights[row][scene.present[0]])
            answers.append((own, predictor.score_of(scene, int(chances[row].argmax()))))
        lost = deletion(answers)
    return Judged(metrics, {"pointing": round(share[0], 4), "forced": share[1]}, lost)
