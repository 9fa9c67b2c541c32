"""Image files of any common format, decoded safely to RGB at one size.

`decode` converts a file or bytes to a uint8 array (3, height, width); `image_store` caches many of them on disk.
"""

import io
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from regard.data.data_files import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]

# Formats of pixels. Pillow opens others by running programs (EPS: Ghostscript), which a data file must not cause.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF")
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".avif"),
)
# Pillow's own limit: a quarter of a gigabyte of RGB.
MOST_PIXELS = 89_478_485

_GREY = (128, 128, 128)
_ORIENTATION = 0x0112
# The Pillow operation that turns a picture of each EXIF orientation upright.
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# `warnings.catch_warnings` affects the whole process, so a lock serialises the reading of headers.
_HEADER = threading.Lock()


def decode(
    source: Path | str | bytes,
    size: tuple[int, int] | None = None,
    *,
    fit: str = "crop",
    most_pixels: int = MOST_PIXELS,
    name: str = "these bytes",
) -> Pixels:
    """Return the picture of a file or of bytes as RGB, (3, height, width); `size` is (height, width), None: unchanged.

    `fit` handles another aspect ratio: "crop" fills the size and crops two sides, "letterbox" adds grey bars. A picture
    is rotated by its EXIF orientation; of an animation the first frame is used; transparent pixels are white; 16 bits
    become 8. A picture that cannot be decoded is a DataError that names the file (or `name`). Pictures of more than
    `most_pixels` pixels, or than Pillow's limit, are refused before decoding.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (20, 10), (255, 0, 0)).save(file, "PNG")
    >>> decode(file.getvalue(), (5, 7)).shape
    (3, 5, 7)
    """
    from PIL import UnidentifiedImageError

    if size is not None and min(size) < 1:
        raise ValueError(f"size must be (height, width) of at least 1 pixel, not {size}")
    if fit not in ("crop", "letterbox"):
        raise ValueError(f"fit must be 'crop' or 'letterbox', not {fit!r}")
    name = name if isinstance(source, bytes) else str(source)
    try:
        with _opened(source, most_pixels) as image:
            if size is not None:
                # A JPEG is decoded at a half, a quarter or an eighth of its size if that is still twice the required
                # size.
                image.draft(None, (2 * max(size), 2 * max(size)))
            orientation = _orientation(image)
            image.load()
            upright = _upright(_eight_bits(image), orientation)
        fitted = upright if size is None else _fitted(upright, size, fit)
        return np.ascontiguousarray(np.asarray(fitted).transpose(2, 0, 1))
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except UnidentifiedImageError as error:
        known = ", ".join(sorted(FORMATS))
        raise DataError(f"{name}: not a picture that can be read; formats: {known}") from error
    except FileNotFoundError as error:
        raise DataError(f"{name}: no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{name}: a directory; expected a picture") from error
    except Exception as error:
        # A damaged file makes Pillow's readers raise many types: OSError, SyntaxError, struct.error, IndexError.
        raise DataError(f"{name}: the picture cannot be decoded: {error or type(error).__name__}") from error


def _opened(source: Path | str | bytes, most_pixels: int) -> "Image":
    """Return the picture with its header read; a decompression bomb is rejected before any pixel is decoded."""
    from PIL import Image

    if not (len(source) if isinstance(source, bytes) else Path(source).stat().st_size):
        raise DataError("the file is empty")
    with _HEADER, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF data does not matter
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        Image.init()
        # AVIF and WEBP may be missing from a build of Pillow.
        formats = [name for name in FORMATS if name in Image.OPEN]
        try:
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=formats)
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise DataError(f"too many pixels to decode: {error}") from error
    width, height = image.size
    if width * height > most_pixels:
        image.close()
        raise DataError(f"{width}×{height} is {width * height:,} pixels, more than the {most_pixels:,} allowed")
    return image


def _eight_bits(image: "Image") -> "Image":
    """Convert a picture of any mode to RGB."""
    from PIL import Image

    if image.mode == "F":
        raise DataError("32-bit float pixels; expected 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.size and not 0 <= values.min() <= values.max() <= 65_535:
            raise DataError(f"pixel values from {values.min()} to {values.max()}; expected 8 or 16 bits")
        # A file of 32 bits does not record how many are used: without a value over 255 it is taken as 8 bits.
        bits = 8 if image.mode == "I" and values.size and values.max() < 256 else 16
        image = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _orientation(image: "Image") -> int:
    """Return the EXIF orientation; 1, upright, if there is none or it cannot be read."""
    with _HEADER, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF data does not affect the pixels
        try:
            orientation = image.getexif().get(_ORIENTATION, 1)
        except Exception:  # Pillow raises as many types as for damaged pixels
            return 1
    return orientation if isinstance(orientation, int) else 1


def _upright(image: "Image", orientation: int) -> "Image":
    from PIL.Image import Transpose

    turn = _UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(Transpose[turn])


def _fitted(image: "Image", size: tuple[int, int], fit: str) -> "Image":
    from PIL import Image

    high, wide = size
    width, height = image.size
    if (width, height) == (wide, high):
        return image
    if fit == "crop":
        scale = min(width / wide, height / high)
        left, top = (width - wide * scale) / 2, (height - high * scale) / 2
        box = (left, top, left + wide * scale, top + high * scale)
        return image.resize((wide, high), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    scale = max(width / wide, height / high)
    inner = (max(1, min(wide, round(width / scale))), max(1, min(high, round(height / scale))))
    canvas = Image.new("RGB", (wide, high), _GREY)
    shown = image.resize(inner, Image.Resampling.BICUBIC, reducing_gap=3.0)
    canvas.paste(shown, ((wide - inner[0]) // 2, (high - inner[1]) // 2))
    return canvas
