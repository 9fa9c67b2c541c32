"""The predictor of speech recognition: transcripts of recordings, with the time and probability of each symbol."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core.requests import full
from regard.data.audio.sound_files import Samples, read_sound, wav_bytes
from regard.data.data_files import DataError
from regard.data.record_batches import groups_by_length
from regard.decode.graph_search import Captures
from regard.decode.records import Hypothesis
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.models.frame import EncoderDecoder
from regard.tasks.deletion_test import Score
from regard.tasks.inference import answered, evaluating
from regard.tasks.speech.codec import BLANK, SpeechCodec, Symbols
from regard.tasks.speech.config import SpeechConfig
from regard.tasks.speech.log_mel_frames import Frames, frames_of, interval, spectrogram
from regard.tasks.speech.material import collate, record
from regard.tasks.task import InputError
from regard.tasks.text_generation import NEVER, hypotheses
from regard.train.distributed import in_shares

_FRAMES = 16_384  # largest number of frames in a batch, with padding


@dataclass(frozen=True)
class Word:
    """A word of a transcript, with its probability, and its start and end in seconds (None without attention)."""

    text: str
    probability: float
    start: float | None
    end: float | None
    doubtful: bool  # whether the word contains the least certain symbol of the transcript

    def __str__(self) -> str:
        when = "" if self.start is None else f" {self.start:.2f}–{self.end:.2f} s"
        mark = "*" if self.doubtful else ""
        return f"{mark}{self.text}{when} {self.probability:.2f}{mark}"

    def record(self) -> dict[str, Any]:
        """Return the word as a JSON object."""
        entry: dict[str, Any] = {"word": self.text, "probability": round(self.probability, 4)}
        if self.start is not None and self.end is not None:
            entry |= {"start": round(self.start, 3), "end": round(self.end, 3)}
        return entry


@dataclass(frozen=True, eq=False)
class Transcript:
    """The prediction for a recording: its transcript, with the probability and the attention weights of each symbol.

    `weights` (t, k) has a row for each of the t symbols over k encoder steps, each of `step` seconds.
    """

    text: str
    symbols: tuple[str, ...]
    numbers: tuple[int, ...]
    probabilities: tuple[float, ...]  # probability of each symbol, given the symbols before it
    weights: Tensor | None
    frames: Frames
    step: float
    score: float
    others: tuple[tuple[str, float], ...] = ()  # the next best transcripts with their scores, best first
    samples: Samples | None = None
    rate: int = 8000
    by: Symbols = "words"

    @property
    def answer(self) -> str:
        return self.text

    @property
    def doubtful(self) -> int:
        """Return the index of the least certain symbol."""
        return min(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def times(self) -> list[tuple[float, float, float]]:
        """Return the start, the end and the peak of each symbol in seconds; an empty list without attention."""
        return [] if self.weights is None else [interval(row, self.step) for row in self.weights.tolist()]

    @property
    def words(self) -> list[Word]:
        """Return the words with their times; the probability of a word is the product over its symbols."""
        groups: list[list[int]] = [[]]
        for place, symbol in enumerate(self.symbols):
            if symbol == BLANK or (self.by == "words" and groups[-1]):
                groups.append([])
            if symbol != BLANK:
                groups[-1].append(place)
        times = self.times
        return [
            Word(
                text="".join(self.symbols[place] for place in places),
                probability=math.prod(self.probabilities[place] for place in places),
                start=min(times[place][0] for place in places) if times else None,
                end=max(times[place][1] for place in places) if times else None,
                # The space after a word counts as one of the word's symbols, because it marks the end of the word.
                doubtful=places[0] <= self.doubtful <= places[-1] + (self.by == "characters"),
            )
            for places in groups
            if places
        ]

    @property
    def line(self) -> str:
        """Return the transcript, and its words with times and probabilities, as one line.

        Asterisks mark the least certain word.
        """
        words = ", ".join(map(str, self.words))
        return f"{self.text}  ({words})" if words else self.text

    def record(self) -> dict[str, Any]:
        """Return the transcript as a JSON object, with the times, the probability and the weights of each symbol."""
        symbols = []
        for place, (symbol, chance) in enumerate(zip(self.symbols, self.probabilities, strict=True)):
            entry: dict[str, Any] = {"symbol": symbol, "probability": round(chance, 4)}
            if self.times:
                start, end, peak = self.times[place]
                entry |= {"start": round(start, 3), "end": round(end, 3), "peak": round(peak, 3)}
            symbols.append(entry)
        rows = None if self.weights is None else self.weights.tolist()
        return {
            "answer": self.text,
            "score": round(self.score, 5),
            "words": [word.record() for word in self.words],
            "symbols": symbols,
            "least_certain": self.doubtful if self.symbols else None,
            "step": self.step,
            "weights": None if rows is None else [[round(number, 5) for number in row] for row in rows],
            "others": [{"transcript": text, "score": round(score, 5)} for text, score in self.others],
        }

    def trace(self) -> Trace | None:
        """Return the attention weights; the labels of rows are symbols, those of columns the times of encoder steps."""
        if self.weights is None or not self.symbols:
            return None
        steps = self.weights.shape[1]
        # The last encoder step may extend beyond the last frame: pad the frames with silence.
        missing = -len(self.frames) % -(-len(self.frames) // steps)
        shown = np.pad(self.frames, ((0, missing), (0, 0)), constant_values=-1)
        columns = Labels(
            "frames",
            tuple(f"{place * self.step:.2f} s" for place in range(steps)),
            {"spectrogram": spectrogram(shown), "seconds": self.step, **self._played()},
        )
        rows = Labels("tokens", self.symbols, {"probability": list(self.probabilities)})
        return Trace.from_weights(
            {"attention": self.weights[None].float()}, title=self.text, rows=rows, columns=columns
        )

    def _played(self) -> dict[str, bytes]:
        return {} if self.samples is None else {"sound": wav_bytes(self.samples, self.rate)}


@dataclass(frozen=True, eq=False)
class SpeechPredictor:
    """The predictor of speech recognition: a trained model with its codec."""

    network: EncoderDecoder
    codec: SpeechCodec
    config: SpeechConfig
    captures: Captures = field(default_factory=Captures)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def answers(self, inputs: Sequence[Mapping[str, Any]], *, beam: int | None = None) -> list[Transcript | InputError]:
        """Return a transcript for each sound file, in order; for an unusable file, an `InputError` instead."""

        def transcribed(sounds: list[Samples]) -> list[Transcript]:
            frames = [frames_of(samples, self.config) for samples in sounds]
            return self.search(frames, width=beam, samples=sounds)

        return answered(inputs, self._samples, transcribed)

    def _samples(self, given: Mapping[str, Any]) -> Samples:
        sound, data = given["sound"], self.config.data
        try:
            return read_sound(sound if isinstance(sound, bytes) else Path(sound), data.rate, longest=data.seconds)
        except DataError as error:
            raise InputError(str(error)) from error

    def search(
        self, features: Sequence[Frames], *, width: int | None = None, samples: Sequence[Samples] | None = None
    ) -> list[Transcript]:
        """Return the transcripts of recordings, given as log-mel features, in order.

        Beam search has `width` hypotheses. The sound samples of the recordings, `samples`, are stored in the returned
        transcripts if given. Several workers (processes) share the recordings.
        """
        both = list(zip(features, [None] * len(features) if samples is None else samples, strict=True))
        return in_shares(both, lambda part: self._search(part, width or self.config.decode.beam))

    def _search(self, sounds: Sequence[tuple[Frames, Samples | None]], width: int) -> list[Transcript]:
        features = [frames for frames, _ in sounds]
        transcripts: dict[int, Transcript] = {}
        for places in groups_by_length([len(one) for one in features], tokens=_FRAMES):
            batch = collate([record(features[place], ()) for place in places], self.config).to(self.device)
            with evaluating(self.network):
                state = self.network.start(batch.frames, batch.frames_lengths)
                # A transcript has at most as many symbols as encoder steps, because a step is too short for more than
                # one symbol.
                steps = (batch.frames_lengths // self.config.reduction + 1).clamp_max(self.config.data.longest)
                options: dict[str, Any] = {"width": width, "n_best": width, "never": NEVER, "minimum": 1}
                options |= {"length_penalty": self.config.decode.length_penalty, "captures": self.captures}
                every = hypotheses(self.network.decoder, state, steps, **options)
            for place, best in zip(places, every, strict=True):
                transcripts[place] = self._transcript(features[place], best, sounds[place][1])
        return [transcripts[place] for place in range(len(features))]

    def _transcript(self, frames: Frames, best: Sequence[Hypothesis], samples: Samples | None) -> Transcript:
        decoded = [self.codec.vocabulary.decode(one.tokens) for one in best]
        texts = [self.codec.text(symbols) for symbols in decoded]
        steps = -(-len(frames) // self.config.reduction)
        return Transcript(
            text=texts[0],
            symbols=decoded[0],
            numbers=best[0].tokens,
            probabilities=tuple(best[0].log_probs[: len(decoded[0])].exp().tolist()),
            weights=None if best[0].weights is None else best[0].weights[: len(decoded[0]), :steps].float(),
            frames=frames,
            step=self.config.step,
            score=best[0].score,
            others=tuple((text, one.score) for text, one in zip(texts[1:], best[1:], strict=True)),
            samples=samples,
            rate=self.config.data.rate,
            by=self.codec.by,
        )

    def read(
        self, features: Sequence[Frames], transcripts: Sequence[Sequence[int]]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return log-probabilities (t,) and attention weights (t, encoder steps) for the t symbols of each transcript.

        Recordings are given as log-mel features, transcripts as symbol numbers. The weights are None without attention.
        """
        results: dict[int, tuple[Tensor, Tensor | None]] = {}
        for places in groups_by_length([len(one) for one in features], tokens=_FRAMES):
            records = [record(features[place], transcripts[place]) for place in places]
            batch = collate(records, self.config).to(self.device)
            with evaluating(self.network):
                decoded = self.network(batch.frames, batch.prefix, batch.frames_lengths, weights=full())
                scores = self.network.logits(decoded.states).float().log_softmax(-1)
            chances = scores.gather(-1, batch.target.clamp_min(0).unsqueeze(-1)).squeeze(-1).cpu()
            weights = None if decoded.weights is None else decoded.weights.float().cpu()
            for row, place in enumerate(places):
                count, steps = len(transcripts[place]), -(-len(features[place]) // self.config.reduction)
                results[place] = chances[row, :count], None if weights is None else weights[row, :count, :steps]
        return [results[place] for place in range(len(features))]

    def score_of(self, transcript: Transcript, place: int) -> Score:
        """Return the score function for `deletion`: the log-probability of symbol `place`, with masked encoder steps.

        The frames of encoder steps that the mask deletes are replaced by silence.
        """

        def score(mask: Tensor) -> Tensor:
            shown = mask.repeat_interleave(self.config.reduction, 1)[:, : len(transcript.frames)].numpy()
            silenced = [np.where(row[:, None], transcript.frames, np.float16(-1)) for row in shown]
            read = self.read(silenced, [transcript.numbers] * len(silenced))
            return torch.stack([chances[place] for chances, _ in read])

        return score
