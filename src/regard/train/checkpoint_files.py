"""Checkpoints on disk: written atomically, and loaded only if their checksums match."""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.train.atomic_files import force, sha256
from regard.train.errors import RunError
from regard.train.weight_files import read_tensors, write_tensors

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


class CheckpointError(RunError):
    """A checkpoint is damaged or missing; the message says what is wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: every file has the checksum of the manifest."""

    path: Path
    step: int

    def model(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The trained weights, and the additional names of shared tensors."""
        return read_tensors(self.path / "model.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        """Tensors of the optimiser, the moving average and the random generators."""
        return read_tensors(self.path / "optimizer.safetensors")[0]

    def average(self) -> dict[str, Tensor]:
        """The moving average of the weights, by name; empty if there is none."""
        return {
            name.partition("/")[2]: tensor for name, tensor in self.optimizer().items() if name.startswith("average/")
        }

    def state(self) -> dict[str, Any]:
        """The training state: counts, position in the data, settings."""
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
        """The steps that have a folder, oldest first; the folders are not verified."""
        found = (re.fullmatch(r"step-(\d{6,})", path.name) for path in self.folder.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> Path:
        """Writes a checkpoint, unless a valid one of the same step exists already."""
        target = self.path(step)
        if target.exists():
            try:
                return self.at(step).path
            except CheckpointError:
                self._remove(target)
        aside = self.folder / f".step-{step:06d}.{os.getpid()}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            write_tensors(aside / "model.safetensors", model, aliases=aliases)
            write_tensors(aside / "optimizer.safetensors", optimizer)
            _write_json(aside / "state.json", state)
            files = {name: {"sha256": sha256(aside / name), "bytes": (aside / name).stat().st_size} for name in FILES}
            _write_json(aside / "manifest.json", {"format": FORMAT, "step": step, "files": files})
            force(aside)
            aside.rename(target)
        except OSError as error:
            why = error.strerror or error
            raise CheckpointError(f"could not write {target}: {why}; older checkpoints are untouched") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        force(self.folder)
        return target

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of a step, verified; `CheckpointError` says what is wrong with it."""
        path = self.path(step)
        if not path.is_dir():
            raise CheckpointError(f"{path} is not there")
        try:
            manifest = json.loads((path / "manifest.json").read_bytes())
            files = {name: (manifest["files"][name]["sha256"], manifest["files"][name]["bytes"]) for name in FILES}
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
        """The newest valid checkpoint; `say` is called with a message for each invalid one that is skipped.

        `usable` raises `CheckpointError` for a valid checkpoint from which training cannot resume.
        """
        for step in reversed(self.steps()):
            try:
                found = self.at(step)
                usable(found)
                return found
            except CheckpointError as error:
                say(f"checkpoint of step {step} passed over: {error}")
        return None

    def prune(self, keep: Collection[int]) -> None:
        """Removes all checkpoints but those of the steps to keep."""
        for step in self.steps():
            if step not in keep:
                self._remove(self.path(step))

    def sweep(self) -> None:
        """Removes the temporary folders of processes that were killed while writing or removing."""
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        # Renamed first: an interrupted removal must not leave a folder that looks like a checkpoint.
        aside = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
