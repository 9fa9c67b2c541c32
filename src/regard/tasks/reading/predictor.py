"""The predictor of reading comprehension: answers to questions, as spans of passages, with attention weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.core.requests import full
from regard.data.record_batches import groups_by_length, padded
from regard.data.text.passages import Passage, words
from regard.data.text.questions import Question
from regard.look.trace import Trace
from regard.tasks.deletion_test import Score
from regard.tasks.inference import answered, evaluating
from regard.tasks.reading.answers import Answer, answers
from regard.tasks.reading.codec import ReadingCodec
from regard.tasks.reading.config import ReadingConfig
from regard.tasks.reading.material import encoded
from regard.tasks.reading.network import Reader, Texts
from regard.tasks.task import InputError
from regard.train.distributed import shareable

_TOKENS = 8192  # largest number of passage words in a batch, with padding
_WORDS = 5000  # largest number of words of a passage, and of a question
PADS = dict.fromkeys(
    f"{name}{part}" for name in ("passage", "question") for part in ("", "_features", "_letters")
)  # fields of a record that are padded in a batch


def collated(records: Sequence[Mapping[str, Any]], *, grid: int = 1, rows: int = 0) -> Any:
    return padded(list(records), dict.fromkeys(PADS, 0), grid=grid, rows=rows)


@dataclass(frozen=True, eq=False)
class ReadingPrediction:
    """An answer with its question, and the attention weights (n, m) of n passage words over m question words."""

    best: Answer
    question: Question
    alignment: Tensor | None

    @property
    def answer(self) -> str:
        return self.best.text

    @property
    def line(self) -> str:
        return f"{self.answer} {self.best.probability:.2f}"

    def record(self) -> dict[str, Any]:
        """Return the question and the answer as a JSON object, with the answer's position, sentence and weights."""
        return {"question": self.question.text, **self.best.record()}

    def trace(self) -> Trace | None:
        """Return two attention maps: the span pointer over the passage, and each passage word over the question.

        A model without attention has only the map of the span pointer.
        """
        passage, question = list(self.best.passage.words), list(self.question.question)
        maps = {"answer": torch.tensor(self.best.weights)[None, None]}
        if self.alignment is not None:
            maps["passage to question"] = self.alignment[None]
        trace = Trace.from_weights(maps, title=self.answer)
        trace.label(rows=[self.answer], columns=passage, of="answer")
        if self.alignment is not None:
            trace.label(rows=passage, columns=question, of="passage to question")
        return trace


@dataclass(frozen=True, eq=False)
class ReadingPredictor:
    """The predictor of reading comprehension: a trained model with its codec."""

    network: Reader
    codec: ReadingCodec
    config: ReadingConfig

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def answers(self, inputs: Sequence[Mapping[str, Any]]) -> list[ReadingPrediction | InputError]:
        """Return the answers to questions, in order.

        For an empty or too long passage or question, an `InputError` is returned instead of the answer.
        """
        return answered(inputs, self._question, self.read)

    def _question(self, given: Mapping[str, Any]) -> Question:
        passage, question = self.codec.passage(given["passage"]), words(given["question"])
        for name, count in (("passage", len(passage.words)), ("question", len(question))):
            if not 0 < count <= _WORDS:
                raise InputError(f"the {name} must have from 1 to {_WORDS:,} words, it has {count:,}")
        return Question(passage, question, (), None)

    @shareable
    def read(self, questions: Sequence[Question], *, weights: bool = True) -> list[ReadingPrediction]:
        """Return the answers to questions, in order; a batch has passages of similar length."""
        records = [encoded(self.codec, one, self.config) for one in questions]
        predictions: dict[int, ReadingPrediction] = {}
        for part in groups_by_length([len(record["passage"]) for record in records], tokens=_TOKENS):
            pointed = self._run([records[place] for place in part], weights)
            passages: list[Passage] = [questions[place].passage for place in part]
            best = answers(pointed, passages, longest=self.config.model.longest_answer)
            maps = pointed.weights.float().cpu() if isinstance(pointed.weights, Tensor) else None
            for row, (place, one) in enumerate(zip(part, best, strict=True)):
                sizes = len(one.passage.words), len(questions[place].question)
                own = None if maps is None else maps[row, : sizes[0], : sizes[1]]
                predictions[place] = ReadingPrediction(one, questions[place], own)
        return [predictions[place] for place in range(len(questions))]

    def score_of(self, prediction: ReadingPrediction) -> Score:
        """Return the score function for `deletion`: the log-probability of an answer's first word, with masked words.

        A word of the passage that the mask deletes is replaced by the token for unknown words, so that the answer keeps
        its position. The first word of the answer is never deleted.
        """
        record, first = encoded(self.codec, prediction.question, self.config), prediction.best.span[0]

        def score(mask: Tensor) -> Tensor:
            rows = []
            for row in mask.numpy():
                row = row.copy()
                row[first] = True
                blank = record["passage_features"] * row[:, None]
                rows.append({**record, "passage": record["passage"] * row + 3 * ~row, "passage_features": blank})
            return self._run(rows, False).start_logits.float().cpu().log_softmax(-1)[:, first]

        return score

    def _run(self, records: Sequence[Mapping[str, Any]], weights: bool) -> Any:
        batch = collated(records).to(self.device)
        request = full() if weights and self.config.model.attention != "none" else None
        with evaluating(self.network):
            return self.network(Texts.of(batch, "passage"), Texts.of(batch, "question"), weights=request)
