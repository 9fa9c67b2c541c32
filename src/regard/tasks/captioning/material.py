"""Training and evaluation data of a captioner: the built-in scenes, or the user's pictures with captions."""

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
_BEYOND = 2  # `longer` scenes have up to this number of additional shapes


@dataclass(frozen=True, eq=False)
class Example:
    """A picture or its file, the words of its captions, and the regions of the words of the first caption."""

    image: Pixels | Path
    captions: tuple[Words, ...]
    regions: tuple[Regions | None, ...] = ()
    maps: Any = None  # feature maps of a frozen backbone, if computed

    def pixels(self, size: int) -> Pixels:
        """Return the picture at the size of the model."""
        return decode(self.image, (size, size)) if isinstance(self.image, Path) else self.image


def world_material(config: CaptioningConfig, codec: CaptionCodec | None) -> Material:
    """Return drawn scenes with their captions."""
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
    """Return a picture for the example of the run."""
    return examples[0].pixels(size) if examples else None


def encode(codec: CaptionCodec, example: Example, config: CaptioningConfig) -> Record:
    """Return an example as input of the network, with its first caption."""
    image = example.pixels(config.data.picture) if example.maps is None else np.asarray(example.maps)
    return record(image, codec.vocabulary.encode(example.captions[0])[: config.data.longest])


def record(image: Any, caption: list[int]) -> Record:
    """Return a picture or its feature map, the decoder's input, and its target."""
    return {"image": image, "prefix": [BOS, *caption], "target": [*caption, EOS]}
