"""Files of a run: checkpoints with checksums, metrics, weights, the run directory and its card."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from regard.train import checkpoint_files as checkpoint_module
from regard.train.atomic_files import write_whole
from regard.train.checkpoint_files import FILES, CheckpointError, Checkpoints
from regard.train.metrics_log import Metrics
from regard.train.random_state import RandomState
from regard.train.run_directory import Run, RunError
from regard.train.weight_averaging import mean_weights
from regard.train.weight_files import load_model, model_tensors, read_tensors, save_model, shared_names


def save(checkpoints: Checkpoints, step: int) -> Path:
    weights = {"w": torch.full((3, 5), float(step)), "n": torch.tensor(step)}
    return checkpoints.save(step, model=weights, aliases={"v": "w"}, optimizer={"m": torch.ones(2)}, state={"a": [1.5]})


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path / "checkpoints")
    for step in (4, 12, 1_000_008):
        save(made, step)
    return made


def test_a_checkpoint_comes_back_as_it_was(checkpoints):
    assert checkpoints.steps() == [4, 12, 1_000_008]
    assert sorted(path.name for path in checkpoints.path(12).iterdir()) == sorted([*FILES, "manifest.json"])
    assert checkpoints.path(12).name == "step-000012"
    found = checkpoints.newest(pytest.fail)
    assert found is not None
    assert found.step == 1_000_008
    tensors, aliases = found.model()
    assert aliases == {"v": "w"}
    assert torch.equal(tensors["w"], torch.full((3, 5), 1_000_008.0))
    assert torch.equal(found.optimizer()["m"], torch.ones(2))
    assert found.state() == {"a": [1.5]}


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("fault", ["flip", "cut", "gone"])
def test_damage_is_noticed(checkpoints, name, fault):
    path = checkpoints.path(12) / name
    data = bytearray(path.read_bytes())
    if fault == "flip":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif fault == "cut":
        path.write_bytes(data[:-7])
    else:
        path.unlink()
    said: list[str] = []
    checkpoints.prune({4, 12})
    found = checkpoints.newest(said.append)
    assert found is not None
    assert found.step == 4
    assert len(said) == 1
    assert said[0].startswith("checkpoint of step 12 passed over: ")
    assert "step-000012" in said[0]
    with pytest.raises(CheckpointError, match="step-000012"):
        checkpoints.at(12)
    save(checkpoints, 12)  # saving step 12 again replaces its damaged checkpoint
    assert checkpoints.at(12).step == 12


def test_every_single_byte_of_the_weights_counts(checkpoints):
    path = checkpoints.path(4) / "model.safetensors"
    data = path.read_bytes()
    for place in range(0, len(data), 11):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=r"model.safetensors is not what the manifest says"):
            checkpoints.at(4)
    path.write_bytes(data)
    assert checkpoints.at(4).step == 4


def test_a_renamed_checkpoint_is_not_believed(checkpoints):
    checkpoints.path(12).rename(checkpoints.path(13))
    with pytest.raises(CheckpointError, match="a manifest of another format or step"):
        checkpoints.at(13)
    with pytest.raises(CheckpointError, match="is not there"):
        checkpoints.at(12)


def test_a_good_one_is_not_written_twice(checkpoints):
    before = (checkpoints.path(12) / "manifest.json").stat().st_ino
    assert save(checkpoints, 12) == checkpoints.path(12)
    assert (checkpoints.path(12) / "manifest.json").stat().st_ino == before


def test_a_full_disk_leaves_the_others(checkpoints, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"could not write .*step-000020: .*No space left .*untouched"):
        save(checkpoints, 20)
    assert checkpoints.steps() == [4, 12, 1_000_008]
    assert not list(checkpoints.folder.glob(".*"))


def test_what_was_left_half_done_is_swept(checkpoints):
    (checkpoints.folder / ".step-000020.99.tmp").mkdir()
    (checkpoints.folder / "step-nonsense").mkdir()
    assert checkpoints.steps() == [4, 12, 1_000_008]
    checkpoints.sweep()
    assert not list(checkpoints.folder.glob(".*"))
    checkpoints.prune({12})
    assert checkpoints.steps() == [12]


def test_metrics_survive_a_cut_last_line(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    assert metrics.read() == []
    assert metrics.force() == 0
    metrics.cut(0)
    metrics.add({"step": 1, "loss": 0.1 + 0.2, "text": "汤姆"})
    size = metrics.force()
    metrics.add({"step": 2, "loss": float("nan")})
    with metrics.path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert metrics.read() == [{"step": 1, "loss": 0.1 + 0.2, "text": "汤姆"}, {"step": 2, "loss": None}]
    metrics.cut(10**9)
    assert metrics.path.read_text().endswith("\n")
    assert len(metrics.read()) == 2
    metrics.cut(size)
    assert [line["step"] for line in metrics.read()] == [1]
    metrics.add({"step": 2})
    assert [line["step"] for line in metrics.read()] == [1, 2]


def test_a_file_is_old_or_new(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_whole(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_is_not_written_over(tmp_path):
    config = {"task": "copy", "train": {"steps": 5}, "data": None}
    run = Run.create(tmp_path / "a" / "b", config)
    assert run.config() == config
    with pytest.raises(RunError, match="holds a run already: choose another directory, or go on with it by resuming"):
        Run.create(run.path, config)
    assert Run.create(run.path, config, resume=True) == run
    more = {"task": "copy", "train": {"steps": 9}, "data": None}
    with pytest.raises(RunError, match=r"another config: train.steps was 5 and is now 9"):
        Run.create(run.path, more, resume=True)
    assert Run.create(run.path, more, resume=True, changeable=["train.steps"]).config() == more
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(RunError, match=r"holds files but no config.json, so it is no run"):
            Run.create(other, config, resume=resume)
    with pytest.raises(RunError, match=r"is no run: it has no config.json"):
        Run.open(other)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert Run.create(empty, config, resume=True).config() == config


def test_results_and_card(tmp_path):
    run = Run.create(tmp_path / "run", {})
    for missing in (run.result, lambda: run.load_model(nn.Linear(1, 1))):
        with pytest.raises(RunError, match=r"its training has not (begun|ended)"):
            missing()
    run.save_result({"metrics": {"bleu": 97.5}, "language": "中文"})
    assert run.result() == {"metrics": {"bleu": 97.5}, "language": "中文"}
    figures = {"BLEU": 97.5, "a|b": "x\ny"}
    run.save_card(
        {"title": "Tiny", "tags": ["attention"], "summary": "A toy.", "Figures": figures, "Limits": ["Small."]}
    )
    text = (run.path / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: regard\ntags:\n- attention\n---\n\n# Tiny\n\nA toy.\n\n## Figures\n")
    assert "| a\\|b | x y |" in text
    assert text.endswith("## Limits\n\n- Small.\n")


class Odd(nn.Module):
    """A module with a shared matrix, a buffer, a view of a larger storage, and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("part", torch.arange(10.0)[2:5])
        self.register_buffer("count", torch.tensor(7))


def test_weights_come_back(tmp_path):
    model, fresh = Odd(), Odd()
    assert shared_names(model) == {"b.weight": "a.weight"}
    save_model(model, tmp_path / "m.safetensors")
    tensors, _ = read_tensors(tmp_path / "m.safetensors")
    assert tensors.keys() == {"a.weight", "a.bias", "part", "count"} == model_tensors(model).keys()
    fresh.part.zero_()
    load_model(fresh, tmp_path / "m.safetensors")
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())
    assert fresh.b.weight is fresh.a.weight
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_weights_that_do_not_fit_change_nothing(tmp_path):
    save_model(nn.Linear(3, 2), tmp_path / "m.safetensors")
    model = nn.Linear(2, 3)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=r"weight must have shape \(3, 2\); got \(2, 3\)"):
        load_model(model, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"it lacks \[\] and has \['bias'\] besides"):
        load_model(nn.Linear(3, 2, bias=False), tmp_path / "m.safetensors")
    assert torch.equal(model.weight, before)
    (tmp_path / "m.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(ValueError, match=r"m.safetensors cannot be read"):
        load_model(model, tmp_path / "m.safetensors")


def test_only_tensors_are_saved():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(TypeError, match="'_extra_state', a dict: only tensors can be saved"):
        model_tensors(Extra(1, 1))


@pytest.mark.parametrize("gauss", [False, True])
def test_random_numbers_go_on_where_they_were(gauss):
    if gauss:  # Python's gauss() computes two numbers and caches the second for the next call
        random.gauss()
        np.random.standard_normal()
    device = torch.device("cpu")
    state = RandomState.of(json_round(RandomState.take(device).tensors()))
    draws = [(random.gauss(), random.random(), np.random.standard_normal(), float(torch.randn(())))]
    state.put(device)
    assert draws == [(random.gauss(), random.random(), np.random.standard_normal(), float(torch.randn(())))]


def json_round(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors after conversion to JSON text and back, as if read from a file."""
    return {
        name: torch.tensor(json.loads(json.dumps(tensor.tolist())), dtype=tensor.dtype)
        for name, tensor in tensors.items()
    }


def test_a_mean_needs_something():
    with pytest.raises(ValueError, match="states must have at least one entry"):
        mean_weights([])
    mean = mean_weights([{"w": torch.ones(2), "n": torch.tensor(3)}, {"w": torch.zeros(2), "n": torch.tensor(4)}])
    assert torch.equal(mean["w"], torch.full((2,), 0.5))
    assert mean["n"] == 4
