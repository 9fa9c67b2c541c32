"""The learning rate as a function of the step alone, so that checkpoints need no state of a scheduler."""

import math

from regard.train.train_settings import TrainSettings


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of update number `step`, counted from 1.

    During the warm-up the rate rises linearly to the peak, `settings.learning_rate`. After it, `settings.schedule`
    decides. inverse_sqrt: peak · √(warmup / step), as in Vaswani et al. 2017, section 5.3, but with an explicit peak;
    cosine: a half cosine from the peak down to final_share · peak at the last step; constant: the peak.

    >>> settings = TrainSettings(learning_rate=1.0, warmup=4, steps=100)
    >>> [learning_rate(step, settings) for step in (1, 4, 16)]
    [0.25, 1.0, 0.5]
    """
    if step < 1:
        raise ValueError(f"step must be 1 or more; got {step}")
    peak, warmup = settings.learning_rate, settings.warmup
    if step < warmup:
        return peak * step / warmup
    if settings.schedule == "inverse_sqrt":
        return peak * math.sqrt(max(1, warmup) / step)
    if settings.schedule == "cosine":
        done = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
        return peak * (settings.final_share + (1 - settings.final_share) * (1 + math.cos(math.pi * done)) / 2)
    return peak
