"""Answers from the output of the span pointer: their text, position, sentence and probability."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.data.text.passages import Passage
from regard.models.span_pointer import Pointed, best_span


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to a question: the most likely span of a passage, with `probability` p(first word) · p(last word).

    `span` holds the indices of the first and the last word of the answer. `weights` holds for each word of the passage
    the probability that the answer begins with this word; these probabilities are the attention weights of the span
    pointer. `pointed` is the index of the word with the largest weight. This word may differ from the first word of
    `span`, because the most likely span also depends on the probability of its last word.
    """

    passage: Passage
    span: tuple[int, int]
    probability: float
    weights: tuple[float, ...]

    @property
    def text(self) -> str:
        """Return the text of the answer, exactly as it is in the passage."""
        return self.passage.between(*self.span)

    @property
    def offsets(self) -> tuple[int, int]:
        """Return `start` and `end`, so that passage.text[start:end] is the answer."""
        return self.passage.places[self.span[0]][0], self.passage.places[self.span[1]][1]

    @property
    def sentence(self) -> int:
        """Return the index of the sentence in which the answer begins, from 0."""
        return self.passage.sentences[self.span[0]]

    @property
    def pointed(self) -> int:
        """Return the index of the word with the largest weight."""
        return max(range(len(self.weights)), key=self.weights.__getitem__)

    def record(self) -> dict[str, Any]:
        """Return the answer as a JSON object, with its position and the words and weights of the passage."""
        start, end = self.offsets
        return {
            "answer": self.text,
            "probability": self.probability,
            "start": start,
            "end": end,
            "sentence": self.sentence,
            "sentence_text": self.passage.sentence(self.sentence),
            "words": list(self.passage.words),
            "weights": list(self.weights),
        }


@torch.no_grad()
def answers(pointed: Pointed, passages: Sequence[Passage], *, longest: int) -> list[Answer]:
    """Return the most likely span of at most `longest` words of each passage."""
    spans = best_span(pointed.start_logits, pointed.end_logits, longest=longest)
    starts, ends = (logits.float().softmax(-1) for logits in (pointed.start_logits, pointed.end_logits))
    chance = starts.gather(1, spans.start.unsqueeze(1)) * ends.gather(1, spans.end.unsqueeze(1))
    columns = (spans.start.tolist(), spans.end.tolist(), chance.squeeze(1).tolist(), starts.tolist())
    return [
        Answer(passage, (first, last), probability, tuple(weights[: len(passage.words)]))
        for passage, first, last, probability, weights in zip(passages, *columns, strict=True)
    ]
