"""A font for drawings made with Pillow, with Chinese characters if such a font is installed."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

_NAMES = (
    "NotoSansCJK-Regular.ttc",
    "NotoSansCJKsc-Regular.otf",
    "NotoSansSC-Regular.otf",
    "wqy-zenhei.ttc",
    "DejaVuSans.ttf",
)


@functools.lru_cache(maxsize=16)
def font_of(size: int) -> "FreeTypeFont | ImageFont":
    """Return the first of some fonts that is installed; else Pillow's default."""
    from PIL import ImageFont

    for name in _NAMES:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)
