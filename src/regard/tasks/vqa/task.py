"""The `Task` record of visual question answering: functions with which shared code trains, evaluates and predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.requests import full
from regard.tasks.attention_learning import with_baseline
from regard.tasks.task import Figure, Input, Outcome, Task, View
from regard.tasks.vqa.codec import VqaCodec
from regard.tasks.vqa.config import NEEDS, VqaConfig
from regard.tasks.vqa.material import Example, collated, encode, examples_of, input_files, make_material
from regard.tasks.vqa.network import VisualAnswerer, build
from regard.tasks.vqa.predictor import VqaPredictor
from regard.tasks.vqa.presets import PRESETS
from regard.tasks.vqa.scoring import accuracy, judge


def _network(config: VqaConfig, codec: VqaCodec) -> nn.Module:
    network = build(config.model, codec.vocabulary.size, len(codec.answers), learning=config.learning)
    is_hard = config.model.image and config.model.attention != "none" and config.model.normalize == "hard"
    return with_baseline(network, config.learning, is_hard=is_hard)


def _outcome(network: VisualAnswerer, batch: Any, config: VqaConfig, attention: bool) -> Outcome:
    output = network(batch.image, batch.question, weights=full() if attention else None)
    known = batch.answer >= 0
    scores = output.logits.float().log_softmax(-1)
    total = F.nll_loss(scores.flatten(0, 1), batch.answer.flatten(), ignore_index=-1, reduction="sum")
    if not attention:
        return Outcome(total, known.sum())
    maps = [one for one in output.weights if isinstance(one, Tensor)]
    weights = [torch.stack(maps, -2)] if maps else []
    mask = known[..., None, None]
    if output.log_prob is None:
        return Outcome(total, known.sum(), weights, mask)
    reward = scores.gather(-1, batch.answer.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return Outcome(total, known.sum(), weights, mask, output.log_prob.sum(-1)[known], reward[known])


def _validate(predictor: VqaPredictor, examples: Sequence[Example], config: VqaConfig) -> dict[str, float]:
    seen = predictor.ask([(one.pixels, one.question) for one in examples], weights=False)
    return {"accuracy": accuracy(seen, examples)}


VQA = Task(
    name="vqa",
    title="A model that answers questions about pictures",
    about="The answer to a question about a picture, and where it is seen",
    data="easy-VQA's folder, or JSON or JSONL of image, question and answer (each maybe .gz); or a folder of such",
    world="scenes of shapes, questions about colour, shape, count, place and relation, and the region asked about",
    config=VqaConfig,
    presets=PRESETS,
    inputs=(Input("image", "image", "Picture"), Input("question", "text", "Question")),
    figures=(
        Figure("accuracy", "accuracy", percent=True),
        Figure("pointing", "pointing at what is asked about", percent=True),
    ),
    view=View("Where the answer is seen", unit="cell of the picture", parts={"en": "Questions", "zh": "问题"}),
    material=make_material,
    files=input_files,
    codec=lambda directory, config: VqaCodec.load(Path(directory)),
    codec_files=("tokenizer.json", "codec.json"),
    network=_network,
    encode=lambda codec, example, config: encode(codec, example),
    sizes=lambda record: (len(record["question"]),),
    collate=lambda records, config, **shape: collated(records, **shape),
    outcome=_outcome,
    predictor=VqaPredictor,
    validate=_validate,
    judge=judge,
    examples=examples_of,
    asked=lambda example: example.inputs,
    needs=NEEDS,
    aliases={"data": "data.files"},
    validated=400,
)
