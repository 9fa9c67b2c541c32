"""The metrics of a run over its steps, read incrementally from metrics.jsonl while it grows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from regard.studio.limits import LIMITS, Limits

_COUNTED = ("kind", "step", "epoch", "tokens", "seconds")
# number of bytes before the last read position that are compared, to detect that metrics.jsonl was rewritten
_SEEN = 64
_SERIES = 64  # largest number of curves of a run


@dataclass
class Curve:
    """One metric over the steps, as a bounded number of points, each the mean of equally many consecutive values.

    >>> curve = Curve(most=4)
    >>> for step in range(6):
    ...     curve.add(float(step), float(step))
    >>> curve.points(), curve.width
    ([(0.5, 0.5), (2.5, 2.5), (4.5, 4.5)], 2)
    """

    most: int
    width: int = 1  # number of lines of the metrics file that one point averages
    means: list[tuple[float, float]] = field(default_factory=list)
    # `open` has the values that will be averaged to the next point of the curve, as soon as there are `width` values.
    open: list[tuple[float, float]] = field(default_factory=list)
    last: tuple[float, float] | None = None

    def add(self, step: float, value: float) -> None:
        """Add the step and the value of one line of the metrics file."""
        self.last = (step, value)
        self.open.append(self.last)
        if len(self.open) == self.width:
            self.means.append(_mean(self.open))
            self.open.clear()
        if len(self.means) > self.most:
            pairs = zip(self.means[::2], self.means[1::2], strict=False)
            odd = self.means[-1] if len(self.means) % 2 else None
            self.means = [_mean(pair) for pair in pairs]
            # Pairs of points are merged. If the number of points is odd, the last point is put back into `open`, and is
            # completed by the next lines of metrics.jsonl.
            self.open = [] if odd is None else [odd] * self.width
            self.width *= 2

    def points(self) -> list[tuple[float, float]]:
        """Return the points as (step, value), including the incomplete last point."""
        return [*self.means, _mean(self.open)] if self.open else list(self.means)


@dataclass
class Curves:
    """The curves of one metrics.jsonl. Each request reads only the lines that were added since the previous one."""

    path: Path
    limits: Limits = LIMITS
    offset: int = 0
    seen: bytes = b""
    series: dict[tuple[str, str], Curve] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def read(self) -> dict[str, Any]:
        """Return every curve of the run, and whether metrics.jsonl has lines that were not read yet."""
        with self.lock:
            more = self._advance()
            listed = [
                {"kind": kind, "name": name, "points": curve.points(), "last": curve.last, "mean_of": curve.width}
                for (kind, name), curve in self.series.items()
            ]
        return {"series": listed, "more": more}

    def _advance(self) -> bool:
        try:
            with self.path.open("rb") as file:
                self._start_over_if_changed(file)
                file.seek(self.offset)
                data = file.read(self.limits.metrics)
                rest = bool(file.read(1))
        except OSError:  # the file does not exist yet, or was removed
            return False
        end = data.rfind(b"\n") + 1
        if not end and rest:  # a line that is longer than the limit is skipped
            end = len(data)
        for line in data[:end].splitlines():
            self._line(line)
        self.offset += end
        self.seen = (self.seen + data[:end])[-_SEEN:]
        return rest

    def _start_over_if_changed(self, file: Any) -> None:
        """Start again at the beginning of metrics.jsonl if the file was rewritten, as by a run that is resumed."""
        file.seek(self.offset - len(self.seen))
        if file.read(len(self.seen)) != self.seen:
            self.offset, self.seen = 0, b""
            self.series.clear()

    def _line(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, Mapping) or not _is_number(record.get("step")):
            return
        kind = str(record.get("kind", ""))[:40]
        for name, value in record.items():
            if name in _COUNTED or not _is_number(value):
                continue
            key = (kind, str(name)[:60])
            if key not in self.series and len(self.series) >= _SERIES:
                continue
            self.series.setdefault(key, Curve(self.limits.points)).add(float(record["step"]), float(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _mean(points: Any) -> tuple[float, float]:
    count = len(points)
    return sum(step for step, _ in points) / count, sum(value for _, value in points) / count
