"""`regard look`, `regard studio`: pages of traces and runs, and translations as a page."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from regard.look.page import page
from regard.look.trace import Trace
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.training import make_material
from regard.tasks.translation.translator import Translation, Translator
from regard.train.durable import write_whole
from regard.train.run import Run, RunError


def trace_of(found: list[Translation], *, title: str = "Where each word came from") -> Trace:
    """One record for each translation, with its words at the rows and the source's at the columns."""
    shown = [(number, one) for number, one in enumerate(found, 1) if one.weights is not None and one.labels]
    maps = {f"{number}. {one.text}": one.weights[None].float() for number, one in shown if one.weights is not None}
    trace = Trace.from_weights(maps, title=title)
    for record, (_, one) in zip(trace.records, shown, strict=True):
        trace.label(rows=list(one.labels), columns=list(one.columns), of=record)
    return trace


def write_page(found: list[Translation], path: Path) -> None:
    """A standalone page."""
    _write_text(path, page(trace_of(found)))


def _write_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all; what is no regular file, such as a pipe, can only be written to."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
    else:
        write_whole(path.resolve(), text)


def look(what: Path, out: Path, language: str) -> None:
    """The page of a trace file, or of the first sentences of a run's test part."""
    with _told(out):
        if not what.exists():
            raise ValueError(f"{what} does not exist: expected a trace file or the directory of a run")
        trace = _of_run(what) if what.is_dir() else Trace.load(what)
        text = page(trace, language=language)
        _write_text(out, text)
    print(f"wrote {out}")


@contextlib.contextmanager
def _told(out: Path | None = None) -> Iterator[None]:
    """What a user can put right, in one line."""
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


def _of_run(path: Path, count: int = 12) -> Trace:
    run = Run.open(path)
    config = run.config_as(TranslationConfig)
    translator = Translator.load(run)
    examples = make_material(config, run).test[:count]
    found = translator.search([translator.coder.read_words(example.source) for example in examples])
    if all(one.weights is None for one in found):
        raise ValueError(f"{path} has no attention: there is nothing to look at")
    return trace_of(found, title=f"Translations of {path.resolve().name}")


def studio(paths: list[Path], *, host: str, port: int, open_page: bool) -> None:
    """Serve the studio until it is interrupted."""
    try:
        from regard.studio.serve import serve

        with _told():
            serve(paths, host=host, port=port, open=open_page)
    except ModuleNotFoundError as error:
        print(f"regard: the studio needs {error.name}: pip install 'regard[studio]'", file=sys.stderr)
        raise typer.Exit(2) from error
