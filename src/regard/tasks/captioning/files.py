"""The user's pictures with captions as material: decoded once; feature maps of a frozen encoder are computed once."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.data.data_files import DataError
from regard.data.vision.captions import CaptionedImage, load_captions
from regard.data.vision.image_files import Pixels
from regard.data.vision.image_store import ImageStore, store_images
from regard.tasks.captioning.codec import CaptionCodec, words_of
from regard.tasks.captioning.config import CaptioningConfig
from regard.tasks.captioning.material import Example, Record, Say, first_picture, record, world_material
from regard.tasks.captioning.network import backbone_of, maps_of
from regard.tasks.image_features import Maps, cached_maps
from regard.tasks.task import Material, SettingError

_SAID = 1024  # pictures between two lines of progress
Part = Sequence[CaptionedImage]
Line = tuple[int, list[int]]  # the place of a picture, and the numbers of a caption


class Lines(Sequence[Record]):
    """Training records of files, one for each caption; the picture is read when a batch needs it."""

    def __init__(self, picture: Callable[[int], Any], lines: Sequence[Line]) -> None:
        self._picture, self._lines = picture, lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, place: Any) -> Any:
        image, caption = self._lines[place]
        return record(self._picture(image), caption)


def make_material(config: CaptioningConfig, cache: Path, codec: CaptionCodec | None, say: Say) -> Material:
    """The pictures of a run; those of files are stored decoded in the folder `cache`."""
    if not config.data.files:
        return world_material(config, codec)
    settings = config.data
    found = load_captions(_one(settings.files), skip_faults=settings.skip_faults)
    say(str(found.report))
    parts = _held_out(found.train, found.valid, found.test, config)
    train, valid, test = ([_captioned(one, settings.tokens) for one in part] for part in parts)
    store, train, valid = _decoded(train, valid, config, Path(cache), say)
    if codec is None:
        captions = (caption for one in train for caption in one.captions)
        codec = CaptionCodec.build(captions, settings.tokens, size=settings.vocabulary, rarest=settings.rarest)
    lines = _lines(train, len(store), codec, config)
    maps = _maps(config, store, Path(cache), say)
    if maps is not None:
        valid = [replace(one, maps=maps[len(train) + place]) for place, one in enumerate(valid)]
    records = Lines(_pictures(store) if maps is None else maps.__getitem__, lines)
    lengths = [len(caption) + 1 for _, caption in lines]
    about = f"{len(train):,} pictures of {settings.files[0]} with {sum(len(one.captions) for one in train):,} captions"
    return Material(codec, records, [lengths], valid, test, [], about, first_picture(test, settings.picture))


def _one(files: Sequence[Path]) -> Path:
    if len(files) != 1:
        raise DataError(f"expected one folder or file of captions, got {len(files)}")
    return Path(files[0])


def _held_out(train: Part, valid: Part, test: Part, config: CaptioningConfig) -> tuple[Part, Part, Part]:
    """The parts; if files have no validation or test part, pictures of the training part are held out."""
    order = list(train)
    random.Random(config.data.seed).shuffle(order)
    parts: dict[str, Part] = {"valid": valid, "test": test}
    for name, count in (("valid", config.data.valid), ("test", config.data.test)):
        if not parts[name]:
            count = min(count, len(train) // 5)
            if not count:
                raise DataError(f"{len(train):,} pictures are too few to hold out a {name} part")
            parts[name], order = order[:count], order[count:]
    return order, parts["valid"], parts["test"]


def _captioned(one: CaptionedImage, tokens: Any) -> Example:
    return Example(one.image, tuple(words_of(caption, tokens) for caption in one.captions))


def _decoded(
    train: list[Example], valid: list[Example], config: CaptioningConfig, cache: Path, say: Say
) -> tuple[ImageStore, list[Example], list[Example]]:
    """The pictures of both parts, one after the other; those that cannot be decoded are left out and counted."""
    size = (config.data.picture, config.data.picture)
    paths = [one.image for one in (*train, *valid) if isinstance(one.image, Path)]

    def progress(done: int, total: int) -> None:
        if done % _SAID < 64:
            say(f"pictures: {done:,} of {total:,}")

    store = store_images(paths, cache, size=size, skip_faults=config.data.skip_faults, progress=progress)
    if not store.faults:
        return store, train, valid
    say(f"{len(store.faults):,} pictures cannot be decoded: {next(iter(store.faults.values()))}")
    bad = {store.paths[place] for place in store.faults}
    train, valid = ([one for one in part if one.image not in bad] for part in (train, valid))
    return _decoded(train, valid, config, cache, say)


def _lines(examples: Sequence[Example], mirrored: int, codec: CaptionCodec, config: CaptioningConfig) -> list[Line]:
    """All captions with the places of their pictures; the mirrored pictures begin at the place `mirrored`."""
    longest = config.data.longest
    lines = [
        (place, codec.vocabulary.encode(caption)[:longest])
        for place, one in enumerate(examples)
        for caption in one.captions
        if caption
    ]
    if not lines:
        raise DataError("no caption with a word is left to train on")
    return lines + [(place + mirrored, caption) for place, caption in lines] if config.data.flip else lines


def _pictures(store: ImageStore) -> Callable[[int], Pixels]:
    """Pictures by index; indices past the last are of the mirrored ones."""
    count = len(store)
    return lambda place: store[place] if place < count else np.ascontiguousarray(store[place - count][..., ::-1])


def _maps(config: CaptioningConfig, store: ImageStore, cache: Path, say: Say) -> Maps | None:
    """The feature maps of all pictures, if the backbone is frozen."""
    model = config.model
    if model.encoder != "efficientnet":
        return None
    try:
        backbone = backbone_of(model, trained=True).eval()
    except ImportError as error:
        raise SettingError(f"model.encoder=efficientnet: {error}") from error
    if not model.frozen:
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone.to(device)
    name = f"efficientnet-lite0 {model.stage}"
    flip = config.data.flip
    return cached_maps(store, lambda x: maps_of(backbone, x), cache, name=name, device=device, flip=flip, say=say)


def input_files(config: CaptioningConfig) -> list[Path]:
    """Every file that a run reads: captions, lists and pictures."""
    if not config.data.files:
        return []
    path = _one(config.data.files)
    found = load_captions(path, skip_faults=config.data.skip_faults)
    texts = sorted(one for one in path.iterdir() if _is_text(one)) if path.is_dir() else [path]
    return [*texts, *(one.image for part in (found.train, found.valid, found.test) for one in part)]


def _is_text(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith((".tsv", ".jsonl", ".token.txt", "Images.txt"))


def examples_of(paths: Sequence[Path], config: CaptioningConfig, codec: CaptionCodec) -> tuple[list[Example], str]:
    """The pictures of other files: of a folder with parts, its test part."""
    found = load_captions(_one(paths), skip_faults=config.data.skip_faults)
    examples = [_captioned(one, codec.by) for one in found.test or found.train]
    return examples, f"{len(examples):,} pictures of {paths[0]}: {found.report}"
