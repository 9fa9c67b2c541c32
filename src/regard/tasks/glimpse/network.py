"""Builds recurrent visual attention from its settings, with a gaze that is learned, random, or fixed."""

from typing import Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from regard.models.vision.visual_attention import Looked, RecurrentVisualAttention
from regard.nn.glimpse import Glimpse
from regard.tasks.glimpse.config import ModelSettings

_MODULUS = 2**31 - 1  # the product of two numbers below it fits into 64 bits
_FACTOR = 48271  # factor of the "minimal standard" generator (Park and Miller 1988, revised 1993)


class Gazer(nn.Module):
    """Recurrent visual attention on bytes. A random or a fixed gaze has the same parameters as the learned one."""

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
        """Return the number of distinct locations of the glimpses at an image."""
        return 1 if self.gaze == "none" else self.model.steps

    def pixels_read(self, height: int, width: int) -> float:
        """Return the number of values that the retina takes from an image, relative to its pixels, for distinct
        locations."""
        retina = self.model.glimpse
        return self.looks() * retina.scales * retina.size**2 / (height * width)


def places_of(images: UInt8[Tensor, "b 1 height width"], steps: int) -> Float[Tensor, "b steps 2"]:
    """Return random locations that depend on the image alone: the same in any batch and on any device.

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
        if number >= 4:  # the first outputs are skipped: they are similar for similar seeds
            numbers.append(state.double() / _MODULUS)
    return (torch.stack(numbers, 1).float() * 2 - 1).unflatten(1, (steps, 2))


def build(settings: ModelSettings, classes: int) -> Gazer:
    """Return a model of grey images with this number of classes."""
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
