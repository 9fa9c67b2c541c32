"""Limits of one request to the studio, so that no request can exhaust the memory or the time of the machine."""

from dataclasses import dataclass


class RefusedError(Exception):
    """A request exceeds a limit or names something unknown; the message states what was expected."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """The limits of one request; each field states its unit.

    >>> Limits().body
    262144
    """

    body: int = 256 * 1024  # bytes of a JSON body
    trace: int = 256 * 1024 * 1024  # bytes of an uploaded trace file
    question: int = 24 * 1024 * 1024  # bytes of a JSON body with the inputs of a prediction, files in base64
    upload: int = 16 * 1024 * 1024  # bytes of an image or a sound
    passage: int = 100_000  # characters of a text, or of a scene, as input of a prediction
    receive_seconds: float = 20.0  # seconds in which a request body must arrive
    answer_seconds: float = 30.0  # seconds in which the response must be computed and sent
    traces: int = 16  # number of uploaded traces that the studio stores
    answers: int = 16  # number of traces of predictions that the studio stores
    vectors: int = 32  # number of queries, and of keys, in the playground
    size: int = 32  # numbers in a vector of the playground
    text: int = 2_000  # characters of a sentence
    tokens: int = 256  # tokens of a source sentence, and of a translation
    beams: int = 16  # hypotheses of a beam search
    pixels: int = 16_777_216  # pixels of a picture in a trace
    tile: int = 512  # rows, and columns, of one tile of an attention map
    metrics: int = 16 * 1024 * 1024  # bytes of metrics.jsonl that are read in one request
    points: int = 1_000  # points of a curve of a metric
    card: int = 256 * 1024  # bytes of a model card that are displayed


LIMITS = Limits()


def within(value: int, low: int, high: int, name: str) -> int:
    """Return `value` if it is from `low` to `high`, otherwise raise a `RefusedError` that contains `name`.

    >>> within(3, 0, 7, "head")
    3
    """
    if not low <= value <= high:
        raise RefusedError(f"{name} must be from {low} to {high}, got {value}")
    return value
