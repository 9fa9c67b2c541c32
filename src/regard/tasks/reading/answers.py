"""Answers from the output of the pointer: text, position, sentence and probability."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.data.text.passages import Passage
from regard.models.span_pointer import Pointed, best_span


@dataclass(frozen=True, eq=False)
class Answer:
    """The best span of a passage. `probability` is p(first word) · p(last word).

    `weights` are the probabilities of each word as the answer's first: the attention of the pointer. `pointed`, the
    word with the largest one, is what `pointing` evaluates; it is the first word of `span` unless the two ends
    disagree.
    """

    passage: Passage
    span: tuple[int, int]
    probability: float
    weights: tuple[float, ...]

    @property
    def text(self) -> str:
        """Return the answer, exactly as in the passage."""
        return self.passage.between(*self.span)

    @property
    def offsets(self) -> tuple[int, int]:
        """Return the characters of the answer: passage.text[start:end]."""
        return self.passage.places[self.span[0]][0], self.passage.places[self.span[1]][1]

    @property
    def sentence(self) -> int:
        """Return the index of the sentence in which the answer begins, from 0."""
        return self.passage.sentences[self.span[0]]

    @property
    def pointed(self) -> int:
        """Return the word with the largest weight."""
        return max(range(len(self.weights)), key=self.weights.__getitem__)

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON."""
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
    """Return the best span of each passage, of at most `longest` words."""
    spans = best_span(pointed.start_logits, pointed.end_logits, longest=longest)
    starts, ends = (logits.float().softmax(-1) for logits in (pointed.start_logits, pointed.end_logits))
    chance = starts.gather(1, spans.start.unsqueeze(1)) * ends.gather(1, spans.end.unsqueeze(1))
    columns = (spans.start.tolist(), spans.end.tolist(), chance.squeeze(1).tolist(), starts.tolist())
    return [
        Answer(passage, (first, last), probability, tuple(weights[: len(passage.words)]))
        for passage, first, last, probability, weights in zip(passages, *columns, strict=True)
    ]
