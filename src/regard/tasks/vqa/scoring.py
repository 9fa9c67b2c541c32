"""Metrics of answers: accuracy, also for each type of question, and pointing accuracy of the last hop of attention."""

from collections.abc import Sequence
from typing import Any

from regard.tasks.deletion_test import deletion
from regard.tasks.image_inputs import cell_of, points_at
from regard.tasks.task import Judged
from regard.tasks.vqa.config import VqaConfig
from regard.tasks.vqa.material import Example
from regard.tasks.vqa.predictor import Seen, VqaPredictor

_EXPLAINED = 100  # number of questions whose faithfulness is measured


def accuracy(seen: Sequence[Seen], examples: Sequence[Example]) -> float:
    """Return the fraction of questions whose predicted answer is the gold answer."""
    right = sum(one.answer == example.answer for one, example in zip(seen, examples, strict=True))
    return right / max(1, len(examples))


def accuracy_by_form(seen: Sequence[Seen], examples: Sequence[Example]) -> dict[str, float]:
    """Return the accuracy for each type of generated question, such as "count"; empty if the types are not known."""
    forms: dict[str, list[bool]] = {}
    for one, example in zip(seen, examples, strict=True):
        if example.form:
            forms.setdefault(example.form, []).append(one.answer == example.answer)
    return {form: round(sum(right) / len(right), 4) for form, right in sorted(forms.items())}


def pointing(seen: Sequence[Seen], examples: Sequence[Example]) -> float | None:
    """Return the fraction of questions for which the last hop's most attended cell has its centre in a gold box.

    The gold boxes of a question, `Example.regions`, contain the shapes that show its answer. Questions without boxes or
    attention weights are left out; if none is left, the result is None.
    """
    inside = []
    for one, example in zip(seen, examples, strict=True):
        if one.weights is not None and example.regions:
            size = one.pixels.shape[-2], one.pixels.shape[-1]
            inside.append(points_at(cell_of(one.weights[-1]), example.regions, grid=one.grid, size=size))
    return sum(inside) / len(inside) if inside else None


def judge(predictor: VqaPredictor, examples: Sequence[Example], config: VqaConfig, explain: bool) -> Judged:
    """Return the accuracy over all questions and for each type of question, and the pointing accuracy.

    With `explain`, the faithfulness of the attention weights is also measured: the effect of deleting the most attended
    key.
    """
    seen = predictor.ask([(one.pixels, one.question) for one in examples])
    metrics: dict[str, Any] = {"accuracy": round(accuracy(seen, examples), 4), "questions": len(examples)}
    forms = accuracy_by_form(seen, examples)
    if forms:
        metrics["accuracy_by_form"] = forms
    unseen = sum(predictor.codec.label(one.answer) < 0 for one in examples)
    if unseen:
        metrics["unseen_answers"] = unseen
    share = pointing(seen, examples)
    lost: dict[str, float] = {}
    if explain:
        lost = deletion(
            [(one.weights[-1], predictor.score_of(one)) for one in seen[:_EXPLAINED] if one.weights is not None]
        )
    return Judged(metrics, {} if share is None else {"pointing": round(share, 4)}, lost)
