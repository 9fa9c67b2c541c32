"""The colours of heat maps of attention weights: one hue, with perceptually equal steps.

The lightness of a cell's OKLCH colour (Ottosson 2020) is a linear function of its weight. Lightness in OKLCH is
perceptual, so a cell of twice the weight looks twice as far from the background, also in grey print and for
colour-blind readers.
"""

import math
from typing import NamedTuple

HUE = math.radians(258)  # a hue that looks blue at every lightness
BELOW = math.radians(48)  # the hue of cells with negative weights


RGB = tuple[int, int, int]


class Scale(NamedTuple):
    """A colour scale: `lightness` and `chroma` are pairs of values, at weight 0 and at the largest weight.

    `odd` is the colour of NaN and infinite weights, `odd_ink` the colour of text on it.
    """

    lightness: tuple[float, float]
    chroma: tuple[float, float]
    odd: RGB
    odd_ink: RGB


# The colour scale for light backgrounds.
LIGHT = Scale((0.97, 0.40), (0.008, 0.17), odd=(199, 21, 133), odd_ink=(255, 255, 255))
# The colour scale for dark backgrounds.
DARK = Scale((0.25, 0.86), (0.02, 0.10), odd=(255, 105, 200), odd_ink=(0, 0, 0))


def shade(share: float, scale: Scale) -> RGB:
    """Return the colour of a weight; `share` is the weight divided by the largest weight, from −1 to 1.

    NaN and infinite shares return the separate colour `scale.odd`.

    >>> [hexadecimal(shade(share, LIGHT)) for share in (0.0, 0.5, 1.0)]
    ['#f2f5fb', '#779bd1', '#0040a0']
    """
    if not math.isfinite(share):
        return scale.odd
    hue, share = BELOW if share < 0 else HUE, abs(share)
    lightness = _between(scale.lightness, share)
    chroma = _between(scale.chroma, share)
    return _srgb(lightness, chroma * math.cos(hue), chroma * math.sin(hue))


def ink(share: float, scale: Scale) -> RGB:
    """Return the colour of text on the background `shade(share, scale)`: black on light, white on dark backgrounds.

    The text changes from black to white at the lightness at which both have the same contrast to the background,
    4.5 : 1, which is the minimum of WCAG for small text.

    >>> ink(0.0, LIGHT), ink(1.0, LIGHT)
    ((0, 0, 0), (255, 255, 255))
    """
    if not math.isfinite(share):
        return scale.odd_ink
    return (0, 0, 0) if _between(scale.lightness, abs(share)) > 0.565 else (255, 255, 255)


def hexadecimal(color: RGB) -> str:
    """Return the colour in the hexadecimal notation of CSS.

    >>> hexadecimal((255, 0, 128))
    '#ff0080'
    """
    return "#{:02x}{:02x}{:02x}".format(*color)


def _between(ends: tuple[float, float], share: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * share


def _srgb(lightness: float, a: float, b: float) -> RGB:
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        _byte(4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short),
        _byte(-1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short),
        _byte(-0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short),
    )


def _byte(linear: float) -> int:
    """Return one linear RGB channel as an sRGB byte (gamma-encoded); values outside 0 to 1 are clipped."""
    linear = min(1.0, max(0.0, linear))
    encoded = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
    return round(255 * encoded)
