"""The data of a run's page: its configuration, its result, its model card, and the name of its weights."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.studio.limits import LIMITS, RefusedError
from regard.studio.prediction_api import plain

if TYPE_CHECKING:
    from regard.tasks.live_runs import LiveRun
    from regard.tasks.task import Input, Task

_FACTS = ("data", "parameters", "steps", "ended", "training_seconds", "seconds", "device", "seed", "command")
_TYPES = {".png": "image/png", ".wav": "audio/wav"}
_LARGEST = 4 * 1024 * 1024  # largest size of a result.json in bytes


def summary(run: Any) -> dict[str, Any]:
    """Return the entry of a run for the list of runs: its name, task, inputs and example, and if it can predict."""
    task: Task = run.task
    result = _result(_path(run))
    return {
        "name": run.name,
        "task": task.name,
        "about": task.about,
        "inputs": [_input(spec) for spec in task.inputs],
        "ready": run.ready,
        "example": example(task, result),
        "files": _files(run, result),
    }


def details(run: "LiveRun") -> dict[str, Any]:
    """Return the data of a run's page."""
    path, task = _path(run), run.task
    result = _result(path)
    return {
        **summary(run),
        "title": task.title,
        "weights": _weights(run),
        "finished": bool(result),
        "changed": _seconds_since_change(path),
        "config": _config(run),
        "figures": list(_figures(task, result)),
        "facts": {name: plain(result[name]) for name in _FACTS if result.get(name) not in (None, "")},
        "unit": task.view.unit,
        "labels": {figure.name: {"label": figure.label, "percent": figure.percent} for figure in task.figures},
        "card": _card(path),
    }


def example(task: "Task", result: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the texts and scenes of a run's example by the names of the inputs; None if the result has none."""
    from regard.tasks.example_files import example_parts

    parts = example_parts(task.inputs, result.get("example"))
    begin = {}
    for spec in task.inputs:
        value = parts.get(spec.name)
        if spec.kind == "scene" and isinstance(value, (dict, list)):
            begin[spec.name] = json.dumps(value, ensure_ascii=False, indent=1)
        elif spec.kind in ("text", "scene") and isinstance(value, str):
            begin[spec.name] = value
    short = {name: text for name, text in begin.items() if len(text) <= LIMITS.passage}
    return short or None


def example_bytes(run: "LiveRun", name: str) -> tuple[bytes, str]:
    """Return the image or the sound of a run's example, and its media type."""
    from regard.tasks.example_files import example_file

    path = Path(run.run.path)
    for spec in run.task.inputs:
        file = example_file(spec, _result(path).get("example"), path) if spec.name == name else None
        if file is not None and file.stat().st_size <= LIMITS.upload:
            return file.read_bytes(), _TYPES[file.suffix]
    raise RefusedError(f"the run has no example of {name[:40]!r}", 404)


def example_inputs(run: Any) -> dict[str, Any] | None:
    """Return the example of a run as input of its predictor; None if it is incomplete."""
    result = _result(_path(run))
    texts, files = example(run.task, result) or {}, _files(run, result)
    inputs: dict[str, Any] = {}
    for spec in run.task.inputs:
        if spec.name in files:
            inputs[spec.name] = example_bytes(run, spec.name)[0]
        elif spec.name in texts:
            inputs[spec.name] = json.loads(texts[spec.name]) if spec.kind == "scene" else texts[spec.name]
        else:
            return None
    return inputs


def _files(run: Any, result: Mapping[str, Any]) -> list[str]:
    """Return the names of the inputs whose example is an image or sound file that the page can fetch."""
    from regard.tasks.example_files import example_file

    path = _path(run)
    if path is None:
        return []
    return [spec.name for spec in run.task.inputs if example_file(spec, result.get("example"), path) is not None]


def _input(spec: "Input") -> dict[str, Any]:
    return {"name": spec.name, "kind": spec.kind, "label": spec.label, "long": spec.from_file}


def _path(run: Any) -> Path | None:
    """Return the directory of a run; None if the run exists in memory only."""
    opened = getattr(run, "run", None)
    return None if opened is None else Path(opened.path)


def _weights(run: "LiveRun") -> str | None:
    from regard.train.run_directory import RunError

    try:
        return run.weights
    # The files of a run may be damaged; the page then displays the rest of its data.
    except (RunError, OSError) as error:
        return str(error)[:300]


def _result(path: Path | None) -> dict[str, Any]:
    """Return the result of a run; an empty dict if there is none, as while the run trains, or it is unreadable."""
    if path is None:
        return {}
    try:
        file = path / "result.json"
        read = json.loads(file.read_bytes()) if file.stat().st_size <= _LARGEST else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _config(run: "LiveRun") -> list[dict[str, Any]]:
    """Return every setting of the run's configuration with its value and its description."""
    from regard.tasks.config_overrides import listed

    config = run.run.config_as(run.task.config)
    return [
        {"name": setting.name, "value": _written(setting.value), "about": setting.about} for setting in listed(config)
    ]


def _written(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figures(task: "Task", result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the metrics in a result with the names and units that the task declares."""
    parts = {"test": result, "longer": result.get("longer") or {}}
    for part, record in parts.items():
        for group in ("metrics", "attention"):
            figures = record.get(group) if isinstance(record, Mapping) else None
            for name, value in (figures if isinstance(figures, Mapping) else {}).items():
                figure = task.figure(name)
                if figure is not None and isinstance(value, (int, float)):
                    about = {"label": figure.label, "percent": figure.percent, "better": figure.better}
                    yield {"part": part, "group": group, "name": name, "value": plain(value), **about}
    faithful = result.get("faithfulness")
    for name, value in (faithful if isinstance(faithful, Mapping) else {}).items():
        if isinstance(value, (int, float)):
            what = f"the {task.view.unit} attended most" if name == "attended" else f"another {task.view.unit}"
            label = f"log-probability lost without {what}"
            about = {"label": label, "percent": False, "better": None}
            yield {"part": "test", "group": "faithfulness", "name": name, "value": plain(value), **about}


def _seconds_since_change(path: Path | None) -> float | None:
    """Return the time in seconds since metrics.jsonl was last written; None if the file does not exist."""
    try:
        return None if path is None else max(0.0, round(time.time() - (path / "metrics.jsonl").stat().st_mtime, 1))
    except OSError:
        return None


def _card(path: Path | None) -> str:
    """Return the run's model card (README.md) as text."""
    if path is None:
        return ""
    try:
        with (path / "README.md").open("rb") as file:
            return file.read(LIMITS.card).decode("utf-8", "replace")
    except OSError:
        return ""
