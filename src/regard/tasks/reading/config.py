"""The settings of reading comprehension: its data, its model and its training."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from regard.tasks.config import (
    FILES,
    WORLD,
    Count,
    Depth,
    Need,
    ScoreName,
    Settings,
    TaskConfig,
    TaskData,
    Width,
    shared_needs,
)

AlignmentName = Literal["none", ScoreName, "hard"]


class DataSettings(TaskData):
    """The data of reading comprehension: built-in stories with questions, or files."""

    files: tuple[Path, ...] = ()
    """SQuAD .json, .jsonl or bAbI .txt: one file, training and test, or training, validation and test; or a folder."""
    sentences: tuple[Depth, Depth] = (5, 9)
    """The smallest and largest number of sentences in a story."""
    longest: int = Field(default=400, gt=0, le=10**5)
    """Training questions of files whose passages have more words are skipped."""
    vocabulary: Count = 30_000
    """The largest number of words of files that have their own vector."""
    rare: Count = 2
    """A word of files has its own vector only if it occurs at least this often in training questions and passages."""


class ModelSettings(Settings):
    """The model of reading comprehension: an encoder, attention over the question, self-attention, a span pointer."""

    attention: AlignmentName = "dot"
    """Score of the attention of passage words over the question; none: the question's mean is used."""
    align: Literal["states", "words"] = "states"
    """The vectors by which words of passage and question are compared: the encoder's states, or the word vectors."""
    products: bool = False
    """Whether the product of a passage word and its context of the question is an input too."""
    matching: Literal["none", ScoreName] = "scaled_dot"
    """Score of the self-attention of the passage; none: without this stage."""
    hops: Depth = 1
    """Number of self-attention stages: an answer that follows from several facts may need more than one."""
    exact_match: bool = True
    """Whether a word has a feature for its occurrence in the other text."""
    characters: int = Field(default=0, ge=0, le=2**16)
    """Number of features from a word's letters, for words without their own vector."""
    size: Width = 64
    """Size of the states, in each direction."""
    embedding: Width | None = None
    """Size of the word vectors; none: the size."""
    layers: Depth = 1
    """Layers of the encoder."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout in training."""
    longest_answer: int = Field(default=16, gt=0, le=1000)
    """The largest number of words in an answer."""


class ReadingConfig(TaskConfig):
    """All settings of a run that trains and evaluates a model of reading comprehension."""

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
"""For each setting that is not always used, the conditions under which it has an effect. Giving such a setting where it
has no effect is an error."""
