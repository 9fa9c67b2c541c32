"""Tests of two claims about Transformers on the built-in translation data, with several seeds each; prints a table.

python benchmarks/claims.py positions --out runs/positions     # sinusoidal against learned positions
python benchmarks/claims.py depth --out runs/depth             # six layers with and without residuals and layer norm
python benchmarks/claims.py depth --only neither --seeds 1 --out runs/trial --set train.steps=20

The runs of one row of the table train at the same time, in one process for each seed; `--set` applies to all runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMMON = {
    "model": "transformer",
    "model.size": "128",
    "model.heads": "4",
    "model.feed_forward": "256",
    "data.batch_tokens": "4096",
    "train.learning_rate": "1e-3",
    "train.warmup": "200",
    "train.steps": "3000",
    "train.validate_every": "1000",
}
KINDS = {
    "positions": {
        "sinusoidal": {"model.layers": "3", "positions": "sinusoidal"},
        "learned": {"model.layers": "3", "positions": "learned"},
    },
    "depth": {
        "both": {"model.layers": "6"},
        "no-residual": {"model.layers": "6", "residual": "false"},
        "no-norm": {"model.layers": "6", "norm": "none"},
        "neither": {"model.layers": "6", "residual": "false", "norm": "none"},
    },
}


def command(settings: dict[str, str], seed: int, out: Path) -> list[str]:
    """Return the command that trains with some settings and a seed."""
    merged = {**COMMON, **settings, "train.seed": str(seed)}
    options = [part for name, value in merged.items() for part in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "regard", "train", "translation", "--preset", "tiny", *options, "--out", str(out)]


def figures(run: Path) -> dict[str, float] | None:
    """Return BLEU on sentences of trained lengths and on longer sentences, and the last training loss; None if the run
    failed.
    """
    if not (run / "result.json").exists():
        return None
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in metrics if line["kind"] == "train"]
    return {
        "bleu": result["metrics"]["bleu"],
        "exact": 100 * result["metrics"]["exact"],
        "longer": result.get("longer", {}).get("metrics", {}).get("bleu", float("nan")),
        "loss": losses[-1] if losses else float("nan"),
        "seconds": result["training_seconds"],
    }


def row(name: str, results: Sequence[dict[str, float] | None]) -> str:
    """Return a line of the table: the result of each seed, and the mean over the seeds."""

    def cell(what: str, digits: int = 1) -> str:
        values = [result[what] for result in results if result is not None]
        if not values:
            return "–"
        return f"{statistics.fmean(values):.{digits}f} ({', '.join(f'{value:.{digits}f}' for value in values)})"

    failed = sum(result is None for result in results)
    cells = [cell("bleu"), cell("exact"), cell("longer"), cell("loss", 3), cell("seconds", 0), str(failed)]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=[*KINDS])
    parser.add_argument("--only", action="append", help="only this kind; may be repeated")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    further = dict(item.split("=", 1) for item in chosen.set)
    print("| kind | BLEU | exact % | BLEU, longer | training loss | seconds | failed |\n|---|--:|--:|--:|--:|--:|--:|")
    for name, settings in KINDS[chosen.claim].items():
        if chosen.only and name not in chosen.only:
            continue
        runs = [chosen.out / f"{name}-{seed}" for seed in chosen.seeds]
        chosen.out.mkdir(parents=True, exist_ok=True)
        started = []
        for seed, run in zip(chosen.seeds, runs, strict=True):
            with run.with_suffix(".log").open("w") as log:
                started.append(subprocess.Popen(command({**settings, **further}, seed, run), stdout=log, stderr=log))
        for process, run in zip(started, runs, strict=True):
            if process.wait():
                print(run.with_suffix(".log").read_text(encoding="utf-8")[-2000:], file=sys.stderr)
        print(row(name, [figures(run) for run in runs]), flush=True)


if __name__ == "__main__":
    main()
