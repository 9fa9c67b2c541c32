"""The result of attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from jaxtyping import Float
from torch import Tensor

from regard.core.requests import Top

_new, _set = object.__new__, object.__setattr__
_NO_TUPLE = "Attended is no tuple: read its output, weights and log_prob by name, as in attended.output"


@dataclass(frozen=True, eq=False)
class Attended:
    """The result of attention: `output` (…, heads, queries, value size), and the requested `weights` or their summary.

    `log_prob` (…, heads, queries) is the log-probability of the key that hard attention chose for each query.
    """

    output: Float[Tensor, "... q e"]
    weights: Tensor | Top | None = None
    log_prob: Float[Tensor, "... q"] | None = None

    def __iter__(self) -> Iterator[object]:
        raise TypeError(_NO_TUPLE)

    def __getitem__(self, place: object) -> NoReturn:
        raise TypeError(_NO_TUPLE)


def with_output(output: Tensor) -> Attended:
    """Return `Attended(output)`, bypassing the frozen dataclass's constructor, which takes three times as long."""
    attended = _new(Attended)
    _set(attended, "output", output)
    return attended
