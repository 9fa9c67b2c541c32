"""Compilation of a function of tensors to C++ for the CPU at its first call; the result is cached.

The compiled function equals the original; torch caches the C++ on disk for later processes.
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
_LONG = 2.0  # seconds of compilation from which on the log mentions it


def compiler() -> bool:
    """Return whether torch.compile can build C++ on this machine."""
    return sys.platform == "linux" and any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))


@functools.cache
def compiled(form: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function `form` compiled for any sizes, for use inside loops with their own backward pass.

    Arguments are passed as tensors that are not views and need no gradient: for views the compiler would compile once
    per kind of base, and give up after eight.
    """
    function: Callable[..., Any] | None = None

    def call(*arguments: Tensor | None) -> Any:
        nonlocal function
        bare = [None if each is None else each.data for each in arguments]
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
