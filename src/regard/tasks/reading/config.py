"""The settings of a reader: its data, its model and its training."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from regard.tasks.config import FILES, WORLD, Count, Depth, Need, Settings, TaskConfig, TaskData, Width, shared_needs

AlignmentName = Literal["none", "dot", "scaled_dot", "cosine", "bilinear", "additive", "hard"]
MatchingName = Literal["none", "dot", "scaled_dot", "cosine", "bilinear", "additive"]


class DataSettings(TaskData):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """SQuAD .json, .jsonl or bAbI .txt: one file, training and test, or training, validation and test; or a folder."""
    sentences: tuple[Depth, Depth] = (5, 9)
    """Sentences of the world's stories, at least and at most."""
    longest: int = Field(default=400, gt=0, le=10**5)
    """Training questions of files whose passages have more words are left out."""
    vocabulary: Count = 30_000
    """Words of files that have a vector of their own, at most."""
    rare: Count = 2
    """... if they occur at least so often in the training questions and passages."""


class ModelSettings(Settings):
    """Encoders of passage and question, alignment, self-matching and a span pointer."""

    attention: AlignmentName = "dot"
    """Score by which each word of the passage attends the question; none: it reads the question's mean."""
    align: Literal["states", "words"] = "states"
    """What words of the passage and of the question are compared by: the encoder's states, or their vectors alone."""
    products: bool = False
    """Whether a word of the passage also reads its product with what it attends in the question."""
    matching: MatchingName = "scaled_dot"
    """Score by which each word of the passage attends the passage; none: without this stage."""
    hops: Depth = 1
    """How often each word attends the passage: an answer that follows from several facts may need more than one."""
    exact_match: bool = True
    """Whether a word's input says that it also occurs in the other text."""
    characters: int = Field(default=0, ge=0, le=2**16)
    """Features made of a word's letters, for words that have no vector of their own."""
    size: Width = 64
    """Size of the states, in each direction."""
    embedding: Width | None = None
    """Size of the word vectors; none: the size."""
    layers: Depth = 1
    """Layers of the encoder."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout in training."""
    longest_answer: int = Field(default=16, gt=0, le=1000)
    """Words of an answer, at most."""


class ReadingConfig(TaskConfig):
    """A whole run."""

    figures = ("loss", "exact_match", "f1")

    task: Literal["reading"] = "reading"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()


_HARD = Need.value("model.attention", "hard")
_SOFT = Need("model.attention", lambda name: name not in ("none", "hard"), "soft attention")
NEEDS = {
    **shared_needs(_HARD, _SOFT),
    "data.sentences": (WORLD,),
    **dict.fromkeys(("data.longest", "data.vocabulary", "data.rare"), (FILES,)),
    "model.align": (Need("model.attention", lambda name: name != "none", "a model with attention"),),
    "model.hops": (Need("model.matching", lambda name: name != "none", "self-matching (model.matching)"),),
}
"""What has each setting that not every run has. One that was asked for and has no effect is an error."""
