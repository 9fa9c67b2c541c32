"""Items that run in a second pytest process: kernels without a GPU, and code that torch.compile traces.

Triton reads TRITON_INTERPRET at its first import, and the test process may have imported it already: items marked
`interpreted` run under its interpreter in a second process. The checks of shapes and types are added to the library as
it loads, and the compiler would have to compile them: items marked `installed` run in a second process without them.
Each test process starts one process of each kind; it runs the requested items, one at a time, and returns their
reports.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import pytest

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = os.environ.get("REGARD_AS_INSTALLED") == "1"
# Environment variables of the second process, by the name of the marker. The interpreter has no visible GPU, so that
# "cuda" cannot be selected by mistake; it uses numpy with one thread.
ENVIRONMENTS = {
    "interpreted": {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    "installed": {"REGARD_AS_INSTALLED": "1"},
}
MISSING = "TRITON IS NOT INSTALLED: the kernels are not tested at all" if not importlib.util.find_spec("triton") else ""

# The devices of a test of Triton kernels, which are interpreted on the CPU and compiled on a GPU.
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreted, id="interpreted"),
    pytest.param("cuda", marks=pytest.mark.cuda, id="cuda"),
]


class Apart:
    """The client of a second pytest process: sends an item's id as one line, and receives its reports as one line."""

    def __init__(self, config: pytest.Config, kind: str) -> None:
        self.config, self.kind = config, kind
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        environment = os.environ | ENVIRONMENTS[self.kind]
        environment.pop("PYTEST_ADDOPTS", None)
        return subprocess.Popen(
            [sys.executable, __file__, f"--rootdir={self.config.rootpath}", f"--tb={self.config.option.tbstyle}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self.config.rootpath,
        )

    def run(self, item: pytest.Item) -> list[pytest.TestReport]:
        if self.process is None:
            self.process = self.start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        answer = ""
        try:
            print(json.dumps([str(item.path), item.nodeid]), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        if not answer:
            return [self.ended(item)]
        return [self.report(data) for data in json.loads(answer)]

    def report(self, data: dict[str, Any]) -> pytest.TestReport:
        # The report of a skipped test has a tuple, which JSON converts to a list.
        if isinstance(data["longrepr"], list):
            data["longrepr"] = tuple(data["longrepr"])
        return self.config.hook.pytest_report_from_serializable(config=self.config, data=data)

    def ended(self, item: pytest.Item) -> pytest.TestReport:
        """Return a failed report of an item during which the second process ended; the next item starts another one."""
        assert self.process is not None
        self.close()
        message = f"its process ended with code {self.process.returncode}"
        self.process = None
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


class Server:
    """The pytest plugin of the second process: collects an item's file when the item is first requested."""

    def __init__(self, requests: Iterable[str], answers: TextIO) -> None:
        self.requests, self.answers = requests, answers
        self.items: dict[str, pytest.Item] = {}
        self.reports: list[pytest.TestReport] = []

    def pytest_collection(self) -> bool:
        return True  # this hook replaces pytest's collection: items are collected when they are requested

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        hook = session.config.hook
        for line in self.requests:
            path, name = json.loads(line)
            if name not in self.items:
                self.items.update((item.nodeid, item) for item in session.perform_collect([path]))
            self.reports.clear()
            hook.pytest_runtest_protocol(item=self.items[name], nextitem=None)
            data = [hook.pytest_report_to_serializable(config=session.config, report=each) for each in self.reports]
            print(json.dumps(data), file=self.answers, flush=True)
        return True


def patch_once() -> None:
    """Speed up Triton's interpreter, which patches its whole language again for every function that a kernel calls."""
    from triton.runtime import interpreter

    # This speed-up does not apply to versions of Triton without `_LangPatchScope`.
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    from triton import language

    patch, scope, done = interpreter._patch_lang, interpreter._LangPatchScope(), set()

    def patched(fn: Callable[..., Any]) -> Any:
        nonlocal scope, done
        seen = {module.__name__ for module in fn.__globals__.values() if module is language or module is language.core}
        # The kernel that is running has already patched the language, and restores it when it ends.
        if scope._changes and seen <= done:
            return interpreter._LangPatchScope()
        if scope._changes:
            done |= seen
            return patch(fn)
        scope, done = patch(fn), seen
        return scope

    interpreter._patch_lang = patched


def serve(options: list[str]) -> int:
    if INSIDE and not MISSING:
        patch_once()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # the second process prints nothing: the test process prints the reports
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark"]
    return pytest.main([str(Path(__file__).parent), *plugins, *options], plugins=[Server(requests, answers)])


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
