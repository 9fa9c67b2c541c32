"""Tests of `image_inputs`: decoding of pictures, positions of the cells of a grid, and covered cells."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from regard.tasks.image_inputs import cell_labels, covered, points_at, read_picture, scaled
from regard.tasks.task import InputError


def png(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (255, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_bytes_are_read_at_the_size_asked() -> None:
    pixels = read_picture(png(30, 50), (24, 40))
    assert pixels.shape == (3, 24, 40)
    assert pixels[:, 5, 7].tolist() == [255, 0, 0]


def test_a_file_that_is_no_picture_is_an_input_error(tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(b"text")
    with pytest.raises(InputError, match=r"a\.png"):
        read_picture(str(tmp_path / "a.png"), (8, 8))


# The cells of a grid of 2 rows and 3 columns over 20 × 60 pixels are 10 pixels high and 20 wide.
@pytest.mark.parametrize(
    ("cell", "box", "inside"),
    [
        (0, (0, 0, 20, 10), True),
        (0, (11, 0, 20, 10), False),  # the centre of cell 0 is (10, 5)
        (0, (10, 5, 11, 6), True),
        (0, (0, 0, 10, 5), False),  # the right and bottom coordinates of a box are exclusive
        (4, (20, 10, 40, 20), True),  # cell 4 of the 2 × 3 grid is in row 1, column 1
        (4, (0, 0, 20, 10), False),
        (5, (40, 10, 60, 20), True),
    ],
)
def test_a_cell_points_at_the_box_that_holds_its_centre(
    cell: int, box: tuple[int, int, int, int], inside: bool
) -> None:
    assert points_at(cell, [box], grid=(2, 3), size=(20, 60)) is inside


def test_one_of_several_boxes_is_enough() -> None:
    assert points_at(0, [(40, 0, 60, 10), (0, 0, 20, 10)], grid=(2, 3), size=(20, 60))
    assert not points_at(0, [], grid=(2, 3), size=(20, 60))


def test_cells_that_are_not_kept_have_the_mean_colour() -> None:
    pixels = torch.zeros(3, 4, 6, dtype=torch.uint8)
    pixels[:, :2, :2] = 240  # the pixels of the first of 2 × 3 cells
    kept = torch.ones(2, 6, dtype=torch.bool)
    kept[1, 0] = False
    whole, without = covered(pixels, kept, grid=(2, 3))
    assert torch.equal(whole, pixels)
    assert without[:, :2, :2].unique().tolist() == [40]  # the mean colour of the picture is 240 · 4 / 24
    assert without[:, 2:].unique().tolist() == [0]


def test_bytes_become_numbers_from_minus_one_to_one() -> None:
    assert scaled(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).flatten().tolist() == [-1.0, 1.0]


def test_labels_hold_the_picture() -> None:
    pixels = np.zeros((3, 8, 12), np.uint8)
    labels = cell_labels(pixels, (2, 3))
    assert len(labels.items) == 6
    with Image.open(io.BytesIO(labels.extra["image"])) as image:
        assert image.size == (12, 8)
