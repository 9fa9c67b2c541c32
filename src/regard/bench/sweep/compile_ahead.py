"""Compile all cases of a sweep in several processes before the first measurement, to shorten the sweep.

Triton and torch.compile store compiled code in caches on disk. The processes started here fill these caches, and the
process that measures loads the compiled code from the caches. Without compiled code in the caches, every peer that uses
torch.compile takes 5 to 20 seconds for each case.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from regard.bench.sweep.cases import Case
from regard.bench.sweep.contests import Contender
from regard.bench.sweep.timing import call_once, contest

COMPILED = ("torch.compile", "FlexAttention")  # names of the peers that compile


def compile_ahead(cases: Sequence[Case], processes: int, say: Callable[[str], None]) -> None:
    """Run every case once in one of the `processes` processes, without measuring it. Failures are ignored here; the
    measurement of the case reports them."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not work in a forked process
    slowest_first = sorted(cases, key=lambda case: not case.compiled)
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        started = [pool.submit(compile_case, case) for case in slowest_first]
        for number, _ in enumerate(as_completed(started), 1):
            if number % 20 == 0 or number == len(started):
                say(f"compiled {number} of {len(started)} cases")


def compile_case(case: Case) -> None:
    """Run regard's call, and each peer that uses torch.compile, once."""
    with contextlib.suppress(Exception):
        if case.compiled:
            torch.compiler.reset()
        case_contest = contest(case)
        contenders: list[Callable[[], Contender]] = [lambda: case_contest.ours]
        contenders += [make for name, make in case_contest.peers.items() if name in COMPILED]
        for make in contenders:
            with contextlib.suppress(Exception):
                call_once(case, make())
    if case.device == "cuda":
        torch.cuda.empty_cache()
