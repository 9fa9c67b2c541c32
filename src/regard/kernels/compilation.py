"""Compile a function of tensors to C++ for the CPU when it is first called, and keep the result.

The compiled function equals the plain function it is made from; torch keeps the C++ on disk for later processes.
"""

import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("regard")
_LONG = 2.0  # seconds of compilation from which the log mentions it


def compiler() -> bool:
    """Can torch.compile build C++ here?"""
    return sys.platform == "linux" and any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))


@functools.cache
def compiled(form: Callable[..., Any], announced: str | None = None) -> Callable[..., Any]:
    """The function `form` compiled for any sizes; it must have no gradient of its own.

    `announced` names it in the log before a compilation that a user would notice. The arguments reach the compiler as
    tensors that are no views and want no gradient: of a view it would also see the base, compile anew for each kind,
    and give up after eight.
    """
    function: Callable[..., Any] | None = None

    def call(*arguments: Tensor | None) -> Any:
        nonlocal function
        bare = [None if each is None else each.data for each in arguments]
        if function is None:
            function, result = _first(form, announced, bare)
            return result
        if announced is None:
            return function(*bare)
        # Threads, inference mode and equal sizes are compiled for anew. After eight torch would go on without
        # compiling, with the hidden layer of every pair in memory.
        with torch._dynamo.config.patch(recompile_limit=256):
            return function(*bare)

    return call


def _first(form: Callable[..., Any], announced: str | None, arguments: list[Any]) -> tuple[Callable[..., Any], Any]:
    """The compiled function and its first result, with a message about the time that takes."""
    if announced is not None:
        _log.warning(
            "compiling %s: some seconds, kept on disk (backend='blocked' does without, and is slower) …", announced
        )
    start = time.perf_counter()
    function = torch.compile(form, dynamic=True)
    result = function(*arguments)
    seconds = time.perf_counter() - start
    if announced is not None or seconds > _LONG:
        _log.warning("compiled %s in %.1f s", announced or "a loop of a recurrent network for this CPU", seconds)
    return function, result
