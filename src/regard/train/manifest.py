"""Checksums of a run's files, so that a damaged file raises an error instead of causing wrong predictions."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.train.atomic_files import as_os_error, force, sha256, write_whole
from regard.train.errors import RunError

NAME = "manifest.json"
FORMAT = 1
Entry = tuple[str, int]  # the SHA-256 checksum of a file, and the size of the file in bytes


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`, which lists the SHA-256 and the size of each file of a run directory.

    In a directory without a manifest no file is checked. While a file is being replaced, the manifest lists its old and
    its new version, so that the files agree with the manifest even if the process is killed at any moment.
    """

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / NAME

    def entries(self) -> dict[str, list[Entry]] | None:
        """Return the listed versions of each file, or None if there is no manifest, as in runs of older releases."""
        try:
            stored: Any = json.loads(self.path.read_bytes())
            if stored["format"] != FORMAT:
                raise RunError(f"{self.path} has format {stored['format']!r}, expected {FORMAT}")
            return {
                str(name): [(str(version["sha256"]), int(version["bytes"])) for version in versions]
                for name, versions in stored["files"].items()
            }
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{self.path} is damaged: {_one_line(error)}") from error

    def check(self, name: str) -> None:
        """Raise `RunError` if a file is missing, is not listed, or differs from every version in the manifest.

        A file that neither exists nor is listed is accepted. Before a file is rejected, file and manifest are read a
        second time, because another process may have replaced the file between the two reads.
        """
        fault = self._fault(name)
        if fault and (fault := self._fault(name)):
            raise RunError(f"{self.folder / name} {fault}")

    def _fault(self, name: str) -> str | None:
        entries, file = self.entries(), self.folder / name
        if entries is None:
            return None
        if name not in entries:
            return f"is not a file of this run: {NAME} does not list it" if file.exists() else None
        if not file.is_file():
            return "is missing"
        size = file.stat().st_size
        if all(size != expected for _, expected in entries[name]):
            return f"is damaged or was edited: it has {size} bytes, {NAME} says {entries[name][-1][1]}"
        if (sha256(file), size) not in entries[name]:
            return f"is damaged or was edited: its SHA-256 is not the one in {NAME}"
        return None

    def adopt(self, names: Iterable[str]) -> None:
        """Write a manifest of the named files as they are now, if the directory has no manifest yet."""
        if self.entries() is None:
            self._write({name: [_entry(self.folder / name)] for name in names})

    def write(self, name: str, content: str) -> None:
        """Write a file of the run atomically, and its checksum to the manifest."""
        data = content.encode()
        with self._replacing({name: (hashlib.sha256(data).hexdigest(), len(data))}):
            write_whole(self.folder / name, data)

    def keep(self, save: Callable[[Path], None]) -> None:
        """Call `save` with a temporary folder, move the files written there to the run, and list their checksums."""
        draft = Path(tempfile.mkdtemp(prefix=".draft-", suffix=".tmp", dir=self.folder))
        try:
            save(draft)
            files = sorted(draft.iterdir())
            for path in files:
                force(path)
            with self._replacing({path.name: _entry(path) for path in files}):
                for path in files:
                    path.replace(self.folder / path.name)
                force(self.folder)
        except OSError:
            raise
        except Exception as error:  # the tokenizers library raises a plain Exception when the disk is full
            raise as_os_error(error, self.folder) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the temporary folders in the run directory that were left by killed processes."""
        for path in self.folder.glob(".draft-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _replacing(self, new: dict[str, Entry]) -> Generator[None, None, None]:
        """A context in which the manifest lists the old and the new versions of the files in `new`.

        If the `with` block succeeds, the manifest afterwards lists only the new version of each of these files.
        """
        known = self.entries() or {}
        both = {name: [*(old for old in known.get(name, []) if old != entry), entry] for name, entry in new.items()}
        self._write({**known, **both})
        yield
        self._write({**(self.entries() or {}), **{name: [entry] for name, entry in new.items()}})

    def _write(self, entries: dict[str, list[Entry]]) -> None:
        files = {
            name: [{"sha256": digest, "bytes": size} for digest, size in versions] for name, versions in entries.items()
        }
        write_whole(self.path, json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n")


def _entry(path: Path) -> Entry:
    return sha256(path), os.stat(path).st_size


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
