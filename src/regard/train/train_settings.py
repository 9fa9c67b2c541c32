"""The settings of a training run, the same for every model."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

Count = Annotated[int, Field(gt=0, le=10**12)]
"""A number of updates, passes or batches: more would never end."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What every generator of random numbers takes."""
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class TrainSettings(BaseModel):
    """How long, how fast, how often; frozen, and an unknown name is an error.

    >>> TrainSettings(steps=200, warmup=20).model_dump(include={"steps", "warmup", "schedule"})
    {'steps': 200, 'schedule': 'inverse_sqrt', 'warmup': 20}
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    steps: Count = 10_000
    """Updates of the parameters, at most."""
    epochs: Count | None = None
    """Passes over the data, at most."""
    accumulate: Count = 1
    """Batches to each update; their loss is averaged over all their tokens, as if they were one batch."""
    learning_rate: float = Field(default=1e-3, gt=0.0, le=1e6)
    """The largest, reached after the warm-up."""
    schedule: Literal["inverse_sqrt", "cosine", "constant"] = "inverse_sqrt"
    """How the learning rate falls after the warm-up."""
    warmup: int = Field(default=400, ge=0, le=10**12)
    """Updates over which the learning rate rises from 0."""
    final_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Where the cosine ends, as a share of the largest learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices only: biases, gains of norms and embeddings have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Memory of AdamW's first and second moments."""
    epsilon: PositiveFloat = 1e-9
    """Epsilon of AdamW, added to the root of the second moment."""
    clip: PositiveFloat | None = 1.0
    """Largest norm of the gradient; None lets it be."""
    average: Literal["none", "ema", "checkpoints"] = "none"
    """Weights to validate and keep: as trained, their moving average, or the mean of the last checkpoints."""
    ema_decay: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the moving average; it starts lower, so that early weights are soon forgotten."""
    average_last: int = Field(default=5, gt=0, le=10_000)
    """How many checkpoints are averaged."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the matrix products; auto is bfloat16 on CUDA and float32 elsewhere. Parameters stay float32."""
    compile: bool = False
    """Whether the model goes through torch.compile."""
    graphs: bool = False
    """On CUDA, whether a step is captured once for each shape of batch and replayed; batches then have few shapes."""
    shard: bool = False
    """Under torchrun, whether parameters, gradients and optimiser state are divided among the workers (FSDP2)."""
    pieces: bool | None = None
    """Whether each worker writes its part of a checkpoint; none: where more than 256 MiB are sharded."""
    log_every: Count = 50
    """Updates between two lines of metrics."""
    validate_every: Count = 500
    """Updates between two validations."""
    checkpoint_every: Count | None = None
    """Updates between two checkpoints; None is as often as validation. A new best is always kept."""
    watch: str = "loss"
    """The validation figure that says which weights are best."""
    watch_for: Literal["lowest", "highest"] = "lowest"
    """Which way is better."""
    patience: Count | None = None
    """Validations without a new best before training ends; None never ends it early."""
    keep_last: int = Field(default=2, gt=0, le=1_000_000)
    """Checkpoints kept besides the best."""
    seed: Seed = 1
    """Seed of dropout and of all other randomness in a step."""

    def kept(self) -> int:
        """How many of the last checkpoints must stay, whatever wrote them."""
        return max(self.keep_last, 1)

    def scheduled(self, last: int) -> list[int]:
        """The steps up to `last` whose checkpoints the schedule writes and the mean is of, oldest first.

        Those that a signal or a new best added are not among them: the mean would depend on when a signal came.

        >>> TrainSettings(average="checkpoints", average_last=3, checkpoint_every=4).scheduled(14)
        [8, 12, 14]
        """
        every = self.checkpoint_every or self.validate_every
        first = last - last % every
        steps = [first - every * back for back in range(self.average_last) if first - every * back > 0]
        return sorted({last, *steps})[-self.average_last :]

    def better(self, value: float, best: float | None) -> bool:
        """Whether a figure is a new best; one that is not a number never is."""
        if value != value:
            return False
        return best is None or (value < best if self.watch_for == "lowest" else value > best)
