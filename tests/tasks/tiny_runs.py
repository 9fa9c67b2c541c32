"""Runs of a few training steps for the tests, created by calling the command line in the test's process."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jaxtyping
from click.testing import Result
from typer.testing import CliRunner

from regard.cli import app
from regard.data.audio.sound_files import wav_bytes
from regard.data.driving.traffic_scenes import scene_json
from regard.data.worlds.digits import digits
from regard.data.worlds.scene_captions import captioned
from regard.data.worlds.traffic import record
from regard.data.worlds.utterances import utterances
from regard.tasks.catalog import TASKS
from regard.tasks.glimpse.grey_images import grey_png
from regard.tasks.image_inputs import png_of

NAMES = sorted(TASKS)
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


@dataclass(frozen=True)
class TinyRun:
    """A task's settings for a tiny run, in addition to the settings for all tasks, and an example input.

    Each part of the input is a text, or a function that writes a file into a folder and returns its path.
    """

    asked: tuple[str | Callable[[Path], Path], ...]
    settings: tuple[str, ...] = ()

    def given(self, folder: Path) -> tuple[str, ...]:
        """Return the input as arguments of the command line; its files are written into `folder`."""
        return tuple(part if isinstance(part, str) else str(part(folder)) for part in self.asked)


def _scene(folder: Path) -> Path:
    path = folder / "scene.png"
    path.write_bytes(png_of(next(captioned(5, count=1)).scene.image))
    return path


def _digit(folder: Path) -> Path:
    path = folder / "digit.png"
    path.write_bytes(grey_png(next(digits(5, count=1, layout="translated")).image))
    return path


def _utterance(folder: Path) -> Path:
    path = folder / "utterance.wav"
    path.write_bytes(wav_bytes(next(utterances(5, count=1)).samples, 8000))
    return path


def _traffic(folder: Path) -> Path:
    path = folder / "traffic.json"
    path.write_text(json.dumps(scene_json(record("tiny", 1, even=True).scenes, 0)))
    return path


TINY = {
    "driving": TinyRun((_traffic,), ("model.size=8", "hidden=8", "drives=4")),
    "glimpse": TinyRun((_digit,), ("model.size=8", "hidden=8")),
    "vqa": TinyRun((_scene, "What colour is the circle?"), ("model.size=8", "widths=[4, 4, 4]", "questions=2")),
    "captioning": TinyRun((_scene,), ("model.size=8", "widths=[4]", "patch=4")),
    "speech": TinyRun((_utterance,), ("model.size=8", "encoder_size=8", "data.words=[1, 2]")),
    "translation": TinyRun(("Tom chases Jerry",), ("model.size=8", "lengths=[3, 8]")),
    "sentiment": TinyRun(("The film is not bad.",), ("model.size=8", "features=4")),
    "reading": TinyRun(("Emma took the ball. Emma went to the kitchen.", "Where is the ball?"), ("model.size=8",)),
}


def tiny(name: str) -> TinyRun:
    """Return the `TinyRun` of the task with this name."""
    assert name in TINY, f"tests/tasks/tiny_runs.py has no tiny run of {name}: add one to TINY"
    return TINY[name]


def tiny_settings(name: str) -> tuple[str, ...]:
    """Return options of `regard train` for a run that takes seconds: six steps, and a checkpoint every two steps."""
    every = ("steps=6", "validate_every=2", "warmup=1", "longer=2", "data.train=80", "data.valid=6", "data.test=6")
    return ("--preset", "tiny", *(word for one in (*every, *tiny(name).settings) for word in ("--set", one)))


def regard(*arguments: str | Path) -> Result:
    """Run the command line `regard` without jaxtyping's checks of shapes and types, as it is installed."""
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
    """Write two aligned text files of 60 lines; return their paths."""
    lines = [" ".join(WORDS[(n * 7 + k * (n % 5 + 1)) % len(WORDS)] for k in range(3 + n % 6)) for n in range(60)]
    lines = [f"{line} {n}" for n, line in enumerate(lines)]
    paths = folder / f"{name}.en", folder / f"{name}.de"
    paths[0].write_text("\n".join(lines) + "\n", encoding="utf-8")
    paths[1].write_text("\n".join(line[::-1] for line in lines) + "\n", encoding="utf-8")
    return paths


def one_line(done: Result, *words: str) -> None:
    """Assert that a command failed with a single error line that contains these words."""
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
    """Return the contents of every file of a run except the lock file."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }
