"""The predictor of glimpse models: the class of an image, with the locations and the patches of the glimpses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.requests import full
from regard.data.vision.image_files import Pixels
from regard.look.labels import glimpses
from regard.look.trace import Trace
from regard.tasks.deletion_test import Score
from regard.tasks.glimpse.codec import GlimpseCodec
from regard.tasks.glimpse.config import GlimpseConfig
from regard.tasks.glimpse.grey_images import read_grey
from regard.tasks.glimpse.network import Gazer
from regard.tasks.image_inputs import Grid, cell_labels, covered
from regard.tasks.inference import answered, evaluating
from regard.tasks.task import InputError
from regard.train.distributed import shareable

_ROWS = 256  # largest number of images in a batch
_CELL = 4  # height and width in pixels of a cell of the displayed attention map
_REGIONS: Grid = (5, 5)  # rows and columns of image regions, which are covered one at a time to measure faithfulness


@dataclass(frozen=True, eq=False)
class Seen:
    """The prediction for an image: the class probabilities after each glimpse, and the glimpses.

    `places` (steps, 2) are the locations (x, y) of the glimpses, from −1 to 1; `chances` (steps, classes) are the class
    probabilities after each glimpse; `patches` (steps, scales, size, size) are the patches of each glimpse; `shares`
    (steps, height, width) holds the weight of each pixel of the image in a glimpse's patches.
    """

    image: Pixels
    classes: tuple[str, ...]
    places: tuple[tuple[float, float], ...]
    chances: Tensor
    patches: Tensor
    shares: Tensor
    sides: tuple[int, ...]  # side of the part of the image that each scale covers, in pixels
    pixels_read: float

    @property
    def answer(self) -> str:
        """Return the most probable class after the last glimpse."""
        return self.classes[int(self.chances[-1].argmax())]

    @property
    def probability(self) -> float:
        return float(self.chances[-1].max())

    @property
    def line(self) -> str:
        """Return the class, its probability, and the numbers of glimpses and of pixels read, as one line of text."""
        read = f"{len(self.places)} glimpses, {self.pixels_read:.2f} of the pixels read"
        return f"{self.answer} {self.probability:.2f}: {read}"

    def _steps(self) -> list[tuple[str, float]]:
        """Return the most probable class after each glimpse, with its probability."""
        return [(self.classes[int(row.argmax())], float(row.max())) for row in self.chances]

    def record(self) -> dict[str, Any]:
        """Return the prediction as a JSON object; locations are in pixels, from the upper left corner of the image."""
        high, wide = self.image.shape[1:]
        return {
            "answer": self.answer,
            "probability": round(self.probability, 5),
            "probabilities": {
                name: round(float(value), 5) for name, value in zip(self.classes, self.chances[-1], strict=True)
            },
            "gaze": [
                {
                    "x": round((x + 1) / 2 * wide, 2),
                    "y": round((y + 1) / 2 * high, 2),
                    "answer": answer,
                    "probability": round(probability, 5),
                }
                for (x, y), (answer, probability) in zip(self.places, self._steps(), strict=True)
            ],
            "pixels_read": round(self.pixels_read, 4),
        }

    def trace(self) -> Trace | None:
        """Return an attention map with a row for each glimpse: the weights of the image's cells in its patches.

        The labels of the rows contain the locations and the patches of the glimpses.
        """
        high, wide = (-(-length // _CELL) for length in self.image.shape[1:])
        cells = F.interpolate(self.shares.unsqueeze(1), size=(high * _CELL, wide * _CELL), mode="nearest")
        weights = F.avg_pool2d(cells, _CELL).flatten(1)
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)
        names = [f"{answer} {probability:.2f}" for answer, probability in self._steps()]
        places = [((x + 1) / 2, (y + 1) / 2) for x, y in self.places]
        sides = [side / self.image.shape[2] for side in self.sides]
        rows = glimpses(names, places, self.patches.tolist(), sides)
        columns = cell_labels(np.repeat(self.image, 3, 0), (high, wide))
        return Trace.from_weights({"gaze": weights[None].float()}, title=self.answer, rows=rows, columns=columns)


@dataclass(frozen=True, eq=False)
class GlimpsePredictor:
    """The predictor of glimpse models: a trained model of recurrent visual attention with its codec."""

    network: Gazer
    codec: GlimpseCodec
    config: GlimpseConfig

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def answers(self, inputs: Sequence[Mapping[str, Any]]) -> list[Seen | InputError]:
        """Return a prediction for each image file, in order; for an unreadable image an `InputError`."""
        return answered(inputs, lambda one: read_grey(one["image"], self.codec.size), self.look)

    @shareable
    @torch.no_grad()
    def look(self, images: Sequence[Pixels]) -> list[Seen]:
        """Return the predictions for images, with the locations and the patches of their glimpses."""
        retina = self.network.model.glimpse
        predictions: list[Seen] = []
        sides = tuple(retina.size * retina.factor**scale for scale in range(retina.scales))
        share = self.network.pixels_read(*self.codec.size)
        for first in range(0, len(images), _ROWS):
            part = images[first : first + _ROWS]
            whole = torch.from_numpy(np.stack(part)).to(self.device)
            output = self._run(whole)
            assert output.step_logits is not None
            chances = output.step_logits.float().softmax(-1).cpu()
            places = output.locations.float()
            patches, shares = self._patches(whole, places)
            for row, image in enumerate(part):
                path = tuple((float(x), float(y)) for x, y in places[row].tolist())
                predictions.append(
                    Seen(image, self.codec.classes, path, chances[row], patches[row], shares[row], sides, share)
                )
        return predictions

    def _patches(self, whole: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image patches (b, steps, scales, size, size) of glimpses at the locations `places` (b, steps, 2).

        The second tensor (b, steps, height, width) holds the weight of each pixel of the image in the patches of each
        glimpse.
        """
        patches: list[Tensor] = []
        shares: list[Tensor] = []
        for place in places.unbind(1):
            seen = self.network.model.glimpse(whole.float() / 255, place, weights=full())
            assert isinstance(seen.weights, Tensor)
            patches.append(seen.output[:, :, 0])
            shares.append(seen.weights.mean(1))
        return torch.stack(patches, 1).cpu(), torch.stack(shares, 1).cpu()

    @shareable
    def classes(self, images: Sequence[Pixels]) -> list[str]:
        """Return only the predicted classes of images, which is faster than `look`, which also returns the glimpses."""
        classes: list[str] = []
        for first in range(0, len(images), _ROWS):
            whole = torch.from_numpy(np.stack(images[first : first + _ROWS])).to(self.device)
            classes += [self.codec.classes[best] for best in self._run(whole).logits.argmax(-1).tolist()]
        return classes

    def regions(self, seen: Seen) -> Tensor:
        """Return the weight of each of 5 × 5 image regions in the glimpses' patches, summed over all glimpses."""
        return F.adaptive_avg_pool2d(seen.shares.sum(0)[None], _REGIONS).flatten()

    def score_of(self, seen: Seen) -> Score:
        """Return the score function for `deletion`: the log-probability of the predicted class, with masked regions.

        Regions of the image that the mask deletes are covered by the image's mean brightness.
        """
        best = int(seen.chances[-1].argmax())

        def score(mask: Tensor) -> Tensor:
            rows = covered(torch.from_numpy(seen.image).to(self.device), mask.to(self.device), grid=_REGIONS)
            return self._run(rows).logits.float().cpu().log_softmax(-1)[:, best]

        return score

    def _run(self, images: Tensor) -> Any:
        with evaluating(self.network):
            return self.network(images)
