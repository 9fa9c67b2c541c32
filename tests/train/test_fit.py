"""The training loop: updates, exact resumption, averaged weights, early stopping, printed output and files."""

import functools
import io
import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_training import Shuffled, Tied, make, same_weights, summed
from torch import Tensor, nn

from regard.train.interruption import Diverged, Interrupted, OutOfMemory
from regard.train.learning_rate import learning_rate
from regard.train.loop import Fitted, fit
from regard.train.progress_display import Bar, Lines, Silent
from regard.train.run_directory import Run, RunError
from regard.train.train_settings import TrainSettings
from regard.train.updates import Loss
from regard.train.weight_files import load_model, read_tensors

SMALL = {"warmup": 5, "log_every": 3, "validate_every": 5, "checkpoint_every": 4}


def loss(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(*summed(model, batch))


def train(folder: Path, model: nn.Module | None = None, *, batches=None, resume: bool = False, **options) -> Fitted:
    extra = {name: options.pop(name) for name in ("held_out", "validate", "progress") if name in options}
    call = options.pop("loss", loss)
    run = Run.create(folder, {"task": "copy"}, resume=resume)
    settings = TrainSettings(**{**SMALL, **options})
    model, batches = model or make(), batches or Shuffled()
    return fit(model, call, batches, run=run, settings=settings, **{"progress": Silent(), **extra})


def figures(folder: Path) -> list[dict]:
    """Return the lines of a run's metrics file, without the fields that hold times."""
    lines = Run.open(folder).metrics.read()
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def held_out() -> list[Tensor]:
    return Shuffled(2, seed=9).batches


class Cut(Exception):  # noqa: N818
    """Raised by a loss function to simulate that the process is killed."""


def cut_at(calls: int):
    """Return a loss function that raises `Cut` after the given number of calls in training."""
    count = 0

    def cutting(model: nn.Module, batch: Tensor) -> Loss:
        nonlocal count
        if model.training:
            count += 1
            if count > calls:
                raise Cut
        return loss(model, batch)

    return cutting


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")  # without run-time type checks, which use Python's random numbers
@pytest.mark.parametrize("average", ["none", "ema", "checkpoints"])
@pytest.mark.parametrize("cuts", [[9], [15, 3, 11], [33]])
def test_a_run_that_was_cut_ends_as_one_that_was_not(tmp_path, average, cuts):
    options = {"steps": 19, "accumulate": 2, "average": average, "held_out": held_out(), "average_last": 3}
    whole, cut = make(), make()
    expected = train(tmp_path / "whole", whole, **options)
    for calls in cuts:
        with pytest.raises(Cut):
            train(tmp_path / "cut", make(), resume=True, loss=cut_at(calls), **options)
        torch.manual_seed(99)  # between two runs, other code may change the state of the random generator
    found = train(tmp_path / "cut", cut, resume=True, **options)
    same_weights(cut.state_dict(), whole.state_dict())
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    assert (found.best, found.best_step, found.tokens, found.weights, found.figures) == (
        *(expected.best, expected.best_step, expected.tokens),
        *(expected.weights, expected.figures),
    )
    last = Run.open(tmp_path / "whole").checkpoints.at(19), Run.open(tmp_path / "cut").checkpoints.at(19)
    same_weights(last[0].optimizer(), last[1].optimizer())


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    weights = []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        model = make()
        train(tmp_path / name, model, steps=6, seed=seed)
        weights.append(model.state_dict())
    same_weights(weights[0], weights[1])
    assert not torch.equal(weights[0]["hidden.weight"], weights[2]["hidden.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("average", ["none", "ema"])
def test_looking_more_often_changes_nothing(tmp_path, average):
    def noisy(model: nn.Module) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"noise": float(torch.rand(()))}

    train(tmp_path / "one", steps=8, average=average)
    options = {"validate": noisy, "watch": "noise", "checkpoint_every": 1, "validate_every": 2}
    train(tmp_path / "two", steps=8, average=average, **options)
    one, two = (Run.open(tmp_path / name).checkpoints.at(8) for name in ("one", "two"))
    same_weights(one.model()[0], two.model()[0])


def test_an_update_is_adamw_on_the_mean_over_tokens(tmp_path):
    """One update equals the formulas of Adam in float64: two batches of different sizes, clipping, and weight decay."""
    batches = Shuffled(2)
    model = make(dropout=0.0).double()
    twin = make(dropout=0.0).double()
    train(tmp_path, model, batches=batches, steps=1, accumulate=2, clip=0.01, weight_decay=0.5, learning_rate=0.25)
    total, count = 0.0, 0
    for batch in batches.batches:
        each, tokens = summed(twin, batch)
        total, count = total + each, count + tokens
    (total / count).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in twin.parameters()))
    assert norm > 0.01
    rate = 0.25 / 5
    for name, parameter in twin.named_parameters():
        gradient = parameter.grad * (0.01 / norm)
        start = parameter.data * (1 - rate * 0.5) if name == "hidden.weight" else parameter.data
        # After one update, Adam's bias-corrected moments are the gradient and its square.
        expected = start - rate * gradient / (gradient.abs() + 1e-9)
        torch.testing.assert_close(model.get_parameter(name).data, expected, rtol=1e-9, atol=1e-9)


def test_how_tokens_fall_into_batches_makes_no_difference(tmp_path):
    class Whole(Shuffled):
        def __init__(self, pieces: int) -> None:
            super().__init__(1)
            rows = torch.randint(1, 13, (6, 5), generator=torch.Generator().manual_seed(1))
            self.batches = list(rows.split(6 // pieces))

    models = []
    for pieces in (1, 3):
        models.append(make(dropout=0.0).double())
        train(tmp_path / str(pieces), models[-1], batches=Whole(pieces), steps=5, accumulate=pieces)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_it_learns(tmp_path):
    model = make(size=16, dropout=0.0)
    fitted = train(tmp_path, model, steps=250, learning_rate=0.03, held_out=held_out(), validate_every=50)
    assert fitted.figures["loss"] < 0.05
    assert fitted.weights == "best"
    assert json.loads((tmp_path / "checkpoints" / "step-000250" / "state.json").read_text())["course"]["step"] == 250


def test_ties_stay_ties(tmp_path):
    model = make()
    train(tmp_path, model, steps=4)
    tensors, shared = read_tensors(tmp_path / "model.safetensors")
    assert shared == {"output.weight": "embedding.weight"}
    assert "output.weight" not in tensors
    fresh = make(seed=1)
    load_model(fresh, tmp_path / "model.safetensors")
    assert fresh.output.weight is fresh.embedding.weight
    same_weights(fresh.state_dict(), model.state_dict())
    loose = make(seed=1)
    loose.output.weight = nn.Parameter(torch.zeros(13, 8))
    with pytest.raises(ValueError, match=r"the file shares weights .*output.weight.*, the model shares \{\}"):
        load_model(loose, tmp_path / "model.safetensors")


def test_the_best_weights_are_kept(tmp_path):
    seen = []

    def validate(model: nn.Module) -> dict[str, float]:
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"score": [1.0, 5.0, math.nan, 3.0, 5.0][len(seen) - 1]}

    model = make()
    options = {"watch": "score", "watch_for": "highest", "patience": 3, "validate_every": 2, "keep_last": 1}
    fitted = train(tmp_path, model, steps=100, validate=validate, **options)
    assert (fitted.ended, fitted.step, fitted.best, fitted.best_step) == ("patience", 10, 5.0, 4)
    assert len(seen) == 5
    same_weights(model.state_dict(), seen[1])
    assert Run.open(tmp_path).checkpoints.steps() == [4, 10]
    again = make(seed=1)
    Run.open(tmp_path).load_model(again)
    same_weights(again.state_dict(), seen[1])
    # Resuming a finished run does not train and returns the result of the run.
    assert train(tmp_path, make(), resume=True, steps=100, validate=validate, **options).step == 10
    assert len(seen) == 5


def test_going_back_finds_what_was_the_best_then(tmp_path):
    """If the newest checkpoint, which is the best one, is damaged, an earlier checkpoint still records which was best
    before it."""
    scores = {2: 5.0, 4: 1.0, 6: 2.0, 8: 9.0}
    seen = iter(scores.values())
    options = {"watch": "score", "watch_for": "highest", "validate_every": 2, "checkpoint_every": 2, "keep_last": 2}
    train(tmp_path, steps=8, validate=lambda model: {"score": next(seen)}, **options)
    checkpoints = Run.open(tmp_path).checkpoints
    assert checkpoints.steps() == [2, 6, 8]
    best = checkpoints.at(2).model()[0]
    (checkpoints.path(8) / "model.safetensors").write_bytes(b"")
    model = make()
    fitted = train(tmp_path, model, steps=8, resume=True, validate=lambda model: {"score": 3.0}, **options)
    assert (fitted.best, fitted.best_step, fitted.weights) == (5.0, 2, "best")
    same_weights({name: value for name, value in model.state_dict().items() if name in best}, best)
    assert checkpoints.newest(pytest.fail).step == 8


def test_a_moving_average_follows_its_formula(tmp_path):
    seen: list[Tensor] = []

    def watching(model: nn.Module, batch: Tensor) -> Loss:
        seen.append(model.hidden.weight.detach().clone())
        return loss(model, batch)

    model = make()
    fitted = train(tmp_path, model, steps=6, average="ema", ema_decay=0.4, loss=watching, checkpoint_every=6)
    trained = Run.open(tmp_path).checkpoints.at(6).model()[0]["hidden.weight"]
    mean = seen[0]
    for step, weight in enumerate([*seen[1:], trained], 1):
        decay = min(0.4, (1 + step) / (10 + step))
        mean = decay * mean + (1 - decay) * weight
    torch.testing.assert_close(model.hidden.weight.data, mean)
    assert fitted.weights == "average"


def test_the_mean_of_the_last_checkpoints(tmp_path):
    model = make()
    fitted = train(tmp_path, model, steps=10, average="checkpoints", average_last=3, checkpoint_every=2)
    checkpoints = Run.open(tmp_path).checkpoints
    assert checkpoints.steps() == [4, 6, 8, 10], "the last two, and those that join the mean of either"
    states = [checkpoints.at(step).model()[0] for step in (6, 8, 10)]
    for name, value in states[0].items():
        torch.testing.assert_close(model.state_dict()[name], (value + states[1][name] + states[2][name]) / 3)
    assert fitted.weights == "average"


def test_weights_that_are_not_finite_are_not_validated(tmp_path):
    def validate(model: nn.Module) -> dict[str, float]:
        raise AssertionError("never reached")

    model = make()

    def breaking(network: nn.Module, batch: Tensor) -> Loss:
        found = loss(network, batch)
        model.hidden.bias.data.fill_(float("inf"))
        return found

    with pytest.raises(Diverged, match="weights are NaN or infinite after step 1: lower learning_rate"):
        train(tmp_path, model, steps=4, validate_every=1, validate=validate, loss=breaking)
    assert Run.open(tmp_path).checkpoints.steps() == []


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("moments", [[3], [7, 9], [1, 2, 3, 5, 6, 7, 9]])
def test_a_checkpoint_that_a_signal_wrote_does_not_join_the_mean(tmp_path, moments):
    options = {"steps": 11, "average": "checkpoints", "average_last": 3, "checkpoint_every": 2}
    whole, cut = make(), make()
    train(tmp_path / "whole", whole, **options)

    def signalling(call: int):
        calls = []

        def interrupted(model: nn.Module, batch: Tensor) -> Loss:
            calls.append(None)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss(model, batch)

        return interrupted

    for before, moment in zip([0, *moments], moments, strict=False):
        with pytest.raises(Interrupted, match=f"after step {moment}"):
            train(tmp_path / "cut", resume=True, loss=signalling(moment - before), **options)
    train(tmp_path / "cut", cut, resume=True, **options)
    same_weights(cut.state_dict(), whole.state_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(("average", "step"), [("none", 5), ("checkpoints", 8), ("checkpoints", 12)])
def test_a_damaged_checkpoint_that_the_end_relies_on_is_made_again(tmp_path, average, step):
    """If a checkpoint needed for the final weights is damaged, the run resumes from an earlier one and ends with the
    same weights."""
    scores = {5: 3.0, 10: 1.0, 13: 2.0}
    options = {"steps": 13, "average": average, "average_last": 3, "watch": "score", "watch_for": "highest"}
    if average == "none":
        options["validate"] = lambda model: {"score": scores[Run.open(tmp_path).metrics.read()[-1]["step"]]}
        options |= {"log_every": 1}
    else:
        options["watch"] = "loss"
    whole, again = make(), make()
    train(tmp_path, whole, **options)
    path = Run.open(tmp_path).checkpoints.path(step) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    train(tmp_path, again, resume=True, **options)
    same_weights(again.state_dict(), whole.state_dict())


def test_a_mean_that_is_worse_is_not_taken(tmp_path):
    scores = iter([1.0, 9.0, 2.0, 3.0, 4.0])
    options = {"watch": "score", "watch_for": "highest", "validate_every": 2, "checkpoint_every": 2}
    model = make()
    validate = lambda model: {"score": next(scores)}  # noqa: E731
    fitted = train(tmp_path, model, steps=8, average="checkpoints", validate=validate, **options)
    assert (fitted.weights, fitted.best_step, fitted.figures) == ("best", 4, {"score": 9.0})
    same_weights(
        {k: v for k, v in model.state_dict().items() if k != "output.weight"},
        Run.open(tmp_path).checkpoints.at(4).model()[0],
    )


def test_epochs_end_a_run(tmp_path):
    batches = Shuffled(7)
    fitted = train(tmp_path, batches=batches, steps=1000, epochs=3, accumulate=4, held_out=held_out())
    # 3 epochs of 7 batches: five updates with four batches each, and one with the last batch.
    assert (fitted.ended, fitted.epochs, fitted.step) == ("epochs", 3, 6)
    assert fitted.tokens == 3 * sum(batch[:, 1:].numel() for batch in batches.batches)
    assert figures(tmp_path)[-1]["kind"] == "validation"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_with_a_good_checkpoint(tmp_path, value):
    calls = []

    def bad(model: nn.Module, batch: Tensor) -> Loss:
        calls.append(batch)
        result = loss(model, batch)
        return Loss(result.total * value, result.count) if len(calls) == 8 else result

    words = rf"the loss is {value} at step 8, batch 1 of pass 2: lower learning_rate.*step-000007"
    with pytest.raises(Diverged, match=words) as error:
        train(tmp_path / "bad", make(), steps=12, loss=bad)
    assert error.value.checkpoint == tmp_path / "bad" / "checkpoints" / "step-000007"
    model, whole = make(), make()
    train(tmp_path / "bad", model, steps=12, resume=True)
    train(tmp_path / "whole", whole, steps=12)
    same_weights(model.state_dict(), whole.state_dict())
    assert figures(tmp_path / "bad") == figures(tmp_path / "whole")


def test_a_gradient_that_is_no_number_stops_too(tmp_path):
    def bad(model: nn.Module, batch: Tensor) -> Loss:
        total, count = summed(model, batch)
        return Loss(total + (model.hidden.weight[0, 0] * 0).sqrt(), count)

    with pytest.raises(Diverged, match=r"the norm of the gradient is (nan|inf) at step 1, batch 1 of pass 1"):
        train(tmp_path, steps=3, loss=bad)
    assert Run.open(tmp_path).checkpoints.steps() == [0]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_memory_that_runs_out_stops_with_advice(tmp_path, error):
    calls = []

    def hungry(model: nn.Module, batch: Tensor) -> Loss:
        calls.append(batch)
        if len(calls) == 6:
            raise error
        return loss(model, batch)

    with pytest.raises(OutOfMemory, match=r"out of memory at step 3, batch 6 of pass 1 .*fewer tokens.*step-000002"):
        train(tmp_path / "a", steps=7, accumulate=2, loss=hungry)
    model, whole = make(), make()
    train(tmp_path / "a", model, steps=7, accumulate=2, resume=True)
    train(tmp_path / "b", whole, steps=7, accumulate=2)
    same_weights(model.state_dict(), whole.state_dict())


def test_memory_that_runs_out_while_validating(tmp_path):
    def hungry(model: nn.Module) -> dict[str, float]:
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(OutOfMemory, match=r"while validating after step 5 .*smaller batches.*step-000005"):
        train(tmp_path, steps=7, validate=hungry)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_validating_breaks_it_off(tmp_path, number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    armed = []

    def validate(model: nn.Module) -> dict[str, float]:
        if len(armed) == 2:
            armed.clear()
            os.kill(os.getpid(), number)
            raise AssertionError("never reached: the signal has left this function")
        if armed:
            armed.append(None)
        return {"loss": float(model.hidden.weight.sum())}

    options = {"validate": validate, "steps": 12, "average": "ema"}
    expected = train(tmp_path / "whole", **options)
    armed.append(None)
    with pytest.raises(Interrupted, match=rf"{number.name} ended training after step 10; resume to go on") as error:
        train(tmp_path / "cut", **options)
    assert error.value.code == 128 + number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    found = train(tmp_path / "cut", resume=True, **options)
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    assert found.figures == expected.figures


def test_a_signal_in_a_step_lets_it_finish(tmp_path):
    calls = []

    def signalling(model: nn.Module, batch: Tensor) -> Loss:
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(model, batch)

    with pytest.raises(Interrupted, match="after step 3"):
        train(tmp_path, steps=9, loss=signalling)
    assert len(calls) == 3
    assert Run.open(tmp_path).checkpoints.at(3).state()["course"]["step"] == 3


def test_it_trains_outside_the_main_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(tmp_path, steps=2)))
    thread.start()
    thread.join()
    assert found[0].step == 2


def test_the_lines_of_metrics(tmp_path):
    train(tmp_path, steps=7, held_out=held_out())
    lines = Run.open(tmp_path).metrics.read()
    assert [(line["kind"], line["step"]) for line in lines] == [
        *[("train", 3), ("validation", 5), ("train", 6), ("validation", 7)]
    ]
    assert lines[0].keys() == {
        *("kind", "step", "epoch", "tokens", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds")
    }
    batches = Shuffled()
    model = make(dropout=0.0)
    first = [summed(model, batch) for batch, _ in zip(batches, range(3), strict=False)]
    assert lines[0]["tokens"] == sum(count for _, count in first)
    assert lines[0]["learning_rate"] == pytest.approx(1e-3 * 3 / 5)


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
def test_a_compiled_model_is_trained_all_the_same(tmp_path, monkeypatch):
    plain, compiled = make(dropout=0.0), make(dropout=0.0)
    train(tmp_path / "plain", plain, steps=3)
    seen = []

    def peeking(model: nn.Module, batch: Tensor) -> Loss:
        seen.append(model)
        return loss(model, batch)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    train(tmp_path / "compiled", compiled, steps=3, compile=True, loss=peeking)
    assert all(model is not compiled for model in seen)
    for one, two in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_lines_and_bar_tell_where_training_stands(tmp_path):
    said = {}
    for name, kind, terminal in [("lines", Lines, False), ("bar", Bar, True)]:
        text = io.StringIO()
        console = Console(file=text, force_terminal=terminal, width=160)
        train(tmp_path / name, steps=7, held_out=held_out(), progress=kind(console))
        said[name] = text.getvalue()
    assert "step 3/7  loss " in said["lines"]
    assert "tokens/s  left 0:00" in said["lines"]
    assert "step 5  validation  loss " in said["lines"]
    assert "best loss " in said["lines"]
    assert "\x1b" not in said["lines"]
    assert all(words in said["bar"] for words in ("training", "7/7", "tokens/s", "validation", "at step"))


def test_low_precision_on_the_cpu(tmp_path):
    seen = []

    def peeking(model: nn.Module, batch: Tensor) -> Loss:
        seen.append(model(batch).dtype)
        return loss(model, batch)

    model = make()
    train(tmp_path, model, steps=2, precision="bfloat16", loss=peeking)
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_one_process_at_a_time(tmp_path):
    def again(model: nn.Module, batch: Tensor) -> Loss:
        train(tmp_path, steps=2, resume=True)
        return loss(model, batch)

    with pytest.raises(RunError, match="another process is training in"):
        train(tmp_path, steps=2, loss=again)


def test_changed_settings_are_said(tmp_path):
    train(tmp_path, steps=4)
    text = io.StringIO()
    fitted = train(tmp_path, make(), steps=6, resume=True, progress=Lines(Console(file=text)))
    assert fitted.step == 6
    assert "settings changed since the checkpoint: steps" in text.getvalue()
    assert "resumed from step 4" in text.getvalue()


class Nothing(Shuffled):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batches": Nothing()}, "batches gave nothing: it must give at least one batch in each pass"),
        ({"held_out": iter([])}, "held_out gave nothing to validate on"),
        (
            {"held_out": held_out(), "watch": "bleu"},
            r"watch must be one of the figures of validation, \['loss'\]; got 'bleu'",
        ),
        ({"loss": lambda model, batch: Loss(loss(model, batch).total, 0)}, "loss must give a count of more than 0"),
        ({"loss": lambda model, batch: Loss(model(batch), 1)}, "loss must give a total of one number; got shape"),
        ({"model": Tied().requires_grad_(False)}, "model has no parameter that learns"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        train(tmp_path, steps=5, **options)


@pytest.mark.usefixtures("as_installed")
def test_batches_without_a_state_are_refused(tmp_path):
    run = Run.create(tmp_path, {})
    with pytest.raises(TypeError, match=r"batches must have __iter__, state\(\) and resume\(state\); got list"):
        fit(make(), loss, [torch.ones(2, 3)], run=run, settings=TrainSettings())


def test_schedules():
    rate = {
        name: [
            learning_rate(step, TrainSettings(steps=20, warmup=4, learning_rate=2.0, schedule=name, final_share=0.1))
            for step in (1, 2, 4, 9, 12, 20, 30)
        ]
        for name in ("inverse_sqrt", "cosine", "constant")
    }
    assert rate["inverse_sqrt"] == pytest.approx(
        [0.5, 1.0, 2.0, 2 * 2 / 3, 2 * (1 / 3) ** 0.5, 2 * 0.2**0.5, 2 * (4 / 30) ** 0.5]
    )
    assert rate["constant"] == [0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert rate["cosine"] == pytest.approx(
        [0.5, 1.0, 2.0, *[2 * (0.1 + 0.45 * (1 + math.cos(math.pi * t))) for t in (5 / 16, 0.5, 1, 1)]]
    )
    assert learning_rate(1, TrainSettings(warmup=0, learning_rate=3.0)) == 3.0
    with pytest.raises(ValueError, match="step must be 1 or more; got 0"):
        learning_rate(0, TrainSettings())


@pytest.mark.parametrize("options", [{"stepz": 3}, {"steps": 0}, {"schedule": "linear"}, {"ema_decay": 1.0}])
def test_settings_refuse_what_they_do_not_know(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TrainSettings(**options)
    with pytest.raises(ValueError, match="frozen"):
        TrainSettings().steps = 3
