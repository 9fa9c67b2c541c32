"""The settings of a text classifier: its data, its model and its training."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from regard.tasks.attention_learning import NormalizerName
from regard.tasks.config import FILES, WORLD, Depth, Need, Settings, TaskConfig, TaskData, Width, shared_needs

ATTENTIONS = ("none", "dot", "scaled_dot", "cosine", "bilinear", "additive")
AttentionName = Literal["none", "dot", "scaled_dot", "cosine", "bilinear", "additive"]
Content = Literal["states", "words", "both"]


class DataSettings(TaskData):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """CSV, TSV, JSONL, a folder of such or of text files by class; none: the world."""
    text: str | None = None
    """Name or number (from 0) of the column with the text; none: guessed."""
    label: str | None = None
    """Name or number (from 0) of the column with the label; none: guessed."""
    merge: dict[str, str] = Field(default_factory=dict)
    """Other names of labels, several may get the same; an empty name leaves the rows of a label out."""
    phrases: bool = False
    """For parse trees with a label at every phrase: whether training includes the phrases."""
    labels: Literal["sentiment", "sentiment3", "subjectivity"] = "sentiment"
    """Label set of the world."""
    language: Literal["en", "zh"] = "en"
    """Language of the world."""
    tokens: Literal["words", "characters", "subwords"] = "words"
    """What a text is cut into; characters: Chinese characters one by one, other writing as words."""
    vocabulary: int = Field(default=30_000, gt=0, le=10**6)
    """Tokens known, at most."""
    rarest: PositiveInt = 1
    """Words that stand in the training texts less often are unknown."""
    longest: int = Field(default=400, gt=0, le=10**5)
    """Tokens of a text that are read; the rest is cut off and counted."""


class ModelSettings(Settings):
    """An encoder and attention that pools what it read."""

    kind: Literal["recurrent", "transformer", "ngrams"] = "recurrent"
    """recurrent, transformer, or ngrams: sums of hashed n-grams, which know their nearest neighbours only."""
    attention: AttentionName = "additive"
    """Score by which the words are weighted; none: one fixed summary decides."""
    normalize: NormalizerName = "softmax"
    """How scores become weights."""
    alpha: float = Field(default=1.5, ge=1.0, le=10.0)
    """Alpha of entmax."""
    looks: int = Field(default=1, gt=0, le=64)
    """Queries side by side, each with weights of its own."""
    attention_size: Width | None = None
    """Hidden size of the score; none: the size."""
    features: int = Field(default=0, ge=0, le=2**16)
    """Size of a hidden layer of products before the classes; 0: there is none."""
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
    """Words of the longest n-gram."""
    buckets: int = Field(default=100_003, gt=0, le=2**31)
    """Vectors that the n-grams of one order share."""
    size: Width = 128
    """Size of the states."""
    embedding: Width | None = None
    """Size of the recurrent model's word vectors; none: the size."""
    layers: Depth = 1
    """Layers of the encoder."""
    keys: Content = "states"
    """What the text is searched by: the encoder's states, the words alone, or their sum."""
    values: Content = "states"
    """What is taken from where the classifier looks, likewise: of words alone, it has to look at all that decide."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout in training."""
    word_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the words that are unknown in training."""
    stop_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Words that stand in more than this share of the training texts are read, but never attended; 1: all are."""


class SentimentConfig(TaskConfig):
    """A whole run."""

    figures = ("loss", "accuracy")

    task: Literal["sentiment"] = "sentiment"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the label's probability that goes to all classes alike."""

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
"""What has each setting that not every run has. One that was asked for and has no effect is an error."""

COUNTED = ("model.looks", "model.attention_size", "model.keys", "model.values")
"""Settings of attention that also say how many parameters its twin without attention has."""
