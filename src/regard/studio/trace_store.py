"""The traces of a studio: examples, files from the command line or the browser, traces of predictions and runs.

The studio gives each trace a short id. No text from HTTP is ever used as a path.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal

from regard.studio.limits import LIMITS, Limits, RefusedError

if TYPE_CHECKING:  # imported for type checkers only, because torch is imported when a trace is first opened
    from regard.look.trace import Trace
    from regard.studio.examples import Example

Origin = Literal["example", "given", "handed in", "answer", "run"]


@dataclass
class StoredTrace:
    """A trace of the studio, which is loaded or computed at the first request for it."""

    id: str
    title: str
    origin: Origin
    open: Callable[[], "Example"]
    opened: "Example | None" = None
    lock: Lock = field(default_factory=Lock)


class TraceStore:
    """The traces of a studio by their ids."""

    def __init__(self, traces: Sequence["Trace | Path"] = (), limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.lock = Lock()
        self.count = 0
        self.stored: dict[str, StoredTrace] = {}
        for trace in traces:
            self._add(trace, "given")
        for name, title in EXAMPLES.items():
            self.stored[name] = StoredTrace(name, title, "example", _example(name))

    def list(self) -> list[StoredTrace]:
        """Return all traces in the order in which they were added."""
        return list(self.stored.values())

    def __getitem__(self, id: str) -> "Example":
        """Return the trace with this id; it is loaded or computed at the first request."""
        entry = self.stored.get(id) if re.fullmatch(r"[a-z0-9-]{1,40}", id) else None
        if entry is None:
            raise RefusedError(f"no trace has the id {id[:40]!r}: there is {', '.join(self.stored)}", 404)
        with entry.lock:
            if entry.opened is None:
                entry.opened = entry.open()
            return entry.opened

    def hand_in(self, path: Path) -> StoredTrace:
        """Open an uploaded file and store its trace, or raise a `RefusedError` if it is not a trace."""
        from regard.look.trace import Trace

        try:
            trace = Trace.load(path)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise RefusedError(f"this is not a trace that can be opened: {without_paths(error)}") from None
        self._make_room("handed in", self.limits.traces)
        return self._add(trace, "handed in")

    def answered(self, trace: "Trace") -> StoredTrace:
        """Store the trace of a prediction; at the limit of traces of predictions, the oldest of them is removed."""
        self._make_room("answer", self.limits.answers)
        return self._add(trace, "answer")

    def of_run(self, number: int, name: str, answer: "Callable[[], Trace]") -> None:
        """Store the trace of a run's own example; it is computed when the trace is first opened."""

        def open_() -> "Example":
            from regard.studio.examples import Example

            return Example(answer())

        self.stored[f"run-{number}"] = StoredTrace(f"run-{number}", name, "run", open_)

    def remove(self, id: str) -> None:
        """Remove an uploaded trace."""
        entry = self.stored.get(id)
        if entry is None or entry.origin != "handed in":
            raise RefusedError(f"only traces that were handed in can be removed, got {id[:40]!r}", 404)
        del self.stored[id]

    def _make_room(self, origin: Origin, most: int) -> None:
        """Remove the oldest trace with this origin if the number of such traces has reached the limit."""
        with self.lock:
            held = [entry.id for entry in self.stored.values() if entry.origin == origin]
            for id in held[: max(0, len(held) - most + 1)]:
                del self.stored[id]

    def _add(self, trace: "Trace | Path", origin: Origin) -> StoredTrace:
        with self.lock:
            self.count += 1
            id = f"trace-{self.count}"
            name = trace.name if isinstance(trace, Path) else trace.title
            self.stored[id] = StoredTrace(id, name, origin, _opener(trace))
            return self.stored[id]


EXAMPLES = {
    "image": "A caption, a map for each word",
    "sound": "Speech, the frames of each letter",
    "sentiment": "Which words decide a review",
    "reading": "A question, and the span that answers it",
    "scene": "Traffic, and the lorry that makes us brake",
}


def _example(name: str) -> Callable[[], "Example"]:
    def build() -> "Example":
        from regard.studio.examples import BUILD

        return BUILD[name]()

    return build


def _opener(trace: "Trace | Path") -> Callable[[], "Example"]:
    def load() -> "Example":
        from regard.look.trace import Trace
        from regard.studio.examples import Example

        return Example(Trace.load(trace) if isinstance(trace, Path) else trace)

    return load


def without_paths(error: Exception) -> str:
    """Return the message of an error without paths of this machine."""
    return re.sub(r"(/[\w.+-]+){2,}", "the file", str(error))[:300]
