"""What can be chosen about a text classifier: its data, its model and its training."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from regard.train.settings import TrainSettings

ATTENTIONS = ("none", "dot", "scaled_dot", "cosine", "bilinear", "additive")
AttentionName = Literal["none", "dot", "scaled_dot", "cosine", "bilinear", "additive"]
NormalizerName = Literal["softmax", "sparsemax", "entmax", "sigmoid", "hard"]
Content = Literal["states", "words", "both"]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DataSettings(_Settings):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """CSV, TSV, JSONL, a folder of such or of text files by class; none: the world."""
    text: str | None = None
    """Name or number (from 0) of the column with the text; none: guessed."""
    label: str | None = None
    """Name or number (from 0) of the column with the label; none: guessed."""
    merge: dict[str, str] = {}
    """Other names of labels, several may get the same; an empty name leaves the rows of a label out."""
    phrases: bool = False
    """Of parse trees with a label at every phrase: whether training has the phrases too."""
    labels: Literal["sentiment", "sentiment3", "subjectivity"] = "sentiment"
    """Label set of the world."""
    language: Literal["en", "zh"] = "en"
    """Of the world."""
    train: PositiveInt = 20_000
    """Texts of the world to train on."""
    valid: PositiveInt = 500
    """Texts held out for validation, of the world or of files that bring none."""
    test: PositiveInt = 500
    """Texts held out for the test, likewise."""
    longer: NonNegativeInt = 200
    """Texts of the world that are longer than any trained on."""
    tokens: Literal["words", "characters", "subwords"] = "words"
    """What a text is cut into; characters: Chinese characters one by one, other writing as words."""
    vocabulary: PositiveInt = 30_000
    """Tokens known, at most."""
    rarest: PositiveInt = 1
    """Words that stand in the training texts less often are unknown."""
    longest: PositiveInt = 400
    """Tokens of a text that are read; the rest is cut off and counted."""
    batch_tokens: PositiveInt = 2048
    """Tokens of a batch, padding counted."""
    seed: int = 1
    """Of the world, of the parts held out and of the order."""


class ModelSettings(_Settings):
    """An encoder and attention that pools what it read."""

    kind: Literal["recurrent", "transformer", "ngrams"] = "recurrent"
    """recurrent, transformer, or ngrams: sums of hashed n-grams, which know their nearest neighbours only."""
    attention: AttentionName = "additive"
    """Score by which the words are weighted; none: one fixed summary decides."""
    normalize: NormalizerName = "softmax"
    """How scores become weights."""
    alpha: float = Field(default=1.5, ge=1.0)
    """Of entmax."""
    estimator: Literal["straight_through", "reinforce", "gumbel"] = "straight_through"
    """Of the gradient of hard attention."""
    looks: PositiveInt = 1
    """Queries side by side, each with weights of its own."""
    attention_size: PositiveInt | None = None
    """Hidden size of the score; none: the size."""
    features: NonNegativeInt = 0
    """Size of a hidden layer of products before the classes; 0: there is none."""
    cell: Literal["gru", "lstm"] = "gru"
    """Of the recurrent model."""
    positions: Literal["sinusoidal", "learned", "relative", "rotary", "alibi", "none"] = "sinusoidal"
    """Of the Transformer."""
    norm: Literal["pre", "post"] = "pre"
    """Of the Transformer."""
    heads: PositiveInt = 4
    """Of the Transformer."""
    feed_forward: PositiveInt | None = None
    """Hidden size of the Transformer's layers; none: four times the size."""
    order: int = Field(default=2, ge=1, le=3)
    """Words of the longest n-gram."""
    buckets: PositiveInt = 100_003
    """Vectors that the n-grams of one order share."""
    size: PositiveInt = 128
    """Of the states."""
    embedding: PositiveInt | None = None
    """Of the recurrent model's word vectors; none: the size."""
    layers: PositiveInt = 1
    """Of the encoder."""
    keys: Content = "states"
    """What the text is searched by: the encoder's states, the words alone, or their sum."""
    values: Content = "states"
    """What is taken from where the classifier looks, likewise: of words alone, it has to look at all that decide."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """In training."""
    word_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the words that are unknown in training."""
    stop_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Words that stand in more than this share of the training texts are read, but never attended; 1: all are."""


class SentimentConfig(_Settings):
    """A whole run."""

    task: Literal["sentiment"] = "sentiment"
    preset: str = "tiny"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the label's probability that goes to all classes alike."""
