"""Metrics of the network that drives from camera frames, and of two baselines that use no frames."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.data.driving.driving_log import CONTROLS
from regard.tasks.driving.camera_material import CameraExample
from regard.tasks.driving.camera_predictor import CameraPredictor
from regard.tasks.task import Judged


def errors(predictor: CameraPredictor, examples: Sequence[CameraExample]) -> dict[str, float]:
    """Return mean squared errors of the controls."""
    gold = np.array([one.controls for one in examples])
    wrong = np.square(predictor.controls(examples) - gold).mean(0)
    return {f"{name}_mse": float(value) for name, value in zip(CONTROLS, wrong, strict=True)}


def baselines(examples: Sequence[CameraExample]) -> dict[str, float]:
    """Return the squared errors of two baselines: always straight ahead, and repeating the previous steering angle.

    The second baseline uses the previous angle of the driving log, an input that the network has only with
    `model.angles`.
    """
    gold = np.array([one.controls[0] for one in examples])
    last = np.array([one.last_angle for one in examples])
    return {"zero_mse": float(np.square(gold).mean()), "repeat_mse": float(np.square(gold - last).mean())}


def judge_camera(predictor: CameraPredictor, examples: Sequence[CameraExample]) -> Judged:
    """Return the squared errors of the network and of the baselines, and which baselines are at least as good."""
    figures = errors(predictor, examples) | baselines(examples)
    metrics: dict[str, Any] = {name: round(value, 5) for name, value in figures.items()}
    metrics["frames"] = len(examples)
    metrics["knows_angles"] = "yes" if predictor.config.model.angles else "no"
    better = [name for name in ("zero_mse", "repeat_mse") if figures[name] <= figures["steering_mse"]]
    metrics["beaten_by"] = ", ".join(name.removesuffix("_mse") for name in better) or "neither baseline"
    return Judged(metrics)
