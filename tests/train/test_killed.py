"""Training processes killed at random moments: their files are complete, and resumed runs equal undisturbed ones."""

import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import tiny_training
from tiny_training import same_weights

from regard.train.run_directory import Run
from regard.train.weight_files import read_tensors
from time_limits import HANG_SECONDS

STEPS = 120


def start(folder: Path, slow_after: int = 16) -> ForkServerProcess:
    """Start a training process, forked from a server that has imported torch, which saves seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_training", "torch._dynamo"])
    process = context.Process(target=tiny_training.main, args=(str(folder), STEPS, slow_after))
    process.start()
    return process


def said(folder: Path) -> str:
    return Path(f"{folder}.log").read_text()


def finished(folder: Path) -> None:
    """Run a training process in `folder` to its end, without pauses."""
    process = start(folder, 0)
    process.join(HANG_SECONDS)
    assert process.exitcode == 0, said(folder)


def wait_for_step(folder: Path, step: int, process: ForkServerProcess) -> None:
    """Wait until the process has written a checkpoint of the given step or of a later one."""
    checkpoints = Run(folder).checkpoints
    while not any(each >= step for each in checkpoints.steps()):
        assert process.is_alive(), said(folder)
        time.sleep(0.002)


def kill(process: ForkServerProcess) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    finished(folder)
    return folder


def same_run(found: Path, expected: Path) -> None:
    same_weights(read_tensors(found / "model.safetensors")[0], read_tensors(expected / "model.safetensors")[0])
    lines = [
        [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in run.metrics.read()]
        for run in (Run.open(found), Run.open(expected))
    ]
    assert lines[0] == lines[1]
    assert Run.open(found).result() == Run.open(expected).result()


@pytest.mark.process
def test_killed_at_random_moments(tmp_path, whole):
    chance = random.Random(7)
    folder = tmp_path / "killed"
    reached = []
    for _ in range(6):
        before = max(Run(folder).checkpoints.steps(), default=0)
        process = start(folder)
        wait_for_step(folder, before + 4, process)
        # The process may be killed during a step, a validation or the writing of a checkpoint.
        time.sleep(chance.uniform(0, 0.12))
        kill(process)
        good = Run.open(folder).checkpoints.newest(lambda text: pytest.fail(text))
        assert good is not None
        reached.append(good.step)
    assert reached == sorted(reached)
    assert 0 < reached[0] < reached[-1] < STEPS
    finished(folder)
    assert f"resumed from step {reached[-1]}" in said(folder)
    same_run(folder, whole)
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_end(tmp_path, whole, number, code):
    folder = tmp_path / "asked"
    process = start(folder)
    wait_for_step(folder, 8, process)
    os.kill(process.pid, number)
    process.join(HANG_SECONDS)
    assert process.exitcode == code, said(folder)
    assert f"{signal.Signals(number).name} ended training after step" in said(folder)
    step = Run.open(folder).checkpoints.steps()[-1]
    assert f"step-{step:06d}" in said(folder)
    assert Run.open(folder).checkpoints.at(step).state()["course"]["step"] == step
    finished(folder)
    same_run(folder, whole)


@pytest.mark.process
def test_a_flipped_byte_is_noticed_and_the_older_checkpoint_taken(tmp_path, whole):
    folder = tmp_path / "flipped"
    process = start(folder)
    wait_for_step(folder, 12, process)
    kill(process)
    older, newest = Run.open(folder).checkpoints.steps()[-2:]
    path = folder / "checkpoints" / f"step-{newest:06d}" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    finished(folder)
    assert f"checkpoint of step {newest} passed over" in said(folder)
    assert f"resumed from step {older}" in said(folder)
    same_run(folder, whole)
    assert json.loads((folder / "checkpoints" / f"step-{STEPS:06d}" / "manifest.json").read_text())["step"] == STEPS
