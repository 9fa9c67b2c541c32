"""A lock on a directory: one process at a time trains in it."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from regard.train.errors import RunError


def lock_path(folder: Path) -> Path:
    """Return the path of the lock file, `.lock` in the directory."""
    return folder / ".lock"


@contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """A context that holds the lock of a directory; the operating system releases it if the process ends.

    If another process holds the lock, a `RunError` is raised.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl: the directory is not locked
        yield
        return
    path = lock_path(folder)
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another process is training in {folder}") from None
            if not _same(file.fileno(), path):
                continue  # the previous holder of the lock removed the directory, so the locked file is deleted
            yield
            return


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
