"""Evaluation of any task: metrics of its answers, and metrics and faithfulness of its attention weights."""

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
    """Return the metrics for `result.json`: of the answers, of the attention, and faithfulness.

    The entry "longer" holds the metrics on the examples in `longer`, each of which is longer than any training example.
    """
    judgement = task.judge(predictor, examples, config, True)
    result: dict[str, Any] = {
        "metrics": judgement.metrics,
        "attention": judgement.attention,
        "faithfulness": judgement.faithfulness,
    }
    if longer:
        beyond = task.judge(predictor, longer, config, False)
        result["longer"] = {"metrics": beyond.metrics, "attention": beyond.attention}
    return result


def evaluate(loaded: Loaded, data: Sequence[Path], workers: Workers = ALONE) -> dict[str, Any]:
    """Return the evaluation of a run as a `result.json` record, on its own test examples or on the files `data`.

    Several workers (processes) share the examples.
    """
    task, config, run = loaded.task, loaded.config, loaded.run
    examples, longer, about = workers.in_turn(lambda: _examples(loaded, data))
    run.manifest.check("result.json")
    known = run.result() if (run.path / "result.json").is_file() else {}
    facts = {name: known[name] for name in ("seconds", "parameters", "versions", "device", "seed") if name in known}
    with workers.sharing():
        figures = judged(task, config, loaded.predictor, examples, longer)
    return {"task": config.task, "data": about, **figures, **facts}


def _examples(loaded: Loaded, data: Sequence[Path]) -> tuple[Sequence[Any], Sequence[Any], str]:
    """Return the test examples, examples longer than any training example (may be empty), and a description."""
    if data:
        examples, about = loaded.task.examples(data, loaded.config, loaded.codec)
        return examples, (), about
    material = material_of(loaded.task, loaded.config, loaded.run, loaded.codec)
    return material.test, material.longer, material.about
