"""Predictions of a trained run of any task: the inputs arrive as JSON.

The result has the answer as text, all fields of the prediction as JSON, and the id under which the trace of its
attention is stored (None without attention).
"""

import base64
import binascii
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from regard.studio.limits import LIMITS, Limits, RefusedError
from regard.studio.trace_store import TraceStore, without_paths

# For type checkers only: the modules import torch, which a studio without runs does not need at its start.
if TYPE_CHECKING:
    from regard.look.trace import Trace
    from regard.tasks.live_runs import LiveRun
    from regard.tasks.task import Input, Prediction, Task

FILES = ("image", "sound")  # the kinds of inputs that are files


@runtime_checkable
class Asks(Protocol):
    """The interface of a run (a trained model) that predicts from inputs of its task."""

    @property
    def name(self) -> str: ...

    @property
    def task(self) -> "Task": ...

    @property
    def ready(self) -> bool:
        """Return whether the run has trained weights, so that it can predict."""

    @property
    def more(self) -> Any:
        """Return an object with further functions of the task, such as interactive translation, or None."""

    def ask(self, inputs: Mapping[str, Any]) -> "Prediction": ...


class Asked(BaseModel):
    """The body of a request for a prediction: texts, images and sounds in base64, scenes as JSON text."""

    model_config = ConfigDict(extra="forbid")
    run: Annotated[int, Field(ge=0, le=1000)] = 0
    inputs: Annotated[dict[str, str], Field(max_length=16)]


def answer(runs: Sequence[Any], request: Asked, store: TraceStore, limits: Limits = LIMITS) -> dict[str, Any]:
    """Return the prediction of a run for a request as JSON: the answer, all fields and the id of the stored trace."""
    from regard.train.run_directory import RunError

    run = run_at(runs, request.run)
    inputs = received(run.task.inputs, request.inputs, limits)
    try:
        prediction = run.ask(inputs)
        record, trace = plain(prediction.record()), prediction.trace()
    # this error means that the input is invalid, or that an image or a sound cannot be decoded
    except (ValueError, OSError) as error:
        raise RefusedError(without_paths(error)) from None
    except RunError as error:
        raise RefusedError(without_paths(error), 409) from None
    if trace is not None:
        # The title begins with the run's name, because the viewer can compare the traces of two runs.
        trace.title = f"{run.name} · {trace.title}"
    return {
        "answer": prediction.answer,
        "record": record,
        "trace": None if trace is None else store.answered(trace).id,
    }


def add_examples(runs: Sequence[Any], store: TraceStore) -> None:
    """Register in the store, for each run with an example input, a trace that is computed when it is first opened."""
    from regard.studio.run_page import example_inputs

    for number, run in enumerate(runs):
        if isinstance(run, Asks) and getattr(run, "run", None) is not None and example_inputs(run) is not None:
            store.of_run(number, run.name, functools.partial(_example_trace, run))


def _example_trace(run: Any) -> "Trace":
    from regard.studio.run_page import example_inputs
    from regard.train.run_directory import RunError

    inputs = example_inputs(run)
    try:
        trace = None if inputs is None else run.ask(inputs).trace()
    except (ValueError, OSError, RunError) as error:
        raise RefusedError(without_paths(error), 409) from None
    if trace is None:
        raise RefusedError(f"{run.name} has no attention to show", 404)
    return trace


def run_at(runs: Sequence[Any], number: int) -> Any:
    """Return the run with this index; RefusedError if there is none that can predict."""
    if number >= len(runs) or not isinstance(runs[number], Asks):
        raise RefusedError(f"there is no run {number} that can be asked", 404)
    return runs[number]


def saved_run_at(runs: Sequence[Any], number: int) -> "LiveRun":
    """Return the run with this index; RefusedError if it has no run directory."""
    run = run_at(runs, number)
    if getattr(run, "run", None) is None:
        raise RefusedError(f"run {number} has no directory", 404)
    live: LiveRun = run
    return live


def received(inputs: "Sequence[Input]", texts: Mapping[str, str], limits: Limits = LIMITS) -> dict[str, Any]:
    """Convert the texts of an HTTP request to the inputs of a predictor.

    A predictor interprets a text as the path of a file if the input is an image, a sound or a scene. Therefore images
    and sounds are converted to bytes, and scenes to objects: a text from HTTP is never used as a path.
    """
    names = [spec.name for spec in inputs]
    if sorted(names) != sorted(texts):
        came = ", ".join(name[:40] for name in texts) or "nothing"
        raise RefusedError(f"expected {' and '.join(names)}, got {came}")
    return {spec.name: _value(spec, texts[spec.name], limits) for spec in inputs}


def _value(spec: "Input", text: str, limits: Limits) -> Any:
    if spec.kind in FILES:
        return _decoded(spec.name, text, limits.upload)
    if len(text) > limits.passage:
        raise RefusedError(f"{spec.name} must have at most {limits.passage} characters, got {len(text)}", 413)
    if spec.kind != "scene":
        return text
    try:
        scene = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{spec.name} is not JSON: {error}") from None
    if not isinstance(scene, (dict, list)):
        raise RefusedError(f"{spec.name} must be a JSON object or list, got {type(scene).__name__}")
    return scene


def _decoded(name: str, text: str, most: int) -> bytes:
    size = len(text) * 3 // 4
    if size > most + 2:  # the size is checked before decoding, to save memory; base64 padding adds up to two bytes
        raise RefusedError(f"{name} must have at most {most} bytes, got about {size}", 413)
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise RefusedError(f"{name} must be a file in base64") from None
    if not data:
        raise RefusedError(f"{name} is empty")
    if len(data) > most:
        raise RefusedError(f"{name} must have at most {most} bytes, got {len(data)}", 413)
    return data


def plain(value: Any) -> Any:
    """Return a value that can be written as valid JSON: NaN and infinite numbers become None.

    >>> plain({"score": float("nan"), "pair": (1, "a")})
    {'score': None, 'pair': [1, 'a']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (bytes, bytearray)):
        return [plain(entry) for entry in value]
    return str(value)
