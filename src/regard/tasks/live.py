"""Runs that the studio asks while someone watches."""

from pathlib import Path

from regard.tasks.translation.live import LiveTranslator
from regard.tasks.translation.translator import Translator
from regard.train.run import Run


def open_run(path: Path) -> LiveTranslator:
    """The run in a directory, ready to be asked."""
    run = Run.open(path)
    task = run.config().get("task")
    if task != "translation":
        raise ValueError(f"{path} is a run of {task!r}, which the studio cannot ask")
    return LiveTranslator(path.resolve().name, Translator.load(run))
