"""The log of a run's metrics: a file to which each record is appended as one line of JSON."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Metrics:
    """The file `metrics.jsonl` of a run. An incomplete last line, left by a killed process, is ignored.

    >>> import tempfile
    >>> metrics = Metrics(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    >>> metrics.add({"step": 1, "loss": 2.5})
    >>> metrics.read()
    [{'step': 1, 'loss': 2.5}]
    """

    path: Path

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record as a line. NaN and infinity are written as null, because JSON cannot represent them."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(finite, ensure_ascii=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return the records of all complete lines, oldest first."""
        return [json.loads(line) for line in self._whole().splitlines()]

    def force(self) -> int:
        """Sync all lines to the disk, and return the size of the file in bytes."""
        if not self.path.exists():
            return 0
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut(self, size: int) -> None:
        """Truncate the file to `size` bytes or less, so that it ends with a complete line."""
        if self.path.exists():
            whole = self._whole()[:size]
            os.truncate(self.path, whole.rfind(b"\n") + 1)

    def _whole(self) -> bytes:
        data = self.path.read_bytes() if self.path.exists() else b""
        return data[: data.rfind(b"\n") + 1]
