"""What decoding is given and what it gives back: a step function, the limits of a search, and hypotheses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class Produced(Protocol):
    """What one step gives: scores of the next token (b, v), the state after it, and where it looked (b, k)."""

    @property
    def logits(self) -> Tensor: ...

    @property
    def state(self) -> Any: ...

    @property
    def weights(self) -> Tensor | None: ...


# step(state, tokens (b,)): reads the last token of each row and scores the next one. A state has `reorder(index)`: the
# state of the rows named by `index` (n,), which may repeat rows or leave some out.
#
# A state may know how to carry several hypotheses of a row at once. Then it has `grouped()`, which gives such a state,
# or None where it cannot; that has `regroup(parents (r, s), kept (r,) or None)`, the hypotheses that come from these of
# the rows kept, and is stepped with the tokens of all of them, row by row. It may also have `static(width, steps)`: see
# `regard.decode.graph_search`.
StepFunction = Callable[[Any, Tensor], Produced]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One output: its tokens without the stop token, how likely each was, and where the model looked for each.

    `log_probs` and `weights` have a row for each token; both are on the CPU. `log_prob` is that of the whole, stop
    token included; `score` is what hypotheses are ranked by, `log_prob` over the length penalty.
    """

    tokens: tuple[int, ...]
    score: float
    log_probs: Float[Tensor, "t"]
    weights: Float[Tensor, "t ..."] | None
    log_prob: float


@dataclass(frozen=True, eq=False)
class Bounds:
    """Where a search starts and must end, checked; all on the device of the start tokens."""

    start: Int[Tensor, "b"]
    stop: int
    limit: Int[Tensor, "b"]  # most tokens of each row, the stop token not counted
    longest: int
    minimum: int
    never: Int[Tensor, "n"] | None

    def distribution(self, logits: Tensor, time: int | Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (b, v) with what must not come at −∞, and the stop token's own (b,) before that.

        `time` is a number, or one on the device.
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
        """Steps between checks of what has ended: a check waits for the device, and on the CPU there is no wait."""
        return 1 if self.start.device.type == "cpu" else 4


def bounds(start: Tensor, stop: int, limit: int | Tensor, minimum: int, never: Sequence[int]) -> Bounds:
    """The bounds of a search, or an error that names the argument that is wrong."""
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
    """The state that carries hypotheses side by side, where there is one, or else the state itself."""
    found = state.grouped() if hasattr(state, "grouped") else None
    return state if found is None else found


def check_step(produced: Produced, rows: int, stop: int) -> None:
    """Raises where the first step of a search did not give what it must."""
    shape = tuple(produced.logits.shape)
    if len(shape) != 2 or shape[0] != rows:
        raise ValueError(f"step must give logits of shape ({rows}, vocabulary); got {shape}")
    if stop >= shape[1]:
        raise ValueError(f"stop must be one of the {shape[1]} tokens of the vocabulary; got {stop}")
    if produced.weights is not None and produced.weights.shape[0] != rows:
        raise ValueError(f"step must give weights of {rows} rows, or None; got {tuple(produced.weights.shape)}")


def refuse_broken(broken: Tensor, time: int) -> None:
    """Raises where some row's logits were NaN: a search over them would give words that mean nothing."""
    if bool(broken.any()):
        rows = broken.nonzero().flatten().tolist()
        raise ValueError(f"step gave logits that are NaN or infinite in rows {rows[:5]}, by token {time}")
