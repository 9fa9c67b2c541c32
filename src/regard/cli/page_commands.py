"""`regard look` and `regard studio`: pages that display traces and runs."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from regard.look.trace import Trace
from regard.look.viewer.page import page
from regard.tasks.joined_traces import joined_trace
from regard.tasks.loading import load, material_of
from regard.tasks.task import InputError
from regard.tasks.watched_predictions import watched
from regard.train.atomic_files import write_whole
from regard.train.run_directory import RunError

_EXAMPLES = 12  # number of examples of a run's test split that `regard look RUN` shows


def write_page(path: Path, text: str) -> None:
    """Write the text to a file atomically; if the path is a pipe or another special file, write to it directly."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
    else:
        write_whole(path.resolve(), text)


def look(what: Path, out: Path, language: str) -> None:
    """Write the page of a trace file, or of a run's predictions for the first examples of its test split."""
    with _reported(out):
        if not what.exists():
            raise ValueError(f"{what} does not exist: expected a trace file or the directory of a run")
        trace = _of_run(what) if what.is_dir() else Trace.load(what)
        write_page(out, page(trace, language=language))
    print(f"wrote {out}")


@contextlib.contextmanager
def _reported(out: Path | None = None) -> Iterator[None]:
    """In this context, errors that a user can correct are printed as one line, and the exit status is 2."""
    try:
        yield
    except OSError as error:
        name = str(error.filename) if error.filename else ""
        writing = out is not None and name and out.is_relative_to(name)
        said = f"{'cannot write ' if writing else ''}{name}: {error.strerror}" if name else error.strerror or str(error)
        print(f"regard: {said}", file=sys.stderr)
        raise typer.Exit(2) from error
    except (ValueError, RunError) as error:
        print(f"regard: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def _of_run(path: Path) -> Trace:
    loaded = load(path)
    if loaded.weights != "final weights":
        print(f"regard: {loaded.weights}", file=sys.stderr)
    material = material_of(loaded.task, loaded.config, loaded.run, loaded.codec)
    inputs = [loaded.task.asked(example) for example in material.test[:_EXAMPLES]]
    predictions = [prediction for prediction in watched(loaded, inputs) if not isinstance(prediction, InputError)]
    trace = joined_trace(predictions, loaded.task.view, f"{loaded.task.view.title}: {loaded.name}")
    if trace is None:
        raise ValueError(f"{path} has no attention: there is nothing to look at")
    return trace


def studio(paths: list[Path], *, host: str, port: int, open_page: bool) -> None:
    """Run the server of the studio until it is interrupted."""
    try:
        from regard.studio.server import serve

        with _reported():
            serve(paths, host=host, port=port, open=open_page)
    except ModuleNotFoundError as error:
        print(f"regard: the studio needs {error.name}: pip install 'regard[studio]'", file=sys.stderr)
        raise typer.Exit(2) from error
