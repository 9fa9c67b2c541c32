"""Tests of padded batches of records with any fields, and of the order of the batches."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from regard.data.record_batches import RecordBatches, padded

RECORDS = [
    {"text": [5, 6, 7], "frames": np.ones((2, 3)), "label": 1, "box": (0.5, 1.5)},
    {"text": [], "frames": np.full((5, 3), 2.0), "label": 0, "box": (2.5, 3.5)},
]


def test_fields_become_tensors_by_what_they_hold():
    batch = padded(RECORDS, {"text": 9, "frames": -1.0})
    assert batch.text.tolist() == [[5, 6, 7], [9, 9, 9]]
    assert batch.text_lengths.tolist() == [3, 0]
    assert batch.frames.shape == (2, 5, 3)
    assert batch.frames[0, 2:].eq(-1.0).all()
    assert batch.frames[1].eq(2.0).all()
    assert batch.label.tolist() == [1, 0]
    assert batch.box.tolist() == [[0.5, 1.5], [2.5, 3.5]]
    assert batch.real.tolist() == [True, True]
    kinds = {"text": torch.int64, "frames": torch.float32, "label": torch.int64, "box": torch.float32}
    assert {name: getattr(batch, name).dtype for name in kinds} == kinds


def test_a_batch_is_a_dataclass_of_tensors_so_that_a_step_can_be_captured():
    batch = padded(RECORDS, {"text": 0, "frames": 0})
    assert all(isinstance(getattr(batch, field.name), torch.Tensor) for field in dataclasses.fields(batch))
    moved = batch.to("cpu")
    assert type(moved) is type(batch)
    assert type(padded(RECORDS, {"text": 0, "frames": 0})) is type(batch)


def test_a_grid_and_rows_make_few_shapes():
    batch = padded(RECORDS[:1], {"text": 0, "frames": 0}, grid=4, rows=3)
    assert batch.text.shape == (3, 4)
    assert batch.frames.shape == (3, 4, 3)
    assert batch.text_lengths.tolist() == [3, 0, 0]
    assert batch.real.tolist() == [True, False, False]
    assert batch.label.tolist() == [1, 0, 0]


def test_bytes_of_images_stay_bytes():
    batch = padded([{"image": np.zeros((3, 2, 2), np.uint8)}], {})
    assert batch.image.dtype == torch.uint8


def test_arrays_of_different_shapes_name_the_field():
    with pytest.raises(ValueError, match=r"image must have one shape in every record of a batch, got \[\(2,\), \(3,\)"):
        padded([{"image": [1, 2]}, {"image": [1, 2, 3]}], {})


@pytest.mark.parametrize(("records", "grid"), [([], 1), (RECORDS, 0)], ids=["no records", "grid of 0"])
def test_what_cannot_be_a_batch_is_refused(records, grid):
    with pytest.raises(ValueError, match=r"a batch needs at least one record|grid must be at least 1"):
        padded(records, {"text": 0, "frames": 0}, grid=grid)


def batches(grid: int = 1, **share: Any) -> RecordBatches:
    records = [{"text": list(range(1, 2 + number % 7))} for number in range(41)]
    lengths = [[len(record["text"]) for record in records]]
    return RecordBatches(
        records,
        lengths,
        collate=lambda chosen, **shape: padded(chosen, {"text": 0}, **shape),
        tokens=24,
        seed=3,
        grid=grid,
        **share,
    )


def contents(batch) -> list[list[int]]:
    return [row[:length] for row, length in zip(batch.text.tolist(), batch.text_lengths.tolist(), strict=True)]


def test_an_epoch_holds_every_record_once():
    seen = [tuple(row) for batch in batches() for row in contents(batch)]
    expected = [tuple(range(1, 2 + number % 7)) for number in range(41)]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_the_order_continues_where_its_state_was_taken(taken):
    whole, first = batches(), batches()
    expected = [contents(batch) for batch in whole] + [contents(batch) for batch in whole]
    running = iter(first)
    for _ in range(taken):
        next(running)
    later = batches()
    later.resume(first.state())
    rest = [contents(batch) for batch in later] + [contents(batch) for batch in later]
    assert rest == expected[taken:]


def test_with_a_grid_batches_come_in_few_shapes():
    shapes = {tuple(batch.text.shape) for batch in batches(grid=4)}
    assert shapes == {(6, 4), (3, 8)}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_shares_of_a_batch_are_its_rows_without_overlap_or_loss(ranks):
    shares = [batches(rank=rank, ranks=ranks, idle=lambda _: None) for rank in range(ranks)]
    for whole, *parts in zip(batches(), *shares, strict=True):
        rows = [row for part in parts if part is not None for row in contents(part)]
        assert sorted(rows) == sorted(contents(whole))
    assert all(one.state() == shares[0].state() for one in shares)


def test_a_process_without_a_row_gets_the_first_one_marked():
    parts = [batches(rank=rank, ranks=7, idle=lambda batch: ("idle", contents(batch))) for rank in (0, 6)]
    marked = [(contents(first), last[1]) for first, last in zip(*parts, strict=True) if isinstance(last, tuple)]
    assert marked
    assert all(first[:1] == idle for first, idle in marked)


@pytest.mark.parametrize("ranks", [2, 3])
def test_with_a_grid_all_shares_have_the_same_few_shapes(ranks):
    found = [{tuple(batch.text.shape) for batch in batches(4, rank=rank, ranks=ranks)} for rank in range(ranks)]
    assert all(shapes == {(6 // ranks, 4), (-(-3 // ranks), 8)} for shapes in found)
