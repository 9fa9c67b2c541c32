"""Runs of a few steps, made by the command line in this process."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import jaxtyping
from click.testing import Result
from typer.testing import CliRunner

from regard.cli import app

STEPS = ("--set", "steps=4", "--set", "validate_every=2", "--set", "log_every=1", "--set", "warmup=2")
WORLD = (
    *("--preset", "tiny", *STEPS, "--set", "data.train=60", "--set", "data.valid=6", "--set", "data.test=6"),
    *("--set", "longer=2", "--set", "lengths=[3, 8]", "--set", "model.size=8", "--set", "embedding=8"),
)
FILES = (
    *("--preset", "tiny", *STEPS, "--set", "model=transformer", "--set", "model.size=8", "--set", "heads=2"),
    *("--set", "vocabulary=300", "--set", "data.valid=6", "--set", "data.test=6"),
)
WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "boxed"),
    *("in", "bad", "weather"),
)


def regard(*arguments: str | Path) -> Result:
    """The command as its users have it: without the checks of shapes and types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def train(out: Path, settings: Sequence[str], *more: str | Path) -> Result:
    return regard("train", "translation", *settings, "--out", out, *more)


def data_of(files: Sequence[Path]) -> tuple[str, ...]:
    return tuple(word for path in files for word in ("--data", str(path)))


def write_files(folder: Path, name: str = "text") -> tuple[Path, Path]:
    """Two aligned files of 60 lines."""
    lines = [" ".join(WORDS[(n * 7 + k * (n % 5 + 1)) % len(WORDS)] for k in range(3 + n % 6)) for n in range(60)]
    lines = [f"{line} {n}" for n, line in enumerate(lines)]
    paths = folder / f"{name}.en", folder / f"{name}.de"
    paths[0].write_text("\n".join(lines) + "\n", encoding="utf-8")
    paths[1].write_text("\n".join(line[::-1] for line in lines) + "\n", encoding="utf-8")
    return paths


def one_line(done: Result, *words: str) -> None:
    """That a command refused in one line, with these words in it."""
    said = done.output.strip()
    assert done.exit_code == 2, (done.exit_code, done.exception, said)
    last = said.splitlines()[-1]
    assert last.startswith("regard: "), said
    assert "Traceback" not in said
    for word in words:
        assert word in last, last


def copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run but the lock."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }
