"""Compilation of a function of tensors to C++ for the CPU by torch.compile, at the first call of the function.

The compiled function returns what the original returns. torch caches the compiled code on disk for later processes.
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
_LONG = 2.0  # a compilation that takes more seconds than this is logged


def compiler() -> bool:
    """Return whether torch.compile can build C++ on this machine."""
    return sys.platform == "linux" and any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))


@functools.cache
def compiled(form: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function `form`, compiled for tensors of any size. The callers are loops that have their own backward
    pass.

    The compiled function receives `.data` of each argument, a tensor that is not a view and needs no gradient: for
    views torch.compile would compile once for each kind of base tensor, and stop compiling after eight kinds.
    """
    function: Callable[..., Any] | None = None

    def call(*arguments: Tensor | None) -> Any:
        nonlocal function
        bare = [None if argument is None else argument.data for argument in arguments]
        if function is not None:
            return function(*bare)
        start = time.perf_counter()
        function = torch.compile(form, dynamic=True)
        result = function(*bare)
        seconds = time.perf_counter() - start
        if seconds > _LONG:
            _log.warning("compiled a loop of a recurrent network for this CPU in %.1f s", seconds)
        return result

    return call
