"""What a run keeps on the disk: checkpoints to go on from, and in the end the weights to use."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.train.checkpoint_files import Checkpoint, CheckpointError
from regard.train.distributed import ALONE, Workers
from regard.train.optimizer import load_optimizer, optimizer_tensors
from regard.train.random_state import RandomState, seed_worker
from regard.train.resumable_batches import Batches
from regard.train.run_directory import Run, RunError
from regard.train.sharded_tensors import gathered
from regard.train.train_settings import TrainSettings
from regard.train.training_state import Course
from regard.train.weight_averaging import MovingAverage, mean_weights
from regard.train.weight_files import model_tensors, put_weights, shared_names


@dataclass(frozen=True, eq=False)
class Keeper:
    """Saves and brings back everything that training changes.

    Of several workers all must call it: the first writes the files, and all read them.
    """

    run: Run
    settings: TrainSettings
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    device: torch.device
    say: Callable[[str], None]
    workers: Workers = ALONE

    def save(self, course: Course, position: Any) -> Path:
        """Writes a checkpoint of the moment, and removes those that are no longer needed."""
        tensors = _prefixed("optimizer", optimizer_tensors(self.model, self.optimizer))
        tensors |= _prefixed("average", {} if self.average is None else self.average.tensors())
        tensors = gathered(tensors, keep=self.workers.is_first)
        for rank, numbers in enumerate(self.workers.gather(RandomState.take(self.device).tensors())):
            tensors |= _prefixed(_random(rank), numbers)
        weights = gathered(model_tensors(self.model), keep=self.workers.is_first)
        if not self.workers.is_first:
            return self.run.checkpoints.path(course.step)
        state = {
            "course": asdict(course),
            "batches": position,
            "settings": self.settings.model_dump(mode="json"),
            "relies_on": sorted(self._relies_on(course)),
            "metrics_bytes": self.run.metrics.force(),
            "torch": torch.__version__,
        }
        checkpoints, aliases = self.run.checkpoints, shared_names(self.model)
        path = checkpoints.save(course.step, model=weights, aliases=aliases, optimizer=tensors, state=state)
        checkpoints.prune(self._needed(course))
        return path

    def _needed(self, course: Course) -> set[int]:
        """The last ones, the best, and what was the best for each of those, should one have to go back to it."""
        last = [step for step in self.run.checkpoints.steps() if step <= course.step][-self.settings.kept() :]
        needed = {*last, *self._relies_on(course)}
        for step in last:
            try:
                state = Checkpoint(self.run.checkpoints.path(step), step).state()
                needed |= {state["course"]["best_step"], *state.get("relies_on", ())}
            except (OSError, ValueError, KeyError):
                continue  # a damaged one refers to nothing
        return {step for step in needed if step is not None}

    def _relies_on(self, course: Course) -> set[int]:
        """The earlier checkpoints whose weights may be kept in the end: the best, and those that join the mean."""
        mean = self.settings.scheduled(course.step) if self.settings.average == "checkpoints" else []
        there = set(self.run.checkpoints.steps())
        steps = {course.best_step, *(step for step in mean if step in there)}
        return {step for step in steps if step is not None and step != course.step}

    def newest(self) -> Checkpoint | None:
        """The newest good checkpoint. What killed processes left half done is removed on the way."""
        found, checkpoints = None, self.run.checkpoints
        with self.workers.agreed():
            if self.workers.is_first:
                checkpoints.sweep()
                found = checkpoints.newest(self.say, self._usable)
                if found is None and checkpoints.steps():
                    self.say("no checkpoint is good: training starts from the beginning")
        step = self.workers.from_first(None if found is None else found.step)
        return found if step is None or found is not None else Checkpoint(checkpoints.path(step), step)

    def _usable(self, found: Checkpoint) -> None:
        """Raises `CheckpointError` when a checkpoint that this one relies on is damaged: the end would be another."""
        state = found.state()
        best = state["course"]["best_step"]
        for step in state.get("relies_on", [] if best in (None, found.step) else [best]):
            try:
                self.run.checkpoints.at(step)
            except CheckpointError as error:
                raise CheckpointError(f"it relies on the one of step {step}: {error}") from error

    def take_up(self, found: Checkpoint, batches: Batches) -> Course:
        """Brings everything back as it was when the checkpoint was written."""
        state = found.state()
        now = self.settings.model_dump(mode="json")
        changed = sorted(name for name, value in now.items() if state["settings"].get(name) != value)
        if changed:
            self.say(f"settings changed since the checkpoint: {', '.join(changed)}")
        parts = _parted(found.optimizer())
        put_weights(self.model, *found.model())
        load_optimizer(self.model, self.optimizer, parts.get("optimizer", {}))
        if self.average is not None:
            self.average.load(parts.get("average", {}))
        self._resume(batches, state["batches"])
        if self.workers.is_first:
            self.run.metrics.cut(state["metrics_bytes"])
        if (numbers := parts.get(_random(self.workers.rank))) is not None:
            RandomState.of(numbers).put(self.device)
        else:  # more workers than there were
            seed_worker(self.settings.seed + found.step, self.workers.rank)
        self.say(f"resumed from step {found.step}")
        return Course(**state["course"])

    def _resume(self, batches: Batches, position: Any) -> None:
        try:
            batches.resume(position)
        except ValueError as error:
            if not self.run.accepts_changed_data:
                raise RunError(f"{self.run.path} cannot go on with this data: {error}") from error
            self.say(f"the order of the data starts anew: {error}")

    def put_mean(self, last: int) -> None:
        """Gives the model the mean of the last checkpoints of the schedule, up to a step."""
        steps = self.settings.scheduled(last)
        states = [found.model() for found in map(self.good, steps) if found is not None]
        if states:
            put_weights(self.model, mean_weights([tensors for tensors, _ in states]), states[-1][1])

    def put_best(self, step: int | None) -> bool:
        """Gives the model the weights of the best step, averaged if they were; False if there are none."""
        found = None if step is None else self.good(step)
        if found is None:
            if self.average is not None:
                self.average.put(self.model)
            return False
        put_weights(self.model, *found.model())
        if self.average is not None:
            self.average.load(_parted(found.optimizer()).get("average", {}))
            self.average.put(self.model)
        return True

    def good(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step; None, and a word, if it is not good."""
        try:
            return self.run.checkpoints.at(step)
        except CheckpointError as error:
            self.say(f"checkpoint of step {step} passed over: {error}")
            return None


def _random(rank: int) -> str:
    """The name of a worker's random numbers in a checkpoint."""
    return f"random-{rank}" if rank else "random"


def _prefixed(part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for name, tensor in tensors.items()}


def _parted(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        part, _, name = full.partition("/")
        parts.setdefault(part, {})[name] = tensor
    return parts
