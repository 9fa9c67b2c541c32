"""The glimpse model: recurrent visual attention whose glimpse locations are learned, random, or fixed."""

from typing import Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from regard.models.vision.visual_attention import Looked, RecurrentVisualAttention
from regard.nn.glimpse import Glimpse
from regard.tasks.glimpse.config import ModelSettings

# modulus of a linear congruential generator; the product of two numbers below it fits into 64 bits
_MODULUS = 2**31 - 1
# multiplier of the "minimal standard" linear congruential generator (Park and Miller 1988, revised 1993)
_FACTOR = 48271


class Gazer(nn.Module):
    """Recurrent visual attention on uint8 images, with learned, random or fixed glimpse locations (the gaze).

    Models with learned, random and fixed locations have the same parameters, so that their results are comparable.
    """

    def __init__(self, model: RecurrentVisualAttention, gaze: Literal["learned", "random", "none"]) -> None:
        super().__init__()
        self.model, self.gaze = model, gaze

    def forward(self, images: UInt8[Tensor, "b 1 height width"]) -> Looked:
        return self.model(images.float() / 255, places=self._places(images))

    def _places(self, images: Tensor) -> Tensor | None:
        count, steps = len(images), self.model.steps
        if self.gaze == "learned":
            return None
        if self.gaze == "none":
            return torch.zeros(count, steps, 2, device=images.device)
        if self.training:
            return torch.rand(count, steps, 2, device=images.device) * 2 - 1
        return places_of(images, steps)

    def looks(self) -> int:
        """Return the number of different locations at which the model looks at an image."""
        return 1 if self.gaze == "none" else self.model.steps

    def pixels_read(self, height: int, width: int) -> float:
        """Return how many numbers the retina computes from an image, divided by the image's number of pixels.

        Several glimpses at the same location of an image count once.
        """
        retina = self.model.glimpse
        return self.looks() * retina.scales * retina.size**2 / (height * width)


def places_of(images: UInt8[Tensor, "b 1 height width"], steps: int) -> Float[Tensor, "b steps 2"]:
    """Return pseudo-random glimpse locations, computed from the pixels of each image.

    The locations of an image are the same in every batch and on every device.

    >>> image = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4)
    >>> torch.equal(places_of(image, 3), places_of(image.expand(2, -1, -1, -1), 3)[1:])
    True
    """
    pixels = images.flatten(1).long()
    factors = (torch.arange(pixels.shape[1], device=images.device) * _FACTOR + 1) % _MODULUS
    state = ((pixels + 1) * factors).sum(1) % (_MODULUS - 1) + 1
    numbers = []
    for number in range(2 * steps + 4):
        state = state * _FACTOR % _MODULUS
        if number >= 4:  # skip the first four outputs, which are similar for similar images
            numbers.append(state.double() / _MODULUS)
    return (torch.stack(numbers, 1).float() * 2 - 1).unflatten(1, (steps, 2))


def build(settings: ModelSettings, classes: int) -> Gazer:
    """Return a model that classifies grey images into this number of classes."""
    model = RecurrentVisualAttention(
        classes,
        glimpse=Glimpse(settings.glimpse, settings.scales, factor=settings.factor),
        steps=settings.steps,
        size=settings.size,
        hidden_size=settings.hidden,
        deviation=settings.deviation,
        cell=settings.cell,
        saccade=settings.saccade,
    )
    return Gazer(model, settings.attention)
