"""Evaluating any task: figures of its answers, of where it attends, and whether that matters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.tasks.config import TaskConfig
from regard.tasks.loading import Loaded, material_of
from regard.tasks.task import Task


def judged(
    task: Task, config: TaskConfig, predictor: Any, examples: Sequence[Any], longer: Sequence[Any] = ()
) -> dict[str, Any]:
    """The part of a result that judges: metrics, attention, faithfulness, and the same beyond the trained lengths."""
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


def evaluate(loaded: Loaded, data: Sequence[Path]) -> dict[str, Any]:
    """The result record of a run, for its own test part or for other data."""
    task, config, run = loaded.task, loaded.config, loaded.run
    longer: Sequence[Any] = ()
    if data:
        examples, about = task.examples(data, config, loaded.codec)
    else:
        material = material_of(task, config, run, loaded.codec)
        examples, longer, about = material.test, material.longer, material.about
    run.manifest.check("result.json")
    known = run.result() if (run.path / "result.json").is_file() else {}
    kept = {name: known[name] for name in ("seconds", "parameters", "versions", "device", "seed") if name in known}
    return {"task": config.task, "data": about, **judged(task, config, loaded.predictor, examples, longer), **kept}
