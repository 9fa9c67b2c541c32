"""Fixtures for browser tests: one browser for all tests of a file, and pages that are opened in it."""

from collections.abc import Callable, Iterator

import pytest
from tabs import ARGUMENTS, CHROMIUM, Tab, opened

from time_limits import BROWSER_MILLISECONDS


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=BROWSER_MILLISECONDS)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=BROWSER_MILLISECONDS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def usual(browser) -> tuple[object, list[str]]:
    """Return a tab that tests without special options share, because opening a tab takes longer than most tests."""
    return opened(browser)


@pytest.fixture
def visit(browser, folder, usual) -> Iterator[Callable[..., Tab]]:
    """Return a function that opens a page; after the test, check that there were no errors and no network requests."""
    tabs = []

    def open_page(name: str, *, address: str | None = None, wait: str = ".head .picture[data-view]", **options) -> Tab:
        page, messages = opened(browser, (address,) if address else (), **options) if options or address else usual
        tabs.append((page, messages))
        page.mouse.move(0, 0)
        page.goto(address or (folder / f"{name}.html").as_uri())
        page.wait_for_selector(wait)
        return Tab(page, messages)

    yield open_page
    complaints = [message for _, messages in tabs for message in messages]
    for tab, messages in tabs:
        messages.clear()
        if tab is usual[0]:
            tab.evaluate("localStorage.clear()")
        else:
            tab.context.close()
    assert complaints == []
