"""Test fixtures: a running server of the studio (`regard studio`), HTTP requests to it, and a browser."""

import http.client
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from regard.studio.app import create
from regard.studio.limits import LIMITS, Limits
from regard.studio.server import bind, server
from time_limits import BROWSER_MILLISECONDS, HANG_SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Studio:
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send one HTTP request and return its response; in the names of `headers`, _ stands for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_SECONDS)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return found

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        text = body if isinstance(body, (str, bytes)) else json.dumps(body)
        return self.ask("POST", path, text, **{"content_type": "application/json", **headers})


@contextmanager
def running(*arguments: Any, limits: Limits = LIMITS, **options: Any) -> Iterator[Studio]:
    """Run a studio server on a free port until the context exits; the time limit of its answers is `HANG_SECONDS`."""
    limits = replace(limits, answer_seconds=HANG_SECONDS)
    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    serving = server(create(*arguments, port=port, limits=limits, **options))
    thread = threading.Thread(target=lambda: serving.run(sockets=[listening]), daemon=True)
    thread.start()
    while not serving.started and thread.is_alive():
        time.sleep(0.01)
    assert serving.started
    yield Studio(port)
    serving.should_exit = True
    thread.join(HANG_SECONDS)
    listening.close()


@pytest.fixture(scope="session")
def studio() -> Iterator[Studio]:
    """A studio server without runs: it has the built-in examples, toy translators and playground."""
    with running() as found:
        yield found


# The scope is not "session": Playwright allows one driver at a time, and the tests of other folders start drivers too.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("NO CHROMIUM: the studio was not tested in a browser. Install chromium and run again.")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=BROWSER_MILLISECONDS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=BROWSER_MILLISECONDS)
        yield chromium
        chromium.close()


@dataclass
class Visit:
    """A browser page with its console errors and external requests; errors that contain an `allowed` text may occur."""

    page: Any
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)


@pytest.fixture
def visit(browser: Any, studio: Studio) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page of a studio; after the test, check for errors and external requests."""
    visits: list[tuple[Any, Visit]] = []

    def opened(path: str = "/", at: Studio = studio, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1360, "height": 900}, locale="en-US", **options)
        found = Visit(context.new_page())
        found.page.on(
            "console", lambda message: message.type in ("error", "warning") and found.errors.append(message.text)
        )
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on(
            "request",
            lambda request: (
                request.url.startswith((at.address, "blob:", "data:")) or found.elsewhere.append(request.url)
            ),
        )
        visits.append((context, found))
        found.page.set_default_timeout(BROWSER_MILLISECONDS)
        found.page.goto(at.address + path)
        found.page.visit = found
        return found.page

    yield opened
    for context, found in visits:
        context.close()
        assert found.elsewhere == [], found.elsewhere
        errors = [error for error in found.errors if not any(part in error for part in found.allowed)]
        assert errors == [], errors  # pytest does not rewrite the assertions of this module, so the message is explicit


def says(locator, text: str) -> None:
    """Wait until an element contains a text."""
    from playwright.sync_api import expect

    expect(locator).to_contain_text(text)


def counts(locator, number: int) -> None:
    from playwright.sync_api import expect

    expect(locator).to_have_count(number)
