"""The results of each case as text, and the distribution of the ratios (time of the best peer / time of regard) of a
sweep.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from regard.bench.command_output import duration, size
from regard.bench.sweep.timing import Measured

WORST = 10


def record(measured: Measured) -> dict[str, Any]:
    """Return the record of a case for `--json`."""
    case = measured.case
    measurements = {name: value for name, value in asdict(measured).items() if name != "case"}
    return {
        "case": asdict(case),
        "call": case.call,
        "what": case.what,
        "repeat": case.repeat,
        "ratio": measured.ratio,
        "best_peer": measured.best,
        "error": measured.error,
        **measurements,
    }


def line(measured: Measured) -> str:
    """Return a case in two lines: the ratio (time of the best peer / regard's time), the call, and the measurements."""
    case = measured.case
    head = f"{case.index:4d}  {_times(measured.ratio)}  {case.call}  {case.what}"
    if measured.failed is not None:
        return f"{head}\n      failed: {measured.failed}"
    parts = [f"regard {duration(measured.seconds or 0.0)}"]
    parts += [f"{name} {duration(time)}" for name, time in sorted(measured.peers.items(), key=lambda pair: pair[1])[:3]]
    if measured.host is not None:
        waits = measured.synchronisations
        parts.append(f"host {duration(measured.host)}, {measured.kernels} kernels, {waits} synchronisations")
    parts.append(f"peak {size(measured.memory)} (peer {size(measured.peer_memory)})")
    if measured.error is not None:
        worst = max(measured.errors, key=measured.errors.__getitem__)
        parts.append(f"error {measured.error:.2g} budgets" + (f" ({worst})" if measured.error > 1 else ""))
    parts.append(f"first call {duration(measured.first or 0.0)}")
    missing = [f"without {name}: {reason}" for name, reason in measured.left_out.items()]
    return f"{head}\n      {'; '.join([*parts, *missing])}"


def _times(ratio: float | None) -> str:
    return "     –" if ratio is None else f"{ratio:5.2f}×"


def distribution(sweep: Sequence[Measured]) -> dict[str, Any]:
    """Return a summary of the ratios (time of the best peer / time of regard) of a sweep."""
    ratios = sorted(measured.ratio for measured in sweep if measured.ratio is not None)
    beyond = [measured for measured in sweep if measured.error is not None and not measured.error <= 1]
    return {
        "cases": len(sweep),
        "compared": len(ratios),
        "failed": sum(measured.failed is not None for measured in sweep),
        "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        "fifth_percentile": percentile(ratios, 0.05),
        "median": percentile(ratios, 0.5),
        "least": ratios[0] if ratios else None,
        "slower": sum(ratio < 1 for ratio in ratios),
        "beyond_budget": [measured.case.index for measured in beyond],
        "worst": [measured.case.index for measured in worst(sweep)],
    }


def worst(sweep: Sequence[Measured]) -> list[Measured]:
    """Return the cases that failed, and then the cases with the smallest ratios, smallest first."""
    failed = [measured for measured in sweep if measured.failed is not None]
    compared = sorted(
        (measured for measured in sweep if measured.ratio is not None), key=lambda measured: measured.ratio or 0.0
    )
    return failed + compared[:WORST]


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the number below which the fraction `share` of the ascending numbers lies, interpolated; None if empty.

    >>> percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5), percentile([1.0, 2.0], 0.05), percentile([], 0.5)
    (3.0, 1.05, None)
    """
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(sweep: Sequence[Measured], numbers: dict[str, Any]) -> str:
    """Return the distribution and the worst cases, each with the command that repeats it."""
    if not numbers["compared"]:
        return f"no case was compared, {numbers['failed']} failed"
    lines = [
        f"{numbers['compared']} of {numbers['cases']} cases compared, {numbers['failed']} failed; ratio (best peer's "
        f"time / regard's): geometric mean {numbers['geometric_mean']:.2f}, 5th percentile "
        f"{numbers['fifth_percentile']:.2f}, median {numbers['median']:.2f}, least {numbers['least']:.2f}; "
        f"{numbers['slower']} below 1; {len(numbers['beyond_budget'])} beyond the error budget"
        + (f" ({', '.join(map(str, numbers['beyond_budget']))})" if numbers["beyond_budget"] else ""),
        "the worst:",
    ]
    for measured in worst(sweep):
        peer = measured.failed if measured.failed is not None else f"beside {measured.best}"
        lines += [
            f"{_times(measured.ratio)}  {measured.case.call}  {measured.case.what}; {peer}",
            f"        {measured.case.repeat}",
        ]
    return "\n".join(lines)
