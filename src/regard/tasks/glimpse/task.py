"""The `Task` record of glimpse models: the functions with which shared code trains, evaluates and predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.data.record_batches import padded
from regard.data.worlds.digits import SIDES
from regard.models.vision.visual_attention import stepwise_loss
from regard.tasks.glimpse.codec import FILE, GlimpseCodec
from regard.tasks.glimpse.config import NEEDS, GlimpseConfig
from regard.tasks.glimpse.grey_images import grey_png
from regard.tasks.glimpse.material import Example, encode, examples_of, input_files, make_material
from regard.tasks.glimpse.network import Gazer, build
from regard.tasks.glimpse.placing import placed
from regard.tasks.glimpse.predictor import GlimpsePredictor
from regard.tasks.glimpse.presets import PRESETS
from regard.tasks.glimpse.scoring import judge
from regard.tasks.task import Figure, Input, Outcome, Task, View


def _collate(records: Sequence[dict[str, Any]], config: GlimpseConfig, *, grid: int = 1, rows: int = 0) -> Any:
    return padded(records, {}, grid=grid, rows=rows)


def _outcome(network: Gazer, batch: Any, config: GlimpseConfig, attention: bool) -> Outcome:
    """Return the loss of a batch; in training it includes REINFORCE terms for the locations, with learned baselines.

    The fields `log_prob` and `reward` of `Outcome` stay empty: they are for hard attention over keys.
    """
    count = batch.real.sum()
    if not network.training:
        loss = stepwise_loss(network(batch.image), batch.label, counted=batch.real)
        return Outcome(loss.classification * count, count)
    learning = config.learning
    # With attention="none", all glimpses are at the centre, so several samples of the locations of an image would be
    # equal.
    samples = 1 if config.model.attention == "none" else learning.samples
    images, label, counted = (
        one.repeat_interleave(samples, 0) for one in (_on_canvas(batch.image, config), batch.label, batch.real)
    )
    loss = stepwise_loss(
        network(images),
        label,
        samples=samples,
        reward=learning.reward,
        reinforce_weight=learning.reward_weight,
        baseline_weight=learning.baseline_weight,
        counted=counted,
    )
    return Outcome(loss.total * count, count)


def _on_canvas(images: Any, config: GlimpseConfig) -> Any:
    """Return the images of a training batch at new random positions, on a canvas if `config.data.layout` has one."""
    layout = config.data.layout
    if layout != "plain":
        return placed(images, SIDES[layout], clutter=layout == "cluttered", grain=not config.data.files)
    return placed(images, images.shape[-1], shift=config.data.shift) if config.data.shift else images


def _validate(predictor: GlimpsePredictor, examples: Sequence[Example], config: GlimpseConfig) -> dict[str, float]:
    classes = predictor.classes([one.image for one in examples])
    right = sum(answer == one.label for answer, one in zip(classes, examples, strict=True))
    return {"accuracy": right / max(1, len(examples))}


GLIMPSE = Task(
    name="glimpse",
    title="A model that looks at images in glimpses",
    about="The class of an image from a few small looks, with the path of the gaze",
    view=View("Where the gaze went", unit="cell", parts={"en": "Images", "zh": "图像"}),
    data="a folder with MNIST's four idx files (each maybe .gz)",
    world="drawn digits: plain, somewhere on a canvas, or among clutter, and where each digit is",
    config=GlimpseConfig,
    presets=PRESETS,
    inputs=(Input("image", "image", "Image"),),
    figures=(
        Figure("accuracy", "accuracy", percent=True),
        Figure("pixels_read", "pixels read", percent=True, better="lower"),
        Figure("pointing", "last gaze on the digit", percent=True),
    ),
    material=make_material,
    files=input_files,
    codec=lambda directory, config: GlimpseCodec.load(Path(directory)),
    codec_files=(FILE,),
    network=lambda config, codec: build(config.model, len(codec.classes)),
    encode=lambda codec, example, config: encode(codec, example),
    sizes=lambda record: (1,),
    collate=_collate,
    outcome=_outcome,
    predictor=GlimpsePredictor,
    validate=_validate,
    judge=judge,
    examples=examples_of,
    asked=lambda example: {"image": grey_png(example.image)},
    needs=NEEDS,
    aliases={"data": "data.files", "steps": "train.steps", "glimpses": "model.steps"},
    validated=5000,
)
