"""Metrics of text classification: accuracy, and of its attention, rationale F1 and faithfulness."""

from collections.abc import Sequence
from typing import Any

from regard.data.text.tokens import cut, summed
from regard.tasks.deletion_test import deletion
from regard.tasks.sentiment.config import SentimentConfig
from regard.tasks.sentiment.material import Example
from regard.tasks.sentiment.predictor import SentimentPredictor, Verdict
from regard.tasks.task import Judged

RULE = "words whose weight is at least 1 / (number of words), against the gold words"
_EXPLAINED = 100  # number of texts whose faithfulness is measured


def accuracy(verdicts: Sequence[Verdict], examples: Sequence[Example]) -> float:
    """Return the fraction of texts whose predicted class is the label."""
    right = sum(verdict.answer == example.label for verdict, example in zip(verdicts, examples, strict=True))
    return right / max(1, len(examples))


def rationale_f1(verdict: Verdict, example: Example, *, characters: bool) -> float:
    """Return the F1 score of the words with at least the mean attention weight, against the gold decisive words.

    If `characters` is true, a Chinese character counts as a word.
    """
    words = [token.span for token in cut(verdict.text, "characters" if characters else "words")]
    weights = summed(verdict.word_weights(), verdict.spans, words)
    chosen = {span for span, weight in zip(words, weights, strict=True) if weight >= 1 / len(words)}
    gold = set(example.decisive)
    both = len(chosen & gold)
    return 2 * both / (len(chosen) + len(gold)) if both else 0.0


def judge(predictor: SentimentPredictor, examples: Sequence[Example], config: SentimentConfig, explain: bool) -> Judged:
    """Return the accuracy, and rationale F1 if the decisive words are known; with `explain`, also faithfulness."""
    examples = [example for example in examples if predictor.codec.encode(example.text)[0]]
    verdicts = predictor.classify([example.text for example in examples])
    metrics: dict[str, Any] = {"accuracy": round(accuracy(verdicts, examples), 4), "texts": len(examples)}
    known = [(v, e) for v, e in zip(verdicts, examples, strict=True) if e.decisive and v.weights is not None]
    attention: dict[str, Any] = {}
    if known:
        characters = predictor.codec.coder.by == "characters"
        rates = [rationale_f1(verdict, example, characters=characters) for verdict, example in known]
        attention = {"rationale_f1": round(sum(rates) / len(rates), 4), "rule": RULE}
    lost: dict[str, float] = {}
    if explain:
        some = [(v.weights.mean(0), predictor.score_of(v)) for v in verdicts[:_EXPLAINED] if v.weights is not None]
        lost = deletion(some)
    return Judged(metrics, attention, lost)
