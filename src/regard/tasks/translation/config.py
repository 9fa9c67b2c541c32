"""The settings of translation: its data, its model, its training and its decoding."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from regard.data.text.bpe import SMALLEST
from regard.tasks.config import (
    FILES,
    WORLD,
    DecodeSettings,
    Depth,
    Need,
    ScoreName,
    Settings,
    TaskConfig,
    TaskData,
    Width,
    shared_needs,
)

AttentionName = Literal[
    "none", ScoreName, "local-m", "local-p", "local-hard", "hard", "monotonic", "location", "coverage"
]
Precision = Literal["float32", "bfloat16", "int8"]
Words = Annotated[int, Field(gt=0, le=1000)]


class DataSettings(TaskData):
    """The data of translation: built-in sentence pairs, or files."""

    files: tuple[Path, ...] = ()
    """Two line-aligned files, one TSV or JSONL, or a folder with train, val and test files; none: the built-in
    sentences."""
    source: str = "en"
    """Suffix of the source files in a folder."""
    target: str = "de"
    """Suffix of the target files in a folder."""
    lengths: tuple[Words, Words] = (3, 30)
    """The smallest and largest number of words in a built-in sentence."""
    longest: int = Field(default=100, gt=0, le=10**6)
    """Pairs of files with more words on either side are skipped."""
    ratio: float = Field(default=4.0, gt=1.0)
    """Pairs of files are left out if one side has more than this number of times the words of the other."""
    vocabulary: int = Field(default=8000, ge=SMALLEST, le=10**6)
    """Size of the sub-word vocabulary for files."""
    shared: bool = True
    """Whether both languages share one sub-word vocabulary."""
    merge_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability of skipping a merge when a training text is split into sub-words (BPE-dropout)."""
    cuts: int = Field(default=8, ge=2, le=1000)
    """With merge_dropout: number of segmentations of each pair in the training set; one of them is without dropout."""
    end_mark: bool = True
    """Whether a source ends with a mark, which a model may attend if no word is relevant."""
    first_word: Literal[0, 1] = 1
    """The number of the first word in test.links, the gold alignment beside a test file."""
    tokenize: Literal["auto", "13a", "zh", "none", "char"] = "auto"
    """Tokenisation of BLEU: auto is zh for Chinese, none for text that is already tokenised, else 13a."""

    @model_validator(mode="after")
    def _lengths_in_order(self) -> "DataSettings":
        if self.lengths[0] > self.lengths[1]:
            raise ValueError(f"expected the smaller number first, got {list(self.lengths)} for data.lengths")
        return self


class ModelSettings(Settings):
    """The model of translation: a recurrent model with any attention mechanism, or a Transformer."""

    kind: Literal["recurrent", "transformer"] = "recurrent"
    """recurrent or transformer."""
    attention: AttentionName = "additive"
    """Score of the recurrent model's attention."""
    order: Literal["bahdanau", "luong"] = "bahdanau"
    """Whether attention is computed before (bahdanau) or after (luong) the step of the recurrent decoder."""
    input_feeding: bool = False
    """Luong's order: whether the last output is part of the next input."""
    cell: Literal["gru", "lstm"] = "gru"
    """Cell of the recurrent model: gru or lstm."""
    reach: int = Field(default=5, gt=0, le=10**6)
    """Half width of the window of local attention."""
    positions: Literal["sinusoidal", "learned", "relative", "rotary", "alibi", "none"] = "sinusoidal"
    """Positions of the Transformer."""
    norm: Literal["pre", "post", "none"] = "pre"
    """Where the Transformer normalises: before each part, after it, or nowhere."""
    residual: bool = True
    """Whether Transformer layers have residual connections."""
    heads: Width = 4
    """Attention heads of the Transformer."""
    feed_forward: Annotated[int, Field(gt=0, le=2**20)] | None = None
    """Hidden size of the Transformer's layers; none: four times the size."""
    size: Width = 256
    """Size of the states."""
    embedding: Width | None = None
    """Size of the recurrent model's word vectors; none: the size."""
    layers: Depth = 1
    """Number of layers of encoder and decoder each."""
    decoder_layers: Depth | None = None
    """Number of layers of the decoder, if it differs from the encoder."""
    keys: Literal["states", "words", "both"] = "states"
    """The keys of attention: the encoder's states, the words alone, or their sum."""
    values: Literal["states", "words", "both"] = "states"
    """What the values of attention hold: states, words or both; with words alone, the translated word itself must be
    attended."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout in training."""
    inner_dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Dropout of the Transformer's attention weights and inside its feed-forward parts; none: as dropout."""

    @model_validator(mode="after")
    def _heads_part_the_size(self) -> "ModelSettings":
        if self.kind == "transformer" and self.size % self.heads:
            raise ValueError(f"model.size must be a multiple of model.heads: got {self.size} and {self.heads}")
        return self


class TranslationDecoding(DecodeSettings):
    """Settings of beam search, and the numeric precision of the model during beam search."""

    precision: Precision = "float32"
    """Precision of the matrix products when a run is loaded for translation; int8 is for the CPU."""
    posterior: bool = False
    """Whether gold links are also compared with weights corrected once the word is known, which is slow."""


class TranslationConfig(TaskConfig):
    """All settings of a run that trains and evaluates a translation model."""

    figures = ("loss", "bleu")

    task: Literal["translation"] = "translation"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    decode: TranslationDecoding = TranslationDecoding()
    smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Label smoothing: fraction of the target's probability that is spread over all words."""

    @model_validator(mode="after")
    def _languages(self) -> "TranslationConfig":
        """Set `data.source` and `data.target` to "en" and "zh" if the data are the built-in sentences."""
        if not self.data.files:
            object.__setattr__(self, "data", self.data.model_copy(update={"source": "en", "target": "zh"}))
        return self


_RECURRENT = Need.value("model.kind", "recurrent")
_TRANSFORMER = Need.value("model.kind", "transformer")
_HARD = Need.value("model.attention", "hard", "local-hard")
_SOFT = Need(
    "model", lambda model: model.kind == "transformer" or model.attention not in ("none", "hard"), "soft attention"
)
NEEDS = {
    **shared_needs(_HARD, _SOFT),
    **dict.fromkeys(("model.attention", "model.order", "model.cell", "model.embedding"), (_RECURRENT,)),
    "model.input_feeding": (_RECURRENT, Need.value("model.order", "luong")),
    "model.reach": (_RECURRENT, Need.value("model.attention", "local-m", "local-p", "local-hard")),
    **dict.fromkeys(
        (
            *("model.positions", "model.norm", "model.residual", "model.heads", "model.feed_forward"),
            "model.inner_dropout",
        ),
        (_TRANSFORMER,),
    ),
    "data.lengths": (WORLD,),
    **dict.fromkeys(
        (
            *("data.source", "data.target", "data.longest", "data.ratio", "data.vocabulary", "data.shared"),
            *("data.merge_dropout", "data.first_word"),
        ),
        (FILES,),
    ),
    "data.cuts": (FILES, Need("data.merge_dropout", lambda share: share > 0.0, "data.merge_dropout above 0")),
}
"""For each setting that is not always used, the conditions under which it has an effect. Giving such a setting where it
has no effect is an error."""
