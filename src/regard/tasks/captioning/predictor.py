"""The predictor of captioning: the caption of an image, with attention weights over the image for each word."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core.requests import full
from regard.data.record_batches import padded
from regard.data.vision.image_files import Pixels
from regard.decode.graph_search import Captures
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.models.frame import EncoderDecoder
from regard.tasks.captioning.codec import CaptionCodec
from regard.tasks.captioning.config import CaptioningConfig
from regard.tasks.captioning.material import Example, Record, record
from regard.tasks.deletion_test import Score
from regard.tasks.image_inputs import Grid, cell_labels, covered, read_picture
from regard.tasks.inference import answered, evaluating
from regard.tasks.task import InputError
from regard.tasks.text_generation import NEVER, PAD, hypotheses
from regard.train.distributed import shareable

_AT_ONCE = 64  # largest number of images in a batch
_NONE = -100  # the number that marks padding in targets; the loss ignores it


def collate(records: Sequence[Record], config: CaptioningConfig, *, grid: int = 1, rows: int = 0) -> Any:
    return padded(records, {"prefix": PAD, "target": _NONE}, grid=grid, rows=rows)


@dataclass(frozen=True, eq=False)
class Caption:
    """The prediction for an image: its caption, and attention weights over the cells of the image.

    `weights` (t, k) has a row for each of the t words of the caption; the k cells of the image's grid are in row-major
    order.
    """

    text: str
    words: tuple[str, ...]
    numbers: tuple[int, ...]
    pixels: Pixels | None  # None if feature maps were given instead of an image
    grid: Grid
    weights: Tensor | None
    score: float
    others: tuple[tuple[str, float], ...] = ()  # the next best captions with their scores, best first
    probabilities: tuple[float, ...] | None = None  # probability of each word of the caption, given the words before it

    @property
    def answer(self) -> str:
        return self.text

    @property
    def line(self) -> str:
        return self.text

    def record(self) -> dict[str, Any]:
        """Return the caption as a JSON object, with the attention weights of each word over the cells, row by row."""
        rows = None if self.weights is None else self.weights.tolist()
        return {
            "answer": self.text,
            "score": round(self.score, 5),
            "words": self.words,
            "probabilities": None if self.probabilities is None else [round(one, 4) for one in self.probabilities],
            "grid": self.grid,
            "weights": None if rows is None else [[round(number, 5) for number in row] for row in rows],
            "others": [{"caption": text, "score": round(score, 5)} for text, score in self.others],
        }

    def trace(self) -> Trace | None:
        """Return the attention weights, with words as labels of the rows and image cells as labels of the columns."""
        if self.weights is None or not self.words or self.pixels is None:
            return None
        weights = {"attention": self.weights[None].float()}
        columns = cell_labels(self.pixels, self.grid)
        known = {} if self.probabilities is None else {"probability": list(self.probabilities)}
        return Trace.from_weights(weights, title=self.text, rows=Labels("tokens", self.words, known), columns=columns)


@dataclass(frozen=True, eq=False)
class CaptionPredictor:
    """The predictor of captioning: a trained model with its codec."""

    network: EncoderDecoder
    codec: CaptionCodec
    config: CaptioningConfig
    captures: Captures = field(default_factory=Captures)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def grid(self) -> Grid:
        """Return the numbers of rows and columns of cells of an input image."""
        return self.network.encoder.grid(self.config.data.picture, self.config.data.picture)

    def answers(self, inputs: Sequence[Mapping[str, Any]], *, beam: int | None = None) -> list[Caption | InputError]:
        """Return a caption for each image file, in order; for an unreadable file an `InputError`."""
        size = self.config.data.picture
        return answered(
            inputs,
            lambda one: read_picture(one["image"], (size, size)),
            lambda pictures: self._with_probabilities(self.search(pictures, width=beam)),
        )

    def images(self, examples: Sequence[Example]) -> list[Any]:
        """Return the network's input for each example: its feature maps if they are computed, else its image."""
        size = self.config.data.picture
        return [one.pixels(size) if one.maps is None else one.maps for one in examples]

    @shareable
    def search(self, images: Sequence[Any], *, width: int | None = None) -> list[Caption]:
        """Return the captions of images or feature maps, in order, found by beam search with `width` hypotheses."""
        width = width or self.config.decode.beam
        captions: list[Caption] = []
        with evaluating(self.network):
            for first in range(0, len(images), _AT_ONCE):
                part = [np.asarray(one) for one in images[first : first + _AT_ONCE]]
                state = self.network.start(torch.from_numpy(np.stack(part)).to(self.device))
                limit = torch.full((len(part),), self.config.data.longest, device=self.device)
                options: dict[str, Any] = {"width": width, "n_best": width, "never": NEVER, "minimum": 1}
                options |= {"length_penalty": self.config.decode.length_penalty, "captures": self.captures}
                every = hypotheses(self.network.decoder, state, limit, **options)
                captions += [self._caption(image, best) for image, best in zip(part, every, strict=True)]
        return captions

    def _caption(self, image: Any, best: Sequence[Any]) -> Caption:
        first, decoded = best[0], [self.codec.vocabulary.decode(one.tokens) for one in best]
        weights = None if first.weights is None else first.weights.float()
        texts = [self.codec.text(words) for words in decoded]
        others = tuple((text, one.score) for text, one in zip(texts[1:], best[1:], strict=True))
        pixels = image if image.dtype == np.uint8 else None
        return Caption(texts[0], decoded[0], first.tokens, pixels, self.grid, weights, first.score, others)

    def _with_probabilities(self, captions: Sequence[Caption]) -> list[Caption]:
        """Return the captions, with the probability of each word given the image and the words before it."""
        done: list[Caption] = []
        for first in range(0, len(captions), _AT_ONCE):
            part = captions[first : first + _AT_ONCE]
            chances, _ = self.read([one.pixels for one in part], [one.numbers for one in part])
            known = [tuple(row[: len(one.words)].tolist()) for one, row in zip(part, chances.exp(), strict=True)]
            done += [replace(one, probabilities=row) for one, row in zip(part, known, strict=True)]
        return done

    def read(self, images: Sequence[Any], captions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities (b, t) of the words of given captions, and their attention weights (b, t, k).

        The weights are over the k image cells; they are None without attention. A caption is given as token numbers
        without the end mark; the log-probability of the end mark follows that of the last word.
        """
        records = [record(image, list(caption)) for image, caption in zip(images, captions, strict=True)]
        batch = collate(records, self.config).to(self.device)
        with evaluating(self.network):
            decoded = self.network(batch.image, batch.prefix, weights=full())
            scores = self.network.logits(decoded.states).float().log_softmax(-1)
        chances = scores.gather(-1, batch.target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        weights = decoded.weights
        return chances.cpu(), weights.float().cpu() if isinstance(weights, Tensor) else None

    def score_of(self, caption: Caption, place: int) -> Score:
        """Return the score function for `deletion`: the log-probability of word `place`, with masked image cells.

        Image cells that the mask deletes are covered by the image's mean colour.
        """
        assert caption.pixels is not None
        pixels = torch.from_numpy(caption.pixels)

        def score(mask: Tensor) -> Tensor:
            pictures = covered(pixels, mask, grid=self.grid)
            return self.read(list(pictures.numpy()), [caption.numbers] * len(pictures))[0][:, place]

        return score
