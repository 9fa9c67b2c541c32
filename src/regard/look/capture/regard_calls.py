"""Calls of `regard.attention` itself: any score, normaliser, mask and bias, on whichever backend."""

import functools
import sys
from collections.abc import Callable
from types import FrameType

from torch import Tensor

from regard.core.attention import Attended
from regard.core.normalizers import Hard
from regard.core.problem import Problem
from regard.core.scores import ScaledDot
from regard.look.capture.captured_call import DROPOUT, Call, Recorder, four_axes
from regard.look.recomputed_weights import Pairs

_LOCAL, _NEAR = "regard.core.local", 40  # a module, and how many frames above a call it may stand
_SAMPLED = "a key was drawn for each query: these are the chances it was drawn by, and the check cannot apply"


def heard(recorder: Recorder, problem: Problem, run: Callable[[], Attended]) -> Attended:
    """Run the call and record it."""
    with recorder.deaf():
        result = run()
    if _is_local():
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


def _is_local() -> bool:
    """Was the call made by `local_attention`, which gives each query a memory of its own?"""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_NEAR):
        if frame is None or frame.f_globals.get("__name__") == _LOCAL:
            break
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _LOCAL


def _with_heads(output: Tensor, *, headless: bool) -> Tensor:
    output = output[None] if headless else output
    return output[None] if output.ndim == 3 else four_axes(output)
