"""Where a run stands: everything that is counted, in numbers that a JSON file holds exactly."""

from dataclasses import dataclass, field


@dataclass
class Course:
    """Counted from the first step of a run, however often it was interrupted."""

    step: int = 0
    epoch: int = 0  # passes over the data that are complete
    batch: int = 0  # batches taken from the pass that is not
    tokens: int = 0
    seconds: float = 0.0
    # Since the last line of metrics:
    window_loss: float = 0.0
    window_tokens: int = 0
    window_seconds: float = 0.0
    validated: int = -1  # the step of the last validation
    best: float | None = None
    best_step: int | None = None
    best_figures: dict[str, float] = field(default_factory=dict)
    waited: int = 0  # validations since the best

    def taken(self, loss: float, tokens: int) -> None:
        """An update was made."""
        self.step += 1
        self.tokens += tokens
        self.window_loss += loss
        self.window_tokens += tokens

    def lasted(self, seconds: float) -> None:
        """So long did it take."""
        self.seconds += seconds
        self.window_seconds += seconds

    def window(self) -> tuple[float, float]:
        """Loss for each token, and tokens for each second, since the last line of metrics."""
        loss = self.window_loss / self.window_tokens if self.window_tokens else float("nan")
        return loss, self.window_tokens / self.window_seconds if self.window_seconds else 0.0

    def new_window(self) -> None:
        self.window_loss, self.window_tokens, self.window_seconds = 0.0, 0, 0.0
