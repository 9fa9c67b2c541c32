"""The figures of a run over time: one JSON object to a line, added at the end."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Metrics:
    """`metrics.jsonl`. A last line that was cut when a process was killed is no line.

    >>> import tempfile
    >>> metrics = Metrics(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    >>> metrics.add({"step": 1, "loss": 2.5})
    >>> metrics.read()
    [{'step': 1, 'loss': 2.5}]
    """

    path: Path

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds a line. A figure that is not finite becomes null, because JSON has no word for it."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(finite, ensure_ascii=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All whole lines."""
        return [json.loads(line) for line in self._whole().splitlines()]

    def force(self) -> int:
        """Waits until all lines are on the disk, and gives the size of the file."""
        if not self.path.exists():
            return 0
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut(self, size: int) -> None:
        """Drops every line after this size, and a line that is not whole."""
        if self.path.exists():
            whole = self._whole()[:size]
            os.truncate(self.path, whole.rfind(b"\n") + 1)

    def _whole(self) -> bytes:
        data = self.path.read_bytes() if self.path.exists() else b""
        return data[: data.rfind(b"\n") + 1]
