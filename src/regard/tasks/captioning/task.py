"""The `Task` record of captioning: the functions with which shared code trains, evaluates and predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from regard.core.requests import full
from regard.tasks.attention_learning import with_baseline
from regard.tasks.captioning.codec import FILES, CaptionCodec
from regard.tasks.captioning.config import NEEDS, CaptioningConfig
from regard.tasks.captioning.files import examples_of, input_files, make_material
from regard.tasks.captioning.material import Example, encode
from regard.tasks.captioning.network import build
from regard.tasks.captioning.predictor import CaptionPredictor, collate
from regard.tasks.captioning.presets import PRESETS
from regard.tasks.captioning.scoring import judge, text_figures
from regard.tasks.image_inputs import png_of
from regard.tasks.task import Figure, Input, Outcome, Task, View
from regard.tasks.text_generation import word_outcome


def _network(config: CaptioningConfig, codec: CaptionCodec) -> nn.Module:
    network = build(config.model, codec.vocabulary.size, learning=config.learning)
    is_hard = config.model.attention == "hard"
    return with_baseline(network, config.learning, is_hard=is_hard, kinds=codec.vocabulary.size)


def _outcome(network: Any, batch: Any, config: CaptioningConfig, attention: bool) -> Outcome:
    decoded = network(batch.image, batch.prefix, weights=full() if attention else None)
    given: dict[str, Any] = {"smoothing": config.smoothing, "attention": attention, "credit": config.learning.credit}
    return word_outcome(network, decoded, batch.target, keys=None, **given)


def _validate(predictor: CaptionPredictor, examples: Sequence[Example], config: CaptioningConfig) -> dict[str, float]:
    """Return the metrics of greedy captions, which suffice to compare checkpoints."""
    captions = predictor.search(predictor.images(examples), width=1)
    figures = text_figures([one.words for one in captions], [one.captions for one in examples])
    return {name: figures[name] for name in ("exact", "bleu4")}


def _input_of(example: Example) -> dict[str, Any]:
    return {"image": example.image if isinstance(example.image, Path) else png_of(example.image)}


CAPTIONING = Task(
    name="captioning",
    title="A captioner of pictures",
    about="A caption of a picture, with a map of it for each word",
    inputs=(Input("image", "image", "Picture"),),
    data="a folder of pictures with captions as TSV or JSONL, or with Flickr8k's own files",
    world="drawn scenes, and the region that each content word is about",
    config=CaptioningConfig,
    presets=PRESETS,
    figures=(
        Figure("exact", "exactly as a reference", percent=True),
        *(Figure(f"bleu{n}", f"BLEU-{n}") for n in range(1, 5)),
        Figure("sacrebleu", "BLEU by sacrebleu"),
        Figure("pointing", "pointing", percent=True),
    ),
    view=View("Where each word was seen", unit="cell", parts={"en": "Pictures", "zh": "图片"}),
    material=make_material,
    files=input_files,
    codec=lambda directory, config: CaptionCodec.load(Path(directory)),
    codec_files=FILES,
    network=_network,
    encode=encode,
    sizes=lambda record: (len(record["prefix"]),),
    collate=collate,
    outcome=_outcome,
    predictor=CaptionPredictor,
    validate=_validate,
    judge=judge,
    examples=examples_of,
    asked=_input_of,
    options=("beam",),
    needs=NEEDS,
    aliases={"data": "data.files"},
    changeable=("decode.beam", "decode.length_penalty"),
    validated=1000,
)
