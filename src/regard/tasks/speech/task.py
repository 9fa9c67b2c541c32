"""The `Task` record of speech recognition: the functions with which shared code trains, evaluates and predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.core.requests import full
from regard.tasks.attention_learning import with_baseline
from regard.tasks.speech.codec import FACTS, TOKENIZER, SpeechCodec
from regard.tasks.speech.config import NEEDS, SpeechConfig
from regard.tasks.speech.files import examples_of, input_files, make_material
from regard.tasks.speech.material import Example, collate, encode, input_of
from regard.tasks.speech.network import build
from regard.tasks.speech.predictor import SpeechPredictor
from regard.tasks.speech.presets import PRESETS
from regard.tasks.speech.scoring import judge, text_figures
from regard.tasks.task import Figure, Input, Outcome, Task, View
from regard.tasks.text_generation import word_outcome


def _network(config: SpeechConfig, codec: SpeechCodec) -> nn.Module:
    return with_baseline(
        build(config, codec.vocabulary.size), config.learning, is_hard=config.model.attention == "hard"
    )


def _outcome(network: Any, batch: Any, config: SpeechConfig, attention: bool) -> Outcome:
    decoded = network(batch.frames, batch.prefix, batch.frames_lengths, weights=full() if attention else None)
    keys = None
    if attention:
        steps = -(-batch.frames.shape[1] // config.reduction)
        real = -(-batch.frames_lengths // config.reduction)
        keys = torch.arange(steps, device=real.device) < real.unsqueeze(-1)
    return word_outcome(network, decoded, batch.target, keys=keys, smoothing=config.smoothing, attention=attention)


def _validate(predictor: SpeechPredictor, examples: Sequence[Example], config: SpeechConfig) -> dict[str, float]:
    """Return the metrics of greedy transcripts, which suffice to compare checkpoints."""
    transcripts = predictor.search([one.features(config) for one in examples], width=1)
    figures = text_figures(transcripts, examples)
    return {name: figures[name] for name in ("exact", "wer")}


SPEECH = Task(
    name="speech",
    config=SpeechConfig,
    title="A recogniser of speech",
    about="What is said in a recording, with the time and the probability of each word or letter",
    inputs=(Input("sound", "sound", "Sound"),),
    figures=(
        Figure("wer", "word error rate", percent=True, better="lower"),
        Figure("cer", "character error rate", percent=True, better="lower"),
        Figure("exact", "without an error", percent=True),
        Figure("within_50ms", "attention within 50 ms", percent=True),
        Figure("least_certain_wrong", "least certain symbol is wrong, where one is", percent=True),
        Figure("at_random_wrong", "a symbol at random is wrong, where one is", percent=True),
    ),
    data="a folder of recordings with transcripts as TSV or JSONL, or in LibriSpeech's layout",
    world="synthesised utterances, and when each word and letter is said",
    presets=PRESETS,
    options=("beam",),
    view=View("Where each symbol was heard", unit="frame", parts={"en": "Recordings", "zh": "录音"}),
    codec=lambda directory, config: SpeechCodec.load(Path(directory)),
    codec_files=(TOKENIZER, FACTS),
    network=_network,
    outcome=_outcome,
    predictor=SpeechPredictor,
    changeable=("decode.beam", "decode.length_penalty"),
    aliases={"data": "data.files"},
    needs=NEEDS,
    validate=_validate,
    validated=1000,
    judge=judge,
    sizes=lambda record: (len(record["target"]), len(record["frames"])),
    encode=encode,
    collate=collate,
    material=make_material,
    files=input_files,
    examples=examples_of,
    asked=input_of,
)
