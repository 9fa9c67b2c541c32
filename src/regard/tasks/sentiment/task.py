"""The `Task` record of text classification: the functions with which shared code trains, evaluates and predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.requests import full
from regard.data.record_batches import padded
from regard.tasks.attention_learning import with_baseline
from regard.tasks.sentiment.codec import FILES, SentimentCodec
from regard.tasks.sentiment.config import COUNTED, NEEDS, SentimentConfig
from regard.tasks.sentiment.material import Example, encode, examples_of, input_files, make_material
from regard.tasks.sentiment.network import TextClassifier, build
from regard.tasks.sentiment.predictor import SentimentPredictor
from regard.tasks.sentiment.presets import PRESETS
from regard.tasks.sentiment.scoring import accuracy, judge
from regard.tasks.task import Figure, Input, Outcome, Task, View


def _network(config: SentimentConfig, codec: SentimentCodec) -> nn.Module:
    stop = torch.zeros(codec.coder.size, dtype=torch.bool)
    stop[list(codec.stop)] = True
    network = build(
        config.model,
        codec.coder.size,
        len(codec.classes),
        unknown=codec.coder.unknown,
        stop=stop,
        learning=config.learning,
    )
    return with_baseline(network, config.learning, is_hard=config.model.normalize == "hard")


def _collate(records: Sequence[dict[str, Any]], config: SentimentConfig, *, grid: int = 1, rows: int = 0) -> Any:
    return padded(records, {"text": 0}, grid=grid, rows=rows)


def _outcome(network: TextClassifier, batch: Any, config: SentimentConfig, attention: bool) -> Outcome:
    output = network(batch.text, batch.text_lengths, weights=full() if attention else None)
    losses = F.cross_entropy(output.logits.float(), batch.label, label_smoothing=config.smoothing, reduction="none")
    total, count = torch.where(batch.real, losses, 0).sum(), batch.real.sum()
    if not attention:
        return Outcome(total, count)
    weights = [output.weights] if isinstance(output.weights, Tensor) else []
    here = torch.arange(batch.text.shape[1], device=batch.text.device) < batch.text_lengths.unsqueeze(-1)
    if output.log_prob is None:
        return Outcome(total, count, weights, here.unsqueeze(1))
    reward = output.logits.float().log_softmax(-1).gather(-1, batch.label.unsqueeze(-1)).squeeze(-1)
    return Outcome(total, count, weights, here.unsqueeze(1), output.log_prob.sum(-1)[batch.real], reward[batch.real])


def _validate(predictor: SentimentPredictor, examples: Sequence[Example], config: SentimentConfig) -> dict[str, float]:
    examples = [example for example in examples if predictor.codec.encode(example.text)[0]]
    verdicts = predictor.classify([example.text for example in examples], weights=False)
    return {"accuracy": accuracy(verdicts, examples)}


SENTIMENT = Task(
    name="sentiment",
    title="A text classifier",
    about="The class of a text, with a weight for each word",
    data="CSV, TSV or JSONL with text and label (each maybe .gz), a folder of such or of text files by class",
    world="reviews with negation, intensifiers and contrast, and the words that decide",
    config=SentimentConfig,
    presets=PRESETS,
    inputs=(Input("text", "text", "Text"),),
    figures=(Figure("accuracy", "accuracy", percent=True), Figure("rationale_f1", "rationale F1", percent=True)),
    view=View("Which words decide", unit="word", parts={"en": "Texts", "zh": "文本"}),
    material=make_material,
    files=input_files,
    codec=lambda directory, config: SentimentCodec.load(Path(directory)),
    codec_files=FILES,
    network=_network,
    encode=lambda codec, example, config: encode(codec, example),
    sizes=lambda record: (len(record["text"]),),
    collate=_collate,
    outcome=_outcome,
    predictor=lambda network, codec, config: SentimentPredictor(network, codec),
    validate=_validate,
    judge=judge,
    examples=examples_of,
    asked=lambda example: {"text": example.text},
    needs=NEEDS,
    recorded=COUNTED,
    aliases={"model": "model.kind", "data": "data.files"},
    validated=2000,
)
