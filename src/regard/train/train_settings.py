"""The settings of a training run, the same for every model."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

Count = Annotated[int, Field(gt=0, le=10**12)]
"""The limit on numbers of updates, passes or batches: larger runs would never end."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""The range of seeds that every random generator accepts."""
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class TrainSettings(BaseModel):
    """Length, learning rate, validation and checkpoints of a run. Frozen; an unknown name is an error.

    >>> TrainSettings(steps=200, warmup=20).model_dump(include={"steps", "warmup", "schedule"})
    {'steps': 200, 'schedule': 'inverse_sqrt', 'warmup': 20}
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    steps: Count = 10_000
    """The largest number of updates."""
    epochs: Count | None = None
    """The largest number of passes over the data."""
    accumulate: Count = 1
    """The number of batches in each update; their loss is averaged over all their tokens, as if they were one batch."""
    learning_rate: float = Field(default=1e-3, gt=0.0, le=1e6)
    """The largest learning rate, reached after the warm-up."""
    schedule: Literal["inverse_sqrt", "cosine", "constant"] = "inverse_sqrt"
    """How the learning rate decreases after the warm-up."""
    warmup: int = Field(default=400, ge=0, le=10**12)
    """The number of updates over which the learning rate rises from 0."""
    final_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """The final value of the cosine schedule, as a fraction of the largest learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices only: biases, gains of norms and embeddings have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Decay rates of AdamW's first and second moments."""
    epsilon: PositiveFloat = 1e-9
    """Epsilon of AdamW, added to the root of the second moment."""
    clip: PositiveFloat | None = 1.0
    """The largest norm of the gradient; None: no clipping."""
    average: Literal["none", "ema", "checkpoints"] = "none"
    """Weights to validate and save: as trained, their moving average, or the mean of the last checkpoints."""
    ema_decay: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the moving average; it starts lower, so that early weights decay fast."""
    average_last: int = Field(default=5, gt=0, le=10_000)
    """The number of checkpoints that are averaged."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the matrix products; auto is bfloat16 on CUDA and float32 elsewhere. Parameters stay float32."""
    compile: bool = False
    """Whether the model is compiled by torch.compile."""
    graphs: bool = False
    """On CUDA, whether a step is captured once for each shape of batch and replayed; batches then have few shapes."""
    shard: bool = False
    """Under torchrun, whether parameters, gradients and optimiser state are divided among the workers (FSDP2)."""
    pieces: bool | None = None
    """Whether each worker writes its part of a checkpoint; none: where more than 256 MiB are sharded."""
    log_every: Count = 50
    """The number of updates between two lines of metrics."""
    validate_every: Count = 500
    """The number of updates between two validations."""
    checkpoint_every: Count | None = None
    """The number of updates between two checkpoints; None: as often as validation. A new best is always saved."""
    watch: str = "loss"
    """The validation figure that determines the best weights."""
    watch_for: Literal["lowest", "highest"] = "lowest"
    """Whether a lower or a higher figure is better."""
    patience: Count | None = None
    """The number of validations without a new best after which training ends; None never ends it early."""
    keep_last: int = Field(default=2, gt=0, le=1_000_000)
    """The number of checkpoints that are stored besides the best."""
    seed: Seed = 1
    """Seed of dropout and of all other randomness in a step."""

    def scheduled(self, last: int) -> list[int]:
        """Return the steps whose checkpoints are averaged after step `last`: `last` and scheduled ones, oldest first.

        Checkpoints written because of a signal or a new best validation are not averaged: the mean must not depend on
        when a signal arrived.

        >>> TrainSettings(average="checkpoints", average_last=3, checkpoint_every=4).scheduled(14)
        [8, 12, 14]
        """
        every = self.checkpoint_every or self.validate_every
        first = last - last % every
        steps = [first - every * back for back in range(self.average_last) if first - every * back > 0]
        return sorted({last, *steps})[-self.average_last :]

    def better(self, value: float, best: float | None) -> bool:
        """Return whether a value of the watched metric is better than the best so far; NaN never is."""
        if value != value:
            return False
        return best is None or (value < best if self.watch_for == "lowest" else value > best)
