"""The `Task` record of driving: the functions with which shared code trains, evaluates and predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.requests import full
from regard.data.record_batches import padded
from regard.tasks.attention_learning import with_baseline
from regard.tasks.driving.camera_material import (
    CameraCodec,
    CameraExample,
    camera_examples,
    camera_files,
    camera_material,
)
from regard.tasks.driving.camera_network import build_camera, camera_outcome
from regard.tasks.driving.camera_predictor import CameraPredictor
from regard.tasks.driving.camera_scoring import errors, judge_camera
from regard.tasks.driving.codec import FILE, DrivingCodec
from regard.tasks.driving.config import NEEDS, DrivingConfig
from regard.tasks.driving.material import encode, examples_of, gathered, input_files, make_material
from regard.tasks.driving.network import build
from regard.tasks.driving.predictor import DrivingPredictor
from regard.tasks.driving.presets import PRESETS
from regard.tasks.driving.scoring import agreement, judge
from regard.tasks.task import Figure, Input, Judged, Material, Outcome, Task, View

# The setting `input` selects the network's input: objects as vectors, or camera frames. Examples and codecs differ
# between these two inputs.


def _material(config: DrivingConfig, cache: Path, codec: Any, say: Any) -> Material:
    return (camera_material if config.input == "camera" else make_material)(config, cache, codec, say)


def _files(config: DrivingConfig) -> list[Path]:
    return (camera_files if config.input == "camera" else input_files)(config)


def _codec(directory: Path, config: DrivingConfig) -> Any:
    return (CameraCodec if config.input == "camera" else DrivingCodec).load(Path(directory))


def _network(config: DrivingConfig, codec: Any) -> nn.Module:
    if config.input == "camera":
        return build_camera(config, codec)
    settings = config.model
    is_hard = settings.attention != "none" and settings.normalize == "hard"
    return with_baseline(build(settings, codec.features, learning=config.learning), config.learning, is_hard=is_hard)


def _encode(codec: Any, example: Any, config: DrivingConfig) -> dict[str, Any]:
    return example.record() if isinstance(example, CameraExample) else encode(codec, example)


def _outcome(network: Any, batch: Any, config: DrivingConfig, attention: bool) -> Outcome:
    return (camera_outcome if config.input == "camera" else _object_outcome)(network, batch, config, attention)


def _object_outcome(network: Any, batch: Any, config: DrivingConfig, attention: bool) -> Outcome:
    """Return the cross-entropy of the action plus the squared error of the steering.

    With hard attention, the negative of this loss is the reward of the sampled keys.
    """
    done = network(batch.objects, batch.present, weights=full() if attention else None)
    wrong = F.cross_entropy(done.logits.float(), batch.action, reduction="none")
    wrong = wrong + config.learning.steering_weight * (done.controls[:, 0].float() - batch.steering).square()
    total, count = (wrong * batch.real).sum(), batch.real.sum()
    if not attention or not isinstance(done.weights, Tensor):
        return Outcome(total, count)
    mask = (batch.present & batch.real[:, None])[:, None]
    if done.log_prob is None:
        return Outcome(total, count, [done.weights], mask)
    return Outcome(total, count, [done.weights], mask, done.log_prob[batch.real], -wrong.detach()[batch.real])


def _predictor(network: Any, codec: Any, config: DrivingConfig) -> DrivingPredictor | CameraPredictor:
    return (CameraPredictor if config.input == "camera" else DrivingPredictor)(network, codec, config)


def _judge(predictor: Any, examples: Sequence[Any], config: DrivingConfig, explain: bool) -> Judged:
    if config.input == "camera":
        return judge_camera(predictor, examples)
    return judge(predictor, examples, config, explain)


def _examples(paths: Sequence[Path], config: DrivingConfig, codec: Any) -> tuple[list[Any], str]:
    return (camera_examples if config.input == "camera" else examples_of)(paths, config, codec)


def _validate(predictor: Any, examples: Sequence[Any], config: DrivingConfig) -> dict[str, float]:
    if config.input == "camera":
        return {"steering_mse": errors(predictor, examples)["steering_mse"]}
    recorded = gathered(examples)
    return {"agreement": agreement(predictor.decide(recorded.scenes, weights=False)[0], recorded)}


_POLICIES = {"": "", "expert_": ", expert", "random_": ", random policy", "idle_": ", idle policy"}
_CLOSED = tuple(
    figure
    for prefix, who in _POLICIES.items()
    for figure in (
        Figure(f"{prefix}collisions_per_100km", f"collisions per 100 km{who}", better="lower"),
        Figure(f"{prefix}progress", f"progress{who}", percent=True),
        Figure(f"{prefix}km", f"km driven{who}"),
    )
)

DRIVING = Task(
    name="driving",
    title="A driver",
    about="Brake, hold or accelerate and steer in traffic, and the road user that decides it",
    data="a JSONL file or a folder of scenes with decisions; for input=camera a driving log (CSV) with its frames",
    world="straight roads, streets, crossings and merges with an expert driver, and the object that forces a decision",
    view=View("What the driver looked at", unit="object", parts={"en": "Drives", "zh": "行驶"}),
    inputs=(Input("scene", "scene", "Scene"),),
    config=DrivingConfig,
    presets=PRESETS,
    figures=(
        *_CLOSED,
        Figure("agreement", "agreement with the expert", percent=True),
        Figure("steering_error", "error of the steering", percent=True, better="lower"),
        Figure("steering_mse", "squared error of the steering", better="lower"),
        Figure("zero_mse", "squared error of steering 0", better="lower"),
        Figure("repeat_mse", "squared error of the last angle", better="lower"),
        Figure("throttle_mse", "squared error of the throttle", better="lower"),
        Figure("brake_mse", "squared error of the brake", better="lower"),
        Figure("pointing", "pointing at what forces the decision", percent=True),
    ),
    material=_material,
    files=_files,
    codec=_codec,
    codec_files=(FILE,),
    network=_network,
    encode=_encode,
    sizes=lambda record: (1,),
    collate=lambda records, config, **shape: padded(records, {}, **shape),
    outcome=_outcome,
    predictor=_predictor,
    validate=_validate,
    judge=_judge,
    examples=_examples,
    asked=lambda example: example.inputs,
    choosing={"input": {"camera": "camera"}},
    needs=NEEDS,
    aliases={"data": "data.files"},
    validated=4000,
)
