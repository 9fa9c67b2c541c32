"""Decodes image files of any common format to RGB pictures of one size.

`decode` converts a file or bytes to a uint8 array (3, height, width); the module `image_store` caches many such arrays
on disk.
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

# Only formats that consist of pixels are read. For other formats, such as EPS, Pillow runs an external program
# (Ghostscript), which a data file must not be able to cause.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF")
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".avif"),
)
# The largest number of pixels of a picture. This is Pillow's own limit; as RGB it is a quarter of a gigabyte.
MOST_PIXELS = 89_478_485

_GREY = (128, 128, 128)
_ORIENTATION = 0x0112
# The name of the Pillow operation that turns a picture upright, for each EXIF orientation but 1 (upright).
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# `warnings.catch_warnings` changes the state of the whole process, so only one thread may read headers at a time.
_HEADER = threading.Lock()


def decode(
    source: Path | str | bytes,
    size: tuple[int, int] | None = None,
    *,
    fit: str = "crop",
    most_pixels: int = MOST_PIXELS,
    name: str = "these bytes",
) -> Pixels:
    """Return the picture in a file or in bytes as RGB, (3, height, width).

    If `size`, (height, width), is given, the picture is resized. If the picture has another aspect ratio than `size`,
    `fit="crop"` crops two of its sides and `fit="letterbox"` adds grey bars. The picture is rotated by its EXIF
    orientation; of an animation the first frame is returned; transparent pixels become white; 16 bits per channel
    become 8. A picture that cannot be decoded raises a `DataError` that names the file (or `name`). A picture of more
    than `most_pixels` pixels, or more than Pillow's limit, is rejected before it is decoded.

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
                # Pillow can decode a JPEG at a half, a quarter or an eighth of its size, which is faster; it does so
                # where the result is still at least twice the required size.
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
        # For a damaged file, Pillow raises many types of exceptions: OSError, SyntaxError, struct.error, IndexError.
        raise DataError(f"{name}: the picture cannot be decoded: {error or type(error).__name__}") from error


def _opened(source: Path | str | bytes, most_pixels: int) -> "Image":
    """Return the Pillow image with only its header read, so that a picture with too many pixels is never decoded."""
    from PIL import Image

    if not (len(source) if isinstance(source, bytes) else Path(source).stat().st_size):
        raise DataError("the file is empty")
    with _HEADER, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about damaged EXIF data, which does not affect the pixels
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        Image.init()
        # Some builds of Pillow do not support AVIF or WEBP.
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
    """Return a picture of any Pillow mode converted to RGB with 8 bits per channel."""
    from PIL import Image

    if image.mode == "F":
        raise DataError("32-bit float pixels; expected 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.size and not 0 <= values.min() <= values.max() <= 65_535:
            raise DataError(f"pixel values from {values.min()} to {values.max()}; expected 8 or 16 bits")
        # A file with 32 bits per pixel does not record how many bits are used. If no value is above 255, the values are
        # interpreted as 8 bits, else as 16.
        bits = 8 if image.mode == "I" and values.size and values.max() < 256 else 16
        image = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _orientation(image: "Image") -> int:
    """Return the EXIF orientation of a picture; 1, which means upright, if it is missing or cannot be read."""
    with _HEADER, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about damaged EXIF data, but the pixels are not affected
        try:
            orientation = image.getexif().get(_ORIENTATION, 1)
        except Exception:  # Pillow raises many types of exceptions for damaged EXIF data
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
