"""Images as inputs of tasks, and the grid of cells that attention over an image has as keys."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.data.data_files import DataError
from regard.data.vision.image_files import Pixels, decode
from regard.data.worlds.shapes import Box
from regard.look.labels import Labels, patches, png_bytes
from regard.tasks.task import InputError

Grid = tuple[int, int]  # numbers of rows and columns of cells into which an image is divided
Size = tuple[int, int]  # height and width of an image in pixels


def read_picture(given: Any, size: Size) -> Pixels:
    """Return an image as RGB pixels (3, height, width), decoded from a file's path or from bytes.

    Raise an `InputError` if the image cannot be decoded.
    """
    try:
        return decode(given if isinstance(given, bytes) else Path(given), size, name="the picture")
    except DataError as error:
        raise InputError(str(error)) from error


def png_of(pixels: Pixels | Tensor) -> bytes:
    """Return RGB pixels (3, height, width) with values from 0 to 255 as the bytes of a PNG file."""
    from PIL import Image

    return png_bytes(Image.fromarray(np.asarray(pixels).transpose(1, 2, 0)))


def scaled(pixels: UInt8[Tensor, "b c height width"]) -> Float[Tensor, "b c height width"]:
    """Return pixel values from 0 to 255 as floats from −1 to 1."""
    return pixels.float().div(127.5).sub(1.0)


def cell_of(weights: Float[Tensor, "k"]) -> int:
    """Return the index of the cell with the largest attention weight."""
    return int(weights.argmax())


def points_at(cell: int, boxes: Sequence[Box], *, grid: Grid, size: Size) -> bool:
    """Return whether the centre of a cell of the image is inside one of the boxes (left, top, right, bottom in pixels).

    >>> points_at(7, [(8, 8, 18, 18)], grid=(6, 6), size=(48, 48))  # row 1, column 1: its centre is (12, 12)
    True
    """
    row, column = divmod(cell, grid[1])
    x, y = (column + 0.5) * size[1] / grid[1], (row + 0.5) * size[0] / grid[0]
    return any(left <= x < right and top <= y < bottom for left, top, right, bottom in boxes)


def covered(pixels: UInt8[Tensor, "c height width"], mask: Tensor, *, grid: Grid) -> UInt8[Tensor, "n c height width"]:
    """Return one copy of the image for each row of `mask` (n, cells).

    Cells where the mask is False have the image's mean colour.
    """
    height, width = pixels.shape[-2:]
    cells = mask.unflatten(-1, grid).to(pixels.device, torch.float32).unsqueeze(1)
    shown = torch.nn.functional.interpolate(cells, size=(height, width), mode="nearest").bool()
    mean = pixels.float().mean((-2, -1), keepdim=True).to(torch.uint8)
    return torch.where(shown, pixels, mean)


def cell_labels(pixels: Pixels, grid: Grid) -> Labels:
    """Return labels for an image's cells as keys of attention; they contain the image, so that pages can display it."""
    from PIL import Image

    return patches(Image.fromarray(pixels.transpose(1, 2, 0)), grid)
