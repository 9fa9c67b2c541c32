"""Ctrl-C and SIGTERM before the first training step: the process ends, and no incomplete files remain."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of many distinct words, whose preparation before the first training step takes long."""
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(1)
    lines = [" ".join(f"{draw.randrange(10**12):x}" for _ in range(12)) for _ in range(20_000)]
    for name in ("a.en", "a.de"):
        (folder / name).write_text("\n".join(lines))
    return folder


@pytest.mark.process
@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("reading", signal.SIGINT),
        ("learning", signal.SIGINT),
        ("learning", signal.SIGTERM),
        ("texts into sub-words", signal.SIGTERM),
    ],
)
def test_a_signal_before_the_training_leaves_nothing_behind(folder, stage, number):
    data = ("--data", "a.en", "--data", "a.de", "--set", "vocabulary=20000")
    command = [sys.executable, "-m", "regard", "train", "translation", "--preset", "tiny", *data, "--out", "run"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with forked.Process(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(stage):
                break
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 128 + number, rest
    assert f"regard: ended by {number.name}" in rest
    assert "Traceback" not in rest
    assert sorted(path.name for path in folder.iterdir()) == ["a.de", "a.en"]


@pytest.mark.process
def test_a_signal_that_is_ignored_stays_ignored():
    """nohup ignores SIGINT for a process in the background."""
    source = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from regard.cli import main\n"
        "try: main()\nexcept SystemExit: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    done = subprocess.run([sys.executable, "-c", source, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"
