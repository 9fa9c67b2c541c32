"""The `Task` record of reading comprehension: the functions with which shared code trains, evaluates and predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.requests import full
from regard.data.text.questions import Question
from regard.tasks.attention_learning import hard, with_baseline
from regard.tasks.deletion_test import deletion
from regard.tasks.reading.codec import ReadingCodec
from regard.tasks.reading.config import NEEDS, ReadingConfig
from regard.tasks.reading.material import encoded, examples_of, input_files, make_material
from regard.tasks.reading.network import Reader, Texts, build, loss
from regard.tasks.reading.predictor import ReadingPredictor, collated
from regard.tasks.reading.presets import PRESETS
from regard.tasks.reading.scoring import pointing, scores
from regard.tasks.task import Figure, Input, Judged, Outcome, Task, View

_EXPLAINED = 60  # number of questions whose faithfulness is measured


def _network(config: ReadingConfig, codec: ReadingCodec) -> nn.Module:
    is_hard = config.model.attention == "hard"
    network = build(config.model, codec.vocabulary.size, normalize=hard(config.learning) if is_hard else None)
    return with_baseline(network, config.learning, is_hard=is_hard)


def _collate(records: Sequence[dict[str, Any]], config: ReadingConfig, *, grid: int = 1, rows: int = 0) -> Any:
    return collated(records, grid=grid, rows=rows)


def _outcome(network: Reader, batch: Any, config: ReadingConfig, attention: bool) -> Outcome:
    passage, question = Texts.of(batch, "passage"), Texts.of(batch, "question")
    pointed = network(passage, question, weights=full() if attention else None)
    start, end = (torch.where(batch.real, gold, -1) for gold in (batch.start, batch.end))
    total, count = loss(pointed, start, end), (start >= 0).sum()
    if not attention:
        return Outcome(total, count)
    weights = [pointed.weights] if isinstance(pointed.weights, Tensor) else []
    mask = passage.mask.unsqueeze(-1) & question.mask.unsqueeze(1)
    if pointed.log_prob is None:
        return Outcome(total, count, weights, mask)
    pairs = ((pointed.start_logits, start), (pointed.end_logits, end))
    reward = sum(logits.float().log_softmax(-1).gather(-1, gold.clamp_min(0).unsqueeze(-1)) for logits, gold in pairs)
    assert isinstance(reward, Tensor)
    chosen = torch.where(passage.mask, pointed.log_prob.float(), 0).sum(-1)
    learned = start >= 0
    return Outcome(total, count, weights, mask, chosen[learned], reward.squeeze(-1)[learned])


def _validate(predictor: ReadingPredictor, questions: Sequence[Question], config: ReadingConfig) -> dict[str, float]:
    predictions = predictor.read(questions, weights=False)
    return scores([one.answer for one in predictions], [one.answers for one in questions])


def _judge(predictor: ReadingPredictor, questions: Sequence[Question], config: ReadingConfig, explain: bool) -> Judged:
    predictions = predictor.read(questions, weights=False)
    figures = scores([one.answer for one in predictions], [one.answers for one in questions])
    metrics: dict[str, Any] = {name: round(value, 4) for name, value in figures.items()}
    metrics["questions"] = len(questions)
    known = [
        (one, question)
        for one, question in zip(predictions, questions, strict=True)
        if question.span and question.support
    ]
    attention: dict[str, Any] = {}
    if known:
        places = [one.best.pointed for one, _ in known]
        sentences = [question.passage.sentences for _, question in known]
        answering = [question.passage.sentences[question.span[0]] for _, question in known if question.span]
        attention = {"pointing": round(pointing(places, sentences, answering), 4)}
    lost: dict[str, float] = {}
    if explain:
        lost = deletion([(torch.tensor(_beside(one)), predictor.score_of(one)) for one in predictions[:_EXPLAINED]])
    return Judged(metrics, attention, lost)


def _beside(prediction: Any) -> list[float]:
    """Return the span pointer's weights with 0 for the answer's first word.

    `deletion` must not delete the answer's first word, because it measures the probability of this word.
    """
    first = prediction.best.span[0]
    return [0.0 if place == first else weight for place, weight in enumerate(prediction.best.weights)]


READING = Task(
    name="reading",
    title="A reader",
    about="Reading comprehension: the words of a passage that answer a question",
    data="SQuAD JSON, JSONL of passage, question and answer, or bAbI files (each maybe .gz); or a folder",
    world="stories of people, places and things, and the sentence that answers",
    config=ReadingConfig,
    presets=PRESETS,
    inputs=(Input("passage", "text", "Passage", from_file=True), Input("question", "text", "Question")),
    figures=(
        Figure("exact_match", "exact match", percent=True),
        Figure("f1", "F1", percent=True),
        Figure("pointing", "pointing at the sentence that answers", percent=True),
    ),
    view=View("Where the answer is", unit="word of the passage", parts={"en": "Questions", "zh": "问题"}),
    material=make_material,
    files=input_files,
    codec=lambda directory, config: ReadingCodec.load(Path(directory)),
    codec_files=("tokenizer.json", "codec.json"),
    network=_network,
    encode=encoded,
    sizes=lambda record: (len(record["passage"]),),
    collate=_collate,
    outcome=_outcome,
    predictor=ReadingPredictor,
    validate=_validate,
    judge=_judge,
    examples=examples_of,
    asked=lambda one: {"passage": one.passage.text, "question": one.text},
    needs=NEEDS,
    # model.align is stored even without attention, because it also determines the state size of a model without
    # attention
    recorded=("model.align",),
    aliases={"data": "data.files"},
)
