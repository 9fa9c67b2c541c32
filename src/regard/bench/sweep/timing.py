"""The measurements of one case: interleaved wall-clock time, host time, kernels, synchronisations, memory, errors."""

import contextlib
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from regard.bench.measurement import cuda_memory, orders, why
from regard.bench.sweep import attention_contest, error_budgets, layer_contest, linear_contest
from regard.bench.sweep.cases import Case
from regard.bench.sweep.contests import Contender, Contest

Run = Callable[[], None]
SECONDS = {"cpu": 1.5, "cuda": 0.25}  # time limit for the rounds of a case in seconds
ROUNDS = {"cpu": (3, 25), "cuda": (7, 60)}  # smallest and largest number of rounds of measurement of a case
READING = 1e-3  # smallest duration of a measurement on a CPU in seconds: shorter calls are repeated
SHORT = 0.05  # for a call that takes fewer seconds, the first measurement is the shortest of three
BEHIND = 3.0  # a peer slower than the best peer by this factor is not measured again
CACHE = {"cpu": 2**26, "cuda": 2**28}  # bytes that are overwritten before a cold call
WRONG = 50.0  # a peer whose error exceeds this many budgets is wrong, and is not compared
SLOW = 20.0  # seconds after which no further round of a case begins, even below the smallest number of rounds


@dataclass
class Measured:
    """The measurements of a case; a field is None if it was not measured."""

    case: Case
    seconds: float | None = None  # median seconds of regard's call
    first: float | None = None  # seconds of regard's first call, which loads libraries and compiles kernels
    peers: dict[str, float] = field(default_factory=dict)  # median seconds of each peer's call
    left_out: dict[str, str] = field(default_factory=dict)  # peers that did not take part, with the reason
    errors: dict[str, float] = field(default_factory=dict)  # errors divided by their budgets
    host: float | None = None  # seconds until regard's call returns on CUDA
    kernels: int | None = None  # number of kernels on CUDA
    synchronisations: int | None = None  # number of times that the host waits for the device on CUDA
    memory: int | None = None  # peak memory of regard's call, in bytes above the use before it
    peer_memory: int | None = None  # peak memory of the best peer's call, in bytes above the use before it
    failed: str | None = None  # the reason why regard's call did not run

    @property
    def best(self) -> str | None:
        """Return the fastest peer."""
        return min(self.peers, key=self.peers.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """Return the best peer's time divided by regard's: above 1 regard is faster."""
        return None if self.best is None or not self.seconds else self.peers[self.best] / self.seconds

    @property
    def error(self) -> float | None:
        """Return the largest error relative to its budget; at most 1 is within the budget."""
        return max(self.errors.values(), default=None)


def contest(case: Case) -> Contest:
    """Return the contenders of a case of any kind."""
    if case.kind == "attention":
        return attention_contest.contest(case)
    return linear_contest.contest(case) if case.kind in ("linear", "local") else layer_contest.contest(case)


def measure(case: Case) -> Measured:
    """Measure every contender of a case."""
    measured = Measured(case)
    try:
        _measure(case, measured)
    except Exception as problem:  # the failure of one case does not end a sweep
        measured.failed = why(problem)
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return measured


def _measure(case: Case, measured: Measured) -> None:
    if case.compiled:
        torch.compiler.reset()  # torch limits the compilations of a function over all cases of the process
    field = contest(case)
    truth = error_budgets.truth(case, field)
    measured.first = _clock(lambda: _run(case, field.ours)(), case.device)
    measured.errors = error_budgets.budgets(case, field, field.ours, truth)
    contenders = {"regard": field.ours}
    for name, make in field.peers.items():
        try:
            peer = make()
            off = error_budgets.budgets(case, field, peer, truth)["output"]
            if not off <= WRONG:
                raise ValueError(f"its output is off by {off:.0f} budgets")
            _run(case, peer)()  # results cached by the first call must be valid in a second one
            contenders[name] = peer
        except Exception as problem:  # a peer that fails is reported, and the case continues
            measured.left_out[name] = why(problem)
            gc.collect()
            if case.device == "cuda":
                torch.cuda.empty_cache()
    runs = {name: _run(case, contender) for name, contender in contenders.items()}
    times = turns(case, runs)
    measured.seconds = times.pop("regard")
    measured.peers = times
    measured.memory = peak(runs["regard"], case.device)
    if measured.best is not None:
        measured.peer_memory = peak(runs[measured.best], case.device)
    if case.device == "cuda":
        measured.host = _host(runs["regard"])
        measured.kernels, measured.synchronisations = launches(runs["regard"])


def call_once(case: Case, contender: Contender) -> None:
    """Run a contender once; compute the gradients too if the case has gradients."""
    _run(case, contender)()


def _run(case: Case, contender: Contender) -> Run:
    """Return a function that calls a contender and, if the case has gradients, computes them."""
    if not case.gradients:

        def forward() -> None:
            with torch.no_grad():
                contender.call()

        return forward

    upstream = torch.ones((), device=case.device, dtype=case.torch_dtype)

    def both() -> None:
        output, _ = contender.call()
        torch.autograd.grad(output, contender.leaves, upstream.expand_as(output), allow_unused=True)

    return both


def _clock(run: Run, device: str, number: int = 1) -> float:
    """Return the mean seconds of `number` calls, until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(number):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / number


def turns(case: Case, runs: dict[str, Run]) -> dict[str, float]:
    """Return the median time of each call; calls are interleaved, so that a machine that slows down affects all of
    them."""
    device = case.device
    spoiled = torch.empty(CACHE[device], dtype=torch.uint8, device=device) if case.cold else None

    def reading(name: str) -> float:
        if spoiled is not None:
            spoiled.fill_(1)
        return _clock(runs[name], device, numbers[name])

    numbers = dict.fromkeys(runs, 1)
    readings = {}
    for name, run in runs.items():  # all contenders have run before, so no call includes compilation
        once = _clock(run, device)
        if device == "cpu" and not case.cold:
            numbers[name] = max(1, min(100, round(READING / once)))
        readings[name] = [min(reading(name) for _ in range(3 if once < SHORT else 1))]
    peers = [times[0] for name, times in readings.items() if name != "regard"]
    limit = BEHIND * min(peers, default=0.0)
    active = [name for name in runs if name == "regard" or readings[name][0] <= limit]
    least, most = ROUNDS[device]
    begin = time.perf_counter()
    sequences = orders(len(active))
    for number in range(most):
        spent = time.perf_counter() - begin
        if (number >= least and spent > SECONDS[device]) or spent > SLOW:
            break
        for place in sequences[number % len(sequences)]:
            readings[active[place]].append(reading(active[place]))
    return {name: statistics.median(times[1:] or times) for name, times in readings.items()}


def _host(run: Run, times: int = 15) -> float:
    """Return seconds until a call returns, with the device idle before it."""
    seconds = []
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def launches(run: Run) -> tuple[int, int]:
    """Return the number of kernels that a call runs, and of its synchronisations."""
    of_profiler, (kernels, waits) = _of_profiler(), _counted(run)
    return kernels - of_profiler[0], max(0, waits - of_profiler[1])


@functools.cache
def _of_profiler() -> tuple[int, int]:
    """Return the kernels and synchronisations of the profiler itself, which synchronises when it ends."""
    _counted(lambda: None)  # the first profile of a process initialises the profiler
    return _counted(lambda: None)


def _counted(run: Run) -> tuple[int, int]:
    """Return the kernels and synchronisations that the profiler counts while `run` runs."""
    torch.cuda.synchronize()
    with _silent(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    kernels = waits = 0
    for event in profiler.events() or ():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device and not getattr(event, "is_user_annotation", False):
            kernels += not event.name.startswith(("Memcpy", "Memset"))
        elif event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"):
            waits += 1
    return kernels, waits


def peak(run: Run, device: str) -> int:
    """Return the peak memory of a call in torch's allocator, in bytes above the use before it."""
    if device == "cuda":
        return cuda_memory(run)  # pyrefly: ignore[bad-argument-type]
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = highest = 0
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events = [] if results is None else [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyrefly: ignore[missing-attribute]
        highest = max(highest, held)
    return highest


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress what the profiler's own library prints to standard error at each start and stop."""
    original_stderr = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(original_stderr, 2)
        os.close(original_stderr)
