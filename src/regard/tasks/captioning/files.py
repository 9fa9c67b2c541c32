"""Reads the data of captioning from the user's files; caches decoded images and feature maps of frozen networks."""

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from regard.data.data_files import DataError, only_path
from regard.data.packed import Lazy, Numbers, picked
from regard.data.vision.captions import CaptionedImage, load_captions
from regard.data.vision.image_files import Pixels
from regard.data.vision.image_store import ImageStore, store_images
from regard.tasks.captioning.codec import CaptionCodec, words_of
from regard.tasks.captioning.config import CaptioningConfig
from regard.tasks.captioning.material import Example, Record, Say, first_picture, record, world_material
from regard.tasks.captioning.network import backbone_of, maps_of
from regard.tasks.image_features import Maps, cached_maps
from regard.tasks.task import Material, SettingError

_REPORT_EVERY = 1024  # number of images between two progress messages
Part = Sequence[CaptionedImage]


class Lines(NamedTuple):
    """All training captions as token numbers, and for each caption the index of its image."""

    captions: Numbers
    pictures: NDArray[np.int64]

    def records(self, picture: Callable[[int], Any], mirrored: int | None) -> Sequence[Record]:
        """Return a training record for each caption; `picture(index)` loads an image when a batch needs it.

        If `mirrored` is given, every caption has a second record with the mirrored image, whose index is that of the
        image plus `mirrored`.
        """
        count = len(self.captions)

        def record_at(place: int) -> Record:
            further = mirrored or 0 if place >= count else 0
            return record(picture(int(self.pictures[place % count]) + further), self.captions[place % count])

        return Lazy(count if mirrored is None else 2 * count, record_at)


def make_material(config: CaptioningConfig, cache: Path, codec: CaptionCodec | None, say: Say) -> Material:
    """Return the images and captions of a run; decoded image files are stored in the folder `cache`."""
    if not config.data.files:
        return world_material(config, codec)
    settings = config.data
    dataset = load_captions(_one(settings.files), skip_faults=settings.skip_faults)
    say(str(dataset.report))
    parts = _held_out(dataset.train, dataset.valid, dataset.test, config)
    train, valid, test = (_captioned(part, settings.tokens) for part in parts)
    store, train, valid = _decoded(train, valid, config, Path(cache), say)
    if codec is None:
        captions = (caption for one in train for caption in one.captions)
        codec = CaptionCodec.build(captions, settings.tokens, size=settings.vocabulary, rarest=settings.rarest)
    lines = _lines(train, codec, config)
    maps = _maps(config, store, Path(cache), say)
    if maps is not None:
        seen, known = valid, maps
        valid = Lazy(len(seen), lambda place: replace(seen[place], maps=known[len(train) + place]))
    picture = _pictures(store) if maps is None else maps.__getitem__
    records = lines.records(picture, len(store) if settings.flip else None)
    lengths = np.tile(lines.captions.lengths + 1, 2 if settings.flip else 1)
    about = f"{len(train):,} pictures of {settings.files[0]} with {len(lines.captions):,} captions"
    return Material(codec, records, [lengths], valid, test, [], about, first_picture(test, settings.picture))


def _one(files: Sequence[Path]) -> Path:
    return only_path(files, "folder or file of captions", listed=False)


def _held_out(train: Part, valid: Part, test: Part, config: CaptioningConfig) -> tuple[Part, Part, Part]:
    """Return the training, validation and test splits; a missing split is held out of the training images."""
    order = list(range(len(train)))
    random.Random(config.data.seed).shuffle(order)
    parts: dict[str, Part] = {"valid": valid, "test": test}
    for name, count in (("valid", config.data.valid), ("test", config.data.test)):
        if not parts[name]:
            count = min(count, len(train) // 5)
            if not count:
                raise DataError(f"{len(train):,} pictures are too few to hold out a {name} part")
            parts[name], order = picked(train, order[:count]), order[count:]
    return picked(train, order), parts["valid"], parts["test"]


def _captioned(part: Part, tokens: Any) -> Sequence[Example]:
    """Return the examples of a split; each is created on access, because the words of all captions take much memory."""

    def example(place: int) -> Example:
        one = part[place]
        return Example(one.image, tuple(words_of(caption, tokens) for caption in one.captions))

    return Lazy(len(part), example)


def _decoded(
    train: Sequence[Example], valid: Sequence[Example], config: CaptioningConfig, cache: Path, say: Say
) -> tuple[ImageStore, Sequence[Example], Sequence[Example]]:
    """Return a store with the decoded training and validation images, and both splits without undecodable images.

    The store holds the training images before the validation images. An image that cannot be decoded raises an error,
    unless `data.skip_faults` is set.
    """
    size = (config.data.picture, config.data.picture)
    count = len(train)

    def path(place: int) -> Path:
        image = (train[place] if place < count else valid[place - count]).image
        assert isinstance(image, Path)
        return image

    def progress(done: int, total: int) -> None:
        if done % _REPORT_EVERY < 64:
            say(f"pictures: {done:,} of {total:,}")

    paths = Lazy(count + len(valid), path)
    store = store_images(paths, cache, size=size, skip_faults=config.data.skip_faults, progress=progress)
    if not store.faults:
        return store, train, valid
    say(f"{len(store.faults):,} pictures cannot be decoded: {next(iter(store.faults.values()))}")
    train_rows = [place for place in range(count) if place not in store.faults]
    valid_rows = [place for place in range(len(valid)) if count + place not in store.faults]
    return _decoded(picked(train, train_rows), picked(valid, valid_rows), config, cache, say)


def _lines(examples: Sequence[Example], codec: CaptionCodec, config: CaptioningConfig) -> Lines:
    """Return all captions that are not empty as token numbers, with the indices of their images."""
    captions, pictures = Numbers(), array("q")
    for place, one in enumerate(examples):
        for caption in filter(None, one.captions):
            captions.append(codec.vocabulary.encode(caption)[: config.data.longest])
            pictures.append(place)
    if not len(captions):
        raise DataError("no caption with a word is left to train on")
    return Lines(captions, np.array(pictures, np.int64))


def _pictures(store: ImageStore) -> Callable[[int], Pixels]:
    """Return a function that loads an image by its index; with n images, index n + i is the mirrored image i."""
    count = len(store)
    return lambda place: store[place] if place < count else np.ascontiguousarray(store[place - count][..., ::-1])


def _maps(config: CaptioningConfig, store: ImageStore, cache: Path, say: Say) -> Maps | None:
    """Return the feature maps of all images in the store if the model has a frozen EfficientNet, else None."""
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
    """Return the text files that a run uses (captions and lists of images), without the images.

    The images are not listed, because the image store detects changed images.
    """
    if not config.data.files:
        return []
    path = _one(config.data.files)
    return sorted(one for one in path.iterdir() if _is_text(one)) if path.is_dir() else [path]


def _is_text(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith((".tsv", ".jsonl", ".token.txt", "Images.txt"))


def examples_of(paths: Sequence[Path], config: CaptioningConfig, codec: CaptionCodec) -> tuple[list[Example], str]:
    """Return the captioned images of other files, and a description; of a folder, only the test split is read."""
    dataset = load_captions(_one(paths), skip_faults=config.data.skip_faults)
    examples = list(_captioned(dataset.test or dataset.train, codec.by))
    return examples, f"{len(examples):,} pictures of {paths[0]}: {dataset.report}"
