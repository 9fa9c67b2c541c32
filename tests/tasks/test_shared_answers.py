"""Tests that several workers (processes) return the same metrics and predictions as one process, for every task."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import NAMES, tiny

import worker_threads
from regard.tasks.catalog import TASKS
from regard.tasks.config_overrides import configure, parsed
from regard.tasks.evaluation import judged
from regard.tasks.inputs import from_arguments
from regard.tasks.loading import Loaded
from regard.train.distributed import Workers
from regard.train.run_directory import Run

pytestmark = pytest.mark.slow

FEW = ("data.train=12", "data.valid=3", "data.test=5", "longer=0")
COUNT = 5  # the number of inputs, of which the first of two workers gets three
SHORTER = {"driving": ("drives=2",), "speech": ("longest=6",)}
BAD = {"sound": "no-such-file.wav", "image": "no-such-file.png", "scene": "no-such-file.json"}


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return `together(size, work)`: the result or error of `work(workers)` on each of `size` workers."""
    return worker_threads.started(monkeypatch)


@dataclass
class Untrained:
    """A predictor with initial weights, test examples of its task, and inputs."""

    loaded: Loaded
    examples: Sequence[Any]
    inputs: list[Any]


def untrained(name: str, folder: Path, count: int) -> list[Untrained]:
    """Return `count` equal predictors with initial weights; one of their inputs is invalid."""
    task = TASKS[name]
    config = configure(task, "tiny", [], parsed([*FEW, *tiny(name).settings, *SHORTER.get(name, ())]))
    material = task.material(config, folder / "data", None, lambda _: None)
    [good] = from_arguments(task.inputs, tiny(name).given(folder))
    bad = {**good, task.inputs[0].name: BAD.get(task.inputs[0].kind, "")}
    made = []
    for _ in range(count):
        torch.manual_seed(3)
        predictor = task.predictor(task.network(config, material.codec).eval(), material.codec, config)
        loaded = Loaded(task, Run(folder), config, material.codec, predictor, "untrained")
        made.append(Untrained(loaded, material.test, [bad if place == 3 else good for place in range(COUNT)]))
    return made


def said(answer: Any) -> Any:
    return str(answer) if isinstance(answer, Exception) else json.loads(json.dumps(answer.record()))


def near(found: Any, expected: Any) -> bool:
    """Return whether two results are equal up to rounding, which may depend on the size of the batch."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(near, found, expected))
    return found == pytest.approx(expected, abs=2e-4) if isinstance(expected, float) else found == expected


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_answer_and_evaluate_as_one_process_does(name, tmp_path, together):
    alone, *of_workers = untrained(name, tmp_path, 3)
    task, config = alone.loaded.task, alone.loaded.config
    figures = judged(task, config, alone.loaded.predictor, alone.examples)
    answers = [said(one) for one in alone.loaded.answers(alone.inputs)]
    asked: list[int] = []

    def work(workers: Workers) -> tuple[dict[str, Any], list[Any]]:
        mine = of_workers[workers.rank]
        whole = type(mine.loaded.predictor).answers

        def counted(part: Sequence[Any], **options: Any) -> list[Any]:
            asked.append(len(part))
            return whole(mine.loaded.predictor, part, **options)

        object.__setattr__(mine.loaded.predictor, "answers", counted)
        with workers.sharing():
            return (
                judged(task, config, mine.loaded.predictor, mine.examples),
                [said(one) for one in mine.loaded.answers(mine.inputs)],
            )

    for shared_figures, shared_answers in together(2, work):
        assert near(shared_figures, figures)
        assert near(shared_answers, answers)
    assert sorted(asked) == [2, 3]
