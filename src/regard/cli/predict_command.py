"""`regard predict`: prints the predictions of a trained model, one for each input, in the order of the inputs."""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from regard.cli.error_messages import reported
from regard.cli.input_lines import InputText, input_batches
from regard.cli.page_commands import write_page
from regard.cli.run_commands import report_weights
from regard.look.viewer.page import page
from regard.tasks.inputs import from_arguments, named
from regard.tasks.joined_traces import joined_trace
from regard.tasks.loading import Loaded, load, task_of
from regard.tasks.task import InputError, Prediction, SettingError, Task
from regard.tasks.watched_predictions import watched
from regard.train.distributed import Workers, joined
from regard.train.run_directory import Run, RunError

CHARACTERS = 1_000_000  # the largest number of characters of an input; a task may have a lower limit
# number of predictions for which the page of attention maps also shows self-attention, recorded by `regard.watch`
WATCHED = 12
TOGETHER = 64  # number of inputs from arguments that the model receives as one batch


def predict(
    run: Path,
    *,
    inputs: list[str],
    as_json: bool,
    look: Path | None,
    loading: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Print the prediction for each input; without inputs, for each line of standard input.

    An input without a prediction is reported on standard error. Its line in the output is empty, or with `as_json` an
    object with "error".
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    chosen = {name: value for name, value in options.items() if value is not None}
    seen: list[Prediction] = []
    failed = 0
    with reported(), joined() as workers:
        with workers.agreed():
            loaded = _loaded(run, loading, chosen)
        if workers.is_first:
            report_weights(loaded.weights)
        for batch in workers.read_by_first(_batches(loaded.task, inputs)):
            watching = look is not None and len(seen) < WATCHED
            for place, prediction in _answers(loaded, batch, chosen, workers, watching=watching):
                if isinstance(prediction, InputError):
                    failed += 1
                elif look is not None:
                    seen.append(prediction)
                if workers.is_first:
                    _show(place, prediction, as_json=as_json)
    if look is not None and workers.is_first:
        _write_look(loaded, seen, look)
    if failed and workers.is_first:
        raise typer.Exit(1)


def _loaded(run: Path, loading: dict[str, Any], chosen: dict[str, Any]) -> Loaded:
    opened = Run.open(run)
    loading_options = {name: value for name, value in loading.items() if value is not None}
    loaded = load(opened, **dict.fromkeys(task_of(opened).loading, "auto") | loading_options)
    refused = [name for name in chosen if name not in loaded.task.options]
    if refused:
        raise SettingError(f"--{refused[0]} is not an option of {loaded.task.name}")
    return loaded


def _show(place: str, prediction: Prediction | InputError, *, as_json: bool) -> None:
    if isinstance(prediction, InputError):
        fault = _line(f"{place}: {prediction}")
        print(f"regard: {fault}: not answered", file=sys.stderr, flush=True)
        print(json.dumps({"error": fault}) if as_json else "", flush=True)
    else:
        print(json.dumps(prediction.record(), ensure_ascii=False) if as_json else _line(prediction.line), flush=True)


# a pair: the origin of an input, such as "line 3", and the input, or the InputError if the input is invalid
Given = tuple[str, Any]


def _batches(task: Task, arguments: Sequence[str]) -> Iterator[list[Given]]:
    """Yield batches of inputs with their origins, from the arguments or, if there are none, from standard input."""
    if arguments and (len(task.inputs) > 1 or task.inputs[0].kind != "text"):
        groups = from_arguments(task.inputs, arguments)
        numbered = [(f"input {number}", group) for number, group in enumerate(groups)]
        yield from (numbered[first : first + TOGETHER] for first in range(0, len(numbered), TOGETHER))
        return
    for batch in input_batches(arguments, characters=CHARACTERS):
        yield [(item.place, _parsed(task, item, from_line=not arguments)) for item in batch]


def _parsed(task: Task, item: InputText, *, from_line: bool) -> Any:
    """Return the input of the model that a line of text or of JSON describes, or an InputError if the line is invalid.

    Tasks with several inputs accept only JSON objects.
    """
    if item.fault:
        return InputError(item.fault)
    # If the only input of the task is a text, a line that begins with { and is not valid JSON is that text.
    strictly = len(task.inputs) > 1 or task.inputs[0].kind != "text"
    if from_line and item.text.lstrip().startswith("{"):
        try:
            return named(task.inputs, json.loads(item.text))
        except (json.JSONDecodeError, RecursionError) as error:
            if strictly:
                return InputError(f"not JSON: {error}")
        except InputError as error:
            if strictly:
                return error
    if len(task.inputs) > 1:
        names = ", ".join(f'"{part.name}": …' for part in task.inputs)
        return InputError(f"expected a JSON object {{{names}}}")
    if not from_line:
        return from_arguments(task.inputs, [item.text])[0]
    return {task.inputs[0].name: item.text}


def _answers(
    loaded: Loaded, batch: Sequence[Given], options: dict[str, Any], workers: Workers, *, watching: bool
) -> Iterator[tuple[str, Prediction | InputError]]:
    good = [entry for _, entry in batch if not isinstance(entry, InputError)]
    first = watched(loaded, good[:WATCHED], **options) if watching else []
    with workers.sharing():
        answers = iter([*first, *loaded.answers(good[len(first) :], **options)])
    for place, entry in batch:
        yield place, entry if isinstance(entry, InputError) else next(answers)


def _line(text: str) -> str:
    """Return a prediction as one line: with line breaks in it, the output would not have one line for each input."""
    return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")


def _write_look(loaded: Loaded, seen: list[Prediction], look: Path) -> None:
    with reported():
        trace = joined_trace(seen, loaded.task.view)
        if trace is None:
            why = (
                "this run has no attention"
                if any(prediction.answer for prediction in seen)
                else "there was nothing to answer"
            )
            raise RunError(f"{why}: {look} was not written")
        write_page(look, page(trace))
    print(f"wrote {look}", file=sys.stderr)
