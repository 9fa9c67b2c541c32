"""The record that a backend returns, and the types of functions that run a call without its checks."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from regard.core.requests import Request, Top

# A function of query, key, value, score, mask and bias that returns the output, or None if its kernel cannot compute
# these values (such as NaN).
Direct = Callable[[Tensor, Tensor, Tensor, Any, Any, Any], Tensor | None]

# A function of query, key, value, score, mask, bias and request that returns the output, the requested weights or their
# summary, and the log-probability of hard choices; or None if its kernel cannot compute these values (such as NaN).
WithRequest = Callable[
    [Tensor, Tensor, Tensor, Any, Any, Any, Request | None], tuple[Tensor, Tensor | Top | None, Tensor | None] | None
]

# A function of query, key and value that returns the output and the log-sum-exp (b, h, q), or (None, None) if no kernel
# returns both.
Both = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | tuple[None, None]]


class Result(NamedTuple):
    """The output, the requested weights, and for hard attention the log-probability and index of the chosen keys."""

    output: Tensor
    weights: Tensor | Top | None = None
    log_prob: Tensor | None = None
    chosen: Tensor | None = None
    lse: Tensor | None = None  # log-sum-exp of each row of scores, (…, h, q), if the backend computes it
