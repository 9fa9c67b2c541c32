"""Several workers train one model: the losses of one worker, one checkpoint format, and a common end."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from worker_process import Started, killed_once, start

from regard.train.run_directory import Run
from regard.train.weight_files import read_tensors

TINY = (
    *("steps=6", "validate_every=2", "log_every=1", "warmup=1", "keep_last=3", "data.train=60", "data.valid=5"),
    # Batches have so few rows that with three workers some get no row.
    *("data.test=5", "longer=0", "lengths=[3, 8]", "model.size=8", "batch_tokens=24", "learning_rate=1e-3"),
)
# Adam divides by the root of the second moment. If a gradient is only a rounding error, its step has a random direction
# and the usual size; with a larger epsilon such steps are small, so that weights can be compared.
EXACT = ("dropout=0", "epsilon=1e-3")
RECURRENT = (*EXACT, "embedding=8", "accumulate=2")
PIECES = "train.pieces=true"  # with train.pieces=true, each worker writes its part of a checkpoint
SHARDED = ("train.shard=true", PIECES)
# With train.pieces=false, worker 0 writes all tensors of a checkpoint.
GATHERED = ("train.shard=true", "train.pieces=false")
TRANSFORMER = (*EXACT, "model=transformer", "heads=2", "average=ema")
RANDOM = ("dropout=0.2", "embedding=8", "average=ema")
CUT = 4  # the step of the checkpoint from which the tests resume runs

Trained = Callable[..., Path]


def settings(*given: str) -> list[str]:
    return [word for one in given for word in ("--set", one)]


def trains(folder: Path, size: int, given: Sequence[str]) -> Path:
    """Train on `size` workers (0: the command without torchrun), and return the run's directory."""
    out = folder / "run"
    done = start(folder, size, "train", "translation", "--preset", "tiny", *settings(*TINY, *given), "--out", out)
    assert set(done.ended().codes) == {0}, done.everything()
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function that trains a run with the given settings, at most once, and returns its directory."""
    made: dict[tuple[object, ...], Path] = {}

    def get(size: int, *given: str) -> Path:
        if (size, *given) not in made:
            made[size, *given] = trains(tmp_path_factory.mktemp("workers"), size, given)
        return made[size, *given]

    return get


def cut(run: Path, folder: Path) -> Path:
    """Return a copy of a run as it was after the checkpoint of step CUT."""
    copy = folder / "cut"
    shutil.copytree(run, copy)
    for step in Run.open(copy).checkpoints.steps():
        if step > CUT:
            shutil.rmtree(Run.open(copy).checkpoints.path(step))
    for name in ("model.safetensors", "result.json", "README.md"):
        (copy / name).unlink()
    return copy


def resumed(run: Path, folder: Path, size: int) -> Path:
    copy = cut(run, folder)
    done = start(folder / "logs", size, "train", copy, "--resume").ended()
    assert set(done.codes) == {0}, done.everything()
    assert f"resumed from step {CUT}" in done.printed()
    return copy


def lines(run: Path, kind: str, name: str = "loss") -> Tensor:
    return torch.tensor([line[name] for line in Run.open(run).metrics.read() if line["kind"] == kind]).double()


def weights(run: Path) -> dict[str, Tensor]:
    return read_tensors(run / "model.safetensors")[0]


def same(found: Path, expected: Path) -> None:
    """Assert that two runs have the same losses, gradients and weights, up to rounding."""
    for kind, name in (("train", "loss"), ("train", "gradient_norm"), ("train", "tokens"), ("validation", "loss")):
        torch.testing.assert_close(lines(found, kind, name), lines(expected, kind, name), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-3, atol=1e-4)


WAYS = {
    "3 recurrent": (3, RECURRENT, (PIECES,)),
    "2 transformer sharded": (2, TRANSFORMER, SHARDED),
}


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_weights_are_those_of_one_process(trained, way):
    size, given, more = WAYS[way]
    run = trained(size, *given, *more)
    same(run, trained(0, *given))
    assert Run.open(run).result()["workers"] == size


@pytest.mark.process
@pytest.mark.parametrize("size", [0, 2])
def test_saved_by_three_workers_and_resumed_by_others(trained, tmp_path, size):
    run = trained(3, *RECURRENT, PIECES)
    same(resumed(run, tmp_path, size), run)


@pytest.mark.process
@pytest.mark.parametrize(("way", "files"), [(SHARDED, 2), (GATHERED, 1)], ids=["in pieces", "gathered"])
def test_saved_sharded_and_resumed_plain(trained, tmp_path, way, files):
    run = trained(2, *TRANSFORMER, *way)
    assert len(list(Run.open(run).checkpoints.path(CUT).glob("model*.safetensors"))) == files
    same(resumed(run, tmp_path, 0), run)


@pytest.mark.process
def test_a_killed_worker_is_started_again_and_nothing_changes(trained, tmp_path):
    """Worker 1 is killed in step 3, and torchrun's agent starts both workers again from the checkpoint of step 2.

    The result equals that of two undisturbed workers bit for bit, including dropout.
    """
    run = tmp_path / "killed"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=run.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        start_method="forkserver",  # workers are forked from a server that has imported everything
        monitor_interval=0.1,
    )
    given = ["train", "translation", "--preset", "tiny", *settings(*TINY, *RANDOM), "--out", str(run)]
    elastic_launch(config, killed_once)(given, tmp_path)
    assert "resumed from step 2" in (tmp_path / "0-1.log").read_text()
    found, expected = weights(run), weights(trained(2, *RANDOM))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def asked_to_end(tmp_path_factory: pytest.TempPathFactory) -> tuple[Started, Path]:
    """Send SIGTERM to the second of two workers during training; return both processes and the run's directory."""
    folder = tmp_path_factory.mktemp("asked")
    given = settings(*TINY, *RECURRENT, "steps=1000000", "validate_every=1000000", "checkpoint_every=2")
    started = start(folder, 2, "train", "translation", "--preset", "tiny", *given, "--out", folder / "run")
    while not Run(folder / "run").checkpoints.steps():
        assert all(process.is_alive() for process in started.processes), started.everything()
        time.sleep(0.01)
    os.kill(started.processes[1].pid, signal.SIGTERM)
    return started.ended(), folder / "run"


@pytest.mark.process
def test_a_signal_to_one_worker_ends_all(asked_to_end):
    started, _ = asked_to_end
    assert started.codes == [143, 143], started.everything()


@pytest.mark.process
def test_a_signal_leaves_a_checkpoint_and_one_message(asked_to_end):
    started, run = asked_to_end
    step = Run.open(run).checkpoints.steps()[-1]
    assert f"SIGTERM ended training after step {step}" in started.printed(0)
    assert not started.printed(1)
    assert Run.open(run).checkpoints.at(step).state()["course"]["step"] == step


def ends(folder: Path, *, own: dict[int, Sequence[str]], given: Sequence[str] = ()) -> Started:
    arguments = ("train", "translation", "--preset", "tiny", *settings(*TINY, *given), "--out", folder / "run")
    return start(folder, 2, *arguments, own=own).ended()


REFUSED = {
    "other settings": ({1: settings("data.seed=9")}, "regard: the configuration of worker 1 is not that of worker 0"),
    "a missing file": ({1: ("--data", "no-such-file.tsv")}, "regard: worker 1: no such file: no-such-file.tsv"),
    "a wrong setting": (dict.fromkeys((0, 1), settings("model.size=none")), "regard: model.size: expected"),
}


@pytest.mark.process
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_ends_all(tmp_path, case):
    own, message = REFUSED[case]
    done = ends(tmp_path, own=own)
    assert all(done.codes), done.everything()
    said = [line for rank in range(2) for line in done.printed(rank).splitlines()]
    assert len(said) == 1, done.everything()
    assert said[0].startswith(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.process
def test_a_worker_that_fails_ends_all(tmp_path):
    arguments = ("train", "translation", "--preset", "tiny", *settings(*TINY, *RECURRENT), "--out", tmp_path / "run")
    done = start(tmp_path, 2, *arguments, failing=1).ended()
    assert all(done.codes), done.everything()
    assert done.printed(1).strip() == "regard: worker 1: the loss failed for a test"
    assert "the connection to another worker broke" in done.printed(0)
    assert "Traceback" not in done.printed(0)


@pytest.fixture(scope="module")
def figures(trained, tmp_path_factory) -> dict:
    """Return the figures that `regard evaluate` prints, computed by two workers."""
    folder = tmp_path_factory.mktemp("evaluated")
    done = start(folder, 2, "evaluate", trained(0, *RECURRENT), "--json").ended()
    assert set(done.codes) == {0}, done.everything()
    return json.loads(done.printed())


@pytest.mark.process
@pytest.mark.parametrize("part", ["metrics", "attention", "faithfulness"])
def test_two_workers_evaluate_as_one_process_did(figures, trained, part):
    assert figures[part] == Run.open(trained(0, *RECURRENT)).result()[part]


@pytest.mark.process
def test_answers_keep_the_order_of_the_lines(trained, tmp_path):
    """The printed source sentences are compared instead of translations, because a run of few steps translates all
    lines nearly alike."""
    sources = ["Tom chases Jerry", "Jerry chases Tom", "Mary sees the cat", "the cat sees Mary", "Tom sees Mary"]
    text = "\n".join(sources) + "\n"
    done = start(tmp_path, 2, "predict", trained(0, *RECURRENT), "--json", lines=text).ended()
    assert set(done.codes) == {0}, done.everything()
    assert [json.loads(line)["source"] for line in done.printed().splitlines()] == sources
