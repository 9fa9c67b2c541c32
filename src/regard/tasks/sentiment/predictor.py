"""The predictor of text classification: the class of a text, with an attention weight for each word."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.core.requests import full
from regard.data.record_batches import groups_by_length, padded
from regard.data.text.tokens import Span, phrases, sentences, summed
from regard.look.trace import Trace
from regard.tasks.deletion_test import Score
from regard.tasks.inference import answered, evaluating
from regard.tasks.sentiment.codec import SentimentCodec
from regard.tasks.sentiment.network import TextClassifier
from regard.tasks.task import InputError
from regard.train.distributed import shareable

_TOKENS = 16_384  # largest number of tokens in a batch, with padding
_CHARACTERS = 1_000_000  # largest number of characters of a text
_NAMED = 3  # number of the most attended words that `Verdict.line` names


@dataclass(frozen=True, eq=False)
class Verdict:
    """The prediction for a text: the probability of each class, and attention weights over the tokens.

    `weights` (looks, k) has a row for each learned query; `spans` are the positions of the k tokens in the text, and
    `numbers` the tokens' numbers in the vocabulary.
    """

    text: str
    spans: tuple[Span, ...]
    numbers: tuple[int, ...]
    classes: tuple[str, ...]
    probabilities: Tensor
    weights: Tensor | None

    @property
    def answer(self) -> str:
        return self.classes[int(self.probabilities.argmax())]

    @property
    def probability(self) -> float:
        return float(self.probabilities.max())

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the tokens as they are written in the text."""
        return tuple(self.text[span.start : span.end] for span in self.spans)

    def word_weights(self) -> list[float]:
        """Return the attention weight of each token, averaged over the queries; an empty list without attention."""
        return [] if self.weights is None else self.weights.mean(0).tolist()

    @property
    def line(self) -> str:
        """Return the class, its probability, and the words with the largest attention weights."""
        weights = self.word_weights()
        first = f"{self.answer} {self.probability:.2f}"
        most = sorted(range(len(weights)), key=lambda place: -weights[place])[:_NAMED]
        named = ", ".join(f"{self.tokens[place]} {weights[place]:.2f}" for place in most)
        return f"{first}: {named}" if named else first

    def record(self) -> dict[str, Any]:
        """Return the prediction as a JSON object; the weight of a phrase or a sentence is the sum over its words."""
        weights = self.word_weights()
        parts = {"phrases": phrases(self.text), "sentences": sentences(self.text)} if weights else {}
        return {
            "text": self.text,
            "answer": self.answer,
            "probability": round(self.probability, 5),
            "probabilities": {
                name: round(float(value), 5) for name, value in zip(self.classes, self.probabilities, strict=True)
            },
            "tokens": self.tokens,
            "weights": [round(weight, 5) for weight in weights] or None,
            **{
                name: [
                    {"text": self.text[span.start : span.end], "weight": round(weight, 5)}
                    for span, weight in zip(spans, summed(weights, self.spans, spans), strict=True)
                ]
                for name, spans in parts.items()
            },
        }

    def trace(self) -> Trace | None:
        """Return the attention weights, with a row for each learned query and the tokens as labels of the columns."""
        if self.weights is None or not self.spans:
            return None
        looks = len(self.weights)
        rows = [self.answer] if looks == 1 else [f"{self.answer}, look {look}" for look in range(looks)]
        weights = {"attention": self.weights[None].float()}
        return Trace.from_weights(weights, title=self.answer, rows=rows, columns=list(self.tokens))


@dataclass(frozen=True, eq=False)
class SentimentPredictor:
    """The predictor of text classification: a trained model with its codec."""

    network: TextClassifier
    codec: SentimentCodec

    def answers(self, inputs: Sequence[Mapping[str, Any]]) -> list[Verdict | InputError]:
        """Return a prediction for each text, in order; for a text that is too long or has no words, an `InputError`."""
        return answered(inputs, self._text, self.classify)

    def _text(self, given: Mapping[str, Any]) -> str:
        text = given["text"]
        if len(text) > _CHARACTERS:
            raise InputError(f"more than {_CHARACTERS:,} characters")
        if not self.codec.encode(text)[0]:
            raise InputError("there are no words in it")
        return text

    @shareable
    def classify(self, texts: Sequence[str], *, weights: bool = True) -> list[Verdict]:
        """Return the classes of texts, in order; every text must have a token. A batch has texts of similar length."""
        coded = [self.codec.encode(text) for text in texts]
        verdicts: dict[int, Verdict] = {}
        for part in groups_by_length([len(numbers) for numbers, _ in coded], tokens=_TOKENS):
            logits, maps = self._run([coded[place][0] for place in part], weights)
            for row, place in enumerate(part):
                numbers, spans = coded[place]
                own = None if maps is None else maps[row, :, : len(numbers)]
                chances = logits[row].softmax(-1)
                verdicts[place] = Verdict(texts[place], tuple(spans), tuple(numbers), self.codec.classes, chances, own)
        return [verdicts[place] for place in range(len(texts))]

    def score_of(self, verdict: Verdict) -> Score:
        """Return the score function for `deletion`: the log-probability of the predicted class without deleted tokens.

        Tokens that the mask deletes are removed from the text, which becomes shorter.
        """
        best = int(verdict.probabilities.argmax())

        def score(mask: Tensor) -> Tensor:
            rows = [
                [number for number, here in zip(verdict.numbers, row, strict=True) if here] for row in mask.tolist()
            ]
            return self._run(rows, False)[0].log_softmax(-1)[:, best]

        return score

    def _run(self, rows: Sequence[Sequence[int]], weights: bool) -> tuple[Tensor, Tensor | None]:
        batch = padded([{"text": row} for row in rows], {"text": self.codec.coder.pad}).to(self.network.stop.device)
        with evaluating(self.network):
            output = self.network(batch.text, batch.text_lengths, weights=full() if weights else None)
        maps = output.weights.float().cpu() if isinstance(output.weights, Tensor) else None
        return output.logits.float().cpu(), maps
