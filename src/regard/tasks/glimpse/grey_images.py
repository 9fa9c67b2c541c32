"""Functions that read and write grey images."""

from typing import Any

import numpy as np

from regard.data.vision.image_files import Pixels
from regard.look.labels import png_bytes
from regard.tasks.image_inputs import Size, read_picture


def read_grey(given: Any, size: Size) -> Pixels:
    """Return an image file, given as a path or bytes, as grey pixels (1, height, width), the means of R, G and B."""
    colours = read_picture(given, size).astype(np.float32)
    return np.rint(colours.mean(0, keepdims=True)).astype(np.uint8)


def grey_png(image: Pixels) -> bytes:
    """Return grey pixels (1, height, width) as the bytes of a PNG file.

    >>> read_grey(grey_png(np.full((1, 3, 5), 7, np.uint8)), (3, 5)).tolist() == [[[7] * 5] * 3]
    True
    """
    from PIL import Image

    return png_bytes(Image.fromarray(image[0]))
