"""Training a translator, from its configuration to a run directory that holds everything."""

import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from regard import __version__
from regard.data.batches import Batch, TokenBatches, collate
from regard.models.frame import EncoderDecoder
from regard.nn.cross_entropy import linear_cross_entropy
from regard.tasks.settings import recorded
from regard.tasks.translation.coding import TOKENIZERS, Coder, PieceCoder, WordCoder, load_coder
from regard.tasks.translation.config import NEEDS, TranslationConfig
from regard.tasks.translation.material import Example, Material, file_material, input_files, world_material
from regard.tasks.translation.network import build
from regard.tasks.translation.scoring import faithfulness, judge, text_figures
from regard.tasks.translation.translator import BOS, EOS, PAD, Translator
from regard.train.capacity import check_capacity
from regard.train.loop import Fitted, fit
from regard.train.progress import Progress, default_progress
from regard.train.run import Run
from regard.train.updates import Loss

_VALIDATED = 200  # sentences translated at each validation
_GRID = 8  # lengths of batches are multiples of it where steps are replayed
_EXPLAINED = 40  # translations whose faithfulness is measured
_KEPT = ("data.source", "data.target")  # the languages, which config.json says of the built-in world too
CHANGEABLE = (
    *("train.steps", "train.epochs", "train.patience"),
    *("decode.beam", "decode.length_penalty", "decode.precision", "decode.posterior"),
)


class Batches:
    """Padded batches of a corpus, in the order of its `TokenBatches`, whose place is theirs.

    With a `grid` above 1 they come in few shapes: lengths are multiples of it, and the rows are those that fit.
    """

    def __init__(self, material: Material, *, tokens: int, seed: int, source_end: bool, grid: int = 1) -> None:
        self._pairs, self._source_end, self._tokens, self._grid = material.train, source_end, tokens, grid
        self._lengths = np.maximum(*material.lengths)
        self._order = TokenBatches(*material.lengths, tokens=tokens, seed=seed, grid=grid)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._order:
            pairs = [self._pairs[row] for row in rows]
            shape = {"grid": self._grid, "rows": self._fitting(int(self._lengths[rows].max()))}
            yield collate(pairs, pad=PAD, bos=BOS, eos=EOS, source_end=self._source_end, **shape)

    def _fitting(self, longest: int) -> int:
        """How many rows a batch of such sentences is filled up to."""
        return self._tokens // (-(-longest // self._grid) * self._grid) if self._grid > 1 else 0

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def resume(self, state: dict[str, Any]) -> None:
        self._order.resume(state)


def train(
    config: TranslationConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    accept_changed_data: bool = False,
) -> dict[str, Any]:
    """Train into the run directory `out`, judge on the test part, and give the result that is written there.

    A run that goes on must find its data files as they were, unless changed data is accepted.
    """
    data = {"files": tuple(path.absolute() for path in config.data.files)} if config.data.files else {}
    config = config.model_copy(update={"data": config.data.model_copy(update=data or _languages(out, resume))})
    with Run.training(
        out,
        recorded(config, NEEDS, keep=_KEPT),
        resume=resume,
        changeable=CHANGEABLE,
        renewed=_renewed,
        inputs=input_files(config.data),
        accept_changed_data=accept_changed_data,
    ) as run:
        return _train(config, run, default_progress() if progress is None else progress)


def _train(config: TranslationConfig, run: Run, progress: Progress) -> dict[str, Any]:
    began = time.monotonic()
    # Weights belong to the tokenizer they were trained with; without any, an interrupted start is begun again.
    known = _coder(config, run) if run.checkpoints.steps() or run.model_path.is_file() else None
    material = _material(config, run, known, progress.say)
    if known is None:
        run.manifest.keep(material.coder.save)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = partial(build, config.model, material.coder.sizes, shared=material.coder.shared)
    check_capacity(made, device)
    torch.manual_seed(config.train.seed)
    model = made().to(device)
    translator = Translator(model, material.coder, config.decode, config.data.end_mark)

    def loss(network: nn.Module, batch: Batch) -> Loss:
        return _loss(network, batch.to(device), config.smoothing)

    def validate(_: nn.Module) -> dict[str, float]:
        return _bleu(translator, material.valid[:_VALIDATED], config.data.tokenize)

    fitted = fit(
        model,
        loss,
        Batches(
            material,
            tokens=config.data.batch_tokens,
            seed=config.data.seed,
            source_end=config.data.end_mark,
            grid=_GRID if config.train.graphs else 1,
        ),
        run=run,
        settings=config.train,
        held_out=_held_out(material, config.data.end_mark),
        validate=validate,
        progress=progress,
    )
    result = evaluated(translator, config, material.test, material.longer)
    result |= _facts(config, material, model, fitted, time.monotonic() - began)
    run.save_result(result)
    run.save_card(_card(result, material))
    return result


def _renewed(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with the defaults of settings that it does not know."""
    try:
        config = TranslationConfig.model_validate(stored)
    except ValueError:  # of another task, or written by hand: compared as it is
        return stored
    files = tuple(path.absolute() for path in config.data.files)
    config = config.model_copy(update={"data": config.data.model_copy(update={"files": files})})
    return recorded(config, NEEDS, keep=_KEPT)


def make_material(config: TranslationConfig, run: Run, *, tell: Callable[[str], None] = lambda _: None) -> Material:
    """What a trained run learned from, cut by its own tokenizer; files must be as they were when it was started."""
    run.check_inputs(input_files(config.data), "give the files to judge by with --data")
    return _material(config, run, _coder(config, run), tell)


def _coder(config: TranslationConfig, run: Run) -> Coder:
    with run.reading(*TOKENIZERS):
        return load_coder(run.path, words=not config.data.files)


def _material(config: TranslationConfig, run: Run, known: Coder | None, tell: Callable[[str], None]) -> Material:
    """Files are indexed inside the run directory."""
    if config.data.files:
        codes = known.codes if isinstance(known, PieceCoder) else None
        return file_material(config.data, run.path / "data", codes, tell=tell)
    return world_material(config.data, known if isinstance(known, WordCoder) else None)


def evaluated(
    translator: Translator, config: TranslationConfig, examples: Sequence[Example], longer: Sequence[Example] = ()
) -> dict[str, Any]:
    """The part of a result that judges: figures, attention, faithfulness."""
    judged = judge(translator, examples, tokenize=config.data.tokenize)
    some = translator.search([one.source for one in judged.translations[:_EXPLAINED]])
    found = {"metrics": judged.metrics, "attention": judged.attention, "faithfulness": faithfulness(translator, some)}
    if longer:
        beyond = judge(translator, longer, tokenize=config.data.tokenize)
        found["longer"] = {"metrics": beyond.metrics, "attention": beyond.attention}
    return found


def _loss(network: Any, batch: Batch, smoothing: float) -> Loss:
    decoded = network(batch.source, batch.prefix, batch.source_lengths)
    model: EncoderDecoder = getattr(network, "_orig_mod", network)
    summed = linear_cross_entropy(
        decoded.states, model.output_weight, batch.target, bias=model.output_bias, smoothing=smoothing
    )
    return Loss(summed.loss, summed.count)


def _bleu(translator: Translator, examples: Sequence[Example], tokenize: str) -> dict[str, float]:
    """BLEU of greedy translations: enough to tell which weights are better."""
    sources = [translator.coder.read_words(example.source) for example in examples]
    texts = [one.text for one in translator.search(sources, width=1, weights=False)]
    return {"bleu": text_figures(texts, [example.reference for example in examples], tokenize)["bleu"]}


def _held_out(material: Material, source_end: bool) -> list[Batch]:
    pairs = []
    for example in material.valid:
        words = example.target
        target = material.coder.target_words(words)[0] if words else material.coder.target(example.reference)
        pairs.append((material.coder.read_words(example.source).numbers, target))
    pairs.sort(key=lambda pair: len(pair[1]))
    parts = (pairs[first : first + 64] for first in range(0, len(pairs), 64))
    return [collate(part, pad=PAD, bos=BOS, eos=EOS, source_end=source_end) for part in parts]


def _facts(
    config: TranslationConfig, material: Material, model: nn.Module, fitted: Fitted, seconds: float
) -> dict[str, Any]:
    return {
        "task": config.task,
        "data": material.about,
        "seconds": round(seconds, 1),
        "training_seconds": round(fitted.seconds, 1),
        "steps": fitted.step,
        "ended": fitted.ended,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "command": " ".join(sys.argv),
        "versions": {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "seed": config.train.seed,
        "example": _example(material.test) if config.data.files else "Tom chases Jerry",
    }


def _languages(out: Path, resume: bool) -> dict[str, str]:
    """What the built-in world speaks, whatever the suffix of files would be; of a run that goes on, what it says."""
    languages = {"source": "en", "target": "zh"}
    kept = Run.open(out).config().get("data", {}) if resume and (out / "config.json").is_file() else {}
    return {name: kept.get(name, language) for name, language in languages.items()}


def _example(examples: Sequence[Example]) -> str | None:
    """A sentence to begin with: of the first ones, one that is short, but not the shortest."""
    few = sorted((example.source for example in examples[:50] if example.source), key=len)
    return " ".join(few[len(few) // 4]) if few else None


def _card(result: dict[str, Any], material: Material) -> dict[str, Any]:
    return {"title": "A translator", "about": material.about, **result}
