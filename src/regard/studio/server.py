"""Starts the studio: binds the port, prints the address, and stops cleanly."""

import errno
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from regard.look.trace_format import check
from regard.studio.prediction_api import Asks
from regard.studio.request_guard import is_loopback
from regard.studio.translation_api import Translates, open_run

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from regard.look.trace import Trace


def serve(
    paths: Sequence[Path] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 7788,
    open: bool = False,
    runs: Sequence[Translates | Asks] = (),
    traces: "Sequence[Trace]" = (),
    say: Callable[[str], None] = print,
) -> None:
    """Run the server until it is interrupted. `paths` are trace files and run directories; port 0 is any free port.

    Raises OSError if the port is in use, and ValueError if a path is neither a trace nor a run.
    """
    from regard.studio.app import create

    wanted = [Path(path) for path in paths]
    for path in wanted:
        if not path.exists():
            raise ValueError(f"{path} does not exist: expected a trace file or the directory of a run")
        if path.is_file():
            check(path)
    opened: list[Translates | Asks] = [*runs, *(open_run(path) for path in wanted if path.is_dir())]
    opened_traces = [*(path for path in wanted if path.is_file()), *traces]
    listening = bind(host, port)
    with listening:
        port = listening.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{port}/"
        app = create(opened, opened_traces, host=host, port=port)
        say(f"regard studio: {address}  (Ctrl-C stops it)")
        if not is_loopback(host):
            say(f"warning: {host} can be reached from other machines, and the studio has no password")
        if open:
            webbrowser.open(f"{address}#/ask" if opened else address)
        # Imports torch shortly after the start, when the first page has been sent.
        warming = threading.Timer(0.3, _warm)
        warming.start()
        with suppress(KeyboardInterrupt):  # uvicorn raises KeyboardInterrupt again after it has closed all connections
            server(app).run(sockets=[listening])
        warming.cancel()
        say("regard studio: stopped")


def server(app: "FastAPI") -> "uvicorn.Server":
    """Return the web server of an application, without access log or websockets, and with time limits."""
    import uvicorn

    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=15,
        timeout_graceful_shutdown=2,
        limit_concurrency=64,
        h11_max_incomplete_event_size=16 * 1024,
        http="h11",
        ws="none",
    )
    return uvicorn.Server(settings)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, or raise an OSError that names the address and the reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(64)
    except OSError as error:
        listening.close()
        advice = ": is a studio running already? --port chooses another" if error.errno == errno.EADDRINUSE else ""
        raise OSError(error.errno, f"{host}:{port} cannot be used ({error.strerror}){advice}") from None
    return listening


def _warm() -> None:
    """Import torch in advance, so that the first request to the playground does not wait for the import."""
    from regard.studio import (
        playground,
        toy_translator,  # noqa: F401
    )

    playground.answer(playground.Question(query=[[1.0]], key=[[1.0]]))
