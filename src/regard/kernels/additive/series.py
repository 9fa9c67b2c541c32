"""Trigonometric series for activations: additive scores as dot products.

On ``|x| <= X`` an activation is nearly ``constant + slope * x + Σ_r sine_r sin(ω_r x) + cosine_r cos(ω_r x)`` with odd
harmonics ``ω_r = (2r + 1) π / (2P)``. Since ``sin ω(a + b) = sin ωa cos ωb + cos ωa sin ωb``, a score ``Σ_f w_f
act(a_f + b_f)`` is a dot product of 2R features per hidden unit, for R harmonics. Sines of odd harmonics are symmetric
about P; tanh is flat near P, so P may be smaller than X, which saves terms. A linear term saves another half harmonic:
``tanh x - x/P`` has the period 2P, so the remaining series has the harmonics ``ω_r = (2r + 2) π / (2P)``. The linear
term adds almost no work: its query part is the same for all keys, and its key part is one number for each key.

The backward pass uses the series and its derivative, so its fit minimises the larger of two numbers: the worst error of
the value, and a quarter of the worst error of the derivative. The forward pass needs the value only. Its fit allows an
error that grows from 0.3 X to three times as much at 0.65 X and beyond, because few sums are so large. X is the maximum
over all hidden units, and most units have a smaller range: each unit uses a fit for its own range with the same number
of harmonics, which takes the same time and halves the error. The number of harmonics is chosen for the error of all
units together, not for the unit with the largest error.

``python -m regard.kernels.additive.series`` regenerates ``series.json``.
"""

import functools
import importlib.resources
import json
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

GROUPS = {"forward": 1, "backward": 2}  # the number of harmonics is a multiple of this: backward kernels use pairs
MOST = 16  # the largest number of harmonics in a table row
WIDTH = 8 + 2 * MOST  # the number of floats in a fit in the kernels' format
# A table row of the forward pass has one fit for each of these ranges, which are relative to the row's largest range.
SHORTER = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.7, 0.6)
# The number of fits in a table row: the backward kernels use one base frequency for all hidden units.
FITS = {"forward": len(SHORTER), "backward": 1}
_SHARES = {"forward": 0.0, "backward": 0.25}  # weight of the derivative's error in the fit

# The largest allowed errors of value and derivative for each dtype of the features and each pass: about the rounding
# error of one activation in that dtype.
BUDGETS = {
    ("bfloat16", "forward"): (3.2e-3, math.inf),
    ("bfloat16", "backward"): (2.8e-3, 6e-3),
    ("float16", "forward"): (3.2e-4, math.inf),
    ("float16", "backward"): (3.2e-4, 1e-3),
}
STEP = 0.25  # distance between the ranges X that the forward fits try
# Factors of the errors allowed in the forward pass: for the hidden units together, and for each hidden unit.
ALL, ONE = 0.8, 1.25
# The ranges X that the backward fits try; the last is also the largest range that the forward fits try.
REACHES = (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 6.5, 7.0, 7.5, 8.0, 8.5, 8.75, 9.0, 9.25, 9.5, 10.0,
           11.0, 12.0, 13.0, 14.0, 16.0, 18.0, 20.0, 24.0)  # fmt: skip


class Series(NamedTuple):
    """A series that approximates an activation for ``|x| <= reach``."""

    reach: float
    period: float  # P: the base frequency is π / (2P)
    waves: tuple[float, ...]  # coefficients of sines if the activation is odd, of cosines if it is even
    constant: float = 0.0  # the constant term, which cancels in a softmax, but not in the log-sum-exp
    # The coefficient of the linear term. If there is one, the harmonics are 2, 4, 6, … times the base frequency, else
    # 1, 3, 5, … times.
    slope: float = 0.0

    @property
    def harmonics(self) -> int:
        return len(self.waves)


class Row(NamedTuple):
    """A table row: fits with the same number of harmonics, of which the first has the largest range.

    A row applies to a call if no hidden unit exceeds the first range, and a mean over all hidden units that emphasises
    large ranges (triton.additive.series_features.table_row) is at most `together`.
    """

    together: float
    fits: tuple[Series, ...]

    @property
    def reach(self) -> float:
        return self.fits[0].reach


def _tanh(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.tanh(x), 1.0 / np.cosh(x) ** 2


def _gelu_even(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the even function gelu(x) - x/2 = x erf(x/√2) / 2 and its derivative; the term x/2 needs no series."""
    erf = np.vectorize(math.erf)(x / math.sqrt(2.0))
    return x * erf / 2.0, erf / 2.0 + x * np.exp(-x * x / 2.0) / math.sqrt(2.0 * math.pi)


TARGETS: dict[str, tuple[Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], bool]] = {
    "tanh": (_tanh, True),
    "gelu": (_gelu_even, False),
}


class Fit(NamedTuple):
    worst: float
    value_error: float
    slope_error: float
    period: float
    coefficients: np.ndarray
    sloped: bool


def _tolerance(x: np.ndarray, direction: str) -> np.ndarray:
    """Return the allowed error at each x divided by the allowed error near 0: 1, or in the forward pass up to 3."""
    return np.ones_like(x) if direction == "backward" else 1.0 + np.clip((x / x[-1] - 0.3) / 0.175, 0.0, 2.0)


def _fit(
    values: np.ndarray,
    slopes: np.ndarray,
    x: np.ndarray,
    *,
    odd: bool,
    sloped: bool,
    harmonics: int,
    period: float,
    direction: str,
) -> Fit:
    """Return a fit that minimises the largest error, by least squares whose weights grow where the error is large."""
    share, tolerance = _SHARES[direction], _tolerance(x, direction)
    omega = (2 * np.arange(harmonics) + 1 + sloped) * math.pi / (2 * period)
    phase = np.outer(x, omega)
    basis, basis_slope = (np.sin(phase), omega * np.cos(phase)) if odd else (np.cos(phase), -omega * np.sin(phase))
    if not odd:  # an even function also needs a constant
        basis = np.hstack([basis, np.ones((len(x), 1))])
        basis_slope = np.hstack([basis_slope, np.zeros((len(x), 1))])
    elif sloped:
        basis = np.hstack([basis, x[:, None]])
        basis_slope = np.hstack([basis_slope, np.ones((len(x), 1))])
    weight = np.ones_like(x)
    best = None
    for _ in range(20):
        root = np.sqrt(weight)[:, None]
        rows, goal = basis * root, values * root[:, 0]
        if share > 0.0:
            rows = np.vstack([rows, share * basis_slope * root])
            goal = np.concatenate([goal, share * slopes * root[:, 0]])
        solution = np.linalg.lstsq(rows, goal, rcond=1e-9)[0]
        error = np.abs(basis @ solution - values) / tolerance
        slope_error = np.abs(basis_slope @ solution - slopes)
        merit = np.maximum(error, share * slope_error)
        if best is None or merit.max() < best.worst:
            best = Fit(merit.max(), error.max(), slope_error.max(), period, solution, sloped)
        weight *= 1e-3 + merit / merit.max()
        weight /= weight.mean()
    assert best is not None
    return best


@functools.cache
def fit_row(target: str, reach: float, harmonics: int, direction: str) -> Fit:
    """Return the best fit over all periods and, for odd functions in the forward pass, with and without a slope."""
    function, odd = TARGETS[target]
    x = np.linspace(0.0, reach, 601)
    values, slopes = function(x)
    settings = {"odd": odd, "harmonics": harmonics, "direction": direction}
    kinds = (False, True) if odd and direction == "forward" else (False,)

    def best(periods: np.ndarray, kinds: tuple[bool, ...]) -> Fit:
        fits = (_fit(values, slopes, x, period=period, sloped=kind, **settings) for period in periods for kind in kinds)
        return min(fits, key=lambda fit: fit.worst)

    periods = np.linspace(max(1.5, 0.45 * reach), 1.1 * reach + 1.0, 36)
    rough = best(periods, kinds)
    step = periods[1] - periods[0]
    return best(rough.period + step * np.linspace(-0.8, 0.8, 9), (rough.sloped,))


def _series(target: str, reach: float, harmonics: int, direction: str) -> Series:
    fit = fit_row(target, reach, harmonics, direction)
    rounded = tuple(float(f"{c:.9g}") for c in fit.coefficients)
    waves, last = rounded[:harmonics], rounded[-1]
    constant, slope = 0.0 if TARGETS[target][1] else last, last if fit.sloped else 0.0
    return Series(reach, float(f"{fit.period:.9g}"), waves, constant, slope)


def fit_table(target: str, budget: tuple[float, float], direction: str) -> Iterator[Row]:
    """Yield the table rows of an activation in the order of increasing range."""

    def serves(reach: float, harmonics: int, share: float = 1.0) -> bool:
        fit = fit_row(target, reach, harmonics, direction)
        return fit.value_error <= share * budget[0] and fit.slope_error <= share * budget[1]

    numbers = range(2, MOST + 1, GROUPS[direction])
    if direction == "backward":  # for each range the smallest number of harmonics that meets BUDGETS, if one does
        for reach in REACHES:
            least = next((n for n in numbers if serves(reach, n)), None)
            if least is None:
                return
            yield Row(reach, (_series(target, reach, least, direction),))
        return
    steps = {ALL: 0, ONE: 0}
    for harmonics in numbers:  # for each number of harmonics the largest range that meets BUDGETS
        before = dict(steps)
        for share in steps:
            while (steps[share] + 1) * STEP <= REACHES[-1] and serves((steps[share] + 1) * STEP, harmonics, share):
                steps[share] += 1
        if steps[ALL] > before[ALL]:
            reaches = [round(part * steps[ONE] * STEP, 6) for part in SHORTER]
            yield Row(steps[ALL] * STEP, tuple(_series(target, reach, harmonics, direction) for reach in reaches))


@functools.cache
def packed(target: str, dtype: str, direction: str) -> tuple[tuple[float, ...], ...]:
    """Return the table rows in the kernels' format: the numbers of all fits of a row, one fit after another.

    The numbers of a fit are reach, harmonics, base frequency in turns, slope, constant, lowest, together, 0 (unused),
    sines and cosines, each padded with zeros to MOST harmonics. `lowest` is the lowest harmonic as a multiple of the
    base frequency; the next harmonics are two base frequencies apart.
    """
    none = (0.0,) * MOST

    def numbers(fit: Series, together: float) -> tuple[float, ...]:
        waves = (*fit.waves, *none[fit.harmonics :])
        turns = 1.0 / (4.0 * fit.period)  # the base frequency π / (2P), divided by 2π
        lowest = 2.0 if fit.slope else 1.0
        head = (fit.reach, float(fit.harmonics), turns, fit.slope, fit.constant, lowest, together, 0.0)
        first, second = (waves, none) if TARGETS[target][1] else (none, waves)
        return (*head, *first, *second)

    rows = _fitted()[f"{target} {dtype} {direction}"]
    return tuple(tuple(x for fit in row.fits for x in numbers(fit, row.together)) for row in rows)


@functools.cache
def _fitted() -> dict[str, list[Row]]:
    """Return the table rows of `series.json`; the keys are "target dtype direction"."""
    text = importlib.resources.files("regard.kernels.additive").joinpath("series.json").read_text()
    return {
        name: [Row(together, tuple(_from_json(*fit) for fit in fits)) for together, fits in rows]
        for name, rows in json.loads(text).items()
    }


def _from_json(reach: float, period: float, waves: list[float], constant: float, slope: float) -> Series:
    return Series(reach, period, tuple(waves), constant, slope)


def _write() -> None:
    from pathlib import Path

    tables = []
    for target in TARGETS:
        for (dtype, direction), budget in BUDGETS.items():
            rows = ",\n".join("  " + json.dumps(row) for row in fit_table(target, budget, direction))
            tables.append(f'"{target} {dtype} {direction}": [\n{rows}\n]')
    Path(__file__).with_name("series.json").write_text("{\n" + ",\n".join(tables) + "\n}\n")


if __name__ == "__main__":
    _write()
