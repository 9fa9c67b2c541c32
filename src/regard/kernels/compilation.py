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
def compiled(form: Callable[..., Any]) -> Callable[..., Any]:
    """The function `form` compiled for any sizes; it is for loops that compute gradients themselves.

    The arguments reach the compiler as tensors that are no views and need no gradient: of a view it would also see the
    base, compile anew for each kind, and give up after eight.
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
