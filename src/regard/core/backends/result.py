"""The record that a backend returns."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from regard.core.requests import Request, Top

# Takes query, key, value, score, mask and bias of a call; returns its output, or None if the kernel refuses the data.
Direct = Callable[[Tensor, Tensor, Tensor, Any, Any, Any], Tensor | None]

# Takes query, key, value, request, mask and bias of a call; returns its output and what is requested, or None if the
# kernel refuses the call.
Asked = Callable[[Tensor, Tensor, Tensor, Request, Any, Any], tuple[Tensor, Tensor | Top] | None]

# Takes query, key and value; returns output and log-sum-exp (b, h, q), or None for both.
Both = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | tuple[None, None]]


class Result(NamedTuple):
    """The output and, where they apply, requested weights, and the log-probability and index of hard choices."""

    output: Tensor
    weights: Tensor | Top | None = None
    log_prob: Tensor | None = None
    chosen: Tensor | None = None
    lse: Tensor | None = None  # log-sum-exp of each row of scores, (…, h, q), if the backend computes it
