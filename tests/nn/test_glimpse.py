"""Glimpses (patches at a location, of several sizes) against a loop over pixels."""

import math

import pytest
import torch

from regard.core.requests import full, top
from regard.nn.glimpse import Glimpse

BATCH, CHANNELS, HEIGHT, WIDTH = 3, 2, 11, 13


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    image = torch.randn(BATCH, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
    return image, torch.rand(BATCH, 2, dtype=torch.float64) * 2.4 - 1.2


def between(image: list[list[float]], y: float, x: float) -> float:
    """Return the bilinear interpolation of an image at a point; pixels outside of the image are 0."""
    total = 0.0
    for row in (math.floor(y), math.floor(y) + 1):
        for column in (math.floor(x), math.floor(x) + 1):
            if 0 <= row < len(image) and 0 <= column < len(image[0]):
                total += (1 - abs(y - row)) * (1 - abs(x - column)) * image[row][column]
    return total


def by_hand(image: list[list[float]], x: float, y: float, size: int, scale: int, factor: int) -> list[list[float]]:
    """Return the patch at scale s, whose pixels are each the mean of factorˢ × factorˢ interpolated points."""
    height, width, fine = len(image), len(image[0]), factor**scale
    left = (x + 1) / 2 * width - size * fine / 2  # in these coordinates, the centre of pixel p is at p + ½
    upper = (y + 1) / 2 * height - size * fine / 2
    patch = []
    for i in range(size):
        patch.append([])
        for j in range(size):
            points = [
                between(image, upper + i * fine + u, left + j * fine + v) for u in range(fine) for v in range(fine)
            ]
            patch[-1].append(math.fsum(points) / fine**2)
    return patch


@pytest.mark.parametrize(("size", "scales", "factor"), [(5, 1, 2), (4, 3, 2), (3, 2, 3)])
def test_it_is_the_loop(size, scales, factor):
    image, location = inputs()
    found = Glimpse(size, scales, factor=factor)(image, location).output
    assert found.shape == (BATCH, scales, CHANNELS, size, size)
    for b in range(BATCH):
        x, y = location[b].tolist()
        for s in range(scales):
            for c in range(CHANNELS):
                expected = by_hand(image[b, c].tolist(), x, y, size, s, factor)
                torch.testing.assert_close(found[b, s, c], torch.tensor(expected, dtype=torch.float64))


def test_on_whole_pixels_it_is_a_crop():
    image, _ = inputs()
    # A crop of columns 2 … 5 has its centre at 4 of 13 pixels; a crop of rows 5 … 8 has its centre at 7 of 11 pixels.
    location = torch.tensor([[4 / 13 * 2 - 1, 7 / 11 * 2 - 1]], dtype=torch.float64).expand(BATCH, 2)
    found = Glimpse(4)(image, location).output[:, 0]
    torch.testing.assert_close(found, image[:, :, 5:9, 2:6])


def test_the_whole_image_at_a_coarse_scale_is_its_pooling():
    image = torch.randn(1, 1, 8, 8)
    found = Glimpse(4, 2)(image, torch.zeros(1, 2)).output[:, 1]
    torch.testing.assert_close(found, torch.nn.functional.avg_pool2d(image, 2))


def test_far_outside_there_is_nothing():
    image, _ = inputs()
    assert not Glimpse(3)(image, torch.full((BATCH, 2), 9.0, dtype=torch.float64)).output.any()


def test_the_weights_say_what_each_pixel_adds():
    image, location = inputs()
    image = image[:, :1].requires_grad_()
    seen = Glimpse(4, 2)(image, location, weights=full())
    assert seen.weights.shape == (BATCH, 2, HEIGHT, WIDTH)
    for s in range(2):
        (share,) = torch.autograd.grad(seen.output[:, s].mean((-1, -2)).sum(), image, retain_graph=True)
        torch.testing.assert_close(seen.weights[:, s], share.squeeze(1))
    inside = Glimpse(4, 2)(image, torch.zeros(BATCH, 2, dtype=torch.float64), weights=full())
    torch.testing.assert_close(inside.weights.sum((-1, -2)), torch.ones(BATCH, 2, dtype=torch.float64))
    assert Glimpse(4)(image, location).weights is None


def test_gradients_for_image_and_location():
    image, location = inputs()
    leaves = image.requires_grad_(), location.requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: Glimpse(3, 2)(*t).output, leaves, fast_mode=True)


def test_half_precision_keeps_the_place():
    """On an image 1,000 pixels wide, a location rounded to half precision would move the patch."""
    image = torch.arange(1000.0).div(1000).expand(1, 1, 8, 1000)
    location = torch.tensor([[0.3337, 0.0]])
    expected = Glimpse(4)(image, location).output
    found = Glimpse(4)(image.half(), location).output
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("as_installed")
def test_bad_arguments_are_named():
    image, location = inputs()
    with pytest.raises(ValueError, match="scales of Glimpse must be 1 or more, got 0"):
        Glimpse(3, 0)
    with pytest.raises(ValueError, match=r"image must be \(b, c, height, width\), got \(2, 11, 13\)"):
        Glimpse(3)(image[0], location)
    with pytest.raises(ValueError, match=r"location must be \(x, y\) for each image, \(3, 2\), got \(1, 2\)"):
        Glimpse(3)(image, location[:1])
    with pytest.raises(ValueError, match=r"weights of Glimpse are one map: expected full\(\)"):
        Glimpse(3)(image, location, weights=top(1))
