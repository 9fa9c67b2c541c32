"""Metrics of glimpse models: accuracy, the fraction of pixels read, and whether the last glimpse is on the digit."""

from collections.abc import Sequence
from typing import Any

from regard.data.worlds.shapes import Box
from regard.tasks.deletion_test import deletion
from regard.tasks.glimpse.config import GlimpseConfig
from regard.tasks.glimpse.material import Example
from regard.tasks.glimpse.predictor import GlimpsePredictor, Seen
from regard.tasks.image_inputs import Size
from regard.tasks.task import Judged

_EXPLAINED = 100  # number of images whose faithfulness is measured


def inside(place: Sequence[float], box: Box, size: Size) -> bool:
    """Return whether a location (x, y) from −1 to 1 is inside a box (left, top, right, bottom in pixels).

    >>> inside((0.0, -0.5), (29, 14, 31, 16), (60, 60))  # the pixel (30, 15)
    True
    """
    x, y = ((along + 1) / 2 * length for along, length in zip(place, (size[1], size[0]), strict=True))
    left, top, right, bottom = box
    return left <= x < right and top <= y < bottom


def accuracy(predictions: Sequence[Seen], examples: Sequence[Example]) -> float:
    """Return the fraction of images whose predicted class is the label."""
    return sum(one.answer == example.label for one, example in zip(predictions, examples, strict=True)) / max(
        1, len(predictions)
    )


def judge(predictor: GlimpsePredictor, examples: Sequence[Example], config: GlimpseConfig, explain: bool) -> Judged:
    """Return the accuracy, the fraction of pixels read, and how often the last glimpse is centred on the digit.

    With `explain`, faithfulness is also measured: the effect of covering the image region that the glimpses cover most.
    """
    predictions = predictor.look([one.image for one in examples])
    metrics: dict[str, Any] = {"accuracy": round(accuracy(predictions, examples), 4), "images": len(examples)}
    size = predictor.codec.size
    metrics["pixels_read"] = round(predictor.network.pixels_read(*size), 4)
    ends = [inside(one.places[-1], example.box, size) for one, example in zip(predictions, examples, strict=True)]
    attention = {"pointing": round(sum(ends) / max(1, len(ends)), 4)}
    lost: dict[str, float] = {}
    if explain:
        lost = deletion([(predictor.regions(one), predictor.score_of(one)) for one in predictions[:_EXPLAINED]])
    return Judged(metrics, attention, lost)
