"""The `regard` command line. Each command imports what it needs when it runs, so that `regard --help` is fast.

- `run_commands`: `regard tasks`, `train` and `evaluate`
- `predict_command`: `regard predict`
- `input_lines`: input texts from arguments or standard input
- `page_commands`: `regard look` and `studio`
- `bench_commands`: `regard bench`
- `demo`: `regard demo`
- `worked_example`: `regard demo --stages`, the example of the documentation step by step
- `error_messages`: user errors as one line and an exit status

This module defines the typer commands.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from regard import __version__
from regard.cli.bench_commands import bench

# `regard --help` prints plain text, because rendering it with rich would double the time of the command.
app = typer.Typer(
    name="regard",
    help="Attention for PyTorch: compute any mechanism, and see where it looks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
_ENDED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit statuses of a command ended by a signal


def main() -> None:
    """Run the command line. Ctrl-C and SIGTERM end it with the exit status that shells expect, 128 + the signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a signal that the process ignores at its start, as under nohup, stays ignored
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        app(prog_name="regard")
    except SystemExit as end:
        # torchrun sends SIGTERM to all workers when one of them ends. This worker is already exiting, so it ignores it.
        if "RANK" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if end.code in _ENDED and any(thread.daemon for thread in threading.enumerate()):
            # Exit without finalising the interpreter: native code in a daemon thread that still runs would abort the
            # process during finalisation.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(end.code))
        raise


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by raising SystemExit, so that incomplete files are removed before the process ends."""
    # of several workers that torchrun started, only the first one prints the message
    if os.environ.get("RANK", "0") == "0":
        # os.write is used because sys.stderr raises an error if the signal arrived during another write to sys.stderr.
        with suppress(OSError):
            os.write(2, f"\nregard: ended by {signal.Signals(number).name}\n".encode())
    raise SystemExit(128 + number)


def _print_version(show: bool) -> None:
    if show:
        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


@app.command("demo")
def _demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the run, the picture and the page.", file_okay=False, metavar="DIR")
    ] = Path("demo"),
    stages: Annotated[
        bool, typer.Option("--stages", help="Only work attention through by hand, on one sentence: seconds.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Updates of the training: fewer are sooner and worse.", min=1, metavar="N")
    ] = None,
) -> None:
    """Train a translator on this machine, and draw its attention: about two minutes."""
    try:
        if stages:
            from regard.cli.worked_example import tell

            tell(out)
        else:
            from regard.cli.demo import demo
            from regard.cli.error_messages import reported

            with reported():
                demo(out, steps=steps)
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {out}: {error.strerror}", param_hint="--out") from error


@app.command("tasks")
def _tasks() -> None:
    """List the tasks with their data, figures and presets."""
    from regard.cli.run_commands import list_tasks

    list_tasks()


@app.command("train")
def _train(
    task: Annotated[
        str, typer.Argument(help="What to train; `regard tasks` lists them. With --resume, a run.", metavar="TASK|RUN")
    ],
    preset: Annotated[str, typer.Option(help="A named configuration.", metavar="NAME")] = "small",
    data: Annotated[
        list[Path] | None, typer.Option(help="Files or a folder; without any, the built-in world.", metavar="PATH")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change one setting; may be repeated. `--set help` lists them all.", metavar="KEY=VALUE"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; a new one in runs/ unless given.", metavar="DIR")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    accept_changed_data: Annotated[
        bool, typer.Option("--accept-changed-data", help="Resume although the data files have changed.")
    ] = False,
) -> None:
    """Train a model for a task, and write everything into a run directory."""
    from regard.cli.run_commands import train

    train(
        task,
        preset=preset,
        data=data or [],
        settings=settings or [],
        out=out,
        resume=resume,
        accept_changed_data=accept_changed_data,
    )


@app.command("evaluate")
def _evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Other data than the run's own test part.", metavar="PATH")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a run: its answers, its attention, and the effect of removing attention."""
    from regard.cli.run_commands import evaluate

    evaluate(run, data=data or [], as_json=as_json)


@app.command("predict")
def _predict(
    run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts or files, as the task takes them; without any, lines of standard input: text or JSON.",
            metavar="INPUT",
        ),
    ] = None,
    beam: Annotated[
        int | None,
        typer.Option(help="Hypotheses kept; the run's own number unless given.", min=1, max=256, metavar="N"),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Of the matrix products; int8 is for the CPU.", metavar="float32|bfloat16|int8"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with the alignment.")] = False,
    look: Annotated[Path | None, typer.Option(help="Write a page that shows the attention.", metavar="PAGE")] = None,
    longest: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a text, at most: 1000 unless given. A longer one is reported.", min=1, metavar="N"
        ),
    ] = None,
) -> None:
    """Print the answers of a trained model. The exit status is 1 if some texts could not be answered."""
    from regard.cli.predict_command import predict

    predict(
        run,
        inputs=inputs or [],
        as_json=as_json,
        look=look,
        loading={"precision": precision},
        options={"beam": beam, "longest": longest},
    )


@app.command("look")
def _look(
    what: Annotated[Path, typer.Argument(help="A trace file, or a run directory.", metavar="TRACE|RUN")],
    out: Annotated[Path, typer.Option(help="The page to write.", metavar="PAGE")] = Path("look.html"),
    language: Annotated[str, typer.Option(help="Of the page.", metavar="en|zh")] = "en",
) -> None:
    """Write a page of a model's attention, as one file."""
    from regard.cli.page_commands import look

    look(what, out, language)


@app.command("studio")
def _studio(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Run directories and trace files.", metavar="RUN|TRACE")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at: this machine alone unless changed.", metavar="ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="0 takes any that is free.", min=0, max=65535, metavar="PORT")
    ] = 7788,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a web page of attention: a playground, translations, traces."""
    from regard.cli.page_commands import studio

    studio(paths or [], host=host, port=port, open_page=open_page)
