"""The font of drawings that are made with Pillow; it has Chinese characters if such a font is installed."""

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
    """Return the first installed font of `_NAMES` in that size in pixels; Pillow's default font if there is none."""
    from PIL import ImageFont

    for name in _NAMES:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)
