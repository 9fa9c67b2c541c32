"""Time, peak memory and error of the contenders of one case.

Measurements of contenders are interleaved, so that a machine that slows down affects all contenders. A contender
that cannot run also has an entry in the result, with the reason.
"""

import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.bench.attention_cases import ROWS, Case, Run, cases

BATCH = 0.02  # smallest duration of one measurement in seconds: shorter calls are repeated
NEAR = 1.1  # contenders within this factor of the fastest are measured again
SLOW = 10.0  # a contender whose call takes more seconds than this is timed once
LARGE = 3.0  # the memory of a call that takes more seconds than this is measured without a warm-up call


@dataclass(frozen=True)
class Measurement:
    """The measurements of one contender; a field is None if it was not measured, for the given `reason`."""

    name: str
    seconds: float | None = None
    ratio: float | None = None  # the contender's time divided by regard's
    rate: float | None = None  # work per second, in the case's unit
    memory: int | None = None  # peak memory of the call, in bytes above the use before it
    error: float | None = None  # the largest error, relative to the largest output, against float64
    error_by_norm: float | None = None  # the norm of all errors divided by the norm of the outputs
    reason: str | None = None


def measure(case: Case, *, quick: bool, say: Callable[[str], None]) -> list[Measurement]:
    """Measure every contender of a case; return the measurements in the order of the contenders."""
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    try:
        measurements = _measure(case, quick, say)
    finally:
        torch.set_num_threads(threads)
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()
    if case.memory and case.device == "cpu":
        say("memory")
        measurements = _with_memory(case, measurements, quick, say)
    first = measurements[0].seconds
    return [
        measurement
        if measurement.seconds is None
        else replace(
            measurement,
            ratio=measurement.seconds / first if first else None,
            rate=case.work / measurement.seconds if case.work else None,
        )
        for measurement in measurements
    ]


def _measure(case: Case, quick: bool, say: Callable[[str], None]) -> list[Measurement]:
    field = case.build()
    truth = field.truth() if field.truth else None
    measurements: dict[str, Measurement] = {}
    runs: dict[str, Run] = {}
    readings: dict[str, list[float]] = {}
    for name, make in field.contenders.items():
        say(name)
        try:
            run = make()
            errors = relative_errors(run(), truth)  # the first call loads libraries and compiles kernels
            readings[name] = [seconds_per_call(run, 1, case.device)]
            memory = cuda_memory(run) if case.memory and case.device == "cuda" else None
        except Exception as problem:  # a contender that fails is reported, and the run continues
            measurements[name] = Measurement(name, reason=why(problem))
            gc.collect()
            if case.device == "cuda":
                torch.cuda.empty_cache()
        else:
            measurements[name], runs[name] = Measurement(name, None, None, None, memory, *errors), run
    say("times")
    take_turns(runs, readings, case.device, quick)
    settle = statistics.median if case.device == "cuda" else min
    return [
        replace(measurement, seconds=settle(readings[name]) if name in readings else None)
        for name, measurement in measurements.items()
    ]


def take_turns(runs: dict[str, Run], readings: dict[str, list[float]], device: str, quick: bool) -> None:
    """Measure the contenders in turn, until each has enough measurements or has used its time; slow calls are measured
    only once."""
    rounds, budget = (2, 0.2) if quick else (21, 0.4) if device == "cuda" else (9, 4.0)
    numbers = {name: max(1, round(BATCH / readings[name][0])) for name in runs}
    _turns(runs, readings, numbers, device, rounds, budget, quick)
    if quick or device != "cuda":
        return
    # Contenders near the fastest differ by less than the clock speed varies: they are measured more often.
    settled = {name: statistics.median(readings[name]) for name in runs}
    near = {name: runs[name] for name in runs if settled[name] <= NEAR * min(settled.values())}
    if len(near) > 1:
        again = {name: [settled[name]] for name in near}
        number = max(2, round(BATCH / 4 / min(settled.values())))  # calls in one measurement of any contender
        _turns(near, again, dict.fromkeys(near, number), device, 4 * rounds, 2 * budget, quick)
        readings.update(again)


def _turns(
    runs: dict[str, Run],
    readings: dict[str, list[float]],
    numbers: dict[str, int],
    device: str,
    rounds: int,
    budget: float,
    quick: bool,
) -> None:
    spent = dict.fromkeys(runs, 0.0)

    def wanted(name: str) -> bool:
        return readings[name][0] < SLOW and spent[name] < budget and len(readings[name]) <= rounds

    while active := [name for name in runs if wanted(name)]:
        for order in orders(len(active))[: rounds if quick else None]:
            # A contender with long calls stops as soon as its time is used, one with short calls only after all orders.
            names = [name for name in (active[place] for place in order) if numbers[name] > 1 or wanted(name)]
            if names and numbers[names[0]] > 1:  # a warm-up, so that the first contender follows a call too
                seconds_per_call(runs[names[0]], numbers[names[0]], device)
            for name in names:
                reading = seconds_per_call(runs[name], numbers[name], device)
                readings[name].append(reading)
                spent[name] += reading * numbers[name]


def times(runs: dict[str, Run], device: str) -> dict[str, float]:
    """Return the seconds of each call. Each call must have run once before it is timed; measurements are interleaved,
    and end after a number of rounds or a limit of time for each call.
    """
    readings = {name: [seconds_per_call(run, 1, device)] for name, run in runs.items()}
    numbers = {name: max(1, round(BATCH / seconds[0])) for name, seconds in readings.items()}
    rounds, budget, settle = (21, 0.4, statistics.median) if device == "cuda" else (5, 1.0, min)
    _turns(runs, readings, numbers, device, rounds, budget, True)
    return {name: settle(seconds) for name, seconds in readings.items()}


def orders(count: int) -> list[list[int]]:
    """Return orders in which each item follows every other item equally often (Williams 1949).

    A call that heats the processor changes the clock speed of the next one. In rotated lists, and in lists shuffled
    with one seed, a call would always follow the same other call.

    >>> orders(4)
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    first = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    rotated = [[(place + start) % count for place in first] for start in range(count)]
    return rotated + [order[::-1] for order in rotated] if count % 2 else rotated


def seconds_per_call(run: Run, number: int, device: str) -> float:
    """Return the mean seconds of `number` consecutive calls; if there are several, an untimed warm-up call comes first.

    On a GPU the measurement starts when the warm-up ends: the next call is already enqueued, as in any sequence of
    calls.
    """
    if device == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if number > 1:
            run()
        start.record()
        for _ in range(number):
            run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3 / number
    if number > 1:
        run()
    begin = time.perf_counter()
    for _ in range(number):
        run()
    return (time.perf_counter() - begin) / number


def relative_errors(output: Tensor, truth: Tensor | None) -> tuple[float | None, float | None]:
    """Return two relative errors: the largest error divided by the largest output, which in half precision is dominated
    by large outputs, and the norm of the errors divided by the norm of the outputs."""
    if truth is None:
        return None, None
    off = output[..., ROWS, :].double() - truth
    return float(off.abs().max() / truth.abs().max()), float(off.norm() / truth.norm())


def cuda_memory(run: Run) -> int:
    """Return the peak memory of a call on CUDA, in bytes above what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def why(problem: Exception) -> str:
    """Return the reason why a contender did not run, in a few words."""
    if isinstance(problem, ModuleNotFoundError):
        return f"{(problem.name or str(problem)).partition('.')[0]} is not installed"
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    said = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {said[0][:160]}" if said else type(problem).__name__


def _with_memory(
    case: Case, measurements: list[Measurement], quick: bool, say: Callable[[str], None]
) -> list[Measurement]:
    """Return the measurements with the peak memory of each contender, which is measured in a separate process."""
    names = {
        measurement.name: (measurement.seconds or 0.0) < LARGE
        for measurement in measurements
        if measurement.seconds is not None
    }
    arguments = [case.name, json.dumps(names), json.dumps(quick)]
    apart = peaks_apart("regard.bench.measurement", arguments, say) if names else {}
    return [replace(measurement, memory=apart.get(measurement.name)) for measurement in measurements]


def peaks_apart(module: str, arguments: list[str], say: Callable[[str], None]) -> dict[str, int]:
    """Run a module as a program and return the JSON on its last line: peaks by name; empty if not available.

    In the started process the allocator returns freed blocks of memory to the system at once. In an ordinary process
    freed blocks stay resident and would hide a later peak. Returning blocks takes time, so times are not measured in
    the started process.
    """
    if sys.platform != "linux":
        return {}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        say(f"memory could not be measured: {said[-1][:160]}")
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def status_bytes(name: str) -> int:
    """Return an entry of this process's status on Linux in bytes, such as VmRSS (resident memory); elsewhere 0."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(name))
    return 0


def forget_peak() -> None:
    """Reset the peak of the resident memory to its current value."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


def peaks(contenders: Mapping[str, Callable[[], Run]], names: dict[str, bool]) -> dict[str, int]:
    """Return the peak memory of a call of each contender in `names`, in bytes above the resident memory before it. A
    contender whose value in `names` is True is called once before, to load libraries and to compile."""
    peak_bytes = {}
    for name, warm in names.items():
        run = contenders[name]()
        if warm:
            run()
        gc.collect()
        trim()
        forget_peak()
        before = status_bytes("VmRSS")
        run()
        peak_bytes[name] = max(0, status_bytes("VmHWM") - before)
    return peak_bytes


def trim() -> None:
    """Release the free pages of the heap to the system.

    Small blocks of an earlier call may leave the heap large, and a later call would then seem to need no memory.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    wanted, warm, small = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    [chosen] = [case for case in cases("cpu", small) if case.name == wanted]
    print(json.dumps(peaks(chosen.build().contenders, warm)))
