"""The `Task` record of translation: the functions with which shared code trains, evaluates and predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.core.requests import full
from regard.data.token_batches import Batch, Ids, collate
from regard.models.frame import EncoderDecoder
from regard.tasks.attention_learning import with_baseline
from regard.tasks.task import Figure, Input, Judged, Outcome, Task, View
from regard.tasks.text_generation import word_outcome
from regard.tasks.translation.codec import TOKENIZERS, Coder, load_coder
from regard.tasks.translation.config import NEEDS, TranslationConfig
from regard.tasks.translation.interactive import LiveTranslator
from regard.tasks.translation.material import Example, examples_of, input_files, make_material
from regard.tasks.translation.network import build
from regard.tasks.translation.predictor import BOS, EOS, PAD, Translator
from regard.tasks.translation.presets import PRESETS
from regard.tasks.translation.scoring import faithfulness, judge, text_figures

_EXPLAINED = 40  # number of translations whose faithfulness is measured
Pair = tuple[Ids, Ids]


def _codec(directory: Path, config: TranslationConfig) -> Coder:
    return load_coder(directory, words=not config.data.files)


def _network(config: TranslationConfig, codec: Coder) -> nn.Module:
    network = build(config.model, codec.sizes, shared=codec.shared, learning=config.learning)
    return with_baseline(network, config.learning, is_hard=config.model.attention in ("hard", "local-hard"))


def _encode(codec: Coder, example: Example, config: TranslationConfig) -> Pair:
    words = example.target
    target = codec.target_words(words)[0] if words else codec.target(example.reference)
    return codec.read_words(example.source).numbers, target


def _sizes(pair: Pair) -> tuple[int, int]:
    return len(pair[0]) + 1, len(pair[1]) + 1


def _collate(pairs: Sequence[Pair], config: TranslationConfig, *, grid: int = 1, rows: int = 0) -> Batch:
    return collate(pairs, pad=PAD, bos=BOS, eos=EOS, source_end=config.data.end_mark, grid=grid, rows=rows)


def _outcome(network: Any, batch: Batch, config: TranslationConfig, attention: bool) -> Outcome:
    wanted = {"weights": full()} if attention else {}
    decoded = network(batch.source, batch.prefix, batch.source_lengths, **wanted)
    keys = _positions(batch.source, batch.source_lengths) if attention else None
    return word_outcome(network, decoded, batch.target, keys=keys, smoothing=config.smoothing, attention=attention)


def _positions(table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(table.shape[1], device=table.device) < lengths.unsqueeze(-1)


def _predictor(network: EncoderDecoder, codec: Coder, config: TranslationConfig) -> Translator:
    return Translator(network, codec, config.decode, config.data.end_mark)


def _loaded(
    network: EncoderDecoder, codec: Coder, config: TranslationConfig, device: Any, precision: str | None = None
) -> Translator:
    """Return the translator in a precision; "auto" is the precision in the run's configuration.

    If the precision is None, `Translator.of` uses the configured precision too, but does not copy or pack a float32
    model.
    """
    chosen = config.decode.precision if precision == "auto" else precision
    return Translator.of(network, codec, config, device, precision=chosen)


def _validate(translator: Translator, examples: Sequence[Example], config: TranslationConfig) -> dict[str, float]:
    """Return the BLEU score of greedy translations, which suffices to compare checkpoints."""
    sources = [translator.coder.read_words(example.source) for example in examples]
    texts = [one.text for one in translator.search(sources, width=1, weights=False)]
    return {"bleu": text_figures(texts, [example.reference for example in examples], config.data.tokenize)["bleu"]}


def _judge(translator: Translator, examples: Sequence[Example], config: TranslationConfig, explain: bool) -> Judged:
    judged = judge(translator, examples, tokenize=config.data.tokenize)
    if not explain:
        return Judged(judged.metrics, judged.attention)
    some = translator.search([one.source for one in judged.translations[:_EXPLAINED]])
    return Judged(judged.metrics, judged.attention, faithfulness(translator, some))


TRANSLATION = Task(
    name="translation",
    title="A translator",
    about="Machine translation, with the alignment of every word",
    data="two line-aligned files, one TSV or JSONL (each maybe .gz), or a folder; none: the built-in English-Chinese",
    world="English to Chinese by one grammar, with word alignments",
    config=TranslationConfig,
    presets=PRESETS,
    inputs=(Input("source", "text", "Sentence"),),
    figures=(
        Figure("bleu", "BLEU"),
        Figure("chrf", "chrF"),
        Figure("exact", "exactly as the reference", percent=True),
        Figure("aer", "alignment error rate", percent=True, better="lower"),
        Figure("aer_posterior", "alignment error rate, the word known", percent=True, better="lower"),
    ),
    view=View("Where each word came from", unit="source word", parts={"en": "Sentences", "zh": "句子"}),
    material=make_material,
    files=input_files,
    codec=_codec,
    codec_files=TOKENIZERS,
    network=_network,
    encode=_encode,
    sizes=_sizes,
    collate=_collate,
    outcome=_outcome,
    predictor=_predictor,
    loaded=_loaded,
    loading=("precision",),
    live=LiveTranslator,
    validate=_validate,
    judge=_judge,
    examples=examples_of,
    asked=lambda example: {"source": " ".join(example.source)},
    options=("beam", "longest"),
    needs=NEEDS,
    recorded=("data.source", "data.target"),
    aliases={"model": "model.kind", "data": "data.files"},
    changeable=("decode.beam", "decode.length_penalty", "decode.precision", "decode.posterior"),
)
