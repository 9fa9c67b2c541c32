"""Tests of tiles, parts of attention maps: they are compared with weights that are cropped and averaged by loops."""

import json
import struct

import pytest
import torch

from regard.look.attention_records import Record
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.studio import map_tiles as tiles
from regard.studio.examples import Example
from regard.studio.limits import RefusedError


def one(weights: torch.Tensor) -> Record:
    return Trace.from_weights({"layer": weights}).records[0]


def mean_by_loop(weights: torch.Tensor, row: int, column: int, rows: int, columns: int) -> float:
    cells = [
        float(weights[i, j])
        for i in range(row, min(row + rows, weights.shape[0]))
        for j in range(column, min(column + columns, weights.shape[1]))
    ]
    return sum(cells) / len(cells)


def test_a_small_tile_is_exact():
    weights = torch.rand(3, 31, 43)
    grid = tiles.tile(one(weights), 1, 5, 7, 11, 13)
    torch.testing.assert_close(grid.cells, weights[1, 5:16, 7:20])
    assert (grid.at, grid.block, grid.read) == ((5, 7), (1, 1), 1)


def test_a_tile_ends_where_the_map_ends():
    weights = torch.rand(1, 31, 43)
    torch.testing.assert_close(tiles.tile(one(weights), 0, 29, 40, 500, 500).cells, weights[0, 29:, 40:])


@pytest.fixture
def tiny(monkeypatch):
    """Limit pictures of maps to 8 × 8 cells, so that even small maps are pooled."""
    monkeypatch.setattr(tiles, "CELLS", 8)


def test_a_pooled_map_holds_means(tiny):
    weights = torch.rand(2, 29, 37)
    grid = tiles.whole(one(weights), 1)
    assert grid.block == (5, 5)
    assert grid.cells.shape == (6, 8)
    for i in range(6):
        for j in range(8):
            assert float(grid.cells[i, j]) == pytest.approx(mean_by_loop(weights[1], 5 * i, 5 * j, 5, 5), abs=1e-6)


def test_a_pooled_tile_lies_on_the_grid(tiny):
    weights = torch.rand(1, 61, 67)
    grid = tiles.tile(one(weights), 0, 10, 23, 16, 20)  # 20 columns in at most 8 cells require blocks of 3 columns
    assert (grid.at, grid.block) == ((9, 21), (3, 3))
    # 6 × 8 blocks of 3 × 3 weights: rows 9 to 26 and columns 21 to 44 contain the whole requested part.
    assert grid.cells.shape == (6, 8)
    assert float(grid.cells[1, 2]) == pytest.approx(mean_by_loop(weights[0], 12, 27, 3, 3), abs=1e-6)


def test_of_too_large_a_map_some_rows_are_read(tiny, monkeypatch):
    monkeypatch.setattr(tiles, "OVERVIEW", 8 * 64 * 2)
    weights = torch.rand(1, 64, 64)
    grid = tiles.whole(one(weights), 0)
    assert (grid.block, grid.read) == ((8, 8), 2)
    # Two of the eight rows of each block are read: the centres of its upper and lower half.
    expected = weights[0].view(8, 8, 8, 8)[:, [2, 6]].mean((1, 3))
    torch.testing.assert_close(grid.cells, expected)


def test_computed_in_pieces_it_is_the_same(tiny, monkeypatch):
    record = one(torch.rand(1, 53, 47))
    expected = tiles.whole(record, 0).cells
    monkeypatch.setattr(tiles, "AT_ONCE", 100)
    torch.testing.assert_close(tiles.whole(record, 0).cells, expected)


def test_thumbnails_are_small():
    weights = torch.rand(2, 100, 7)
    grid = tiles.thumbnail(one(weights), 1)
    assert grid.block == (4, 1)
    torch.testing.assert_close(grid.cells, weights[1].view(25, 4, 7).amax(1))


def test_of_a_large_map_a_thumbnail_reads_one_row_a_block(monkeypatch):
    monkeypatch.setattr(tiles, "CELLS", 16)
    weights = torch.rand(1, 64, 128)
    grid = tiles.thumbnail(one(weights), 0)
    assert (grid.block, grid.read) == ((2, 4), 1)
    torch.testing.assert_close(grid.cells, weights[0, 1::2].view(32, 32, 4).amax(2))


def test_received_and_rows():
    weights = torch.rand(2, 19, 23)
    torch.testing.assert_close(tiles.received(one(weights), 1), weights[1].mean(0))
    torch.testing.assert_close(tiles.row(one(weights), 0, 17), weights[0, 17])


@pytest.mark.parametrize("type", ["uint8", "float16"])
def test_numbers_of_a_broken_model_are_sent_as_they_are(type):
    weights = torch.ones(1, 2, 3)
    weights[0, 0] = torch.tensor([torch.nan, torch.inf, -0.5])
    body, header = tiles.whole(one(weights), 0).packed(type)
    about = json.loads(header)
    assert (about["type"], about["highest"]) == ("float16", 1.0)
    sent = torch.tensor(struct.unpack("<6e", body)).view(2, 3)
    torch.testing.assert_close(sent, weights[0], equal_nan=True)


def test_a_pooled_cell_with_a_nan_is_nan(tiny):
    weights = torch.rand(1, 29, 37)
    weights[0, 11, 17] = torch.nan
    cells = tiles.whole(one(weights), 0).cells
    assert cells.isnan().nonzero().tolist() == [[2, 3]]


def test_a_sequence_of_a_batch_is_sent_without_its_padding():
    weights = torch.rand(2, 1, 5, 5)
    labels = [Labels("tokens", tuple("abcde")), Labels("tokens", tuple("xyz__"), shown=(0, 1, 2))]
    record = Trace.from_weights({"layer": weights}, rows=labels, columns=labels).records[0]
    torch.testing.assert_close(tiles.whole(record, 0, 1).cells, weights[1, 0, :3, :3])
    torch.testing.assert_close(tiles.received(record, 0, 1), weights[1, 0, :3, :3].mean(0))
    assert tiles.whole(record, 0, 0).cells.shape == (5, 5)


def test_a_map_without_rows_or_heads():
    assert tiles.whole(one(torch.zeros(1, 0, 5)), 0).cells.shape == (0, 5)
    with pytest.raises(RefusedError, match="head must be from 0 to -1, got 0"):
        tiles.whole(one(torch.zeros(0, 3, 5)), 0)


def test_too_wide_a_part_is_refused(monkeypatch):
    monkeypatch.setattr(tiles, "OVERVIEW", 100)
    with pytest.raises(RefusedError, match="9 rows of 31 keys are too many for one picture: ask for fewer rows"):
        tiles.tile(one(torch.rand(1, 17, 31)), 0, 2, 0, 9, 31)
    assert tiles.tile(one(torch.rand(1, 17, 31)), 0, 2, 0, 6, 31).cells.shape == (6, 31)


@pytest.mark.parametrize("type", ["uint8", "float16"])
def test_the_bytes_can_be_read_back(type):
    weights = torch.rand(1, 3, 5) ** 8
    body, header = tiles.whole(one(weights), 0).packed(type)
    about = json.loads(header)
    numbers = struct.unpack("<15B" if type == "uint8" else "<15e", body)
    assert (about["rows"], about["columns"], about["type"]) == (3, 5, type)
    for number, weight in zip(numbers, weights.flatten().tolist(), strict=True):
        assert abs(number * about["scale"] - weight) <= about["error"] * 1.01


def test_a_large_map_from_a_file_brings_its_own_overview(tmp_path, monkeypatch):
    weights = torch.rand(1, 71, 83).softmax(-1)
    path = Trace.from_weights({"layer": weights}).save(tmp_path / "t.trace", whole=10, top=3, overview=8)
    record = Trace.load(path).records[0]
    monkeypatch.setattr(tiles, "CELLS", 16)
    grid = tiles.whole(record, 0)
    assert grid.cells.shape == (8, 8)
    assert grid.block == (71 / 8, 83 / 8)
    # A cell is the mean of its block of 71/8 × 83/8 weights, and each of the 71 rows of weights sums to 1.
    assert float(grid.cells.sum()) * 71 * 83 / 64 == pytest.approx(71, rel=0.02)
    torch.testing.assert_close(tiles.received(record, 0), weights[0].mean(0), atol=1e-4, rtol=1e-2)


def test_the_head_after_the_last_is_the_mean():
    weights = torch.rand(3, 5, 7)
    mean = weights.sum(0) / 3
    torch.testing.assert_close(tiles.whole(one(weights), 3).cells, mean)
    torch.testing.assert_close(tiles.thumbnail(one(weights), 3).cells, mean)
    torch.testing.assert_close(tiles.row(one(weights), 3, 4), mean[4])
    torch.testing.assert_close(tiles.received(one(weights), 3), mean.mean(0))
    with pytest.raises(RefusedError, match="head must be from 0 to 3, got 4"):
        tiles.whole(one(weights), 4)


def test_one_head_has_no_mean():
    with pytest.raises(RefusedError, match="head must be from 0 to 0, got 1"):
        tiles.whole(one(torch.rand(1, 5, 7)), 1)


def test_a_thumbnail_keeps_what_is_negative_or_nan():
    weights = torch.full((1, 64, 64), 0.25)
    weights[0, 0, 0], weights[0, 63, 63] = torch.nan, -0.5
    cells = tiles.thumbnail(one(weights), 0).cells
    assert cells[0, 0].isnan()
    assert (float(cells[31, 31]), float(cells[5, 5])) == (-0.5, 0.25)


def test_the_rollout_of_a_stack_is_a_record_of_its_own():
    swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    shown = Example(Trace.from_weights({f"layers.{n}.attention": swap for n in range(2)})).shown
    assert [record.name for record in shown.records] == ["layers.0.attention", "layers.1.attention", "rollout"]
    torch.testing.assert_close(tiles.whole(shown.records[2], 0).cells, torch.full((2, 2), 0.5))
