"""`regard bench decoding`: beam search of a Transformer, compared with HF `generate` and CTranslate2 for a model with
equal weights.

Weights are random. All contenders generate sentences of the same fixed length, in the same number of steps.
Measurements are interleaved, in one process.
"""

import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from regard.bench.command_output import check_page, chosen_device, header, machine, print_table, quiet, say, table_lines
from regard.bench.decoding_peers import BEGIN, END, Decode, ctranslate2, generate, marian
from regard.bench.marked_pages import write_part
from regard.bench.measurement import why
from regard.decode.beam import beam
from regard.decode.graph_search import Captures
from regard.models.frame import EncoderDecoder
from regard.models.quantized import pack, quantize
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder

PACKAGES = ("transformers", "ctranslate2", "triton")
COLUMNS = ("contender", "sentences/s", "× HF", "time", "a step")
ROUNDS = 5
PAGE = "decoding.md"


@dataclass(frozen=True)
class Setting:
    """The settings of the benchmark."""

    sentences: int
    tokens: int  # number of tokens of each source and each output, including the end mark
    vocabulary: int
    size: int = 512
    heads: int = 8
    hidden: int = 2048
    layers: int = 6
    width: int = 4


SETTINGS = {
    "cuda": Setting(sentences=128, tokens=48, vocabulary=32_000),
    "cpu": Setting(sentences=16, tokens=24, vocabulary=8_000),
}
TINY = Setting(sentences=3, tokens=5, vocabulary=31, size=16, heads=2, hidden=32, layers=2, width=3)


@dataclass
class Measurement:
    """The measurement of one contender; if the contender could not run, `reason` says why."""

    name: str
    seconds: float | None = None
    rate: float | None = None  # sentences per second
    ratio: float | None = None  # rate divided by that of HF generate
    reason: str | None = None


def decoding(*, device: str | None, quick: bool, as_json: bool, out: Path | None) -> None:
    """Measure, then print and write the results."""
    device = chosen_device(device, SETTINGS)
    check_page(out, PAGE)
    setting = TINY if quick else SETTINGS[device]
    with quiet():
        record = run(setting, device=device, quick=quick, say=say)
    say("")
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        show(record)
    if out is not None:
        print(f"wrote {write(record, out)}", file=sys.stderr)


def model_of(setting: Setting, device: str) -> EncoderDecoder:
    """Return a post-norm Transformer with random weights, in bfloat16 on CUDA; encoder, decoder and output share one
    embedding (Vaswani et al. 2017)."""
    torch.manual_seed(0)
    embedding = nn.Embedding(setting.vocabulary, setting.size)
    nn.init.normal_(embedding.weight, std=setting.size**-0.5)
    options: dict[str, Any] = {
        "layers": setting.layers,
        "heads": setting.heads,
        "feed_forward": setting.hidden,
        "norm": "post",
        "embedding": embedding,
    }
    model = EncoderDecoder(
        TransformerEncoder(setting.vocabulary, setting.size, **options),
        TransformerDecoder(setting.vocabulary, setting.size, **options),
    )
    return model.eval().to(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


def regard(model: EncoderDecoder, width: int, captures: Captures | None = None) -> Decode:
    """Return a function that decodes with this library's beam search, as `regard predict` does."""

    @torch.no_grad()
    def decode(source: Tensor, tokens: int) -> list[list[int]]:
        state = model.start(source, limit=tokens)
        start = torch.full(source.shape[:1], BEGIN, device=source.device)
        most = tokens - 1  # the end mark counts as a token too
        hypotheses = beam(
            model.step, state, start=start, stop=END, limit=most, minimum=most, width=width, captures=captures
        )
        return [[*best.tokens, END] for [best] in hypotheses]

    return decode


def contenders(setting: Setting, device: str) -> dict[str, Callable[[], Decode]]:
    """Return, by the name of each contender, a function that prepares it."""
    model, width, threads = model_of(setting, device), setting.width, torch.get_num_threads()
    peer = functools.cache(lambda: marian(model, positions=2 * setting.tokens + 2))
    if device == "cuda":
        return {
            "regard": lambda: regard(model, width, Captures()),
            "regard, every search captured anew": lambda: regard(model, width),
            "HF generate": lambda: generate(peer(), width),
            "CTranslate2 bfloat16": lambda: ctranslate2(peer(), width, "bfloat16", threads),
        }
    return {
        "regard float32": lambda: regard(pack(model), width),
        "regard int8": lambda: regard(quantize(model), width),
        "HF generate": lambda: generate(peer(), width),
        "CTranslate2 float32": lambda: ctranslate2(peer(), width, "float32", threads),
        "CTranslate2 int8": lambda: ctranslate2(peer(), width, "int8", threads),
    }


def run(setting: Setting, *, device: str, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the record for `--json`: the machine, the setting, and the result of each contender."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(3, setting.vocabulary, (setting.sentences, setting.tokens), generator=generator).to(device)
    measurements: dict[str, Measurement] = {}
    sides: dict[str, Decode] = {}
    for name, make in contenders(setting, device).items():
        say(name)
        measurements[name] = Measurement(name)
        try:
            decode = make()
            outputs = decode(source, setting.tokens)
            if len(outputs) != setting.sentences or any(len(sentence) != setting.tokens for sentence in outputs):
                raise ValueError(
                    f"wrote {len(outputs)} sentences of {sorted({len(sentence) for sentence in outputs})} tokens"
                )
            sides[name] = decode
        except Exception as problem:  # a contender that fails is reported, and the run continues
            measurements[name].reason = why(problem)
    readings: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides.items())
    gc.collect()
    for number in range(2 if quick else ROUNDS):
        say(f"round {number + 1}")
        order = order[1:] + order[:1]  # rotated, because clock rates and caches differ for the first contender
        for name, decode in order:
            readings[name].append(_seconds(decode, source, setting.tokens))
    settle = statistics.median if device == "cuda" else min
    for name, seconds in readings.items():
        measurements[name].seconds = settle(seconds)
        measurements[name].rate = setting.sentences / settle(seconds)
    peer = measurements["HF generate"].rate
    for measurement in measurements.values():
        measurement.ratio = measurement.rate / peer if measurement.rate is not None and peer is not None else None
    return {
        "bench": "decoding",
        "quick": quick,
        **machine(device, PACKAGES),
        "setting": vars(setting),
        "contenders": [vars(measurement) for measurement in measurements.values()],
    }


def show(record: dict[str, Any]) -> None:
    """Print the record as a table."""
    console = Console(highlight=False)
    console.print(header(record), markup=False)
    print_table(COLUMNS, rows(record), title=what(record), left=COLUMNS[:1])
    for contender in record["contenders"]:
        if contender["reason"]:
            console.print(f"not run: {contender['name']}: {contender['reason']}", markup=False)


def what(record: dict[str, Any]) -> str:
    """Return a description of the work in one line."""
    setting = Setting(**record["setting"])
    dtype = "bfloat16" if record["device"] == "cuda" else "float32 or int8"
    return (
        f"beam {setting.width}, {setting.sentences} sentences × {setting.tokens} tokens, Transformer "
        f"{setting.layers} + {setting.layers} layers of {setting.size}, vocabulary {setting.vocabulary:,}, {dtype}"
    )


def rows(record: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the table, a row for each contender that ran."""
    steps = record["setting"]["tokens"]
    return [
        [
            contender["name"],
            f"{contender['rate']:,.0f}" if contender["rate"] >= 100 else f"{contender['rate']:.1f}",
            "–" if contender["ratio"] is None else f"{contender['ratio']:.2f}",
            f"{contender['seconds'] * 1e3:,.0f} ms",
            f"{contender['seconds'] * 1e3 / steps:.2f} ms",
        ]
        for contender in record["contenders"]
        if contender["seconds"] is not None
    ]


def markdown(record: dict[str, Any]) -> str:
    """Return the record as a section of a documentation page."""
    device = record["device"]
    best = "median" if device == "cuda" else "best"
    command = f"`regard bench decoding --device {device}`; {header(record)}; the {best} of readings taken in turns."
    lines = [f"**{'GPU' if device == 'cuda' else 'CPU'}**: {what(record)}. {command}", ""]
    lines += table_lines(COLUMNS, rows(record))
    lines += [
        f"\nNot run: {contender['name']}: {contender['reason']}."
        for contender in record["contenders"]
        if contender["reason"]
    ]
    return "\n".join(lines) + "\n"


def write(record: dict[str, Any], out: Path) -> Path:
    """Write the table to decoding.md of a folder, between the marks of its device; other text of the page is
    unchanged."""
    return write_part(out / PAGE, record["device"], markdown(record), title="Decoding")


def _seconds(decode: Decode, source: Tensor, tokens: int) -> float:
    if source.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    decode(source, tokens)  # a contender returns Python lists, so the device has finished
    return time.perf_counter() - begin
