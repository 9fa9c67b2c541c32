"""`regard bench layers`: the cost of self-attention, recurrent, convolutional and linear layers at several lengths.

All layers have the same width and input. Measurements of all kinds are interleaved; the number of layers and steps
until the last position depends on the first is counted by running the layers (`regard.bench.layer_kinds.meet`).
"""

import gc
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from regard.bench import line_chart
from regard.bench.attention_peers import Run
from regard.bench.command_output import (
    check_page,
    chosen_device,
    duration,
    header,
    machine,
    print_table,
    quiet,
    say,
    size,
    table_lines,
)
from regard.bench.layer_kinds import KINDS, Kind, Setting, meet
from regard.bench.marked_pages import write_part
from regard.bench.measurement import cuda_memory, peaks, peaks_apart, times, why
from regard.train.memory_check import count_parameters

PAGE = "layers.md"
LENGTHS = {"cpu": tuple(2**power for power in range(7, 14)), "cuda": tuple(2**power for power in range(7, 16))}
LONGEST = 2**20
SLOW = 10.0  # seconds; if a training step takes longer, longer sequences of the same kind of layer are skipped
MATRICES = {"cpu": 2 * 2**30, "cuda": 16 * 2**30}  # bytes of the largest matrix of weights that is materialised
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass
class Point:
    """The measurements of one kind of layer at one length; a field is None if it was not measured, for the given
    `reason`.
    """

    length: int
    layers: int  # number of layers until the last position depends on the first
    steps: int  # number of sequential steps until the last position depends on the first
    expected: int  # the value of `steps` by the formula `Kind.expected`
    forward: float | None = None  # seconds of one layer, without gradients
    training: float | None = None  # seconds of one layer, forward and backward
    stack: float | None = None  # seconds of the forward and backward pass of `layers` layers: training · layers
    memory: int | None = None  # peak memory of one layer's training call, in bytes above the use before it
    reason: str | None = None


def layers(
    *, lengths: str | None, width: int, kernel: int, reach: int, device: str | None, as_json: bool, out: Path | None
) -> None:
    """Measure, then print and write the record."""
    device = chosen_device(device, LENGTHS)
    chosen = LENGTHS[device] if lengths is None else _numbers(lengths)
    check_page(out, PAGE)
    with quiet():
        record = run(chosen, Setting(width, kernel, reach), device=device, say=say)
    say("")
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        show(record)
    if out is not None:
        for path in write(record, out):
            print(f"wrote {path}", file=sys.stderr)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the given lengths, shortest first."""
    parts = text.split(",")
    lengths = sorted({int(part) for part in parts if part.strip().isdecimal()})
    if not all(part.strip().isdecimal() for part in parts) or lengths[0] < 2 or lengths[-1] > LONGEST:
        raise typer.BadParameter(
            f"must be numbers from 2 to {LONGEST:,} with commas between them, such as 128,256; got {text!r}",
            param_hint="--lengths",
        )
    return tuple(lengths)


def run(lengths: Sequence[int], setting: Setting, *, device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the record for `--json`: the machine, the setting, and the measurements of each kind at each length."""
    points: dict[str, list[Point]] = {kind.name: [] for kind in KINDS}
    for length in lengths:
        for kind in KINDS:
            say(f"{length:,} positions: steps of {kind.name}")
            met = meet(KINDS[0] if kind.forms_matrix else kind, length, setting)
            point = Point(length, met.layers, met.steps, kind.expected(length, setting))
            point.reason = reason_to_skip(kind, length, setting, device, points[kind.name])
            points[kind.name].append(point)
        _time(length, setting, device, {name: kind_points[-1] for name, kind_points in points.items()}, say)
    if device == "cpu":
        say("memory")
        _remember(points, setting, say)
    return {
        "bench": "layers",
        "quick": False,
        **machine(device, ("triton",)),
        "setting": {**asdict(setting), "heads": setting.heads, "dtype": str(DTYPES[device]).removeprefix("torch.")},
        "lengths": list(lengths),
        "kinds": [summary_of_kind(kind, points[kind.name], setting) for kind in KINDS],
    }


def reason_to_skip(kind: Kind, length: int, setting: Setting, device: str, before: list[Point]) -> str | None:
    """Return the reason why a length is skipped, or None if it is measured."""
    matrix = setting.heads * length**2 * DTYPES[device].itemsize
    if kind.forms_matrix and matrix > MATRICES[device]:
        return f"its matrix of weights would take {size(matrix)}"
    if before and before[-1].reason is not None:
        return before[-1].reason
    if before and (before[-1].training or 0.0) > SLOW:
        return f"{before[-1].length:,} positions took {duration(before[-1].training or 0.0)}"
    return None


def _time(length: int, setting: Setting, device: str, points: dict[str, Point], say: Callable[[str], None]) -> None:
    """Fill in the times of all kinds at one length, and on CUDA the memory."""
    forward: dict[str, Run] = {}
    training: dict[str, Run] = {}
    for kind in KINDS:
        point = points[kind.name]
        if point.reason is not None:
            continue
        say(f"{length:,} positions: {kind.name}")
        try:
            first, second = calls(kind, length, point.layers - 1, setting, device)
            first()  # a first call loads libraries and compiles kernels
            second()
            point.memory = cuda_memory(second) if device == "cuda" else None
            forward[kind.name], training[kind.name] = first, second
        except Exception as problem:  # a kind of layer that fails is reported, and the run continues
            point.reason = why(problem)
    say(f"{length:,} positions: times")
    for name, seconds in times(forward, device).items():
        points[name].forward = seconds
    for name, seconds in times(training, device).items():
        points[name].training = seconds
        points[name].stack = seconds * points[name].layers
    forward.clear()
    training.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def calls(kind: Kind, length: int, depth: int, setting: Setting, device: str) -> tuple[Run, Run]:
    """Return two functions for the layer at this depth of a stack: one runs a forward pass without gradients, the other
    a forward and a backward pass."""
    torch.manual_seed(0)
    layer = kind.make(setting, depth).to(device=device, dtype=DTYPES[device])
    x = torch.randn(1, length, setting.size, device=device, dtype=DTYPES[device], requires_grad=True)
    upstream = torch.randn_like(x)

    @torch.no_grad()
    def forward() -> Tensor:
        return layer(x)

    def training() -> Tensor:
        output = layer(x)
        output.backward(upstream)
        x.grad = None  # gradients are freed, so that the peak memory of every call includes them
        layer.zero_grad(set_to_none=True)
        return output.detach()

    return forward, training


def _remember(points: dict[str, list[Point]], setting: Setting, say: Callable[[str], None]) -> None:
    """Set the peak memory of every kind and length on the CPU, measured in a separate process."""
    measured = [
        (name, point) for name, kind_points in points.items() for point in kind_points if point.training is not None
    ]
    wanted = [(name, point.length, point.layers - 1) for name, point in measured]
    peak_bytes = peaks_apart("regard.bench.layers_bench", [json.dumps(asdict(setting)), json.dumps(wanted)], say)
    for name, point in measured:
        point.memory = peak_bytes.get(f"{name} {point.length}")


def summary_of_kind(kind: Kind, points: list[Point], setting: Setting) -> dict[str, Any]:
    """Return the entry of the record for one kind of layer."""
    with torch.device("meta"):
        parameters = count_parameters(kind.make(setting, 0))
    timed = [(point.length, point.training) for point in points if point.training]
    growth = None
    if len(timed) > 1:
        (short, less), (long, more) = timed[-2:]
        growth = math.log(more / less) / math.log(long / short)
    return {
        "name": kind.name,
        **{name: getattr(kind, name) for name in ("work", "sequential", "path")},
        "parameters": parameters,
        "growth": growth,  # training time ~ length^growth, from the two greatest lengths
        "points": [asdict(point) for point in points],
    }


FIGURES: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "steps": ("Steps until both ends of the sequence meet", "path", "{:,}".format),
    "forward": ("Forward pass of one layer", "work", duration),
    "training": ("Forward and backward pass of one layer", "work", duration),
    "stack": ("The same for as many layers as it takes until the ends meet (time of one × layers)", "path", duration),
    "memory": ("Peak memory of the forward and backward pass of one layer", "work", size),
}
"""For each figure the title of its table, the order of growth, and its format."""


def rows(record: dict[str, Any], figure: str) -> list[list[str]]:
    """Return the cells of the table of one quantity in FIGURES: a row for each kind, a column for each length."""
    _, order, written = FIGURES[figure]
    return [
        [
            kind["name"],
            kind[order],
            *("–" if point[figure] is None else written(point[figure]) for point in kind["points"]),
            *([] if figure != "training" else ["–" if kind["growth"] is None else f"n^{kind['growth']:.1f}"]),
        ]
        for kind in record["kinds"]
    ]


def columns(record: dict[str, Any], figure: str) -> list[str]:
    """Return the header row of the table of one quantity in FIGURES."""
    return ["layer", "order", *(f"{length:,}" for length in record["lengths"])] + ["grew as"] * (figure == "training")


def left_out(record: dict[str, Any]) -> list[str]:
    """Return what was not measured and why, one line for each kind and reason."""
    skipped: dict[tuple[str, str], list[str]] = {}
    for kind in record["kinds"]:
        for point in kind["points"]:
            if point["reason"]:
                skipped.setdefault((kind["name"], point["reason"]), []).append(f"{point['length']:,}")
    return [f"{name} ({', '.join(lengths)}): {reason}" for (name, reason), lengths in skipped.items()]


def what(record: dict[str, Any]) -> str:
    """Return the setting in one line."""
    setting = record["setting"]
    return (
        f"one sequence, {setting['size']} features, {setting['heads']} heads, kernel {setting['kernel']}, restricted "
        f"attention to {setting['reach']} positions on either side, {setting['dtype']}"
    )


def show(record: dict[str, Any]) -> None:
    """Print the record as tables."""
    console = Console(highlight=False)
    console.print(header(record), markup=False)
    console.print(what(record), markup=False)
    for figure, (title, _, _) in FIGURES.items():
        print_table(columns(record, figure), rows(record, figure), title=title, left=("layer", "order"))
    for line in left_out(record):
        console.print(f"not measured: {line}", markup=False)


def markdown(record: dict[str, Any]) -> str:
    """Return the record as a section of a documentation page, with its drawing."""
    device = record["device"]
    best = "medians" if device == "cuda" else "the best"
    lines = [f"### {'GPU' if device == 'cuda' else 'CPU'}", ""]
    lines += [
        f"`regard bench layers --device {device}`; {header(record)}; {what(record)}. Times are {best} of readings "
    ]
    lines[-1] += "taken in turns; “grew as” is the exponent between the two longest lengths."
    lines += ["", f"![Time, memory and steps over length](images/layers-{device}.svg)", ""]
    for figure, (title, _, _) in FIGURES.items():
        lines += [f"**{title}**", "", *table_lines(columns(record, figure), rows(record, figure), left=2), ""]
    lines += [f"Not measured: {line}.\n" for line in left_out(record)]
    return "\n".join(lines)


def drawing(record: dict[str, Any]) -> str:
    """Return the record as curves: training time, memory, steps."""

    def lines(figure: str, unit: int = 1) -> dict[str, list[tuple[float, float]]]:
        curves = {
            kind["name"]: [(float(point["length"]), point[figure] / unit) for point in kind["points"] if point[figure]]
            for kind in record["kinds"]
        }
        return {name: points for name, points in curves.items() if points}

    panels = [
        line_chart.Panel("time, forward and backward", lines("training"), duration),
        line_chart.Panel("peak memory of one layer", lines("memory", 2**20), "{:,g} MiB".format),
        line_chart.Panel("steps until both ends meet", lines("steps"), "{:,.0f}".format),
    ]
    where = record["machine"]["gpu" if record["device"] == "cuda" else "cpu"]
    return line_chart.svg(panels, title=f"regard bench layers, {where}", note=f"by length; {what(record)}")


def write(record: dict[str, Any], out: Path) -> list[Path]:
    """Write the tables to layers.md of a folder, between the marks of the device, and the drawing to its folder
    images."""
    image = out / "images" / f"layers-{record['device']}.svg"
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_text(drawing(record), encoding="utf-8")
    return [write_part(out / PAGE, record["device"], markdown(record), title="What attention costs"), image]


def _peaks(setting: Setting, wanted: list[tuple[str, int, int]]) -> dict[str, int]:
    """Return the peak memory of training calls, by name and length; each call runs once before its measurement, to load
    libraries."""
    by_name = {kind.name: kind for kind in KINDS}
    contenders = {
        f"{name} {length}": lambda name=name, length=length, depth=depth: calls(
            by_name[name], length, depth, setting, "cpu"
        )[1]
        for name, length, depth in wanted
    }
    return peaks(contenders, dict.fromkeys(contenders, True))


if __name__ == "__main__":
    print(json.dumps(_peaks(Setting(**json.loads(sys.argv[1])), json.loads(sys.argv[2]))))
