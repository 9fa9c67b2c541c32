"""Checkpoints that exist whole or not at all, and are believed only when their checksums hold."""

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
    """A checkpoint that is damaged or missing, with what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was found whole: every file has the checksum that the manifest says."""

    path: Path
    step: int

    def model(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The weights as they were trained, and the further names of shared ones."""
        return read_tensors(self.path / "model.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        """What the optimiser, the moving average and the random numbers need."""
        return read_tensors(self.path / "optimizer.safetensors")[0]

    def average(self) -> dict[str, Tensor]:
        """The moving average of the weights, by name; empty where none is kept."""
        return {
            name.partition("/")[2]: tensor for name, tensor in self.optimizer().items() if name.startswith("average/")
        }

    def state(self) -> dict[str, Any]:
        """Where training stood."""
        return json.loads((self.path / "state.json").read_text())


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run: `step-000123/` with weights, optimiser, state, and a manifest written last.

    A checkpoint is written into a folder of another name, forced to the disk, and renamed. So a process that is killed
    at any moment leaves the checkpoints before it as they were.
    """

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """The steps that have a folder, oldest first; whether it is good is not yet known."""
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
        """Writes a checkpoint; one of that step that is already there, and good, is left as it is."""
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
        """The newest good checkpoint; `say` hears of each bad one that is passed over.

        `usable` raises `CheckpointError` for one that is whole but cannot be taken up.
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
        """Removes what killed processes left half written or half removed."""
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        # Renamed first: a removal that is cut short must not leave a folder that looks like a checkpoint.
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
