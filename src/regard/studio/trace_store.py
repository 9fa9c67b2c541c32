"""The traces a studio shows: demonstrations, files named at the start or handed in by the browser, answers, and runs.

A trace is known by a short id that the studio gave it. Nothing that comes over HTTP is ever used as a path.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal

from regard.studio.limits import LIMITS, Limits, RefusedError

if TYPE_CHECKING:  # torch is imported when a trace is first opened
    from regard.look.trace import Trace
    from regard.studio.examples import Example

Origin = Literal["example", "given", "handed in", "answer", "run"]


@dataclass
class Book:
    """One trace on the shelf, opened when it is first asked for."""

    id: str
    title: str
    origin: Origin
    open: Callable[[], "Example"]
    opened: "Example | None" = None
    lock: Lock = field(default_factory=Lock)


class Shelf:
    """Traces by id."""

    def __init__(self, traces: Sequence["Trace | Path"] = (), limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.lock = Lock()
        self.count = 0
        self.books: dict[str, Book] = {}
        for trace in traces:
            self._add(trace, "given")
        for name, title in EXAMPLES.items():
            self.books[name] = Book(name, title, "example", _example(name))

    def list(self) -> list[Book]:
        """Everything on the shelf, in order."""
        return list(self.books.values())

    def __getitem__(self, id: str) -> "Example":
        """The trace of an id, opened."""
        book = self.books.get(id) if re.fullmatch(r"[a-z0-9-]{1,40}", id) else None
        if book is None:
            raise RefusedError(f"no trace has the id {id[:40]!r}: there is {', '.join(self.books)}", 404)
        with book.lock:
            if book.opened is None:
                book.opened = book.open()
            return book.opened

    def hand_in(self, path: Path) -> Book:
        """Open a file of unknown origin, or refuse it, and put it on the shelf."""
        from regard.look.trace import Trace

        try:
            trace = Trace.load(path)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise RefusedError(f"this is not a trace that can be opened: {without_paths(error)}") from None
        self._make_room("handed in", self.limits.traces)
        return self._add(trace, "handed in")

    def answered(self, trace: "Trace") -> Book:
        """Hold the trace of an answer until newer answers need its place."""
        self._make_room("answer", self.limits.answers)
        return self._add(trace, "answer")

    def of_run(self, number: int, name: str, answer: "Callable[[], Trace]") -> None:
        """Hold what a run looks at for its own example; it is asked when the trace is first opened."""

        def open_() -> "Example":
            from regard.studio.examples import Example

            return Example(answer())

        self.books[f"run-{number}"] = Book(f"run-{number}", name, "run", open_)

    def remove(self, id: str) -> None:
        """Take a trace that was handed in off the shelf."""
        book = self.books.get(id)
        if book is None or book.origin != "handed in":
            raise RefusedError(f"only traces that were handed in can be removed, got {id[:40]!r}", 404)
        del self.books[id]

    def _make_room(self, origin: Origin, most: int) -> None:
        """Remove the oldest of an origin, so that there is room for one more."""
        with self.lock:
            held = [book.id for book in self.books.values() if book.origin == origin]
            for id in held[: max(0, len(held) - most + 1)]:
                del self.books[id]

    def _add(self, trace: "Trace | Path", origin: Origin) -> Book:
        with self.lock:
            self.count += 1
            id = f"trace-{self.count}"
            name = trace.name if isinstance(trace, Path) else trace.title
            self.books[id] = Book(id, name, origin, _opener(trace))
            return self.books[id]


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
    """What an error says, without the paths of this machine."""
    return re.sub(r"(/[\w.+-]+){2,}", "the file", str(error))[:300]
