"""Installs the task that the documentation page docs/add-a-task.md describes, from the code blocks of the page."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import regard.tasks
from regard.tasks.catalog import TASKS

PAGE = Path(__file__).parents[2] / "docs/add-a-task.md"
_BLOCK = re.compile(r"^```py\n# src/regard/tasks/(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """Return the code of the page by the file paths, relative to regard/tasks, that its code blocks begin with."""
    found = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


@contextmanager
def added(folder: Path) -> Iterator[dict[str, str]]:
    """Install the task of the page as a folder of regard.tasks and an entry of the catalog until the context exits."""
    written = files()
    entry = written.pop("catalog.py")
    for name, text in written.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    [package] = {Path(name).parent.name for name in written}
    (folder / package / "__init__.py").touch()
    before, path = dict(TASKS), list(regard.tasks.__path__)
    regard.tasks.__path__ = [*path, str(folder)]
    try:
        exec(compile(entry, PAGE, "exec"), {"TASKS": TASKS})
        yield written
    finally:
        regard.tasks.__path__ = path
        for name in set(TASKS) - set(before):
            del TASKS[name]
        for name in [name for name in sys.modules if name.startswith(f"regard.tasks.{package}")]:
            del sys.modules[name]
