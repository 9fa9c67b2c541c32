"""Driving as a task: what is its own of the shared training, evaluation and prediction."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.requests import full
from regard.data.records import padded
from regard.tasks.driving.codec import FILE, DrivingCodec
from regard.tasks.driving.config import NEEDS, DrivingConfig
from regard.tasks.driving.material import Example, encode, examples_of, gathered, input_files, make_material
from regard.tasks.driving.network import Driver, build
from regard.tasks.driving.predictor import DrivingPredictor
from regard.tasks.driving.presets import PRESETS
from regard.tasks.driving.scoring import agreement, judge
from regard.tasks.learning import with_baseline
from regard.tasks.task import Figure, Input, Outcome, Task, View


def _network(config: DrivingConfig, codec: DrivingCodec) -> nn.Module:
    settings = config.model
    is_hard = settings.attention != "none" and settings.normalize == "hard"
    return with_baseline(build(settings, codec.features, learning=config.learning), config.learning, is_hard=is_hard)


def _outcome(network: Driver, batch: Any, config: DrivingConfig, attention: bool) -> Outcome:
    """Cross-entropy of the action and the squared error of the steering; both are rewards of hard choices too."""
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


def _validate(predictor: DrivingPredictor, examples: Sequence[Example], config: DrivingConfig) -> dict[str, float]:
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
    data="a JSONL file of scenes with decisions (maybe .gz), or a folder with train, valid and test files",
    world="straight roads, streets, crossings and merges with an expert driver, and the object that forces a decision",
    view=View("What the driver looked at", unit="object"),
    inputs=(Input("scene", "scene", "Scene"),),
    config=DrivingConfig,
    presets=PRESETS,
    figures=(
        *_CLOSED,
        Figure("agreement", "agreement with the expert", percent=True),
        Figure("steering_error", "error of the steering", percent=True, better="lower"),
        Figure("pointing", "pointing at what forces the decision", percent=True),
    ),
    material=make_material,
    files=input_files,
    codec=lambda directory, config: DrivingCodec.load(Path(directory)),
    codec_files=(FILE,),
    network=_network,
    encode=lambda codec, example, config: encode(codec, example),
    sizes=lambda record: (1,),
    collate=lambda records, config, **shape: padded(records, {}, **shape),
    outcome=_outcome,
    predictor=DrivingPredictor,
    validate=_validate,
    judge=judge,
    examples=examples_of,
    asked=lambda example: example.asked,
    needs=NEEDS,
    aliases={"data": "data.files"},
    validated=4000,
)
