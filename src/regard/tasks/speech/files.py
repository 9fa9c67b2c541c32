"""Reads training and evaluation data of speech recognition from the user's files; caches the features of recordings."""

import hashlib
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from regard.data.audio.transcripts import SpokenFile, load_transcripts
from regard.data.data_files import DataError, only_path
from regard.data.packed import Lazy
from regard.tasks.speech.codec import SpeechCodec, words_of
from regard.tasks.speech.config import SpeechConfig
from regard.tasks.speech.log_mel_frames import Frames
from regard.tasks.speech.material import Example, Say, example_wav, record, world_material
from regard.tasks.task import Material

_REPORT_EVERY = 2000  # number of recordings between two progress messages


def make_material(config: SpeechConfig, cache: Path, codec: SpeechCodec | None, say: Say) -> Material:
    """Return the recordings and transcripts of a run; features of recordings are stored in the folder `cache`."""
    settings = config.data
    if not settings.files:
        return world_material(config, codec)
    dataset = load_transcripts(_one(settings.files), skip_faults=settings.skip_faults)
    say(str(dataset.report))
    train, valid, test = _parted(dataset.train, dataset.valid, dataset.test, config)
    examples = _with_features([*train, *valid], config, Path(cache), say)
    learned, validated = examples[: len(train)], examples[len(train) :]
    train, valid = [one for one in learned if one], [one for one in validated if one]
    if not train:
        raise DataError(f"{settings.files[0]}: no recording is left to train on")
    if codec is None:
        codec = SpeechCodec.build((one.words for one in train), settings.symbols, size=settings.vocabulary)
    numbers = [codec.numbers(one.words)[: settings.longest] for one in train]
    lengths = [[len(one.features(config)) for one in train], [len(one) + 1 for one in numbers]]
    judged = [one for one in _with_features(test, config, Path(cache), say) if one]
    about = f"{len(train):,} recordings of {settings.files[0]}"
    shown = example_wav(judged, config)
    records = Lazy(len(train), lambda place: record(train[place].features(config), numbers[place]))
    return Material(codec, records, lengths, valid, judged, [], about, shown)


def _one(files: Sequence[Path]) -> Path:
    return only_path(files, "folder or file of transcripts", listed=False)


Part = Sequence[SpokenFile]


def _parted(train: Part, valid: Part, test: Part, config: SpeechConfig) -> tuple[Part, Part, Part]:
    """Return the training, validation and test splits; a missing split is held out of the training recordings."""
    rest = random.Random(config.data.seed).sample(train, len(train))
    for name, wanted in (("valid", config.data.valid), ("test", config.data.test)):
        if (valid if name == "valid" else test) or not train:
            continue
        count = min(wanted, len(train) // 5)
        if not count:
            raise DataError(f"{len(train):,} recordings are too few to hold out a {name} part")
        held, rest = rest[:count], rest[count:]
        valid, test = (held, test) if name == "valid" else (valid, held)
    return rest, valid, test


def _with_features(part: Part, config: SpeechConfig, cache: Path, say: Say) -> list[Example | None]:
    """Return the examples of a split with their log-mel features; None for each skipped recording.

    The features of the split are stored in one file in the folder `cache`, which is reused if the recordings and the
    settings are unchanged.
    """
    marks = [f"{one.sound} {one.sound.stat().st_size} {one.sound.stat().st_mtime_ns}" for one in part]
    known = f"{config.data.rate} {config.data.seconds} {config.features.model_dump_json()}"
    name = hashlib.blake2b("\n".join([known, *marks]).encode(), digest_size=8).hexdigest()
    path, index = cache / f"frames-{name}.f16", cache / f"frames-{name}.npy"
    if not index.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        _write(path, index, part, config, say)
    counts = np.load(index)
    bands = config.features.bands
    whole = np.memmap(path, np.float16, "r").reshape(-1, bands) if counts.sum() else np.zeros((0, bands), np.float16)
    ends = np.cumsum(counts)
    return [
        _example(one, whole[end - count : end], config) if count else None
        for one, count, end in zip(part, counts.tolist(), ends.tolist(), strict=True)
    ]


def _write(path: Path, index: Path, part: Part, config: SpeechConfig, say: Say) -> None:
    """Write the features of all recordings one after another to the file `path`.

    The file `index` holds the number of frames of each recording; 0 if the recording is skipped.
    """
    counts = np.zeros(len(part), np.int64)
    faults: Counter[str] = Counter()
    with path.with_suffix(".part").open("wb") as file:
        for place, one in enumerate(part):
            frames = _frames(one, config, faults)
            if frames is not None:
                file.write(frames.tobytes())
                counts[place] = len(frames)
            if (place + 1) % _REPORT_EVERY == 0:
                say(f"recordings: {place + 1:,} of {len(part):,}")
    if faults:
        listed = "; ".join(f"{where}" for where in list(faults)[:3])
        say(f"{sum(faults.values()):,} of {len(part):,} recordings are left out: {listed}{' …' * (len(faults) > 3)}")
    os.replace(path.with_suffix(".part"), path)
    with index.with_suffix(".part").open("wb") as file:
        np.save(file, counts)
    # the file `index` is written last, so that the features are complete if it exists
    os.replace(index.with_suffix(".part"), index)


def _frames(one: SpokenFile, config: SpeechConfig, faults: Counter[str]) -> Frames | None:
    """Return the log-mel features of a recording.

    A recording that cannot be used is an error, which names its line in the transcripts; with `data.skip_faults`, it is
    added to `faults`, and None is returned.
    """
    try:
        return _example(one, None, config).features(config)
    except DataError as error:
        if not config.data.skip_faults:
            raise DataError(f"{one.where}: {error} (--set skip_faults=true leaves such recordings out)") from error
        faults[f"{one.where}: {error}"] += 1
        return None


def _example(one: SpokenFile, frames: Frames | None, config: SpeechConfig) -> Example:
    words = words_of(one.text)
    times = one.times if len(one.times) == len(words) else ()
    return Example(one.sound, words, times, frames=frames, rate=config.data.rate)


def input_files(config: SpeechConfig) -> list[Path]:
    """Return every data file that a run uses: transcripts and recordings."""
    if not config.data.files:
        return []
    dataset = load_transcripts(_one(config.data.files), skip_faults=config.data.skip_faults)
    return [*dataset.files, *(one.sound for part in (dataset.train, dataset.valid, dataset.test) for one in part)]


def examples_of(paths: Sequence[Path], config: SpeechConfig, codec: SpeechCodec) -> tuple[list[Example], str]:
    """Return the transcribed recordings of other files, and a description; of a folder, the test split is read."""
    dataset = load_transcripts(_one(paths), skip_faults=config.data.skip_faults)
    faults: Counter[str] = Counter()
    examples: list[Example] = []
    for one in dataset.test or dataset.train:
        frames = _frames(one, config, faults)
        if frames is not None:
            examples.append(_example(one, frames, config))
    left = f", {sum(faults.values()):,} left out" if faults else ""
    return examples, f"{len(examples):,} recordings of {paths[0]}{left}: {dataset.report}"
