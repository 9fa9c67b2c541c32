"""The counts of a run (steps, epochs, tokens, seconds) and its best validation, all of which JSON stores exactly."""

from dataclasses import dataclass, field


@dataclass
class TrainingState:
    """The counts of a run since its first step; an interrupted run continues them when it is resumed."""

    step: int = 0
    epoch: int = 0  # number of complete passes over the data
    batch: int = 0  # number of batches of the current epoch so far
    tokens: int = 0
    seconds: float = 0.0
    # `window_loss`, `window_tokens` and `window_seconds` are sums since metrics were last logged.
    window_loss: float = 0.0
    window_tokens: int = 0
    window_seconds: float = 0.0
    validated: int = -1  # the step at which the weights were last validated; −1 before the first validation
    best: float | None = None
    best_step: int | None = None
    best_figures: dict[str, float] = field(default_factory=dict)
    waited: int = 0  # number of validations since the one with the best result

    def count_update(self, loss: float, tokens: int) -> None:
        self.step += 1
        self.tokens += tokens
        self.window_loss += loss
        self.window_tokens += tokens

    def add_seconds(self, seconds: float) -> None:
        self.seconds += seconds
        self.window_seconds += seconds

    def window(self) -> tuple[float, float]:
        """Return loss per token and tokens per second since metrics were last logged."""
        loss = self.window_loss / self.window_tokens if self.window_tokens else float("nan")
        return loss, self.window_tokens / self.window_seconds if self.window_seconds else 0.0

    def new_window(self) -> None:
        self.window_loss, self.window_tokens, self.window_seconds = 0.0, 0, 0.0
