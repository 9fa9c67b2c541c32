"""What can be chosen about a reader: its data, its model and its training."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from regard.train.settings import TrainSettings

AlignmentName = Literal["none", "dot", "scaled_dot", "cosine", "bilinear", "additive", "hard"]
MatchingName = Literal["none", "dot", "scaled_dot", "cosine", "bilinear", "additive"]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DataSettings(_Settings):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """SQuAD .json, .jsonl or bAbI .txt: one file to train on, then maybe one for validation and one for the test."""
    train: PositiveInt = 20_000
    """Stories of the world to train on."""
    valid: PositiveInt = 500
    """Questions held out for validation, of the world or of files that bring none."""
    test: PositiveInt = 500
    """Questions held out for the test, likewise."""
    longer: NonNegativeInt = 200
    """Stories of the world that are longer than any trained on."""
    sentences: tuple[PositiveInt, PositiveInt] = (5, 9)
    """Sentences of the world's stories, at least and at most."""
    longest: PositiveInt = 400
    """Training questions of files whose passages have more words are left out."""
    vocabulary: PositiveInt = 30_000
    """Words of files that have a vector of their own, at most."""
    rare: PositiveInt = 2
    """... if they occur at least so often in the training questions and passages."""
    batch_tokens: PositiveInt = 2048
    """Words of the passages of a batch, padding counted."""
    seed: int = 1
    """Of the world and of the order."""


class ModelSettings(_Settings):
    """Encoders of passage and question, alignment, self-matching and a span pointer."""

    attention: AlignmentName = "dot"
    """Score by which each word of the passage attends the question; none: it reads the question's mean."""
    matching: MatchingName = "scaled_dot"
    """Score by which each word of the passage attends the passage; none: without this stage."""
    hops: PositiveInt = 1
    """How often each word attends the passage: an answer that follows from several facts may need more than one."""
    exact_match: bool = True
    """Whether a word's input says that it also occurs in the other text."""
    characters: NonNegativeInt = 0
    """Features made of a word's letters, for words that have no vector of their own."""
    size: PositiveInt = 64
    """Of the states, in each direction."""
    embedding: PositiveInt | None = None
    """Of the word vectors; none: the size."""
    layers: PositiveInt = 1
    """Of the encoder."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """In training."""
    longest_answer: PositiveInt = 16
    """Words of an answer, at most."""


class ReadingConfig(_Settings):
    """A whole run."""

    task: Literal["reading"] = "reading"
    preset: str = "tiny"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
