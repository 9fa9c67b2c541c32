"""Capture of `regard.attention` calls with any score, normaliser, mask and bias, on any backend."""

import functools
from collections.abc import Callable

from torch import Tensor

from regard.core.attended import Attended
from regard.core.normalizers import Hard
from regard.core.problem import Problem
from regard.core.scores import ScaledDot
from regard.look.capture.captured_call import DROPOUT, Call, Recorder, four_axes
from regard.look.recomputed_weights import Pairs

_SAMPLED = "a key was drawn for each query: these are the chances it was drawn by, and the check cannot apply"


def captured(recorder: Recorder, problem: Problem, run: Callable[[], Attended]) -> Attended:
    """Run the call of `regard.attention`, record it, and return its result."""
    with recorder.paused():
        result = run()
    if problem.gathered:
        recorder.cannot_see("local attention, whose keys are a window around each query,")
        return result
    with recorder.safely():
        sampled = isinstance(problem.normalize, Hard) and problem.sample
        note = _SAMPLED if sampled else DROPOUT if problem.dropout > 0 else None
        scale = problem.score.scale if isinstance(problem.score, ScaledDot) else None
        if isinstance(problem.score, ScaledDot) and scale is None:
            scale = problem.query.shape[-1] ** -0.5
        call = Call(
            "regard",
            Pairs(problem),
            four_axes(problem.value) if problem.value.ndim != 3 else problem.value[None],
            result.output,
            scale,
            note=note,
            checkable=note is None,
            view=functools.partial(_with_heads, headless=problem.headless),
        )
        recorder.record(call)
    return result


def _with_heads(output: Tensor, *, headless: bool) -> Tensor:
    output = output[None] if headless else output
    return output[None] if output.ndim == 3 else four_axes(output)
