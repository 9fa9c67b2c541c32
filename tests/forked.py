"""Processes for the tests: forked from one process that has imported the library once.

Importing torch and the library takes seconds, and the tests start a hundred processes. Each is a real process, with its
own memory, files, directory and signals; only Python's start-up before the command is shared. For tests of the start-up
itself (imports, the hash seed), use `subprocess`.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from time_limits import HANG_SECONDS

PRELOADED = ("torch", "torch._inductor.compile_fx", "regard.tasks.catalog", "regard.cli.run_commands")


class Process:
    """A process that runs the command `[sys.executable, "-m", "regard", …]` or `[sys.executable, "-c", code, …]`."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: IO[Any] | int = subprocess.DEVNULL,
        stdout: IO[Any] | int = subprocess.DEVNULL,
        stderr: IO[Any] | int = subprocess.DEVNULL,
    ) -> None:
        python, kind, body, *arguments = map(str, command)
        assert python == sys.executable
        assert kind in ("-c", "-m")
        request = {
            "kind": kind,
            "body": body,
            "arguments": arguments,
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
        }
        with contextlib.ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull, "r+b"))
            self._answers, theirs = socket.socketpair()
            stack.callback(theirs.close)
            self.stdout: IO[str] | None = None
            if stdout == subprocess.PIPE:
                reader, stdout = os.pipe()
                stack.callback(os.close, stdout)
                self.stdout = open(reader, encoding="utf-8")  # noqa: SIM115
            files = [self._descriptor(each, nothing) for each in (stdin, stdout)]
            files.append(files[1] if stderr == subprocess.STDOUT else self._descriptor(stderr, nothing))
            _server().send(request, [theirs.fileno(), *files])
        self._answers.settimeout(HANG_SECONDS)
        self._lines = self._answers.makefile("r")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    @staticmethod
    def _descriptor(file: IO[Any] | int, nothing: IO[bytes]) -> int:
        if file == subprocess.DEVNULL:
            return nothing.fileno()
        return file if isinstance(file, int) else file.fileno()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()


def run(
    command: Sequence[str | Path],
    *,
    input: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a forked process, like `subprocess.run(…, capture_output=True, encoding="utf-8")`."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(input.encode())
        given.seek(0)
        with Process(command, cwd=cwd, env=env, stdin=given, stdout=out, stderr=err) as process:
            process.wait()
        assert process.returncode is not None
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode().replace("\r\n", "\n"))
        return subprocess.CompletedProcess(list(map(str, command)), process.returncode, *texts)


class _Server:
    """The tests' connection to the process that forks: it starts this process and sends it requests."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )

    def send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        body = json.dumps(request).encode()
        socket.send_fds(self.socket, [len(body).to_bytes(8, "big")], descriptors)
        self.socket.sendall(body)

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


_started: list[_Server] = []


def _server() -> _Server:
    if not _started:
        _started.append(_Server())
    return _started[0]


def close() -> None:
    while _started:
        _started.pop().close()


# The functions below run in the process that forks a child for each request.


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise EOFError
        found += more
    return found


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a child for every request: return the request in the child, and None in the parent at the tests' end."""
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([connection], [], [], 0.02 if running else None)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with running.pop(pid) as answers, contextlib.suppress(OSError):
                answers.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        if not ready:
            continue
        head, descriptors, _, _ = socket.recv_fds(connection, 8, 4)
        if not head:
            return None
        request = json.loads(_read(connection, int.from_bytes(head, "big")))
        child = os.fork()
        if not child:
            for each in (connection, *running.values()):
                each.close()
            os.close(descriptors[0])
            return request, descriptors[1:]
        running[child] = socket.socket(fileno=descriptors[0])
        running[child].sendall(f"{child}\n".encode())
        for each in descriptors[1:]:
            os.close(each)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Set signals, streams, environment and directory as Python does before the first line of a command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in set(descriptors) - {0, 1, 2}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    time.tzset()
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "surrogateescape"), (2, "stderr", "backslashreplace")):
        file = open(number, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        file.reconfigure(line_buffering=number == 2, write_through=through)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    sys.argv = ["-c", *request["arguments"]]
    sys.path[0] = ""


def _command(request: dict[str, Any]) -> None:
    if request["kind"] == "-m":
        import runpy

        runpy.run_module(request["body"], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(request["body"], "<string>", "exec"), vars(main))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the test process ends and closes the connection
    for module in PRELOADED:
        importlib.import_module(module)
    _found = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _found is not None:
        _become(*_found)
        _command(_found[0])
