"""The types that decoding takes and returns: step functions, the limits of a search, and hypotheses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class Produced(Protocol):
    """The result of a step function: logits (b, v) of the next token, the next state, and attention weights (b, k)."""

    @property
    def logits(self) -> Tensor: ...

    @property
    def state(self) -> Any: ...

    @property
    def weights(self) -> Tensor | None: ...


# step(state, tokens (b,)) takes the last token of each row and returns logits of the next one. A state has
# `reorder(index)`, which returns the state with the rows `index` (n,); rows may be repeated or left out.
#
# A state may also have `grouped()`, which returns a state that stores several hypotheses of a row as one group, or
# None. A grouped state has `regroup(parents (r, s), rows (r,) or None)`, which keeps the rows `rows` (None: all rows)
# and in each row replaces hypothesis i by hypothesis parents[i]. A step with a grouped state takes the tokens of all
# hypotheses, row by row. A grouped state may have `static(width, steps)`, described in `regard.decode.graph_search`.
StepFunction = Callable[[Any, Tensor], Produced]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A decoded sequence: its tokens without the stop token, their log-probabilities, and their attention weights.

    `log_probs` and `weights` have a row for each token and are on the CPU. `log_prob` is the log-probability of the
    whole sequence, including the stop token. Hypotheses are ranked by `score`, which is `log_prob` divided by the
    length penalty.
    """

    tokens: tuple[int, ...]
    score: float
    log_probs: Float[Tensor, "t"]
    weights: Float[Tensor, "t ..."] | None
    log_prob: float


@dataclass(frozen=True, eq=False)
class Bounds:
    """The validated limits of a search, on the device of the start tokens."""

    start: Int[Tensor, "b"]
    stop: int
    limit: Int[Tensor, "b"]  # the largest number of tokens of each row, without the stop token
    longest: int  # the maximum of `limit`
    minimum: int  # the smallest number of tokens, without the stop token
    never: Int[Tensor, "n"] | None  # the tokens that a hypothesis must not contain

    def distribution(self, logits: Tensor, time: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (b, v) with −∞ for excluded tokens, and the log-probability of the stop token (b,).

        The stop token is excluded while the step number `time` is below `minimum`; the second result is its
        log-probability before that exclusion. `time` is an int, or a tensor on the device.
        """
        log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        stop = log_probs[:, self.stop].clone()
        if self.never is not None:
            log_probs.index_fill_(1, self.never, -torch.inf)
        if isinstance(time, Tensor):
            if self.minimum:
                log_probs[:, self.stop] = torch.where(time < self.minimum, -torch.inf, stop)
        elif time < self.minimum:
            log_probs[:, self.stop] = -torch.inf
        return log_probs, stop

    @property
    def patience(self) -> int:
        """Return the number of decoding steps between two checks whether decoding has ended for all rows.

        On a GPU such a check makes the host wait for the device, so it is not done at every step.
        """
        return 1 if self.start.device.type == "cpu" else 4


def bounds(start: Tensor, stop: int, limit: int | Tensor, minimum: int, never: Sequence[int]) -> Bounds:
    """Return the limits of a search, or raise a `ValueError` that names the invalid argument."""
    if start.ndim != 1 or start.is_floating_point():
        raise ValueError(f"start must be one token for each row, integers (b,); got {start.dtype} {tuple(start.shape)}")
    rows = start.shape[0]
    limits = torch.as_tensor(limit, device=start.device)
    if limits.is_floating_point() or limits.shape not in (torch.Size([]), torch.Size([rows])):
        raise ValueError(
            f"limit must be an integer or one for each of {rows} rows; got {limits.dtype} {tuple(limits.shape)}"
        )
    limits = limits.expand(rows)
    longest = int(limits.max()) if rows else 0
    if rows and int(limits.min()) < 0:
        raise ValueError(f"limit must be 0 or more for every row; got {int(limits.min())}")
    if minimum < 0:
        raise ValueError(f"minimum must be 0 or more; got {minimum}")
    if stop < 0 or stop in never:
        raise ValueError(f"stop must be a token that may come; got {stop}, never={tuple(never)}")
    barred = torch.tensor(sorted(set(never)), device=start.device) if never else None
    return Bounds(start.long(), stop, limits.long(), longest, minimum, barred)


def grouped(state: Any) -> Any:
    """Return `state.grouped()`, which stores the hypotheses of a row as one group; or `state` if that is None."""
    group = state.grouped() if hasattr(state, "grouped") else None
    return state if group is None else group


def check_step(produced: Produced, rows: int, stop: int) -> None:
    """Raise a `ValueError` if the logits or weights of the first step have a wrong shape."""
    shape = tuple(produced.logits.shape)
    if len(shape) != 2 or shape[0] != rows:
        raise ValueError(f"step must give logits of shape ({rows}, vocabulary); got {shape}")
    if stop >= shape[1]:
        raise ValueError(f"stop must be one of the {shape[1]} tokens of the vocabulary; got {stop}")
    if produced.weights is not None and produced.weights.shape[0] != rows:
        raise ValueError(f"step must give weights of {rows} rows, or None; got {tuple(produced.weights.shape)}")


def refuse_broken(broken: Tensor, time: int) -> None:
    """Raise a `ValueError` if a row is marked in `broken`: its logits were NaN, so its tokens would be meaningless."""
    if bool(broken.any()):
        rows = broken.nonzero().flatten().tolist()
        raise ValueError(f"step gave logits that are NaN or infinite in rows {rows[:5]}, by token {time}")
