"""The record that a backend returns."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from regard.core.requests import Request, Top

# Takes query, key, value, score, mask and bias of a call; returns its output, or None if the kernel refuses the data.
Direct = Callable[[Tensor, Tensor, Tensor, Any, Any, Any], Tensor | None]

# Takes the same and the request; returns the output, what is requested, and the log-probability of hard choices.
Asked = Callable[
    [Tensor, Tensor, Tensor, Any, Any, Any, Request | None], tuple[Tensor, Tensor | Top | None, Tensor | None] | None
]

# Takes query, key and value; returns output and log-sum-exp (b, h, q), or None for both.
Both = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | tuple[None, None]]


class Result(NamedTuple):
    """The output and, where they apply, requested weights, and the log-probability and index of hard choices."""

    output: Tensor
    weights: Tensor | Top | None = None
    log_prob: Tensor | None = None
    chosen: Tensor | None = None
    lse: Tensor | None = None  # log-sum-exp of each row of scores, (…, h, q), if the backend computes it
