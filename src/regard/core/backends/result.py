"""What a backend gives back."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from regard.core.requests import Top

# Query, key, value, score and mask of a call → its output, or None for data that the kernel does not take.
Direct = Callable[[Tensor, Tensor, Tensor, Any, Any], Tensor | None]


class Result(NamedTuple):
    """Output and, where they apply, the weights asked, the log-probability and index of hard choices."""

    output: Tensor
    weights: Tensor | Top | None = None
    log_prob: Tensor | None = None
    chosen: Tensor | None = None
    lse: Tensor | None = None  # log-sum-exp of each row of scores, (…, h, q), where the backend has it
