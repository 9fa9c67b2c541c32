"""The settings of speech recognition: its data, its features, its model, its training and its decoding."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from regard.data.worlds.utterances import MOST
from regard.tasks.config import FILES, WORLD, DecodeSettings, Need, Settings, TaskConfig, TaskData, Width, shared_needs

LONGEST_STEP = 0.04  # longest encoder step in seconds, shorter than the tolerance of 50 ms of the metric `within_50ms`
AttentionName = Literal["none", "location", "monotonic", "additive", "dot", "scaled_dot", "cosine", "bilinear", "hard"]
Said = Annotated[int, Field(gt=0, lt=MOST)]


class DataSettings(TaskData):
    """The data of speech recognition: built-in synthesised utterances, or files."""

    files: tuple[Path, ...] = ()
    """A folder of recordings with transcripts as TSV or JSONL, or in LibriSpeech's layout; none: the built-in
    utterances."""
    rate: int = Field(default=8000, ge=4000, le=48_000)
    """Sample rate to which recordings are resampled."""
    seconds: float = Field(default=30.0, gt=0.0, le=600.0)
    """The longest recording in seconds; longer ones are skipped in training and refused in prediction."""
    words: tuple[Said, Said] = (1, 5)
    """The smallest and largest number of words in an utterance; those of the longer test set have one to three more."""
    symbols: Literal["words", "characters"] = "words"
    """The output symbols: whole words, or characters."""
    vocabulary: int = Field(default=10_000, gt=0, le=10**6)
    """The largest number of symbols in the vocabulary."""
    longest: int = Field(default=200, gt=0, le=2000)
    """The largest number of symbols in a transcript."""
    skip_faults: bool = False
    """Whether transcripts without sound and sounds that cannot be used are counted and skipped."""

    @model_validator(mode="after")
    def _words_in_order(self) -> "DataSettings":
        if self.words[0] > self.words[1]:
            raise ValueError(f"expected the smaller number first, got {list(self.words)} for data.words")
        return self


class FeatureSettings(Settings):
    """The log-mel features of recordings, and their masking in training (SpecAugment)."""

    bands: int = Field(default=40, ge=4, le=256)
    """Bands on the mel scale."""
    hop: float = Field(default=0.01, ge=0.002, le=0.04)
    """Seconds between two frames."""
    window: float = Field(default=0.025, ge=0.005, le=0.2)
    """Seconds of a frame's window."""
    mask_bands: int = Field(default=2, ge=0, le=20)
    """SpecAugment: number of frequency masks in training."""
    band_width: int = Field(default=6, ge=0, le=256)
    """SpecAugment: the largest number of adjacent bands in a frequency mask."""
    mask_spans: int = Field(default=2, ge=0, le=20)
    """SpecAugment: number of time masks in training."""
    span_width: int = Field(default=6, ge=0, le=1000)
    """SpecAugment: the largest number of frames in a time mask."""


class ModelSettings(Settings):
    """The model of speech recognition: a pyramidal encoder, and a recurrent decoder with attention over its output."""

    encoder_size: Width = 64
    """Size of the encoder's states in each direction."""
    stack: int = Field(default=2, gt=0, le=16)
    """Number of neighbouring frames that are concatenated before the first layer."""
    pyramid: int = Field(default=1, ge=0, le=6)
    """Number of layers above the first; each halves the number of steps."""
    attention: AttentionName = "location"
    """location: content and location of the last weights; monotonic: forwards only; a score; hard; none: a summary."""
    filters: int = Field(default=8, gt=0, le=1000)
    """Location-aware attention: number of convolution kernels over the attention weights of the last step."""
    kernel: int = Field(default=15, gt=0, le=1001)
    """Location-aware attention: size of these kernels in encoder steps, an odd number."""
    order: Literal["bahdanau", "luong"] = "bahdanau"
    """Whether the decoder attends before its step or after it."""
    cell: Literal["gru", "lstm"] = "gru"
    """Recurrent cell of the decoder."""
    size: Width = 96
    """Size of the decoder's states."""
    embedding: Width | None = None
    """Size of the symbols' vectors; none: the size."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout between the encoder's layers, on the symbols' vectors and before the output layer."""

    @model_validator(mode="after")
    def _kernel_is_odd(self) -> "ModelSettings":
        if self.kernel % 2 == 0:
            raise ValueError(f"model.kernel must be odd, so that a kernel has a middle, got {self.kernel}")
        return self


class SpeechConfig(TaskConfig):
    """All settings of a run that trains and evaluates a model of speech recognition."""

    figures = ("loss", "exact", "wer")

    task: Literal["speech"] = "speech"
    data: DataSettings = DataSettings()
    features: FeatureSettings = FeatureSettings()
    model: ModelSettings = ModelSettings()
    decode: DecodeSettings = DecodeSettings()
    smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Label smoothing: fraction of the symbol's probability that is spread over all symbols."""

    @property
    def step(self) -> float:
        """Return the duration of an encoder step in seconds."""
        return self.features.hop * self.reduction

    @property
    def reduction(self) -> int:
        """Return the number of frames in an encoder step."""
        return self.model.stack * 2**self.model.pyramid

    @model_validator(mode="after")
    def _steps_are_short(self) -> "SpeechConfig":
        if self.step > LONGEST_STEP + 1e-9:
            raise ValueError(
                f"a step of the encoder is features.hop · model.stack · 2^model.pyramid = {1000 * self.step:.0f} ms, "
                f"at most {1000 * LONGEST_STEP:.0f} ms can be told apart in the figures"
            )
        return self


_LOCATION = Need.value("model.attention", "location")
_HARD = Need.value("model.attention", "hard")
_SOFT = Need("model.attention", lambda name: name not in ("none", "hard"), "soft attention")
NEEDS = {
    **shared_needs(_HARD, _SOFT),
    "data.words": (WORLD,),
    "data.skip_faults": (FILES,),
    "model.filters": (_LOCATION,),
    "model.kernel": (_LOCATION,),
    "features.band_width": (Need("features.mask_bands", bool, "masked bands (features.mask_bands)"),),
    "features.span_width": (Need("features.mask_spans", bool, "masked spans (features.mask_spans)"),),
}
"""For each setting that is not always used, the conditions under which it has an effect. Giving such a setting where it
has no effect is an error."""
