"""Random placement of digits on a larger canvas, for a whole batch on the GPU, new in each training step."""

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from regard.data.worlds.digits import INK, PIECE, PIECES

# number of random positions that are sampled for a crop of clutter; the first one that does not overlap the digit is
# used
_TRIES = 16
_GRAIN = 16  # the background of the built-in digits is noise, whose pixel values are below this


def placed(
    images: UInt8[Tensor, "b 1 height width"], side: int, *, shift: int = 0, clutter: bool = False, grain: bool = False
) -> UInt8[Tensor, "b 1 side side"]:
    """Return each image at a random position on a black canvas of side × side pixels.

    `regard.data.worlds.digits.on_canvas` places a single image. With `shift`, an image may be cut off by this number
    of pixels at an edge; an image as large as the canvas is shifted by at most `shift` pixels. With `clutter`, crops of
    other images of the batch are added beside each digit. With `grain`, the background is noise as in the built-in
    digits. Random numbers come from the device's generator, without synchronisation, so that a CUDA graph can capture
    this function.

    >>> placed(torch.full((2, 1, 3, 3), 200, dtype=torch.uint8), 5).flatten(1).ne(0).sum(1)
    tensor([9, 9])
    """
    count, _, height, width = images.shape
    if side < max(height, width):
        raise ValueError(f"images of {height}×{width} do not fit on a canvas of {side}×{side}")
    # Place the images on a canvas with a margin of `shift` pixels, which is cropped at the end.
    inner = images if not grain else torch.where(images < _GRAIN, 0, images)
    whole = side + 2 * shift
    top, left = (_below(torch.full((count,), whole - size + 1, device=images.device)) for size in (height, width))
    canvas = images.new_zeros(count, whole, whole)
    _put(canvas, inner[:, 0], top, left)
    if clutter:
        box = ink_boxes(images[:, 0])
        box = box + torch.stack([left, top, left, top], 1)
        for number in range(PIECES):  # clutter is cropped from the next images of the batch, whose order is random
            _add_piece(canvas, images[:, 0].roll(number + 1, 0), box)
    canvas = canvas[:, shift : whole - shift, shift : whole - shift]
    if grain:
        canvas = torch.maximum(canvas, torch.randint_like(canvas, _GRAIN))
    return canvas.unsqueeze(1)


def _below(limits: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """Return a random integer from 0 to l − 1 for each number l of `limits`."""
    return (torch.rand(limits.shape, device=limits.device) * limits).long().minimum(limits - 1)


def _put(canvas: Tensor, parts: Tensor, top: Tensor, left: Tensor) -> None:
    """Draw image i of `parts` (b, h, w) on canvas i, in place: each pixel becomes the maximum of image and canvas."""
    row, rows, columns = _index(parts.shape, top, left)
    canvas[row, rows, columns] = torch.maximum(canvas[row, rows, columns], parts)


def _index(shape: tuple[int, ...], top: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count, height, width = shape
    rows = top[:, None] + torch.arange(height, device=top.device)
    columns = left[:, None] + torch.arange(width, device=top.device)
    return torch.arange(count, device=top.device)[:, None, None], rows[:, :, None], columns[:, None, :]


def ink_boxes(images: UInt8[Tensor, "b height width"]) -> Int[Tensor, "b 4"]:
    """Return the bounding boxes (left, top, right, bottom) of pixels brighter than the background.

    `regard.data.worlds.digits.ink_box` computes the box of a single image.
    """
    ink = images > INK
    edges = []
    for axis in (1, 2):  # the first pass computes the left and right edge, the second pass top and bottom
        line = ink.any(axis).long()
        empty = line.sum(1) == 0
        edges.append((line.argmax(1), torch.where(empty, line.shape[1], line.shape[1] - line.flip(1).argmax(1))))
    (left, right), (top, bottom) = edges
    return torch.stack([left, top, right, bottom], 1)


def _add_piece(canvas: Tensor, others: Tensor, box: Tensor) -> None:
    """Draw on each canvas a crop of the strokes of another image, at a random position outside the digit's box."""
    left, top, right, bottom = ink_boxes(others).unbind(1)
    row = (top + _below((bottom - PIECE - top).clamp_min(0) + 1)).clamp_max(others.shape[1] - PIECE)
    column = (left + _below((right - PIECE - left).clamp_min(0) + 1)).clamp_max(others.shape[2] - PIECE)
    pieces = others[_index((len(others), PIECE, PIECE), row, column)]
    tries = (torch.rand(2, len(others), _TRIES, device=canvas.device) * (canvas.shape[1] - PIECE + 1)).long()
    x, y = tries.clamp_max(canvas.shape[1] - PIECE)
    left, top, right, bottom = (edge.unsqueeze(1) for edge in box.unbind(1))
    free = (x + PIECE <= left) | (x >= right) | (y + PIECE <= top) | (y >= bottom)
    first = free.int().argmax(1, keepdim=True)
    # if all sampled positions overlap the digit's box, the crop is made black
    pieces = pieces * free.gather(1, first)[:, :, None]
    _put(canvas, pieces, y.gather(1, first)[:, 0], x.gather(1, first)[:, 0])
