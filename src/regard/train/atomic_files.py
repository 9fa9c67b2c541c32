"""Atomic file writes: content is written to a temporary file, synced to the disk, then renamed."""

import hashlib
import os
import re
import tempfile
from pathlib import Path


def force(path: Path) -> None:
    """Sync a file, or a folder's list of its files, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():  # some file systems cannot sync a folder; the error that they raise is ignored
            raise
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader, or a crash, sees either the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    # A pipe or a terminal cannot be replaced by a renamed file, so it is written directly; a folder raises an error.
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise _about(path, error) from error
    aside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.chmod(0o644)
        aside.replace(path)
    except OSError as error:
        raise _about(path, error) from error
    finally:
        aside.unlink(missing_ok=True)
    force(path.parent)


def _about(path: Path, error: OSError) -> OSError:
    """Return a copy of `error` that names `path`, the requested file, instead of the temporary file.

    An error without an errno is returned unchanged.
    """
    return OSError(error.errno, error.strerror, str(path)) if error.errno else error


def as_os_error(error: Exception, path: Path) -> Exception:
    """Return an OSError if the message of a Rust library's error contains an errno, else the error itself.

    >>> as_os_error(Exception("I/O error: No space left on device (os error 28)"), Path("a.json"))
    OSError(28, 'No space left on device')
    """
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
