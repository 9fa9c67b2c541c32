"""Kernels without a GPU: a test file run as a script under Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def interpreted(path: str, what: str) -> str:
    """What the file prints; a skip that is said loudly where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip(f"TRITON IS NOT INSTALLED: {what} are not tested at all")
    found = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": found}
    command = [sys.executable, "-W", "ignore", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
