"""Training records and evaluation examples of speech recognition, and the built-in data (generated utterances)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.data.audio.sound_files import Samples, read_sound, wav_bytes
from regard.data.record_batches import padded
from regard.data.worlds import utterances
from regard.data.worlds.utterances import MOST, Times, Utterance
from regard.tasks.speech.codec import SpeechCodec
from regard.tasks.speech.config import SpeechConfig
from regard.tasks.speech.log_mel_frames import Frames, frames_of
from regard.tasks.task import Material
from regard.tasks.text_generation import BOS, EOS, PAD
from regard.tasks.world_examples import parts_of

Record = dict[str, Any]
Say = Callable[[str], Any]
_BEYOND = 3  # the utterances in `Material.longer` have up to this number of words more than training utterances
_NONE = -100  # the number that marks padding in targets; the loss ignores it


@dataclass(frozen=True, eq=False)
class Example:
    """A recording or its file, the words of its transcript, and the times of the words and characters, if known."""

    sound: Samples | Path
    words: tuple[str, ...]
    times: Times = ()  # start and end of each word in seconds
    letter_times: Times = ()  # start and end of each character in seconds; the spaces between words count as characters
    frames: Frames | None = None  # log-mel features, if they are already computed
    rate: int = 8000  # sample rate of `sound` if `sound` holds samples instead of a path

    def samples(self, config: SpeechConfig) -> Samples:
        """Return the recording at the sample rate of the model."""
        if isinstance(self.sound, Path):
            return read_sound(self.sound, config.data.rate, longest=config.data.seconds)
        return self.sound

    def features(self, config: SpeechConfig) -> Frames:
        """Return the log-mel features of the recording."""
        return frames_of(self.samples(config), config) if self.frames is None else self.frames

    def gold(self, codec: SpeechCodec) -> Times:
        """Return the gold start and end of each symbol in seconds; empty if they are not known."""
        return self.times if codec.by == "words" else self.letter_times


def world_material(config: SpeechConfig, codec: SpeechCodec | None) -> Material:
    """Return the built-in data: synthesised utterances with the times of their words and characters."""
    settings, most = config.data, config.data.words[1]
    parts = parts_of(
        utterances.splits,
        settings,
        lambda item: _example(item, config),
        words=settings.words,
        beyond=(most + 1, min(most + _BEYOND, MOST)),
        rate=settings.rate,
    )
    codec = codec or SpeechCodec.build((one.words for one in parts.train), settings.symbols, size=settings.vocabulary)
    records = [encode(codec, one, config) for one in parts.train]
    about = f"{len(records):,} synthesised utterances of the built-in world"
    shown = example_wav(parts.test, config)
    return Material(codec, records, lengths_of(records), parts.valid, parts.test, parts.longer, about, shown)


def _example(item: Utterance, config: SpeechConfig) -> Example:
    return Example(item.samples, item.words, item.times, item.letter_times, frames_of(item.samples, config), item.rate)


def example_wav(examples: Sequence[Example], config: SpeechConfig) -> dict[str, bytes] | None:
    """Return the first recording, as the bytes of a WAV file, as the run's example input; None without examples."""
    return {"sound": wav_bytes(examples[0].samples(config), config.data.rate)} if examples else None


def input_of(example: Example) -> dict[str, Any]:
    """Return the input of an example: the path of its recording, or the bytes of a WAV file."""
    sound = example.sound
    return {"sound": sound if isinstance(sound, Path) else wav_bytes(sound, example.rate)}


def lengths_of(records: Sequence[Record]) -> list[list[int]]:
    """Return the number of frames and the number of symbols of each record, both of which are padded in a batch."""
    return [[len(one[name]) for one in records] for name in ("frames", "target")]


def encode(codec: SpeechCodec, example: Example, config: SpeechConfig) -> Record:
    return record(example.features(config), codec.numbers(example.words)[: config.data.longest])


def record(frames: Frames, numbers: Sequence[int]) -> Record:
    """Return a record: the log-mel features, and the transcript as the decoder's input and as its target."""
    return {"frames": frames, "prefix": [BOS, *numbers], "target": [*numbers, EOS]}


def collate(records: Sequence[Record], config: SpeechConfig, *, grid: int = 1, rows: int = 0) -> Any:
    """Return records as a batch; frames are padded with −1, which is silence."""
    return padded(records, {"frames": -1.0, "prefix": PAD, "target": _NONE}, grid=grid, rows=rows)
