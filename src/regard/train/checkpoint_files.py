"""Checkpoints on disk: written atomically, and loaded only if their checksums match."""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.train.atomic_files import force, sha256
from regard.train.checkpoint_pieces import JoinedPieces, Part, my_rows, piece_name, pieces_of
from regard.train.distributed import Workers
from regard.train.errors import RunError
from regard.train.weight_files import read_tensors, write_tensors

FORMAT = 1
STATE = "state.json"
KINDS = ("model", "optimizer")
# The files of a checkpoint that a single worker wrote, besides manifest.json.
FILES = (*(f"{kind}.safetensors" for kind in KINDS), STATE)


class CheckpointError(RunError):
    """Raised when a checkpoint is damaged, missing or cannot be written; the message names the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: every file has the checksum that the checkpoint's manifest lists."""

    path: Path
    step: int

    def model(self) -> tuple[Mapping[str, Tensor], dict[str, str]]:
        """Return the trained weights, and for each further name of a shared tensor the name it is stored under."""
        return self._tensors("model")

    def optimizer(self) -> Mapping[str, Tensor]:
        """Return the tensors of the optimiser, the moving average (`average/…`) and the random generators."""
        return self._tensors("optimizer")[0]

    def average(self) -> Mapping[str, Tensor]:
        """Return the moving average of the weights, by name; empty if there is none."""
        return Part(self.optimizer(), "average")

    def _tensors(self, kind: str) -> tuple[Mapping[str, Tensor], dict[str, str]]:
        if paths := pieces_of(self.path, kind):
            joined = JoinedPieces(paths)
            return joined, joined.shared
        return read_tensors(self.path / f"{kind}.safetensors")

    def state(self) -> dict[str, Any]:
        """Return the training state: counts, position in the data, settings."""
        return json.loads((self.path / "state.json").read_text())


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run: `step-000123/` with weights, optimiser, state, and a manifest written last.

    A checkpoint is written to a temporary folder, synced to the disk, and renamed. A process that is killed
    at any moment leaves the earlier checkpoints intact.
    """

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint folder, oldest first; these checkpoints are not verified."""
        matches = (re.fullmatch(r"step-(\d{6,})", path.name) for path in self.folder.glob("step-*"))
        return sorted(int(match[1]) for match in matches if match)

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint, unless a valid one of the same step exists already."""
        target = self.path(step)
        if self._is_there(step):
            return target
        aside = self.folder / f".step-{step:06d}.{os.getpid()}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            with _writing(target):
                aside.mkdir(parents=True)
                write_tensors(aside / FILES[0], model, aliases=aliases)
                write_tensors(aside / FILES[1], optimizer)
                files = {name: _entry(aside / name) for name in FILES[:2]}
                self._finish(aside, step, state, files)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return target

    def save_pieces(
        self,
        step: int,
        workers: Workers,
        *,
        model: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        optimizer: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        state: Callable[[], Mapping[str, Any]],
    ) -> Path:
        """Write a checkpoint in pieces: each worker writes its rows of every tensor, and the tensors in `own` whole.

        Only the checksums of the files are gathered. The first worker calls `state` and writes the manifest when the
        files of all workers are on the disk.
        """
        target = self.path(step)
        aside = self.folder / f".step-{step:06d}.pieces.tmp"
        there = False
        with workers.agreed(), _writing(target):
            if workers.is_first and not (there := self._is_there(step)):
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        if workers.from_first(there):
            return target
        rank, size = workers.rank, workers.size
        rows = {"model": my_rows(model, rank, size), "optimizer": {**my_rows(optimizer, rank, size), **own}}
        mine: dict[str, dict[str, Any]] = {}
        with workers.agreed(), _writing(target):
            for kind, tensors in rows.items():
                name = piece_name(kind, rank, size)
                write_tensors(aside / name, tensors, aliases=aliases if kind == "model" else None)
                mine[name] = _entry(aside / name)
        files = {name: entry for part in workers.gather(mine) for name, entry in part.items()}
        with workers.agreed(), _writing(target):
            if workers.is_first:
                self._finish(aside, step, state(), files, pieces=workers.size)
        return target

    def _is_there(self, step: int) -> bool:
        """Return whether a valid checkpoint of a step exists; a damaged checkpoint of that step is removed."""
        if not self.path(step).exists():
            return False
        try:
            self.at(step)
        except CheckpointError:
            self._remove(self.path(step))
            return False
        return True

    def _finish(
        self, aside: Path, step: int, state: Mapping[str, Any], files: dict[str, dict[str, Any]], **more: int
    ) -> None:
        """Write the state and the manifest, and rename the temporary folder to its final name."""
        _write_json(aside / STATE, state)
        files = {**files, STATE: _entry(aside / STATE)}
        _write_json(aside / "manifest.json", {"format": FORMAT, "step": step, **more, "files": files})
        force(aside)
        aside.rename(self.path(step))
        force(self.folder)

    def at(self, step: int) -> Checkpoint:
        """Return the verified checkpoint of a step, or raise a `CheckpointError` that names the damage."""
        path = self.path(step)
        if not path.is_dir():
            raise CheckpointError(f"{path} is not there")
        try:
            manifest = json.loads((path / "manifest.json").read_bytes())
            wanted = _file_names(manifest.get("pieces"))
            files = {name: (manifest["files"][name]["sha256"], manifest["files"][name]["bytes"]) for name in wanted}
            if manifest["format"] != FORMAT or manifest["step"] != step:
                raise CheckpointError(f"{path} has a manifest of another format or step")
        except FileNotFoundError:
            raise CheckpointError(f"{path} has no manifest: it was never finished") from None
        except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
            raise CheckpointError(f"{path} has a damaged manifest ({error})") from error
        for name, (digest, size) in files.items():
            file = path / name
            if not file.is_file() or file.stat().st_size != size or sha256(file) != digest:
                raise CheckpointError(f"{file} is not what the manifest says: the file is damaged or missing")
        return Checkpoint(path, step)

    def newest(
        self, say: Callable[[str], None], usable: Callable[[Checkpoint], None] = lambda _: None
    ) -> Checkpoint | None:
        """Return the newest valid checkpoint, or None; `say` receives a message for each one that is skipped.

        `usable` raises `CheckpointError` for a valid checkpoint from which training cannot resume.
        """
        for step in reversed(self.steps()):
            try:
                checkpoint = self.at(step)
                usable(checkpoint)
                return checkpoint
            except CheckpointError as error:
                say(f"checkpoint of step {step} passed over: {error}")
        return None

    def prune(self, keep: Collection[int]) -> None:
        """Remove all checkpoints except those of the steps in `keep`."""
        for step in self.steps():
            if step not in keep:
                self._remove(self.path(step))

    def sweep(self) -> None:
        """Remove the temporary folders of processes that were killed while writing or removing."""
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        # The folder is renamed first, because an interrupted removal must not leave a folder that looks like a
        # checkpoint.
        aside = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _file_names(pieces: int | None) -> tuple[str, ...]:
    """Return the file names of a checkpoint that `pieces` workers wrote; None: one worker wrote it whole."""
    if pieces is None:
        return FILES
    return (*(piece_name(kind, rank, pieces) for kind in KINDS for rank in range(pieces)), STATE)


def _entry(path: Path) -> dict[str, Any]:
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


@contextmanager
def _writing(target: Path) -> Generator[None, None, None]:
    """A context that converts an `OSError` to a `CheckpointError` with the path of the checkpoint."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"could not write {target}: {why}; older checkpoints are untouched") from error


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
