"""Evaluation of any task: metrics of its answers, of its attention, and faithfulness."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.tasks.config import TaskConfig
from regard.tasks.loading import Loaded, material_of
from regard.tasks.task import Task
from regard.train.distributed import ALONE, Workers


def judged(
    task: Task, config: TaskConfig, predictor: Any, examples: Sequence[Any], longer: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return the figures of a result: metrics, attention, faithfulness, and the same for longer inputs than trained
    on."""
    found = task.judge(predictor, examples, config, True)
    result: dict[str, Any] = {
        "metrics": found.metrics,
        "attention": found.attention,
        "faithfulness": found.faithfulness,
    }
    if longer:
        beyond = task.judge(predictor, longer, config, False)
        result["longer"] = {"metrics": beyond.metrics, "attention": beyond.attention}
    return result


def evaluate(loaded: Loaded, data: Sequence[Path], workers: Workers = ALONE) -> dict[str, Any]:
    """Return the result record of a run, for its own test part or for other data; several workers share the
    examples."""
    task, config, run = loaded.task, loaded.config, loaded.run
    examples, longer, about = workers.in_turn(lambda: _examples(loaded, data))
    run.manifest.check("result.json")
    known = run.result() if (run.path / "result.json").is_file() else {}
    kept = {name: known[name] for name in ("seconds", "parameters", "versions", "device", "seed") if name in known}
    with workers.sharing():
        figures = judged(task, config, loaded.predictor, examples, longer)
    return {"task": config.task, "data": about, **figures, **kept}


def _examples(loaded: Loaded, data: Sequence[Path]) -> tuple[Sequence[Any], Sequence[Any], str]:
    """Return the test examples, longer ones if the run has them, and a description."""
    if data:
        examples, about = loaded.task.examples(data, loaded.config, loaded.codec)
        return examples, (), about
    material = material_of(loaded.task, loaded.config, loaded.run, loaded.codec)
    return material.test, material.longer, material.about
