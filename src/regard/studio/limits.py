"""Limits of one request to the studio: a web page must not be able to exhaust the machine."""

from dataclasses import dataclass


class RefusedError(Exception):
    """A request that exceeds a limit or names something unknown; the message names what was expected."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Bounds of one request.

    >>> Limits().body
    262144
    """

    body: int = 256 * 1024  # bytes of a JSON body
    trace: int = 256 * 1024 * 1024  # bytes of an uploaded trace file
    question: int = 24 * 1024 * 1024  # bytes of a JSON body with inputs for a run, files in base64
    upload: int = 16 * 1024 * 1024  # bytes of an image or a sound
    passage: int = 100_000  # characters of a text, or of a scene, as input of a run
    receive_seconds: float = 20.0  # time for a body to arrive
    answer_seconds: float = 30.0  # time until an answer begins
    traces: int = 16  # number of uploaded traces stored at once
    answers: int = 16  # number of traces of answers stored at once
    vectors: int = 32  # number of queries, or keys, in the playground
    size: int = 32  # size of a vector in the playground
    text: int = 2_000  # characters of a sentence
    tokens: int = 256  # number of words of a sentence, source or forced
    beams: int = 16
    pixels: int = 16_777_216  # pixels of a picture in a trace
    tile: int = 512  # rows, or columns, of one tile
    metrics: int = 16 * 1024 * 1024  # bytes of metrics.jsonl that are read in one request
    points: int = 1_000  # number of points of a curve
    card: int = 256 * 1024  # bytes of a model card that are displayed


LIMITS = Limits()


def within(value: int, low: int, high: int, name: str) -> int:
    """Return the number, or a `RefusedError` that names it.

    >>> within(3, 0, 7, "head")
    3
    """
    if not low <= value <= high:
        raise RefusedError(f"{name} must be from {low} to {high}, got {value}")
    return value
