"""The settings of text classification: its data, its model and its training."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from regard.tasks.attention_learning import NormalizerName
from regard.tasks.config import (
    FILES,
    WORLD,
    Depth,
    Need,
    ScoreName,
    Settings,
    TaskConfig,
    TaskData,
    Width,
    shared_needs,
)

Content = Literal["states", "words", "both"]


class DataSettings(TaskData):
    """The data of text classification: built-in reviews, or files."""

    files: tuple[Path, ...] = ()
    """CSV, TSV, JSONL, a folder of such or of text files by class; none: the built-in reviews."""
    text: str | None = None
    """Name or number (from 0) of the column with the text; none: guessed."""
    label: str | None = None
    """Name or number (from 0) of the column with the label; none: guessed."""
    merge: dict[str, str] = Field(default_factory=dict)
    """New names of labels, several may get the same; an empty name skips the rows of a label."""
    phrases: bool = False
    """For parse trees with a label at every phrase: whether training includes the phrases."""
    labels: Literal["sentiment", "sentiment3", "subjectivity"] = "sentiment"
    """Label set of the built-in reviews."""
    language: Literal["en", "zh"] = "en"
    """Language of the built-in reviews."""
    tokens: Literal["words", "characters", "subwords"] = "words"
    """The tokens of a text; characters: Chinese characters one by one, other writing as words."""
    vocabulary: int = Field(default=30_000, gt=0, le=10**6)
    """The largest vocabulary size."""
    rarest: PositiveInt = 1
    """Words that occur less often in the training texts are unknown."""
    longest: int = Field(default=400, gt=0, le=10**5)
    """The largest number of tokens of a text; the rest is truncated and counted."""


class ModelSettings(Settings):
    """The model of text classification: an encoder, and attention that pools the encoder's states."""

    kind: Literal["recurrent", "transformer", "ngrams"] = "recurrent"
    """recurrent, transformer, or ngrams: sums of hashed n-grams, which depend on the nearest neighbours only."""
    attention: Literal["none", ScoreName] = "additive"
    """Score of the words; none: a fixed summary replaces attention."""
    normalize: NormalizerName = "softmax"
    """The function from scores to weights."""
    alpha: float = Field(default=1.5, ge=1.0, le=10.0)
    """Alpha of entmax."""
    looks: int = Field(default=1, gt=0, le=64)
    """Number of queries, each with its own weights."""
    attention_size: Width | None = None
    """Hidden size of the score; none: the size."""
    features: int = Field(default=0, ge=0, le=2**16)
    """Size of a hidden layer of products before the classes; 0: none."""
    cell: Literal["gru", "lstm"] = "gru"
    """Cell of the recurrent model: gru or lstm."""
    positions: Literal["sinusoidal", "learned", "relative", "rotary", "alibi", "none"] = "sinusoidal"
    """Positions of the Transformer."""
    norm: Literal["pre", "post"] = "pre"
    """Normalisation of the Transformer."""
    heads: Width = 4
    """Attention heads of the Transformer."""
    feed_forward: Width | None = None
    """Hidden size of the Transformer's layers; none: four times the size."""
    order: int = Field(default=2, ge=1, le=3)
    """Number of words in the longest n-gram."""
    buckets: int = Field(default=100_003, gt=0, le=2**31)
    """Number of vectors that the n-grams of one order share."""
    size: Width = 128
    """Size of the states."""
    embedding: Width | None = None
    """Size of the recurrent model's word vectors; none: the size."""
    layers: Depth = 1
    """Layers of the encoder."""
    keys: Content = "states"
    """The keys of attention: the encoder's states, the words alone, or their sum."""
    values: Content = "states"
    """What the values of attention hold: states, words or both; with words alone, the decisive words must all be
    attended."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout in training."""
    word_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of the words that are replaced by unknown in training."""
    stop_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Words that occur in more than this fraction of the training texts are encoded, but never attended; 1: all are."""


class SentimentConfig(TaskConfig):
    """All settings of a run that trains and evaluates a model of text classification."""

    figures = ("loss", "accuracy")

    task: Literal["sentiment"] = "sentiment"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Label smoothing: fraction of the label's probability that is spread over all classes."""

    @model_validator(mode="after")
    def _characters_of_the_chinese_world(self) -> "SentimentConfig":
        if not self.data.files and self.data.language == "zh" and self.data.tokens == "words":
            object.__setattr__(self, "data", self.data.model_copy(update={"tokens": "characters"}))
        return self


_RECURRENT = Need.value("model.kind", "recurrent")
_TRANSFORMER = Need.value("model.kind", "transformer")
_NGRAMS = Need.value("model.kind", "ngrams")
_ATTENDS = Need("model.attention", lambda name: name != "none", "a model with attention")
_HARD = Need.value("model.normalize", "hard")
_SOFT = Need("model", lambda model: model.attention != "none" and model.normalize != "hard", "soft attention")
NEEDS = {
    **shared_needs(_HARD, _SOFT),
    **dict.fromkeys(("data.labels", "data.language"), (WORLD,)),
    **dict.fromkeys(("data.text", "data.label", "data.merge", "data.phrases"), (FILES,)),
    **dict.fromkeys(("model.normalize", "model.looks", "model.attention_size", "model.stop_share"), (_ATTENDS,)),
    "model.alpha": (_ATTENDS, Need.value("model.normalize", "entmax")),
    **dict.fromkeys(("model.cell", "model.embedding"), (_RECURRENT,)),
    **dict.fromkeys(("model.positions", "model.norm", "model.heads", "model.feed_forward"), (_TRANSFORMER,)),
    **dict.fromkeys(("model.order", "model.buckets"), (_NGRAMS,)),
    **dict.fromkeys(("model.keys", "model.values"), (_ATTENDS, Need.value("model.kind", "recurrent", "transformer"))),
}
"""For each setting that is not always used, the conditions under which it has an effect. Giving such a setting where it
has no effect is an error."""

COUNTED = ("model.looks", "model.attention_size", "model.keys", "model.values")
"""Settings of attention that also determine the number of parameters of the comparable model without attention."""
