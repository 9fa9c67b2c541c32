"""Training records and evaluation examples of captioning, and the built-in data (generated scenes)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.vision.image_files import Pixels, decode
from regard.data.worlds import scene_captions
from regard.data.worlds.scene_captions import Captioned, Regions
from regard.tasks.captioning.codec import CaptionCodec, Words
from regard.tasks.captioning.config import MOST_OBJECTS, CaptioningConfig
from regard.tasks.task import Material
from regard.tasks.text_generation import BOS, EOS
from regard.tasks.world_examples import parts_of

Record = dict[str, Any]
Say = Callable[[str], Any]
_BEYOND = 2  # the scenes in `Material.longer` have up to this number of shapes more than training scenes


@dataclass(frozen=True, eq=False)
class Example:
    """An image or its file, its captions as words, and the image regions of each word of the first caption."""

    image: Pixels | Path
    captions: tuple[Words, ...]
    regions: tuple[Regions | None, ...] = ()
    maps: Any = None  # feature maps of a frozen convolutional network, if they are already computed

    def pixels(self, size: int) -> Pixels:
        """Return the image as pixels; a file is decoded to `size` × `size` pixels."""
        return decode(self.image, (size, size)) if isinstance(self.image, Path) else self.image


def world_material(config: CaptioningConfig, codec: CaptionCodec | None) -> Material:
    """Return the built-in data: generated drawings of scenes, with captions and gold regions."""
    settings, most = config.data, config.data.objects[1]
    parts = parts_of(
        scene_captions.splits,
        settings,
        _example,
        objects=settings.objects,
        beyond=(most + 1, min(most + _BEYOND, MOST_OBJECTS)),
        size=settings.picture,
    )
    codec = codec or CaptionCodec.build((one.captions[0] for one in parts.train), "words", size=settings.vocabulary)
    records = [encode(codec, one, config) for one in parts.train]
    lengths = [len(one["prefix"]) for one in records]
    about = f"{len(records):,} drawn scenes of the built-in world"
    shown = first_picture(parts.test, settings.picture)
    return Material(codec, records, [lengths], parts.valid, parts.test, parts.longer, about, shown)


def _example(item: Captioned) -> Example:
    return Example(item.scene.image, (item.words,), item.regions)


def first_picture(examples: Sequence[Example], size: int) -> Pixels | None:
    """Return the image of the first example, as the example input of the run; None if there are no examples."""
    return examples[0].pixels(size) if examples else None


def encode(codec: CaptionCodec, example: Example, config: CaptioningConfig) -> Record:
    """Return an example as a record for the network, with the first of its captions."""
    image = example.pixels(config.data.picture) if example.maps is None else np.asarray(example.maps)
    return record(image, codec.vocabulary.encode(example.captions[0])[: config.data.longest])


def record(image: Any, caption: list[int]) -> Record:
    """Return a record: an image or its feature map, and a caption as the decoder's input and as its target."""
    return {"image": image, "prefix": [BOS, *caption], "target": [*caption, EOS]}
