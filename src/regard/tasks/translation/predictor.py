"""The predictor of translation: translations of texts, with their attention weights over the source."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.text.alignment import Link, links_from_weights
from regard.data.token_batches import Batch, collate
from regard.decode.graph_search import Captures
from regard.decode.records import Hypothesis
from regard.look.trace import Trace
from regard.models.frame import EncoderDecoder
from regard.models.quantized import pack, quantize
from regard.models.transformer.encoder_decoder import TransformerDecoder
from regard.nn.positions import LearnedPositions
from regard.tasks.inference import answered, evaluating
from regard.tasks.task import InputError, SettingError
from regard.tasks.text_generation import BOS, EOS, PAD, hypotheses
from regard.tasks.translation.codec import NO_WORDS, TOKENIZERS, Coder, Reading, Words, load_coder
from regard.tasks.translation.config import Precision, TranslationConfig, TranslationDecoding
from regard.tasks.translation.network import build
from regard.train.distributed import shareable
from regard.train.run_directory import Run

END = "∎"  # label of the end mark of a source
LONGEST = 1000  # default of the largest number of source tokens of a text
_BATCH = 4096  # largest number of source tokens × hypotheses in a batch
CHARACTERS = 64  # texts with more characters per allowed token are rejected before tokenisation
_SEARCHED = 64 * LONGEST  # default of the largest product of source tokens and hypotheses of one text


@dataclass(frozen=True, eq=False)
class Translation:
    """The translation of one text.

    `weights` (t, s) are the attention weights of each target token over the source tokens; the last source token may be
    the end mark.
    """

    source: Reading
    text: str
    numbers: tuple[int, ...]
    labels: tuple[str, ...]
    weights: Tensor | None
    score: float
    others: tuple[tuple[str, float], ...] = ()  # the next best translations with their scores, best first
    source_words: Words = NO_WORDS  # the words that the source tokens form
    words: Words = NO_WORDS  # the words that the target tokens form

    @property
    def answer(self) -> str:
        return self.text

    @property
    def line(self) -> str:
        return self.text

    def record(self) -> dict[str, Any]:
        """Return the translation as a JSON object.

        The pairs in "alignment" are the indices of a source word and a target word, counted from 0.
        """
        words: list[Link] = []
        pieces: list[Link] = []
        if self.weights is not None:
            owners = {"source": self.source_words.owners, "target": self.words.owners}
            words = sorted(links_from_weights(self.weights, **owners))
            pieces = sorted(links_from_weights(self.weights[:, : len(self.source.labels)]))
        rows = None if self.weights is None else self.weights.tolist()
        return {
            "source": " ".join(self.source.words),
            "translation": self.text,
            "score": round(self.score, 5),
            "source_words": self.source_words.words,
            "target_words": self.words.words,
            "alignment": words,
            "source_pieces": self.columns,
            "target_pieces": self.labels,
            "piece_alignment": pieces,
            "weights": None if rows is None else [[round(number, 5) for number in row] for row in rows],
        }

    def trace(self) -> Trace | None:
        """Return the attention weights, with target tokens as labels of rows and source tokens as labels of columns."""
        if self.weights is None or not self.labels:
            return None
        weights = {"attention": self.weights[None].float()}
        return Trace.from_weights(weights, title=self.text, rows=list(self.labels), columns=list(self.columns))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the labels of the columns of `weights`: the source tokens, and the end mark if there is one."""
        marked = self.weights is not None and self.weights.shape[-1] > len(self.source.labels)
        return (*self.source.labels, END) if marked else self.source.labels


@dataclass(frozen=True, eq=False)
class Translator:
    """The predictor of translation: a trained model with its codec, which translates texts by beam search."""

    model: EncoderDecoder
    coder: Coder
    settings: TranslationDecoding
    end_mark: bool = True
    # a cache of captured CUDA graphs, which beam searches of similar size share
    captures: Captures = field(default_factory=Captures)
    exact: EncoderDecoder | None = None  # the trained model, if `model` is a copy of that model in another precision
    prepared: str | None = None  # the precision to which `in_precision` converted `model`
    # the device of the model in all precisions but int8, which is for the CPU; None: the device of `model`
    place: torch.device | None = None

    @classmethod
    def load(
        cls, run: Run, device: torch.device | str | None = None, *, precision: Precision | str | None = None
    ) -> "Translator":
        """Return the translator of a run, on the GPU if there is one and the precision is not int8.

        If `precision` is given, the model is converted as by `in_precision`. None means the precision in the run's
        settings; if this is float32, the model is used as trained.
        """
        config = run.config_as(TranslationConfig)
        _check_device(precision or config.decode.precision, device)
        with run.reading(*TOKENIZERS):
            coder = load_coder(run.path, words=not config.data.files)
        model = build(config.model, coder.sizes, shared=coder.shared)
        run.load_model(model)
        return cls.of(model, coder, config, device, precision=precision)

    @classmethod
    def of(
        cls,
        model: EncoderDecoder,
        coder: Coder,
        config: TranslationConfig,
        device: torch.device | str | None = None,
        *,
        precision: Precision | str | None = None,
    ) -> "Translator":
        """Return a translator with this trained model; `device` and `precision` are as in `load`."""
        wanted = precision or config.decode.precision
        _check_device(wanted, device)
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if wanted != "int8":
            model.to(place)
        translator = cls(model.eval(), coder, config.decode, config.data.end_mark, place=place)
        return translator if precision is None and wanted == "float32" else translator.in_precision(wanted)

    def in_precision(self, precision: Precision | str) -> "Translator":
        """Return a translator with the model in a precision; an int8 model is on the CPU.

        The model of the result is a copy for inference only, which does not change if the original is trained further.
        If no copy is needed, as in float32 on CUDA, the result has the original model, or is `self`.
        """
        if precision not in ("float32", "bfloat16", "int8"):
            raise SettingError(f"precision must be float32, bfloat16 or int8, got {precision!r}")
        if precision == self.prepared:
            return self
        exact = self.exact or self.model
        if self.place is not None and precision != "int8":
            exact.to(self.place)
        try:
            model = _prepared(exact, precision)
        except ValueError as error:
            raise SettingError(f"{precision} cannot be: {error}") from error
        if model is self.model:
            return self
        return replace(self, model=model, captures=Captures(), exact=exact, prepared=precision)

    @property
    def network(self) -> EncoderDecoder:
        return self.model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def batch(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
        return collate(pairs, pad=PAD, bos=BOS, eos=EOS, source_end=self.end_mark).to(self.device)

    def translate(
        self, texts: Sequence[str], *, width: int | None = None, n_best: int = 1, weights: bool = True
    ) -> list[Translation]:
        """Return the translations of texts, in order, found by beam search with `width` hypotheses."""
        return self.search([self.coder.read(text) for text in texts], width=width, n_best=n_best, weights=weights)

    def longest(self, *, width: int | None = None, tokens: int | None = None) -> int:
        """Return the largest number of source tokens of a text.

        This limit is `tokens` if given, else LONGEST, or less if `width` hypotheses of a text need too much memory. The
        limit is never larger than the number of learned position embeddings allows.
        """
        wanted = tokens or max(1, min(LONGEST, _SEARCHED // (width or self.settings.beam)))
        capacity = _positions(self.model.encoder)
        return wanted if capacity is None else max(1, min(wanted, capacity - self.end_mark))

    def answers(
        self, inputs: Sequence[Mapping[str, Any]], *, beam: int | None = None, longest: int | None = None
    ) -> list[Translation | InputError]:
        """Return a translation for each input, in order; for a text that is too long, an `InputError` instead."""
        limit = self.longest(width=beam, tokens=longest)

        def read(one: Mapping[str, Any]) -> Reading:
            if len(one["source"]) > CHARACTERS * limit:
                raise InputError(f"more than {CHARACTERS * limit:,} characters")
            source = self.coder.read(one["source"])
            if len(source.numbers) > limit:
                raise InputError(f"{len(source.numbers):,} tokens, at most {limit:,}")
            return source

        return answered(inputs, read, lambda sources: self.search(sources, width=beam))

    @shareable
    def search(
        self, sources: Sequence[Reading], *, width: int | None = None, n_best: int = 1, weights: bool = True
    ) -> list[Translation]:
        """Return the translations of encoded sources, in order; a batch has sources of similar length.

        `width` is the number of hypotheses of beam search. Each returned translation also holds the `n_best - 1` next
        best texts.
        """
        width = max(width or self.settings.beam, n_best)
        translations: dict[int, Translation] = {}
        for place, source in enumerate(sources):
            if not source.numbers:  # an empty source has an empty translation
                translations[place] = Translation(source, "", (), (), None, 0.0)
        for part in _by_length(sources, _BATCH // width):
            with evaluating(self.model):
                every = self._hypotheses([sources[place] for place in part], width, n_best, weights)
            for place, best in zip(part, every, strict=True):
                translations[place] = self._translation(sources[place], best)
        return [translations[place] for place in range(len(sources))]

    def _hypotheses(self, sources: Sequence[Reading], width: int, n_best: int, weights: bool) -> list[list[Hypothesis]]:
        batch = self.batch([(source.numbers, ()) for source in sources])
        decoder: Any = self.model.decoder
        limit = 2 * batch.source_lengths + 10
        if (capacity := _positions(decoder)) is not None:
            limit = limit.clamp(max=capacity - 1)  # one position of the decoder is needed for the start token
        memory = self.model.encoder(batch.source, batch.source_lengths)
        wanted = {"weights": True} if weights and isinstance(decoder, TransformerDecoder) else {}
        state = decoder.start(memory, limit=int(limit.max()) + 1, **wanted)
        return hypotheses(
            decoder,
            state,
            limit,
            width=width,
            n_best=n_best,
            length_penalty=self.settings.length_penalty,
            captures=self.captures,
        )

    def _translation(self, source: Reading, hypotheses: Sequence[Hypothesis]) -> Translation:
        best = hypotheses[0]
        weights = None if best.weights is None else best.weights[:, : len(source.numbers) + self.end_mark].float()
        labels = self.coder.labels(best.tokens, source, weights)
        text = self.coder.write(best.tokens, source, weights)
        others = tuple((self.coder.write(one.tokens, source, one.weights), one.score) for one in hypotheses[1:])
        words = (
            self.coder.source_words(source.numbers, source.labels),
            self.coder.written_words(best.tokens, labels),
        )
        return Translation(source, text, best.tokens, labels, weights, best.score, others, *words)


def _check_device(precision: str, device: torch.device | str | None) -> None:
    if precision == "int8" and device is not None and torch.device(device).type != "cpu":
        raise SettingError(f"int8 is for the CPU, and the device is {device}: choose another of the two")


def _positions(part: nn.Module) -> int | None:
    """Return the number of learned positions of an encoder or decoder; None: it accepts any number of positions."""
    capacities = [module.capacity for module in part.modules() if isinstance(module, LearnedPositions)]
    return min(capacities, default=None)


def _prepared(exact: EncoderDecoder, precision: str) -> EncoderDecoder:
    """Return a copy of the model in this precision, or the model itself if no copy is needed."""
    here = next(exact.parameters()).device.type
    if precision == "int8":
        return quantize(exact if here == "cpu" else copy.deepcopy(exact).cpu())
    if precision == "bfloat16":
        return copy.deepcopy(exact).eval().to(torch.bfloat16)
    return pack(exact) if here == "cpu" and torch.backends.mkldnn.is_available() else exact


def _by_length(sources: Sequence[Reading], tokens: int) -> Iterator[list[int]]:
    """Yield groups of indices of sources of similar length, each of at most `tokens` tokens, with padding.

    A source with more tokens is a group by itself; empty sources are left out.
    """
    filled = [place for place, source in enumerate(sources) if source.numbers]
    order = sorted(filled, key=lambda place: len(sources[place].numbers))
    group: list[int] = []
    for place in order:
        if group and (len(group) + 1) * (len(sources[place].numbers) + 1) > tokens:
            yield group
            group = []
        group.append(place)
    if group:
        yield group
