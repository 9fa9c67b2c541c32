"""Functions that the `regard bench` commands share: checks of options, a description of the machine, progress reports,
tables."""

import contextlib
import datetime
import importlib.metadata
import logging
import os
import platform
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from regard import __version__
from regard.bench.marked_pages import try_writing

# Libraries whose versions are reported, if they are installed.
PACKAGES = ("triton", "entmax", "xformers", "keras", "x-transformers")


def chosen_device(given: str | None, known: Collection[str] = ("cpu", "cuda")) -> str:
    """Return the device to measure on: the given one; by default CUDA if it is available, else the CPU."""
    device = given or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in known or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"must be cpu, or cuda where there is one; got {device}", param_hint="--device")
    return device


def check_page(out: Path | None, page: str) -> None:
    """Raise an error if a page cannot be written to a folder. Called before the measurements, since they take
    minutes."""
    try:
        if out is not None:
            try_writing(out / page)
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {out}: {error.strerror}", param_hint="--out") from error


def duration(seconds: float) -> str:
    """Return a duration with three digits and a unit.

    >>> duration(0.0123), duration(4.2e-6), duration(0.99996)
    ('12.3 ms', '4.2 µs', '1 s')
    """
    unit, scale = ("s", 1.0) if seconds >= 0.9995 else ("ms", 1e3) if seconds >= 0.9995e-3 else ("µs", 1e6)
    return f"{seconds * scale:.3g} {unit}"


def size(count: int | None) -> str:
    """Return a number of bytes as text in MiB or GiB, "–" for None.

    >>> size(3 * 2**20), size(5 * 2**29), size(None)
    ('3 MiB', '2.5 GiB', '–')
    """
    if count is None:
        return "–"
    return f"{count / 2**30:.3g} GiB" if count >= 999.5 * 2**20 else f"{count / 2**20:.3g} MiB"


def header(record: dict[str, Any]) -> str:
    """Return date, machine and versions as text."""
    machine, versions = record["machine"], record["versions"]
    gpu = f"{machine['gpu']}; " if machine["gpu"] else ""
    tools = ", ".join(f"{name} {version}" for name, version in versions.items())
    quick = "; quick: sizes too small to mean anything" if record["quick"] else ""
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    return f"{record['date']}; {gpu}{cpu}; {tools}{quick}"


def machine(device: str, packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Return date, processor and versions."""
    versions = {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "machine": {
            "cpu": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        },
        "versions": versions,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if named:
            return named[1]
    return platform.processor() or platform.machine()


def say(what: str) -> None:
    """Report progress on standard error: one changing line on a terminal, else line by line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)
    elif what:
        print(what, file=sys.stderr, flush=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, also those in regard's log. Torch's log still appears, because it reports failed compilations,
    which explain long times.
    """
    log = logging.getLogger("regard")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, left: Collection[str]
) -> None:
    """Print a table; columns are aligned to the right unless they are in `left`."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return a table in Markdown, whose first `left` columns are text.

    >>> table_lines(["layer", "time"], [["GRU", "3 ms"]])
    ['| layer | time |', '|---|--:|', '| GRU | 3 ms |']
    """
    rule = "|---" * left + "|--:" * (len(columns) - left) + "|"
    return [f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]
