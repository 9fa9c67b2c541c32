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

    body: int = 256 * 1024  # largest size of a JSON body in bytes
    trace: int = 256 * 1024 * 1024  # largest size of an uploaded trace file in bytes
    question: int = 24 * 1024 * 1024  # largest JSON body with the inputs of a prediction in bytes; files are in base64
    upload: int = 16 * 1024 * 1024  # largest size of an image or a sound in bytes
    passage: int = 100_000  # largest number of characters of a text or a scene as input of a prediction
    receive_seconds: float = 20.0  # number of seconds within which a request body must arrive
    answer_seconds: float = 30.0  # number of seconds within which a response must be computed and sent
    traces: int = 16  # largest number of uploaded traces that the studio stores
    answers: int = 16  # largest number of traces of predictions that the studio stores
    vectors: int = 32  # largest number of queries, and of keys, in the playground
    size: int = 32  # largest size of a vector in the playground
    text: int = 2_000  # largest number of characters of a sentence to be translated or converted to vectors
    tokens: int = 256  # largest number of tokens of a source sentence, and of a translation
    beams: int = 16  # largest number of hypotheses of a beam search
    pixels: int = 16_777_216  # largest number of pixels of a picture in a trace
    tile: int = 512  # largest number of rows, and of columns, of one tile of an attention map
    metrics: int = 16 * 1024 * 1024  # largest number of bytes of metrics.jsonl that one request reads
    points: int = 1_000  # largest number of points of a metric's curve
    card: int = 256 * 1024  # largest number of bytes of a model card that are displayed


LIMITS = Limits()


def within(value: int, low: int, high: int, name: str) -> int:
    """Return `value` if it is from `low` to `high`, otherwise raise a `RefusedError` that contains `name`.

    >>> within(3, 0, 7, "head")
    3
    """
    if not low <= value <= high:
        raise RefusedError(f"{name} must be from {low} to {high}, got {value}")
    return value
