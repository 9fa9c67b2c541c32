"""The training and evaluation data of glimpse models: built-in drawn digits, or the files of MNIST."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from regard.data.data_files import DataError, only_path
from regard.data.vision.idx import Labelled, load_mnist
from regard.data.vision.image_files import Pixels
from regard.data.worlds import digits
from regard.data.worlds.digits import SIDES, Digit, ink_box, on_canvas
from regard.data.worlds.shapes import Box
from regard.tasks.glimpse.codec import GlimpseCodec
from regard.tasks.glimpse.config import DataSettings, GlimpseConfig
from regard.tasks.glimpse.grey_images import grey_png
from regard.tasks.task import Material
from regard.tasks.world_examples import Parts

# number of images from which the clutter (parts of other digits) of validation and test examples is cropped
_CLUTTER = 1000


@dataclass(frozen=True, eq=False)
class Example:
    """A grey image (1, height, width), its label, and the bounding box of its strokes."""

    image: Pixels
    label: str
    box: Box


def make_material(
    config: GlimpseConfig, cache: Path, codec: GlimpseCodec | None, say: Callable[[str], None]
) -> Material:
    """Return the images of a run; the folder `cache` is not used, because images are read into memory."""
    parts, about = _files(config.data, say) if config.data.files else _world(config.data)
    if codec is None:
        classes = sorted({one.label for one in parts.train}, key=lambda name: (len(name), name))
        high, wide = (parts.test or parts.valid)[0].image.shape[1:]
        codec = GlimpseCodec(tuple(classes), high, wide)
    records = [encode(codec, one) for one in parts.train]
    lengths = np.ones(len(records), np.int32)
    example = {"image": grey_png(parts.test[0].image)}
    return Material(codec, records, [lengths], parts.valid, parts.test, [], about, example)


def _world(settings: DataSettings) -> tuple[Parts, str]:
    """Return the built-in drawn digits and a description of them.

    Training digits are returned without a canvas, because each training step places them at new positions on a canvas.
    """
    train = digits.splits(settings.seed, train=settings.train, valid=0, test=0).train
    held = digits.splits(settings.seed, train=0, valid=settings.valid, test=settings.test, layout=settings.layout)
    written, valid, test = ([_example(one) for one in part] for part in (train, held.valid, held.test))
    parts = Parts(written, valid, test, [])
    return parts, f"{len(parts.train):,} drawn digits of the built-in world, {settings.layout}"


def _example(digit: Digit) -> Example:
    return Example(digit.image, str(digit.label), digit.box)


def _files(settings: DataSettings, say: Callable[[str], None]) -> tuple[Parts, str]:
    read = load_mnist(_folder(settings.files))
    learned, tested = read["train"], read["test"]
    if len(learned) < 2:
        raise DataError(f"{settings.files[0]}: {len(learned)} images to train on; expected at least 2")
    # Validation images are taken from MNIST's training file, so that MNIST's test file is used only for the final
    # evaluation.
    order = np.random.Generator(np.random.PCG64([settings.seed])).permutation(len(learned))
    count = min(settings.valid, len(learned) // 5 or 1)
    valid = Labelled(learned.images[order[:count]], learned.labels[order[:count]])
    train = [_plain(learned, int(place)) for place in sorted(order[count:])]
    parts = Parts(train, _placed(valid, settings, "valid"), _placed(tested, settings, "test"), [])
    high, wide = learned.images.shape[1:]
    say(f"images of {high}×{wide}: {len(train):,} to train on, {count:,} held out of them, {len(tested):,} to test")
    return parts, f"{len(train):,} images of {settings.files[0]}, {settings.layout}"


def _folder(files: Sequence[Path]) -> Path:
    return only_path(files, "folder with idx files")


def _plain(images: Labelled, place: int) -> Example:
    image = images.images[place]
    return Example(image[None], str(images.labels[place]), ink_box(image))


def _placed(images: Labelled, settings: DataSettings, part: str) -> list[Example]:
    """Return the images as examples; for the layouts "translated" and "cluttered", placed on a canvas by the seed."""
    plain = [_plain(images, place) for place in range(len(images))]
    if settings.layout == "plain":
        return plain
    random, side = Random(f"{settings.seed} {part} {settings.layout}"), SIDES[settings.layout]
    others = [one.image for one in plain[:_CLUTTER]] if settings.layout == "cluttered" else []
    if max(images.images.shape[1:]) > side:
        raise DataError(f"images of {images.images.shape[1:]} pixels do not fit on a canvas of {side}×{side}")
    canvases = [on_canvas(one.image, random, side=side, clutter=others) for one in plain]
    return [Example(image, one.label, box) for one, (image, box) in zip(plain, canvases, strict=True)]


def encode(codec: GlimpseCodec, example: Example) -> dict[str, Any]:
    if example.label not in codec.classes:
        raise DataError(f"label {example.label} is none of the classes {', '.join(codec.classes)}")
    return {"image": example.image, "label": codec.classes.index(example.label)}


def input_files(config: GlimpseConfig) -> list[Path]:
    return sorted(_folder(config.data.files).glob("*-ubyte*")) if config.data.files else []


def examples_of(paths: Sequence[Path], config: GlimpseConfig, codec: GlimpseCodec) -> tuple[list[Example], str]:
    """Return the test images of another folder, placed on a canvas if the images of the run are."""
    tested = load_mnist(_folder(paths))["test"]
    return _placed(tested, config.data, "test"), f"{len(tested):,} test images of {paths[0]}, {config.data.layout}"
