"""`regard bench scaling`: the cost of training on many devices, by a cost model that is validated on this machine.

A small model is trained by one, two and four processes (on CUDA by one per GPU). The times of one process and of a few
all-reduces determine the constants of the cost model, which then predicts the other runs, and training on 8, 64 and
1,024 GPUs.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console

import regard
from regard.bench.command_output import (
    check_page,
    chosen_device,
    header,
    machine,
    print_table,
    quiet,
    say,
    size,
    table_lines,
)
from regard.bench.marked_pages import write_part
from regard.bench.scaling_costs import WAYS, Cost, Link, Machine, Model, Work, cost

PAGE = "scaling.md"
MODELS = {
    "cpu": (Model(128, 2, 1000, "0.65 M"), Model(256, 2, 1000, "2.1 M")),
    "cuda": (Model(512, 6, 32_000, "52 M"), Model(1024, 12, 32_000, "217 M")),
}
TOKENS = {"cpu": (512, 1024), "cuda": (8192, 32_768)}
LENGTH = {"cpu": 128, "cuda": 1024}
STEPS = {"cpu": 3, "cuda": 12}
LARGE = (Model(768, 12, 32_000, "134 M"), Model(2048, 24, 32_000, "1.3 B"), Model(4096, 32, 32_000, "6.7 B"))
DEVICES = (1, 8, 64, 1024)
EACH = 16_384  # tokens per device and step, in sequences of 2,048; with context parallelism in one sequence
SEQUENCE = 2048
# NVLink 4 and a 400 Gb/s adapter for each GPU, at 80 % of their nominal speed; latencies are typical for NCCL. The
# other constants of `H200` are assumed values too; on a GPU the benchmark measures them.
H200 = Machine(
    "NVIDIA H200",
    flops=3.0e14,
    per_layer=1e-3,
    per_parameter=1e-11,
    per_logit=2e-11,
    near=Link(0.8 * 450e9, 10e-6),
    far=Link(0.8 * 50e9, 20e-6),
    memory=141e9,
    width=2,
)
PATIENCE = 900.0  # time limit in seconds for the processes of one group


def scaling(*, workers: str | None, steps: int | None, device: str | None, as_json: bool, out: Path | None) -> None:
    """Measure, then print and write the record."""
    device = chosen_device(device, MODELS)
    sizes = _numbers(workers) if workers else _usual(device)
    if device == "cuda" and max(sizes) > torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise typer.BadParameter(f"there are {there} GPUs, {max(sizes)} workers need as many", param_hint="--workers")
    check_page(out, PAGE)
    with quiet():
        record = run(sizes, device=device, steps=steps or STEPS[device], say=say)
    say("")
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        show(record)
    if out is not None:
        path = write_part(out / PAGE, device, markdown(record), title="More than one machine")
        print(f"wrote {path}", file=sys.stderr)


def _usual(device: str) -> tuple[int, ...]:
    most = 4 if device == "cpu" else torch.cuda.device_count()
    return tuple(count for count in (1, 2, 4, 8) if count <= most)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the given numbers of workers; one worker is always included, because it determines the constants."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 64 for part in parts):
        raise typer.BadParameter(
            f"must be numbers from 1 to 64 with commas between them, such as 1,2,4; got {text!r}",
            param_hint="--workers",
        )
    return tuple(sorted({1, *map(int, parts)}))


def run(sizes: Sequence[int], *, device: str, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the record for `--json`: the machine, its constants, measurements with predictions, and forecasts."""
    places = {1: "process"}
    groups = {}
    for count in sizes:
        say(f"{count} {places.get(count, 'processes')}")
        groups[count] = _group(count, device, steps)
    machines = fitted(groups, device)
    rows = [row for count in sizes for row in _compared(groups[count], machines[count], count)]
    large = _profile(machines[1]) if device == "cuda" else H200
    return {
        "bench": "scaling",
        "quick": False,
        **machine(device, ("triton",)),
        "length": LENGTH[device],
        "constants": {str(count): _finite(asdict(constants)) for count, constants in machines.items()},
        "measured": rows,
        "forecast": {"machine": _finite(asdict(large)), "rows": forecasts(large)},
    }


def _group(count: int, device: str, steps: int) -> list[dict[str, Any]]:
    """Return the measurements of each of `count` processes."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        cases = [
            {"way": way, "model": asdict(model), "tokens": tokens, "length": LENGTH[device]}
            for model in MODELS[device]
            for tokens in TOKENS[device]
            for way in WAYS
        ]
        threads = 1 if device == "cpu" else max(1, (os.cpu_count() or 1) // count)
        plan.write_text(json.dumps({"cases": cases, "steps": steps, "device": device, "threads": threads}))
        source = str(Path(regard.__file__).parent.parent)
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "regard.bench.scaling_measurement", str(plan)]
        with (Path(folder) / "log").open("w+") as log:
            started = [
                subprocess.Popen([*command, str(rank), str(count)], env=environment, stdout=log, stderr=log)
                for rank in range(count)
            ]
            if not _ended(started):
                log.seek(0)
                why = log.read().strip().splitlines()[-1:] or ["no message"]
                raise typer.BadParameter(f"{count} processes could not be measured: {why[0]}", param_hint="--workers")
        return [json.loads((Path(folder) / f"{rank}-of-{count}.json").read_text()) for rank in range(count)]


def _ended(started: list[subprocess.Popen[bytes]]) -> bool:
    """Return whether all processes succeeded; if one fails, or at the time limit, the others are terminated."""
    until = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in started):
        if any(process.poll() for process in started) or time.monotonic() > until:
            break
        time.sleep(0.05)
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
    return all(process.returncode == 0 for process in started)


def fitted(groups: dict[int, list[dict[str, Any]]], device: str) -> dict[int, Machine]:
    """Return the constants of the cost model by number of processes. The constants of a training step are fitted to
    training in one process, the constants of the links between processes to the all-reduces of each process group.
    """
    plain = [case for case in groups[1][0]["cases"] if case["way"] == "plain"]
    models = [Model(**case["model"]) for case in plain]
    work = [case["tokens"] * model.flops(case["length"]) for case, model in zip(plain, models, strict=True)]
    tokens = [case["tokens"] for case in plain]
    logits = [n * model.vocabulary for n, model in zip(tokens, models, strict=True)]
    features = [[m.layers, m.parameters, flops, words] for m, flops, words in zip(models, work, logits, strict=True)]
    per_layer, per_parameter, per_flop, per_logit = nonnegative(features, [case["seconds"] for case in plain])
    stored = [[n * model.layers * model.size, n * model.vocabulary] for n, model in zip(tokens, models, strict=True)]
    beyond = [max(0.0, (case["peak"] or 0) - 16 * model.parameters) for case, model in zip(plain, models, strict=True)]
    activation, output = nonnegative(stored, beyond)
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU process"
    cpu = device == "cpu"
    constants = replace(
        H200,
        name=name,
        flops=1 / per_flop if per_flop else H200.flops,
        per_layer=per_layer,
        per_parameter=per_parameter,
        per_logit=per_logit,
        activation=activation,
        output=output,
        memory=float("inf") if cpu else float(torch.cuda.get_device_properties(0).total_memory),
        width=4 if cpu else 2,
        cores=float(_cores()) if cpu else float("inf"),
        overlaps=not cpu,
        scatters=not cpu,
        copies=4 if cpu else 2,  # gloo copies its operands
        node=64 if cpu else 8,
    )
    constants = replace(constants, added={way: _added(way, groups[1][0]["cases"]) for way in WAYS[1:]})
    machines = {}
    for count, processes in groups.items():
        measured = [(int(text), seconds) for text, seconds in processes[0]["probes"].items()]
        link = _link(measured, count) if count > 1 else constants.near
        machines[count] = replace(constants, near=link)
    return machines


def _added(way: str, cases: Sequence[dict[str, Any]]) -> float:
    """Return by how many seconds per layer training in a process group of one is slower than without a group: the
    median over the cases."""
    plain, grouped = ([case for case in cases if case["way"] == kind] for kind in ("plain", way))
    pairs = zip(plain, grouped, strict=True)
    return max(0.0, float(np.median([(b["seconds"] - a["seconds"]) / a["model"]["layers"] for a, b in pairs])))


def _link(measured: Sequence[tuple[int, float]], count: int) -> Link:
    """Fit bandwidth and latency to all-reduces among N processes (`count`), measured as (bytes, seconds).

    An all-reduce takes 2 ((N − 1) / N · bytes / bandwidth + log₂ N · latency) seconds.
    """
    features = [[2 * (count - 1) / count * amount, 2 * float(np.log2(count))] for amount, _ in measured]
    slowness, latency = nonnegative(features, [seconds for _, seconds in measured])
    return Link(1 / slowness if slowness else float("inf"), latency)


def nonnegative(features: Sequence[Sequence[int | float]], values: Sequence[int | float]) -> list[float]:
    """Return the non-negative coefficients with the smallest sum of squared relative errors.

    >>> [round(coefficient, 6) for coefficient in nonnegative([[1, 1], [1, 2], [1, 4]], [3.0, 5.0, 9.0])]
    [1.0, 2.0]
    """
    scale = 1 / np.maximum(np.asarray(values, float), 1e-12)
    matrix = np.asarray(features, float) * scale[:, None]
    wanted = np.asarray(values, float) * scale
    best, least = np.zeros(matrix.shape[1]), float("inf")
    for count in range(1, matrix.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(matrix.shape[1]), count)):
            part = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            error = float(np.square(matrix[:, chosen] @ part - wanted).sum())
            if (part >= 0).all() and error < least:
                best, least = np.zeros(matrix.shape[1]), error
                best[chosen] = part
    return best.tolist()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compared(processes: list[dict[str, Any]], constants: Machine, count: int) -> list[dict[str, Any]]:
    """Return for each case of a process group the measurements and the predictions of the cost model."""
    rows = []
    for cases in zip(*(process["cases"] for process in processes), strict=True):
        case, model = cases[0], Model(**cases[0]["model"])
        expected = cost(case["way"], Work(model, case["tokens"], case["length"]), constants, count)
        sent = [record["sent"] for record in cases]
        peaks = [record["peak"] for record in cases]
        seconds = max(record["seconds"] for record in cases)
        # Processes that share cores run in turn: a step takes at least the sum of their times divided by the cores.
        seconds = max(seconds, sum(record["seconds"] for record in cases) / constants.cores)
        rows.append(
            {
                "workers": count,
                "way": case["way"],
                "model": model.name,
                "parameters": model.parameters,
                "tokens": case["tokens"],
                "measured": {
                    "tokens_per_second": case["tokens"] / seconds,
                    "sent": None if None in sent else sum(sent) / count,
                    "states": max(sum(record["states"].values()) for record in cases),
                    "memory": None if None in peaks else max(peaks),
                },
                "expected": _figures(expected),
            }
        )
    return rows


def _figures(expected: Cost) -> dict[str, float]:
    return {name: value for name, value in asdict(expected).items() if name != "seconds"}


def _profile(constants: Machine) -> Machine:
    """Return a machine with the measured constants of one GPU and the assumed links of `H200`, eight GPUs in a node."""
    return replace(constants, near=H200.near, far=H200.far)


def forecasts(large: Machine) -> list[dict[str, Any]]:
    """Return predictions for many devices. The batch grows with the number of devices; with context parallelism a batch
    is one sequence, whose length grows.
    """
    rows = []
    for model in LARGE:
        for way in ("ddp", "fsdp2", "context"):
            for count in DEVICES:
                tokens = EACH * count
                work = Work(model, tokens, tokens if way == "context" else SEQUENCE)
                expected = cost(way, work, large, count)
                alone = cost("plain", replace(work, tokens=EACH), large, 1)
                rows.append(
                    {
                        "model": model.name,
                        "parameters": model.parameters,
                        "way": way,
                        "devices": count,
                        "tokens": tokens,
                        "efficiency": expected.tokens_per_second / (count * alone.tokens_per_second),
                        "fits": expected.memory <= large.memory,
                        **_figures(expected),
                    }
                )
    return rows


def _finite(constants: dict[str, Any]) -> dict[str, Any]:
    """Return the constants with None in place of infinity, which JSON cannot represent."""
    return {
        name: _finite(value) if isinstance(value, dict) else None if value == float("inf") else value
        for name, value in constants.items()
    }


HEADS = ("model", "tokens", "way", "workers", "tokens/s", "sent a step", "states", "peak memory")
FORECAST = ("model", "way", "devices", "tokens/s", "efficiency", "sent a step", "memory a device", "fits")
NAMES = {"plain": "no group", "ddp": "DDP", "fsdp2": "FSDP2", "context": "context parallel"}


def rows(record: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the table of measurements: each has a measured value, and after it the prediction."""

    def both(row: dict[str, Any], figure: str, written: Callable[[float], str]) -> str:
        measured = row["measured"][figure]
        return f"{'–' if measured is None else written(measured)} ({written(row['expected'][figure])})"

    return [
        [
            row["model"],
            f"{row['tokens']:,}",
            NAMES[row["way"]],
            str(row["workers"]),
            both(row, "tokens_per_second", "{:,.0f}".format),
            *(both(row, figure, _bytes) for figure in ("sent", "states", "memory")),
        ]
        for row in record["measured"]
    ]


def forecast_rows(record: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the table of forecasts."""
    return [
        [
            row["model"],
            NAMES[row["way"]],
            f"{row['devices']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['efficiency']:.0%}",
            _bytes(row["sent"]),
            _bytes(row["memory"]),
            "yes" if row["fits"] else "no",
        ]
        for row in record["forecast"]["rows"]
    ]


def _bytes(amount: float) -> str:
    return "0" if not amount else size(round(amount))


def _notes(record: dict[str, Any]) -> tuple[str, str]:
    constants = record["constants"]["1"]
    large = record["forecast"]["machine"]
    near, far = (large[name]["bandwidth"] / 1e9 for name in ("near", "far"))
    speed = "measured above" if record["device"] == "cuda" else "assumed, a third of the peak in bfloat16"
    return (
        f"Measured (and, in brackets, what the cost model says); sequences of {record['length']} tokens, the batch is "
        f"that of all workers together. Constants from one process: {constants['flops']:.3g} FLOP/s, "
        f"{constants['per_layer'] * 1e3:.3g} ms for each layer, {constants['per_parameter'] * 1e9:.3g} ns for each "
        f"parameter, {constants['per_logit'] * 1e12:.3g} ps for each logit; bandwidth and latency "
        "from all-reduces of 64 KiB to 8 MiB."
        + (" Times are processor times: other programs ran beside." if record["device"] == "cpu" else ""),
        f"Forecast for {large['name']} in nodes of {large['node']}: {EACH:,} tokens of each device in a step, "
        f"{near:.0f} GB/s within a node and {far:.0f} GB/s between nodes for each device (assumed, not measured), "
        f"{large['flops']:.3g} FLOP/s ({speed}). “Efficiency” is against one device without a group and the same "
        "sequences.",
    )


def show(record: dict[str, Any]) -> None:
    """Print the record as tables."""
    console = Console(highlight=False)
    console.print(header(record), markup=False)
    for note, heads, cells in zip(
        _notes(record), (HEADS, FORECAST), (rows(record), forecast_rows(record)), strict=True
    ):
        console.print(note, markup=False)
        print_table(heads, cells, left=("model", "way"))


def markdown(record: dict[str, Any]) -> str:
    """Return the record as a section of a documentation page."""
    lines = [f"`regard bench scaling --device {record['device']}`; {header(record)}.", ""]
    for note, heads, cells in zip(
        _notes(record), (HEADS, FORECAST), (rows(record), forecast_rows(record)), strict=True
    ):
        lines += [note, "", *table_lines(heads, cells, left=len(heads)), ""]
    return "\n".join(lines)
