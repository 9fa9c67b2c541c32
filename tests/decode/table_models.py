"""Models without parameters: the next token's logits are a fixed function of the source and all earlier tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STOP = 2
CAPACITY = 11


@dataclass(frozen=True)
class History:
    """The state of a table model: all tokens so far, and the source, of each row."""

    source: Tensor
    tokens: Tensor

    def reorder(self, index: Tensor) -> "History":
        return History(self.source[index], self.tokens[index])


@dataclass(frozen=True)
class Step:
    logits: Tensor
    state: History
    weights: Tensor | None


@dataclass
class Table:
    """A model with logits_v = sharpness · sin(hash of source, history and v); its weights encode the history."""

    seed: int
    vocabulary: int = 4
    sharpness: float = 2.0
    looks: bool = True
    calls: int = 0
    rows: int = 0

    def start(self, sources: list[int]) -> History:
        return History(torch.tensor(sources), torch.zeros(len(sources), 0, dtype=torch.long))

    def __call__(self, state: History, tokens: Tensor) -> Step:
        self.calls += 1
        self.rows += tokens.shape[0]
        history = torch.cat([state.tokens, tokens[:, None]], 1)
        code = state.source.double() * 37.719 + self.seed * 3.7
        for i in range(history.shape[1]):
            code = (code * 1.7 + history[:, i] * 12.9898 + 4.1) % 1000.0
        logits = self.sharpness * torch.sin(
            code[:, None] + torch.arange(self.vocabulary) * 78.233 * (1 + code[:, None])
        )
        weights = torch.full((len(tokens), CAPACITY), -1.0, dtype=torch.float64)
        weights[:, 0] = state.source
        weights[:, 1 : 1 + history.shape[1]] = history[:, : CAPACITY - 1]
        return Step(logits, History(state.source, history), weights if self.looks else None)

    def log_probs(self, source: int, history: tuple[int, ...]) -> list[float]:
        """Return the log-probabilities of the next token after one history, in Python numbers."""
        state = History(torch.tensor([source]), torch.tensor([history[:-1]], dtype=torch.long))
        logits = self(state, torch.tensor([history[-1]])).logits[0].tolist()
        total = math.log(math.fsum(math.exp(logit) for logit in logits))
        return [logit - total for logit in logits]


def asked_by(source: int, history: tuple[int, ...]) -> list[float]:
    """Return the attention weights that the table model returns for this history."""
    return [float(source), *map(float, history), *[-1.0] * (CAPACITY - 1 - len(history))]
