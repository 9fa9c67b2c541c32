"""Tests of collective operations of data-parallel workers, which are threads of one process here."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch

import worker_threads
from regard.tasks import training
from regard.tasks.catalog import TASKS
from regard.tasks.config_overrides import configure
from regard.train import checkpoint_files as checkpoint
from regard.train.checkpoint_files import CheckpointError, Checkpoints
from regard.train.distributed import ALONE, WorkerFailed, Workers, in_shares, joined, shareable
from regard.train.errors import RunError


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function `together(size, work)`: the result or error of `work(workers)` on each of `size` workers."""
    return worker_threads.started(monkeypatch)


def test_each_worker_answers_a_share_and_all_have_the_answers_in_order(together):
    asked = []

    def work(workers: Workers) -> list[int]:
        def answer(items):
            asked.append(list(items))
            return [10 * item for item in items]

        with workers.sharing():
            return in_shares([1, 2, 3, 4, 5], answer)

    assert together(3, work) == [[10, 20, 30, 40, 50]] * 3
    assert sorted(asked) == [[1, 4], [2, 5], [3]]


def test_what_is_shared_out_is_not_shared_out_again(together):
    class Predictor:
        @shareable
        def outer(self, items, *, add):
            return self.inner([item + add for item in items])

        @shareable
        def inner(self, items):
            return [(item, len(items)) for item in items]

    def work(workers: Workers) -> list[Any]:
        with workers.sharing():
            return Predictor().outer([1, 2, 3, 4], add=5)

    assert together(2, work) == [[(6, 2), (7, 2), (8, 2), (9, 2)]] * 2


def test_one_process_answers_everything_itself():
    with ALONE.sharing():
        assert in_shares([1, 2, 3], lambda items: [len(items)] * len(items)) == [3, 3, 3]


def test_the_first_failure_is_raised_once_and_the_others_end(together):
    def work(workers: Workers) -> None:
        with workers.agreed():
            if workers.rank in (1, 2):
                raise RunError(f"no file at {workers.rank}")

    first, second, third = together(3, work)
    assert isinstance(second, RunError)
    assert str(second) == "no file at 1"
    assert isinstance(first, WorkerFailed)
    assert isinstance(third, WorkerFailed)


@pytest.mark.parametrize(("ranks", "named"), [((2,), "worker 2"), ((1, 3), "worker 1, 3")])
def test_workers_that_differ_are_named(together, ranks, named):
    first, *others = together(4, lambda workers: workers.same("the setting", workers.rank in ranks))
    assert isinstance(first, RunError)
    assert str(first) == f"the setting of {named} is not that of worker 0: all workers must have the same"
    assert all(isinstance(one, WorkerFailed) for one in others)


def test_the_same_value_in_another_order_of_keys_is_the_same(together):
    values = ['{"a": 1, "b": [2]}', '{"b": [2], "a": 1}']
    assert together(2, lambda workers: workers.same("it", json.loads(values[workers.rank]))) == [None, None]


def test_the_first_worker_goes_before_the_others(together):
    order = []

    def work(workers: Workers) -> int:
        return workers.in_turn(lambda: order.append(workers.rank) or workers.rank)

    assert together(3, work) == [0, 1, 2]
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def test_items_are_read_by_the_first_worker(together):
    def work(workers: Workers) -> list[list[int]]:
        return list(workers.read_by_first([[1, 2], [3]] if workers.is_first else iter(())))

    assert together(2, work) == [[[1, 2], [3]]] * 2


MODEL = {"weight": torch.arange(35.0).reshape(7, 5), "bias": torch.tensor([3.0]), "scale": torch.tensor(2.0)}
OPTIMIZER = {"optimizer/step/weight": torch.tensor(4.0), "average/weight": torch.arange(35.0).reshape(7, 5) / 2}


@pytest.fixture
def pieces(together, tmp_path) -> Checkpoints:
    """Return a folder of checkpoints in which three workers wrote one checkpoint, with 3, 3 and 1 rows of a weight
    matrix."""
    checkpoints = Checkpoints(tmp_path)

    def work(workers: Workers) -> Any:
        own = {f"random-{workers.rank}/cpu": torch.tensor([workers.rank])}
        given = {"model": MODEL, "aliases": {"tied": "weight"}, "optimizer": OPTIMIZER, "own": own}
        return checkpoints.save_pieces(12, workers, **given, state=lambda: {"course": {"step": 12}})

    assert together(3, work) == [tmp_path / "step-000012"] * 3
    return checkpoints


def test_a_checkpoint_in_pieces_is_read_as_a_whole(pieces):
    found = pieces.at(12)
    model, shared = found.model()
    torch.testing.assert_close(dict(model), MODEL)
    assert shared == {"tied": "weight"}
    torch.testing.assert_close(dict(found.average()), {"weight": OPTIMIZER["average/weight"]})
    assert [int(found.optimizer()[f"random-{rank}/cpu"]) for rank in range(3)] == [0, 1, 2]
    assert found.state() == {"course": {"step": 12}}


def test_each_worker_writes_its_rows_and_the_manifest_lists_all_files(pieces):
    folder = pieces.path(12)
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {f"{kind}-0000{rank}-of-00003.safetensors" for kind in ("model", "optimizer") for rank in range(3)}
    assert manifest["files"].keys() == {*files, "state.json"}
    assert {path.name for path in folder.iterdir()} == {*files, "state.json", "manifest.json"}
    rows = [safetensors.torch.load_file(folder / f"model-0000{rank}-of-00003.safetensors") for rank in range(3)]
    assert [len(one["weight"]) for one in rows] == [3, 3, 1]
    assert [sorted(one) for one in rows] == [["bias", "scale", "weight"], ["weight"], ["weight"]]


@pytest.mark.parametrize("fault", ["missing", "changed"])
def test_a_damaged_piece_is_found_before_anything_is_read(pieces, fault):
    piece = pieces.path(12) / "optimizer-00001-of-00003.safetensors"
    if fault == "missing":
        piece.unlink()
    else:
        piece.write_bytes(piece.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"optimizer-00001-of-00003\.safetensors is not what the manifest says"):
        pieces.at(12)


def test_a_piece_that_cannot_be_written_leaves_no_checkpoint(together, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    write = checkpoint.write_tensors

    def full(path, tensors, *, aliases=None):
        if "00001-of" in path.name:
            raise OSError(28, "No space left on device", str(path))
        write(path, tensors, aliases=aliases)

    monkeypatch.setattr(checkpoint, "write_tensors", full)

    def work(workers: Workers) -> Any:
        given = {"model": MODEL, "aliases": {}, "optimizer": OPTIMIZER, "own": {}}
        return checkpoints.save_pieces(3, workers, **given, state=dict)

    first, second = together(2, work)
    assert isinstance(first, WorkerFailed)
    assert (
        str(second)
        == f"could not write {tmp_path / 'step-000003'}: No space left on device; older checkpoints are untouched"
    )
    assert checkpoints.steps() == []


def test_workers_with_other_contents_of_a_file_end_before_anything_is_written(together, tmp_path, monkeypatch):
    """Each worker's data file has the same name and other contents (a different checksum)."""
    file, out = tmp_path / "pairs.tsv", tmp_path / "run"
    file.write_text("one\tun\ntwo\tdeux\n")
    task = TASKS["translation"]
    config = configure(task, "tiny", [file], {})
    names = iter("ab")
    monkeypatch.setattr(training, "sha256", lambda path: next(names))
    first, second = together(2, lambda workers: training.train(task, config, out, workers=workers))
    assert str(first).startswith("the contents of the data files of worker 1 is not that of worker 0")
    assert isinstance(second, WorkerFailed)
    assert not out.exists()


def test_a_port_that_is_in_use_is_one_line(monkeypatch):
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
        for name, value in {**given, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        message = f"^port {port} is in use on localhost, where workers meet: choose another as MASTER_PORT"
        with pytest.raises(RunError, match=message), joined():
            pytest.fail("joined by nobody")
