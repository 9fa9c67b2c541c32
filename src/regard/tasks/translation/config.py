"""The settings of a translator: its data, its model, its training and its decoding."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from regard.data.text.bpe import SMALLEST
from regard.tasks.config import FILES, WORLD, Depth, Need, Settings, TaskConfig, TaskData, Width, shared_needs

ATTENTIONS = (
    *("none", "dot", "scaled_dot", "cosine", "bilinear", "additive", "local-m", "local-p", "local-hard", "hard"),
    *("monotonic", "location", "coverage"),
)
AttentionName = Literal[
    "none",
    "dot",
    "scaled_dot",
    "cosine",
    "bilinear",
    "additive",
    "local-m",
    "local-p",
    "local-hard",
    "hard",
    "monotonic",
    "location",
    "coverage",
]

Precision = Literal["float32", "bfloat16", "int8"]
Words = Annotated[int, Field(gt=0, le=1000)]


class DataSettings(TaskData):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """Two line-aligned files, one TSV or JSONL, or a folder with train, val and test files; none: the world."""
    source: str = "en"
    """Suffix of the source files in a folder."""
    target: str = "de"
    """Suffix of the target files in a folder."""
    lengths: tuple[Words, Words] = (3, 30)
    """Words of the world's sentences, at least and at most."""
    longest: int = Field(default=100, gt=0, le=10**6)
    """Pairs of files with more words on either side are left out."""
    ratio: float = Field(default=4.0, gt=1.0)
    """... and pairs of which one side has so many times the words of the other."""
    vocabulary: int = Field(default=8000, ge=SMALLEST, le=10**6)
    """Sub-words of files."""
    shared: bool = True
    """One set of sub-words for both languages."""
    merge_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the merges left out at random when a training text is cut into sub-words."""
    cuts: int = Field(default=8, ge=2, le=1000)
    """With merge_dropout: how many segmentations of each pair are in the training set; one of them is the usual one."""
    end_mark: bool = True
    """Whether a source ends with a mark, which a model may attend when it looks at no word."""
    first_word: Literal[0, 1] = 1
    """Where words are counted from in test.links, the gold alignment beside a test file."""
    tokenize: Literal["auto", "13a", "zh", "none", "char"] = "auto"
    """How BLEU cuts the text: auto is zh for Chinese, none for text that is tokenised already, else 13a."""

    @model_validator(mode="after")
    def _lengths_in_order(self) -> "DataSettings":
        if self.lengths[0] > self.lengths[1]:
            raise ValueError(f"expected the smaller number first, got {list(self.lengths)} for data.lengths")
        return self


class ModelSettings(Settings):
    """A recurrent model with any attention, or a Transformer."""

    kind: Literal["recurrent", "transformer"] = "recurrent"
    """recurrent or transformer."""
    attention: AttentionName = "additive"
    """Score of the recurrent model's attention."""
    order: Literal["bahdanau", "luong"] = "bahdanau"
    """Whether attention is computed before (bahdanau) or after (luong) the step of the recurrent decoder."""
    input_feeding: bool = False
    """Luong's order: the last output joins the next input."""
    cell: Literal["gru", "lstm"] = "gru"
    """Cell of the recurrent model: gru or lstm."""
    reach: int = Field(default=5, gt=0, le=10**6)
    """Reach of local attention to either side."""
    positions: Literal["sinusoidal", "learned", "relative", "rotary", "alibi", "none"] = "sinusoidal"
    """Positions of the Transformer."""
    norm: Literal["pre", "post", "none"] = "pre"
    """Where the Transformer normalises: before each part, after it, or nowhere."""
    residual: bool = True
    """Whether each part of a Transformer layer adds to what it read; false: it replaces it."""
    heads: Width = 4
    """Attention heads of the Transformer."""
    feed_forward: Annotated[int, Field(gt=0, le=2**20)] | None = None
    """Hidden size of the Transformer's layers; none: four times the size."""
    size: Width = 256
    """Size of the states."""
    embedding: Width | None = None
    """Size of the recurrent model's word vectors; none: the size."""
    layers: Depth = 1
    """Layers of encoder and decoder each."""
    decoder_layers: Depth | None = None
    """Layers of the decoder, where it has more or fewer than the encoder."""
    keys: Literal["states", "words", "both"] = "states"
    """What the source is searched by: the encoder's states, the words alone, or their sum."""
    values: Literal["states", "words", "both"] = "states"
    """What is taken from where the decoder looks, likewise: of words alone, it has to look at the word it means."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout in training."""
    inner_dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Dropout of the Transformer's attention weights and inside its feed-forward parts; none: as dropout."""

    @model_validator(mode="after")
    def _heads_part_the_size(self) -> "ModelSettings":
        if self.kind == "transformer" and self.size % self.heads:
            raise ValueError(f"model.size must be a multiple of model.heads: got {self.size} and {self.heads}")
        return self


class DecodeSettings(Settings):
    """How translations are searched."""

    beam: int = Field(default=1, gt=0, le=256)
    """Hypotheses kept; 1 is greedy."""
    length_penalty: float = Field(default=0.6, ge=0.0, le=100.0)
    """Exponent of the penalty that makes longer hypotheses comparable."""
    precision: Precision = "float32"
    """Precision of the matrix products when a run is loaded to translate; int8 is for the CPU."""
    posterior: bool = False
    """Whether gold links are also compared with weights corrected once the word is known, which takes its time."""


class TranslationConfig(TaskConfig):
    """A whole run."""

    figures = ("loss", "bleu")

    task: Literal["translation"] = "translation"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    decode: DecodeSettings = DecodeSettings()
    smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the target's probability that goes to all words alike."""

    @model_validator(mode="after")
    def _languages(self) -> "TranslationConfig":
        """Return the built-in world is English to Chinese, whatever the suffixes of files would be."""
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
"""What has each setting that not every run has. One that was asked for and has no effect is an error."""
