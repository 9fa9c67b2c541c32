"""Tests of which checkpoint's weights are the best if the watched metric is equal in several validations."""

from tiny_training import Shuffled, make, summed

from regard.train.loop import fit
from regard.train.run_directory import Run
from regard.train.train_settings import TrainSettings
from regard.train.updates import Loss


def trained(folder, figures, *, held_out=True, **options):
    said = iter(figures)
    settings = TrainSettings(
        steps=8, validate_every=2, log_every=8, watch="bleu", watch_for="highest", learning_rate=0.02, **options
    )
    return fit(
        make(),
        lambda model, batch: Loss(*summed(model, batch)),
        Shuffled(),
        run=Run.create(folder, {"task": "copy"}),
        settings=settings,
        held_out=Shuffled(2, seed=9).batches if held_out else None,
        validate=lambda _: {"bleu": next(said)},
    )


def test_while_bleu_stays_at_nothing_the_loss_tells(tmp_path):
    fitted = trained(tmp_path / "run", [0.0, 0.0, 0.0, 0.0], patience=2)
    assert (fitted.best_step, fitted.best, fitted.ended) == (8, 0.0, "steps")
    fitted = trained(tmp_path / "other", [0.0, 0.0, 1.0, 0.5])
    assert fitted.best_step == 6


def test_without_a_loss_the_first_of_equals_is_kept(tmp_path):
    fitted = trained(tmp_path / "run", [0.0, 0.0, 0.0, 0.0], held_out=False, patience=2)
    assert (fitted.best_step, fitted.ended) == (2, "patience")
