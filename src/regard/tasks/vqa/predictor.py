"""The predictor of visual question answering: answers to questions about images, with attention over the cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.core.requests import full
from regard.data.vision.image_files import Pixels
from regard.look.trace import Trace
from regard.tasks.deletion_test import Score
from regard.tasks.image_inputs import Grid, cell_labels, covered, read_picture
from regard.tasks.inference import answered, evaluating
from regard.tasks.task import InputError
from regard.tasks.vqa.codec import VqaCodec
from regard.tasks.vqa.config import VqaConfig
from regard.tasks.vqa.material import collated
from regard.tasks.vqa.network import VisualAnswerer
from regard.train.distributed import shareable

_AT_ONCE = 64  # largest number of questions in a batch
_WORDS = 200  # largest number of words in a question
_NAMED = 5  # number of the most probable answers that a prediction lists


@dataclass(frozen=True, eq=False)
class Seen:
    """The prediction for a question about an image: probabilities of answers, and attention weights over the cells.

    `probabilities` lists the most probable answers, best first. `weights` (hops, k) has a row for each hop of
    attention; the k cells of `grid` are in the order of reading, row by row.
    """

    pixels: Pixels
    question: str
    probabilities: dict[str, float]
    weights: Tensor | None
    grid: Grid
    unknown: tuple[str, ...] = ()  # words of the question that are not in the vocabulary

    @property
    def answer(self) -> str:
        return next(iter(self.probabilities))

    @property
    def line(self) -> str:
        return f"{self.answer} {self.probabilities[self.answer]:.2f}"

    def record(self) -> dict[str, Any]:
        """Return the prediction as a JSON object, with the weights of each hop over the cells, row by row."""
        record: dict[str, Any] = {
            "question": self.question,
            "answer": self.answer,
            "probability": self.probabilities[self.answer],
            "answers": self.probabilities,
        }
        if self.unknown:
            record["unknown"] = list(self.unknown)
        if self.weights is not None:
            record |= {"grid": list(self.grid), "weights": self.weights.tolist()}
        return record

    def trace(self) -> Trace | None:
        """Return an attention map over the image's cells with a row for each hop; None without attention."""
        if self.weights is None:
            return None
        hops = [f"hop {number}" for number in range(len(self.weights))]
        trace = Trace.from_weights({"cells": self.weights[None]}, title=f"{self.question} {self.line}")
        trace.label(rows=hops, columns=cell_labels(self.pixels, self.grid), of="cells")
        return trace


@dataclass(frozen=True, eq=False)
class VqaPredictor:
    """The predictor of visual question answering: a trained model with its codec."""

    network: VisualAnswerer
    codec: VqaCodec
    config: VqaConfig

    def answers(self, inputs: Sequence[Mapping[str, Any]]) -> list[Seen | InputError]:
        """Return the predictions for questions about image files, in order.

        For an image that cannot be decoded, or a question that is empty or too long, an `InputError` is returned
        instead.
        """
        return answered(inputs, self._read, self.ask)

    def _read(self, given: Mapping[str, Any]) -> tuple[Pixels, str]:
        side, words = self.config.data.picture, len(self.codec.words(given["question"]))
        if not 0 < words <= _WORDS:
            raise InputError(f"the question must have from 1 to {_WORDS} words, it has {words:,}")
        return read_picture(given["image"], (side, side)), given["question"]

    @shareable
    def ask(self, questions: Sequence[tuple[Pixels, str]], *, weights: bool = True) -> list[Seen]:
        """Return the predictions for pairs of an image and a question, in order."""
        seen: list[Seen] = []
        for first in range(0, len(questions), _AT_ONCE):
            seen += self._ask(questions[first : first + _AT_ONCE], weights)
        return seen

    def _ask(self, questions: Sequence[tuple[Pixels, str]], weights: bool) -> list[Seen]:
        records = [
            {"image": pixels, "question": (self.codec.encode(text),), "answer": (-1,)} for pixels, text in questions
        ]
        chances, maps = self._run(records, weights)
        best = chances.exp().topk(min(_NAMED, len(self.codec.answers)))
        seen = []
        for row, (pixels, text) in enumerate(questions):
            named = {
                self.codec.answers[number]: chance
                for number, chance in zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            }
            own = None if maps is None else maps[row]
            grid = self.network.grid(self.config.data.picture)
            seen.append(Seen(pixels, text, named, own, grid, tuple(self.codec.unknown(text))))
        return seen

    def _run(self, records: Sequence[dict[str, Any]], weights: bool) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities (b, answers) and the attention weights (b, hops, k) for b input records.

        Each record consists of an image and exactly one question.
        """
        batch = collated(records).to(next(self.network.parameters()).device)
        with evaluating(self.network):
            output = self.network(batch.image, batch.question, weights=full() if weights else None)
        maps = [one.squeeze(1) for one in output.weights if isinstance(one, Tensor)]
        chances = output.logits.squeeze(1).float().log_softmax(-1).cpu()
        return chances, torch.stack(maps, 1).float().cpu() if maps else None

    def score_of(self, seen: Seen) -> Score:
        """Return the score function for `deletion`: the log-probability of the predicted answer, given a mask of cells.

        Image cells that the mask deletes are covered by the image's mean colour.
        """
        question, label = (self.codec.encode(seen.question),), self.codec.label(seen.answer)

        def score(mask: Tensor) -> Tensor:
            pictures = covered(torch.from_numpy(seen.pixels), mask, grid=seen.grid).numpy()
            records = [{"image": one, "question": question, "answer": (-1,)} for one in pictures]
            return self._run(records, False)[0][:, label]

        return score
