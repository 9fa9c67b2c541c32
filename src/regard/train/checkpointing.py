"""Checkpointing of a run: saves and restores all training state, and loads the final weights when training ends."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.train.checkpoint_files import Checkpoint, CheckpointError
from regard.train.checkpoint_pieces import Part
from regard.train.distributed import ALONE, Workers
from regard.train.optimizer import load_optimizer, optimizer_tensors
from regard.train.random_state import RandomState, seed_worker
from regard.train.resumable_batches import Batches
from regard.train.run_directory import Run, RunError
from regard.train.sharded_tensors import gathered
from regard.train.train_settings import TrainSettings
from regard.train.training_state import TrainingState
from regard.train.weight_averaging import MovingAverage, mean_weights
from regard.train.weight_files import model_tensors, put_weights, shared_names

# If sharded tensors have more bytes than this, each worker writes its own part of a checkpoint by default, and the
# first worker does not gather the tensors.
_GATHERED = 2**28


@dataclass(frozen=True, eq=False)
class Checkpointer:
    """Saves and restores everything that training changes.

    With several workers, every worker must call each method. The first worker writes all files, or each worker writes
    its own part. Every worker reads the files.
    """

    run: Run
    settings: TrainSettings
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    device: torch.device
    say: Callable[[str], None]
    workers: Workers = ALONE

    def save(self, training: TrainingState, position: Any) -> Path:
        """Write a checkpoint of the current state, and remove the checkpoints that are no longer needed."""
        weights, aliases = model_tensors(self.model), shared_names(self.model)
        tensors = _prefixed("optimizer", optimizer_tensors(self.model, self.optimizer))
        tensors |= _prefixed("average", {} if self.average is None else self.average.tensors())
        numbers = RandomState.take(self.device).tensors()
        checkpoints = self.run.checkpoints
        if self._in_pieces([*weights.values(), *tensors.values()]):
            contents = {"model": weights, "aliases": aliases, "optimizer": tensors}
            own = _prefixed(_random(self.workers.rank), numbers)
            state = lambda: self._state(training, position)  # noqa: E731
            path = checkpoints.save_pieces(training.step, self.workers, **contents, own=own, state=state)
        else:
            tensors = gathered(tensors, keep=self.workers.is_first)
            for rank, random_state in enumerate(self.workers.gather(numbers)):
                tensors |= _prefixed(_random(rank), random_state)
            weights = gathered(weights, keep=self.workers.is_first)
            path = checkpoints.path(training.step)
            if self.workers.is_first:
                state = self._state(training, position)
                checkpoints.save(training.step, model=weights, aliases=aliases, optimizer=tensors, state=state)
        if self.workers.is_first:
            checkpoints.prune(self._needed(training))
        return path

    def _in_pieces(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether each worker writes its own part of a checkpoint; by default if sharded tensors are large."""
        if self.workers.size == 1:
            return False
        if self.settings.pieces is not None:
            return self.settings.pieces
        return sum(t.numel() * t.element_size() for t in tensors if hasattr(t, "to_local")) > _GATHERED

    def _state(self, training: TrainingState, position: Any) -> dict[str, Any]:
        return {
            "course": asdict(training),
            "batches": position,
            "settings": self.settings.model_dump(mode="json"),
            "relies_on": sorted(self._relies_on(training)),
            "metrics_bytes": self.run.metrics.force(),
            "torch": torch.__version__,
        }

    def _needed(self, training: TrainingState) -> set[int]:
        """Return the steps whose checkpoints are not removed.

        These steps are the last `keep_last` steps, the best step and the steps to be averaged. For each of the last
        steps, the steps that were the best or to be averaged at that time are also included, so that training can
        resume from it.
        """
        last = [step for step in self.run.checkpoints.steps() if step <= training.step][-self.settings.keep_last :]
        needed = {*last, *self._relies_on(training)}
        for step in last:
            try:
                state = Checkpoint(self.run.checkpoints.path(step), step).state()
                needed |= {state["course"]["best_step"], *state.get("relies_on", ())}
            except (OSError, ValueError, KeyError):
                # training cannot resume from a damaged checkpoint, so the checkpoints that it refers to are not needed
                continue
        return {step for step in needed if step is not None}

    def _relies_on(self, training: TrainingState) -> set[int]:
        """Return earlier steps whose checkpoints the final weights may use: the best step, and steps to be averaged."""
        mean = self.settings.scheduled(training.step) if self.settings.average == "checkpoints" else []
        there = set(self.run.checkpoints.steps())
        steps = {training.best_step, *(step for step in mean if step in there)}
        return {step for step in steps if step is not None and step != training.step}

    def newest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, or None. Temporary folders of killed processes are removed first."""
        checkpoint, checkpoints = None, self.run.checkpoints
        with self.workers.agreed():
            if self.workers.is_first:
                checkpoints.sweep()
                checkpoint = checkpoints.newest(self.say, self._usable)
                if checkpoint is None and checkpoints.steps():
                    self.say("no checkpoint is good: training starts from the beginning")
        step = self.workers.from_first(None if checkpoint is None else checkpoint.step)
        return checkpoint if step is None or checkpoint is not None else Checkpoint(checkpoints.path(step), step)

    def _usable(self, checkpoint: Checkpoint) -> None:
        """Raise `CheckpointError` if a checkpoint to which `checkpoint` refers, such as the best one, is damaged."""
        state = checkpoint.state()
        best = state["course"]["best_step"]
        for step in state.get("relies_on", [] if best in (None, checkpoint.step) else [best]):
            try:
                self.run.checkpoints.at(step)
            except CheckpointError as error:
                raise CheckpointError(f"it relies on the one of step {step}: {error}") from error

    def restore(self, checkpoint: Checkpoint, batches: Batches) -> TrainingState:
        """Restore model, optimiser, data order and random generators, and return the checkpoint's training state."""
        state = checkpoint.state()
        now = self.settings.model_dump(mode="json")
        changed = sorted(name for name, value in now.items() if state["settings"].get(name) != value)
        if changed:
            self.say(f"settings changed since the checkpoint: {', '.join(changed)}")
        stored = checkpoint.optimizer()
        put_weights(self.model, *checkpoint.model())
        load_optimizer(self.model, self.optimizer, Part(stored, "optimizer"))
        if self.average is not None:
            self.average.load(Part(stored, "average"))
        self._resume(batches, state["batches"])
        if self.workers.is_first:
            self.run.metrics.cut(state["metrics_bytes"])
        if numbers := dict(Part(stored, _random(self.workers.rank))):
            RandomState.of(numbers).put(self.device)
        else:  # the checkpoint was written by fewer workers and has no random state for this worker
            seed_worker(self.settings.seed + checkpoint.step, self.workers.rank)
        self.say(f"resumed from step {checkpoint.step}")
        return TrainingState(**state["course"])

    def _resume(self, batches: Batches, position: Any) -> None:
        try:
            batches.resume(position)
        except ValueError as error:
            if not self.run.accepts_changed_data:
                raise RunError(f"{self.run.path} cannot go on with this data: {error}") from error
            self.say(f"the order of the data starts anew: {error}")

    def put_mean(self, last: int) -> None:
        """Load into the model the mean of the last `average_last` scheduled checkpoints up to step `last`."""
        steps = self.settings.scheduled(last)
        states = [checkpoint.model() for checkpoint in map(self.good, steps) if checkpoint is not None]
        if states:
            put_weights(self.model, mean_weights([tensors for tensors, _ in states]), states[-1][1])

    def put_best(self, step: int | None) -> bool:
        """Load the weights of the best step into the model, and return whether its checkpoint is there and valid.

        If the run has a moving average, the averaged weights of the best step are loaded; without a valid checkpoint of
        the best step, the current moving average is loaded.
        """
        checkpoint = None if step is None else self.good(step)
        if checkpoint is None:
            if self.average is not None:
                self.average.put(self.model)
            return False
        put_weights(self.model, *checkpoint.model())
        if self.average is not None:
            self.average.load(checkpoint.average())
            self.average.put(self.model)
        return True

    def good(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of a step; if that checkpoint is not valid, report an error message and return None."""
        try:
            return self.run.checkpoints.at(step)
        except CheckpointError as error:
            self.say(f"checkpoint of step {step} passed over: {error}")
            return None


def _random(rank: int) -> str:
    """Return the prefix of the tensors in a checkpoint that hold a worker's random state."""
    return f"random-{rank}" if rank else "random"


def _prefixed(part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for name, tensor in tensors.items()}
