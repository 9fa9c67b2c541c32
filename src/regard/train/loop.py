"""One loop for every model: updates, validation, checkpoints, and an end that leaves a good state behind."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.train.checkpointing import Keeper
from regard.train.cuda_graph_gradients import Captured
from regard.train.distributed import ALONE, Workers
from regard.train.gradient_sums import GradientSums, Step
from regard.train.interruption import SIGNALS, Diverged, Interrupted, OutOfMemory, Signals, memory_ran_out
from regard.train.learning_rate import learning_rate
from regard.train.listeners import Listener
from regard.train.optimizer import make_optimizer
from regard.train.progress_display import Progress, Silent, Standing, default_progress
from regard.train.random_state import RandomState, seed_worker
from regard.train.resumable_batches import Batches, Passes
from regard.train.run_directory import Run
from regard.train.sharded_model import Layers, Sharded
from regard.train.sharded_tensors import local_part
from regard.train.train_settings import TrainSettings
from regard.train.training_state import Course
from regard.train.updates import Gradients, LossFunction, differentiated, gather, settle
from regard.train.validation import Validate, Validation, undisturbed
from regard.train.weight_averaging import MovingAverage


@dataclass(frozen=True)
class Fitted:
    """How training ended: after how much, why, and with which weights in the model."""

    step: int
    epochs: int
    tokens: int
    seconds: float
    ended: str  # "steps", "epochs" or "patience"
    best: float | None
    best_step: int | None
    figures: dict[str, float]  # of the weights that were kept, where they were validated
    weights: str  # "last", "best", "average" or "best average"


def fit(
    model: nn.Module,
    loss: LossFunction,
    batches: Batches,
    *,
    run: Run,
    settings: TrainSettings,
    held_out: Iterable[Any] | None = None,
    validate: Validate | None = None,
    starting: Callable[[int], None] | None = None,
    progress: Progress | None = None,
    listeners: Sequence[Listener] = (),
    workers: Workers = ALONE,
    layers: Layers = lambda model: (),
) -> Fitted:
    """Trains a model, from where `run` stands, and leaves the weights to use in it and in `run`.

    `loss(model, batch)` gives a `Loss(total, count)`; it moves the batch to the device. `held_out` batches are
    validated by that loss; `validate(model)` gives further figures by name (the model is in eval mode, without
    gradients, and with averaged weights if those are asked for). `settings.watch` names the figure that says which
    weights are best. `starting(step)` is called before each update with the number of those before it: a loss that
    changes in the course of training learns from it where training stands. Every line of metrics also goes to each of
    the `listeners`.

    With several `workers`, each calls this with its share of the same batches; totals, counts and gradients are summed,
    and the first worker writes the run. `layers(model)` are the parts that a sharded model gathers one by one.

    A run that was interrupted goes on as if it had not been: on the CPU, to the bit. `Interrupted`, `Diverged` and
    `OutOfMemory` end training early, each with a good checkpoint.

    >>> import tempfile
    >>> from regard.train.progress_display import Silent
    >>> from regard.train.updates import Loss
    >>> class Two:
    ...     place = 0
    ...     def __iter__(self):
    ...         while self.place < 2:
    ...             self.place += 1
    ...             yield torch.full((5, 1), float(self.place))
    ...         self.place = 0
    ...     def state(self):
    ...         return self.place
    ...     def resume(self, state):
    ...         self.place = state
    >>> def triple(model, batch):
    ...     return Loss((model(batch) - 3 * batch).square().sum(), len(batch))
    >>> run = Run.create(Path(tempfile.mkdtemp()) / "triple", {"task": "triple"})
    >>> settings = TrainSettings(steps=12, warmup=2)
    >>> fitted = fit(nn.Linear(1, 1), triple, Two(), run=run, settings=settings, progress=Silent())
    >>> fitted.step, fitted.epochs, fitted.weights
    (12, 5, 'last')
    """
    if not isinstance(batches, Batches):
        raise TypeError(f"batches must have __iter__, state() and resume(state); got {type(batches).__name__}")
    show = default_progress() if progress is None else progress
    if not workers.is_first:
        show, listeners = Silent(), ()
    loop = _Loop(model, loss, batches, run, settings, held_out, validate, starting, show, listeners, workers, layers)
    with run.held() if workers.is_first else nullcontext(), loop.signals.listening():
        loop.prepare()
        try:
            return loop.finish(loop.train())
        finally:
            show.end()


class _Loop:
    """What a run consists of while it runs."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        batches: Batches,
        run: Run,
        settings: TrainSettings,
        held_out: Iterable[Any] | None,
        validate: Validate | None,
        starting: Callable[[int], None] | None,
        show: Progress,
        listeners: Sequence[Listener],
        workers: Workers,
        layers: Layers,
    ) -> None:
        self.device = next(model.parameters()).device
        self.sharded = Sharded(model, workers, layers, loss) if settings.shard and workers.grouped else None
        model = model if self.sharded is None else self.sharded.model
        self.model, self.loss, self.batches, self.run, self.settings = model, loss, batches, run, settings
        self.starting, self.show, self.listeners, self.workers = starting, show, listeners, workers
        self.optimizer = make_optimizer(model, settings)
        lower = settings.precision == "bfloat16" or (settings.precision == "auto" and self.device.type == "cuda")
        self.precision = torch.bfloat16 if lower else torch.float32
        self.average = MovingAverage(model, decay=settings.ema_decay) if settings.average == "ema" else None
        self.compiled: Any = torch.compile(model) if settings.compile else model
        graphs = settings.graphs and self.device.type == "cuda" and self.sharded is None
        self.captured = Captured(loss, self.compiled, self.precision, self.device) if graphs else None
        self.shared = self._shared_gradients() if workers.grouped else None
        self.validation = Validation(loss, held_out, validate, self.precision, workers)
        self.keeper = Keeper(run, settings, model, self.optimizer, self.average, self.device, show.say, workers)
        self.passes = Passes(batches, most=settings.epochs)
        self.signals = Signals(shared=workers.grouped)
        self.asked: int | None = None  # the signal that any of several workers received, as of the last update
        self.course = Course()
        self.position: Any = None  # of the data, after the last update

    def _shared_gradients(self) -> GradientSums:
        step = Step(self.compiled, self.loss) if self.sharded is None else self.sharded.step
        step.model = self.compiled
        sharded = self.sharded is not None
        return GradientSums(self.workers, step, self.precision, self.device, sharded=sharded, captured=self.captured)

    def prepare(self) -> None:
        """Goes to the newest good checkpoint, or to the start."""
        found = self.keeper.newest()
        if found is None:
            if self.workers.is_first:
                self.run.metrics.cut(0)
            seed_worker(self.settings.seed, self.workers.rank)
        else:
            self.course = self.keeper.take_up(found, self.batches)
        self.position = self.batches.state()
        self.model.train()
        self.show.begin(self.course.step, self.settings.steps)

    def train(self) -> str:
        """Updates until something says it is enough, and says what."""
        self._look_up()  # what an interruption cut short
        while (ended := self._ended()) is None:
            if self._update():
                self._look_up()
        self._look_up()
        return ended

    def finish(self, ended: str) -> Fitted:
        """Puts the weights to keep into the model, and into the run."""
        self.workers.wait()  # until the first has written the last checkpoint
        weights, figures = self._choose()
        if self.sharded is not None:
            self.sharded.fill()
        with self.workers.agreed():
            if self.workers.is_first:
                self.run.save_model(self.model if self.sharded is None else self.sharded.plain)
        course = self.course
        counted = (course.step, course.epoch, course.tokens, round(course.seconds, 3))
        return Fitted(*counted, ended, course.best, course.best_step, figures, weights)

    def _ended(self) -> str | None:
        course, settings = self.course, self.settings
        if course.step >= settings.steps:
            return "steps"
        if settings.epochs is not None and course.epoch >= settings.epochs:
            return "epochs"
        if settings.patience is not None and course.waited >= settings.patience:
            return "patience"
        return None

    def _update(self) -> bool:
        """One update, or none when the data is at its end. One that fails leaves everything as it was before."""
        began, before, numbers = time.monotonic(), replace(self.course), RandomState.take(self.device)
        self._no_gradients()
        if self.starting is not None:
            self.starting(self.course.step)
        shortage = gradients = None
        try:
            taken = self.passes.take(self.settings.accumulate, self.course)
            gradients = gather(self.model, taken, self.device, self._differentiate, self._exchange)
        except Exception as error:
            if not memory_ran_out(error):
                raise
            if self.workers.size > 1:  # the others wait for this worker's gradients: no checkpoint can be made
                raise self._shortage(f"at step {before.step + 1}", error) from error
            shortage = str(error).partition("\n")[0]
        # Outside the handler: inside it, the traceback would still hold every activation of the batch.
        trouble = shortage or (gradients.trouble() if gradients else None)
        if trouble:
            where = f"at step {before.step + 1}, batch {self.course.batch} of pass {self.course.epoch + 1}"
            self._undo(before, numbers)
            if shortage:
                advice = "give a batch fewer tokens, and raise accumulate by as much"
                raise OutOfMemory(f"out of memory {where} ({shortage}): {advice}", self._save())
            advice = "lower learning_rate, lengthen warmup, or look at that batch"
            raise Diverged(f"{trouble} {where}: {advice}", self._save())
        if gradients is None:
            return False
        self.asked = next((number for number, flag in zip(SIGNALS, gradients.asked, strict=False) if flag), None)
        self._step(gradients, began)
        return True

    def _shortage(self, where: str, error: Exception) -> OutOfMemory:
        """What one of several workers reports: the last checkpoint stays as it is."""
        why = str(error).partition("\n")[0]
        advice = "give a batch fewer tokens, or take more workers"
        return OutOfMemory(f"out of memory {where} ({why}): {advice}", self._last_checkpoint())

    def _no_gradients(self) -> None:
        if self.captured is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.captured.begin()

    def _differentiate(self, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        if self.shared is not None:
            return self.shared.of(batches)
        if self.captured is not None:
            return map(self.captured, batches)
        return (differentiated(self.loss, self.compiled, one, self.precision, self.device) for one in batches)

    def _exchange(self, sums: Tensor) -> Tensor:
        """Total and count over all workers, and with them which signals any of them received."""
        if not self.workers.grouped:
            return sums
        return self.workers.reduce(torch.cat([sums, sums.new_tensor(self.signals.flags())]))

    def _undo(self, before: Course, numbers: RandomState) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.course = before
        numbers.put(self.device)

    def _step(self, gradients: Gradients, began: float) -> None:
        settle(self.model, gradients, self.settings.clip)
        rate = learning_rate(self.course.step + 1, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.course.taken(gradients.total, round(gradients.count))
        if self.average is not None:
            self.average.update(self.model, self.course.step)
        self.position = self.batches.state()
        self.course.lasted(time.monotonic() - began)
        loss, pace = self.course.window()
        standing = Standing(self.course.step, self.settings.steps, loss, rate, pace, self._best())
        self.show.step(standing)
        if self.course.step % self.settings.log_every == 0:
            figures = {"loss": loss, "learning_rate": rate, "gradient_norm": gradients.norm}
            self._record("train", {**figures, "tokens_per_second": round(pace, 1)})
            self.show.logged(standing)
            self.course.new_window()

    def _look_up(self) -> None:
        """What is due after an update: validation, a checkpoint, and an answer to signals."""
        course, settings = self.course, self.settings
        ended = self._ended() is not None
        improved = False
        due = course.step > 0 and (ended or course.step % settings.validate_every == 0)
        if due and self.validation.possible and course.validated != course.step:
            improved = self._validate()
        every = settings.checkpoint_every or settings.validate_every
        if course.step and (improved or ended or course.step % every == 0):
            self._save()
        self._heed()

    def _heed(self) -> None:
        received = self._received()
        if received is not None:
            raise Interrupted(received, self.course.step, self._save())

    def _received(self) -> int | None:
        """The signal to stop for: with several workers, one that all of them know of."""
        return self.asked if self.workers.grouped else self.signals.received

    def _validate(self) -> bool:
        """Validates the weights, and says whether they are the best so far. A signal breaks it off."""
        course, settings = self.course, self.settings
        self._check_weights()
        figures = self._figures()
        if figures is None:
            return False
        if settings.watch not in figures:
            raise ValueError(f"watch must be one of the figures of validation, {list(figures)}; got {settings.watch!r}")
        course.validated = course.step
        improved = settings.better(figures[settings.watch], course.best) or self._tied(figures)
        if improved:
            course.best, course.best_step, course.best_figures = figures[settings.watch], course.step, figures
        course.waited = 0 if improved else course.waited + 1
        self._record("validation", figures)
        self.show.validated(course.step, figures, self._best())
        return improved

    def _check_weights(self) -> None:
        """Finite gradients may give infinite weights: these are not validated, and no checkpoint is made of them."""
        with torch.no_grad():
            parts = [local_part(parameter) for parameter in self.model.parameters()]
            strange = (~torch.stack([part.isfinite().all() for part in parts])).sum()
        if self.workers.reduce(strange):
            advice = "lower learning_rate, or lengthen warmup"
            where = self._last_checkpoint()
            raise Diverged(f"weights are NaN or infinite after step {self.course.step}: {advice}", where)

    def _last_checkpoint(self) -> Path:
        checkpoints = self.run.checkpoints
        steps = checkpoints.steps()
        return checkpoints.path(steps[-1]) if steps else checkpoints.folder

    def _tied(self, figures: Mapping[str, float]) -> bool:
        """As good as the best, and with a lower loss: early on, when BLEU is 0 for long, the loss alone tells."""
        before = self.course.best_figures
        same = figures[self.settings.watch] == self.course.best and "loss" in figures and "loss" in before
        return same and figures["loss"] < before["loss"]

    def _figures(self) -> dict[str, float] | None:
        """The figures of the weights as they would be kept now; None if a signal broke it off."""
        began, figures, shortage = time.monotonic(), None, None
        try:
            with self._as_used() as model:
                figures = self.signals.breakable(lambda: self.validation.figures(model, self.device))
        except Exception as error:
            if not memory_ran_out(error):
                raise
            if self.workers.size > 1:
                raise self._shortage(f"while validating after step {self.course.step}", error) from error
            shortage = str(error).partition("\n")[0]
        if shortage:
            where = f"while validating after step {self.course.step}"
            raise OutOfMemory(f"out of memory {where} ({shortage}): give validation smaller batches", self._save())
        self.course.seconds += time.monotonic() - began
        return figures

    @contextmanager
    def _as_used(self) -> Generator[nn.Module, None, None]:
        """The model with the weights that would be kept now, whole, in eval mode."""
        if self.sharded is None:
            with undisturbed(self.model, self.average, self.device):
                yield self.model
            return
        other = None if self.average is None else self.average.tensors()
        with self.sharded.filled(other) as plain, undisturbed(plain, None, self.device):
            yield plain

    def _choose(self) -> tuple[str, dict[str, float]]:
        """Which weights are kept, and their figures where they have been validated."""
        course = self.course
        if self.settings.average == "checkpoints":
            self.keeper.put_mean(course.step)
            if course.best is None:
                return "average", {}
            figures = self._figures()
            if figures is None and (received := self._received()) is not None:
                # The mean is in the model now; the checkpoint of the last step is on the disk already.
                raise Interrupted(received, course.step, self.run.checkpoints.path(course.step))
            if figures is not None and not self.settings.better(course.best, figures[self.settings.watch]):
                return "average", figures
        name = "last" if self.average is None else "average"
        if self.keeper.put_best(course.best_step):
            return "best" if self.average is None else "best average", course.best_figures
        return name, {}

    def _save(self) -> Path:
        return self.keeper.save(self.course, self.position)

    def _record(self, kind: str, figures: Mapping[str, float]) -> None:
        course = self.course
        counted = {"kind": kind, "step": course.step, "epoch": course.epoch, "tokens": course.tokens}
        record = {**counted, **figures, "seconds": round(course.seconds, 3)}
        if self.workers.is_first:
            self.run.metrics.add(record)
        for listener in self.listeners:
            listener(record)

    def _best(self) -> str:
        course = self.course
        return "" if course.best is None else f"{self.settings.watch} {course.best:.4f} at step {course.best_step}"
