"""The training loop, one loop for every model: it runs updates and validations, and writes checkpoints."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.train.checkpointing import Checkpointer
from regard.train.cuda_graph_gradients import Captured
from regard.train.distributed import ALONE, Workers
from regard.train.gradient_sums import GradientSums, Step
from regard.train.interruption import SIGNALS, Diverged, Interrupted, OutOfMemory, Signals, memory_ran_out
from regard.train.learning_rate import learning_rate
from regard.train.memory_check import peak_bytes
from regard.train.optimizer import make_optimizer, state_bytes
from regard.train.progress_display import Progress, Silent, Standing, default_progress
from regard.train.random_state import RandomState, seed_worker
from regard.train.resumable_batches import Batches, Passes
from regard.train.run_directory import Run
from regard.train.sharded_model import Layers, Sharded
from regard.train.sharded_tensors import local_part
from regard.train.train_settings import TrainSettings
from regard.train.training_state import TrainingState
from regard.train.updates import Gradients, LossFunction, differentiated, gather, settle
from regard.train.validation import Validate, Validation, undisturbed
from regard.train.weight_averaging import MovingAverage


@dataclass(frozen=True)
class Fitted:
    """The result of `fit`: steps and time, the limit that ended training, and which weights the model has now."""

    step: int
    epochs: int
    tokens: int
    seconds: float
    ended: str  # the limit that ended training: "steps", "epochs" or "patience"
    best: float | None
    best_step: int | None
    figures: dict[str, float]  # validation metrics of the final weights; empty if these weights were not validated
    weights: str  # which weights are final: "last", "best", "average" or "best average"
    # Bytes of parameters, gradients, optimiser state and peak memory, each the maximum over workers; empty without a
    # process group.
    memory: dict[str, int] = field(default_factory=dict)


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
    workers: Workers = ALONE,
    layers: Layers = lambda model: (),
) -> Fitted:
    """Train a model, from the newest checkpoint of `run` if there is one, and save the final weights in `run`.

    The final weights are also in `model` afterwards. `loss(model, batch)` moves the batch to the device and returns a
    `Loss(total, count)`. Validation computes the same loss on the `held_out` batches; `validate(model)` returns further
    metrics by name, of a model in eval mode, without gradients, and with averaged weights if configured.
    `settings.watch` names the metric that determines the best weights. `starting(step)` is called before each update
    with the number of updates so far: it can change a weight of the loss during training, for example.

    With several `workers`, each worker calls `fit` with its share of the same batches; totals, counts and gradients are
    summed over the workers, and the first worker writes the run. `layers(model)` returns the modules of a sharded model
    whose parameters are gathered one module at a time.

    An interrupted run resumes with the same results; on the CPU they are the same bit for bit. `Interrupted`,
    `Diverged` and `OutOfMemory` end training early; each of these exceptions has the path of a checkpoint from which
    training can be resumed.

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
        show = Silent()
    loop = _Loop(model, loss, batches, run, settings, held_out, validate, starting, show, workers, layers)
    with run.held() if workers.is_first else nullcontext(), loop.signals.handled():
        loop.prepare()
        try:
            return loop.finish(loop.train())
        finally:
            show.end()


@dataclass(eq=False)
class _Loop:
    """A call of `fit` in progress: the objects it was called with, and the training state."""

    model: nn.Module
    loss: LossFunction
    batches: Batches
    run: Run
    settings: TrainSettings
    held_out: InitVar[Iterable[Any] | None]
    validate: InitVar[Validate | None]
    starting: Callable[[int], None] | None
    show: Progress
    workers: Workers
    layers: InitVar[Layers]

    def __post_init__(self, held_out: Iterable[Any] | None, validate: Validate | None, layers: Layers) -> None:
        loss, settings, workers = self.loss, self.settings, self.workers
        self.device = next(self.model.parameters()).device
        self.sharded = Sharded(self.model, workers, layers, loss) if settings.shard and workers.grouped else None
        self.model = model = self.model if self.sharded is None else self.sharded.model
        self.optimizer = make_optimizer(model, settings)
        lower = settings.precision == "bfloat16" or (settings.precision == "auto" and self.device.type == "cuda")
        self.precision = torch.bfloat16 if lower else torch.float32
        self.average = MovingAverage(model, decay=settings.ema_decay) if settings.average == "ema" else None
        self.compiled: Any = torch.compile(model) if settings.compile else model
        graphs = settings.graphs and self.device.type == "cuda" and self.sharded is None
        self.captured = Captured(loss, self.compiled, self.precision, self.device) if graphs else None
        self.shared = self._shared_gradients() if workers.grouped else None
        self.validation = Validation(loss, held_out, validate, self.precision, workers)
        self.checkpointer = Checkpointer(
            self.run, settings, model, self.optimizer, self.average, self.device, self.show.say, workers
        )
        self.passes = Passes(self.batches, most=settings.epochs)
        self.signals = Signals(shared=workers.grouped)
        self.shared_signal: int | None = None  # the signal that some worker had received by the last update, or None
        self.state = TrainingState()
        # the position in the training data after the last update, which the next checkpoint stores
        self.position: Any = None

    def _shared_gradients(self) -> GradientSums:
        step = Step(self.compiled, self.loss) if self.sharded is None else self.sharded.step
        step.model = self.compiled
        sharded = self.sharded is not None
        return GradientSums(self.workers, step, self.precision, self.device, sharded=sharded, captured=self.captured)

    def prepare(self) -> None:
        """Restore the newest valid checkpoint, or start from the beginning."""
        checkpoint = self.checkpointer.newest()
        if checkpoint is None:
            if self.workers.is_first:
                self.run.metrics.cut(0)
            seed_worker(self.settings.seed, self.workers.rank)
        else:
            self.state = self.checkpointer.restore(checkpoint, self.batches)
        self.position = self.batches.state()
        self.model.train()
        self.show.begin(self.state.step, self.settings.steps)

    def train(self) -> str:
        """Run updates until a limit is reached, and return the limit: "steps", "epochs" or "patience"."""
        self._after_update()  # a resumed run first runs the validation that an interruption prevented
        while (ended := self._ended()) is None:
            if self._update():
                self._after_update()
        self._after_update()
        return ended

    def finish(self, ended: str) -> Fitted:
        """Load the final weights into the model, save them in the run, and return the result of `fit`."""
        self.workers.wait()  # the first worker may still be writing the last checkpoint
        memory = self._memory()
        weights, figures = self._choose()
        if self.sharded is not None:
            self.sharded.fill()
        with self.workers.agreed():
            if self.workers.is_first:
                self.run.save_model(self.model if self.sharded is None else self.sharded.plain)
        state = self.state
        counted = (state.step, state.epoch, state.tokens, round(state.seconds, 3))
        return Fitted(*counted, ended, state.best, state.best_step, figures, weights, memory)

    def _memory(self) -> dict[str, int]:
        """Return bytes of parameters, gradients, optimiser state and peak memory, each the maximum over workers.

        Without a process group, an empty dictionary is returned.
        """
        if not self.workers.grouped:
            return {}
        per_worker = self.workers.gather({**state_bytes(self.model, self.optimizer), "peak": peak_bytes(self.device)})
        return {name: max(sizes[name] for sizes in per_worker) for name in per_worker[0]}

    def _ended(self) -> str | None:
        state, settings = self.state, self.settings
        if state.step >= settings.steps:
            return "steps"
        if settings.epochs is not None and state.epoch >= settings.epochs:
            return "epochs"
        if settings.patience is not None and state.waited >= settings.patience:
            return "patience"
        return None

    def _update(self) -> bool:
        """Run one update, and return False if there was no data left for it.

        An update that fails leaves weights and training state unchanged.
        """
        began, before, numbers = time.monotonic(), replace(self.state), RandomState.take(self.device)
        self._no_gradients()
        if self.starting is not None:
            self.starting(self.state.step)
        shortage = gradients = None
        try:
            batches = self.passes.take(self.settings.accumulate, self.state)
            gradients = gather(self.model, batches, self.device, self._differentiate, self._exchange)
        except Exception as error:
            if not memory_ran_out(error):
                raise
            # the other workers wait for this worker's gradients and cannot write a checkpoint
            if self.workers.size > 1:
                raise self._shortage(f"at step {before.step + 1}", error) from error
            shortage = str(error).partition("\n")[0]
        # The error is handled outside the except block: inside, the traceback would still hold the batch's activations.
        trouble = shortage or (gradients.trouble() if gradients else None)
        if trouble:
            where = f"at step {before.step + 1}, batch {self.state.batch} of pass {self.state.epoch + 1}"
            self._undo(before, numbers)
            if shortage:
                advice = "give a batch fewer tokens, and raise accumulate by as much"
                raise OutOfMemory(f"out of memory {where} ({shortage}): {advice}", self._save())
            advice = "lower learning_rate, lengthen warmup, or look at that batch"
            raise Diverged(f"{trouble} {where}: {advice}", self._save())
        if gradients is None:
            return False
        self.shared_signal = next(
            (number for number, flag in zip(SIGNALS, gradients.extra, strict=False) if flag), None
        )
        self._step(gradients, began)
        return True

    def _shortage(self, where: str, error: Exception) -> OutOfMemory:
        """Return the error to raise if a worker ran out of memory while other workers wait for its gradients.

        No checkpoint can be written in that situation, so the error names the last checkpoint that was written.
        """
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
        return (differentiated(self.loss, self.compiled, batch, self.precision, self.device) for batch in batches)

    def _exchange(self, sums: Tensor) -> Tensor:
        """Return total loss and token count over all workers; if there are several, also how many got each signal."""
        if self.workers.size == 1:
            return sums
        return self.workers.reduce(torch.cat([sums, sums.new_tensor(self.signals.flags())]))

    def _undo(self, before: TrainingState, numbers: RandomState) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.state = before
        numbers.put(self.device)

    def _step(self, gradients: Gradients, began: float) -> None:
        settle(self.model, gradients, self.settings.clip)
        rate = learning_rate(self.state.step + 1, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.state.count_update(gradients.total, round(gradients.count))
        if self.average is not None:
            self.average.update(self.model, self.state.step)
        self.position = self.batches.state()
        self.state.add_seconds(time.monotonic() - began)
        loss, pace = self.state.window()
        standing = Standing(self.state.step, self.settings.steps, loss, rate, pace, self._best())
        self.show.step(standing)
        if self.state.step % self.settings.log_every == 0:
            figures = {"loss": loss, "learning_rate": rate, "gradient_norm": gradients.norm}
            self._record("train", {**figures, "tokens_per_second": round(pace, 1)})
            self.show.logged(standing)
            self.state.new_window()

    def _after_update(self) -> None:
        """Validate and write a checkpoint if they are due after this update, and stop if a signal was received."""
        state, settings = self.state, self.settings
        ended = self._ended() is not None
        improved = False
        due = state.step > 0 and (ended or state.step % settings.validate_every == 0)
        if due and self.validation.possible and state.validated != state.step:
            improved = self._validate()
        every = settings.checkpoint_every or settings.validate_every
        if state.step and (improved or ended or state.step % every == 0):
            self._save()
        self._stop_on_signal()

    def _stop_on_signal(self) -> None:
        received = self._received()
        if received is not None:
            raise Interrupted(received, self.state.step, self._save())

    def _received(self) -> int | None:
        """Return the signal that stops training, or None; with several workers, a signal that any of them received.

        Several workers return the signal that they exchanged with the last update, so that all stop at the same step.
        """
        return self.shared_signal if self.workers.size > 1 else self.signals.received

    def _validate(self) -> bool:
        """Validate the weights, and return whether they are the best so far; False if validation is interrupted."""
        state, settings = self.state, self.settings
        self._check_weights()
        figures = self._figures()
        if figures is None:
            return False
        if settings.watch not in figures:
            raise ValueError(f"watch must be one of the figures of validation, {list(figures)}; got {settings.watch!r}")
        state.validated = state.step
        improved = settings.better(figures[settings.watch], state.best) or self._tied(figures)
        if improved:
            state.best, state.best_step, state.best_figures = figures[settings.watch], state.step, figures
        state.waited = 0 if improved else state.waited + 1
        self._record("validation", figures)
        self.show.validated(state.step, figures, self._best())
        return improved

    def _check_weights(self) -> None:
        """Raise `Diverged` if a weight is NaN or infinite, so that it is neither validated nor saved.

        Finite gradients may still lead to infinite weights.
        """
        with torch.no_grad():
            parts = [local_part(parameter) for parameter in self.model.parameters()]
            strange = (~torch.stack([part.isfinite().all() for part in parts])).sum()
        if self.workers.reduce(strange):
            advice = "lower learning_rate, or lengthen warmup"
            where = self._last_checkpoint()
            raise Diverged(f"weights are NaN or infinite after step {self.state.step}: {advice}", where)

    def _last_checkpoint(self) -> Path:
        checkpoints = self.run.checkpoints
        steps = checkpoints.steps()
        return checkpoints.path(steps[-1]) if steps else checkpoints.folder

    def _tied(self, figures: Mapping[str, float]) -> bool:
        """Return whether the watched metric equals its best value so far, and the loss is lower than at that value.

        While the watched metric does not change, such as a BLEU of 0 early in training, the loss determines the best
        weights.
        """
        before = self.state.best_figures
        same = figures[self.settings.watch] == self.state.best and "loss" in figures and "loss" in before
        return same and figures["loss"] < before["loss"]

    def _figures(self) -> dict[str, float] | None:
        """Return validation metrics of the weights that would be saved now; None if a signal interrupts validation."""
        began, figures, shortage = time.monotonic(), None, None
        try:
            with self._as_used() as model:
                figures = self.signals.breakable(lambda: self.validation.figures(model, self.device))
        except Exception as error:
            if not memory_ran_out(error):
                raise
            if self.workers.size > 1:
                raise self._shortage(f"while validating after step {self.state.step}", error) from error
            shortage = str(error).partition("\n")[0]
        if shortage:
            where = f"while validating after step {self.state.step}"
            raise OutOfMemory(f"out of memory {where} ({shortage}): give validation smaller batches", self._save())
        self.state.seconds += time.monotonic() - began
        return figures

    @contextmanager
    def _as_used(self) -> Generator[nn.Module, None, None]:
        """A context that yields the whole, unsharded model in eval mode, with the weights that would be saved now."""
        if self.sharded is None:
            with undisturbed(self.model, self.average, self.device):
                yield self.model
            return
        other = None if self.average is None else self.average.tensors()
        with self.sharded.filled(other) as plain, undisturbed(plain, None, self.device):
            yield plain

    def _choose(self) -> tuple[str, dict[str, float]]:
        """Load the final weights into the model; return which weights these are, and their metrics if validated."""
        state = self.state
        if self.settings.average == "checkpoints":
            self.checkpointer.put_mean(state.step)
            if state.best is None:
                return "average", {}
            figures = self._figures()
            if figures is None and (received := self._received()) is not None:
                # The model holds the averaged weights now; the checkpoint of the last step is already on the disk.
                raise Interrupted(received, state.step, self.run.checkpoints.path(state.step))
            if figures is not None and not self.settings.better(state.best, figures[self.settings.watch]):
                return "average", figures
        name = "last" if self.average is None else "average"
        if self.checkpointer.put_best(state.best_step):
            return "best" if self.average is None else "best average", state.best_figures
        return name, {}

    def _save(self) -> Path:
        return self.checkpointer.save(self.state, self.position)

    def _record(self, kind: str, figures: Mapping[str, float]) -> None:
        state = self.state
        counted = {"kind": kind, "step": state.step, "epoch": state.epoch, "tokens": state.tokens}
        record = {**counted, **figures, "seconds": round(state.seconds, 3)}
        if self.workers.is_first:
            self.run.metrics.add(record)

    def _best(self) -> str:
        state = self.state
        return "" if state.best is None else f"{self.settings.watch} {state.best:.4f} at step {state.best_step}"
