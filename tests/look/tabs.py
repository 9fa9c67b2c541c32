"""Browser tabs for the tests of the viewer's page, with the actions of a reader, such as clicks and key presses."""

import io
import shutil
from pathlib import Path

import torch
from PIL import Image

from time_limits import BROWSER_MILLISECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def softmax(*shape: int) -> torch.Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))).softmax(-1)


class Tab:
    """An open page, with methods for the actions of a reader and for what the reader sees."""

    def __init__(self, page, messages: list[str]) -> None:
        self.page = page
        self.messages = messages

    def __getattr__(self, name: str):
        return getattr(self.page, name)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def until(self, selector: str, text: str) -> None:
        """Wait until a text appears on the page."""
        from playwright.sync_api import expect

        expect(self.page.locator(selector).first).to_have_text(text)

    def places(self, row: int, column: int = 0, stage: int = 0) -> tuple[float, float]:
        """Return the position on the screen of a cell of the displayed map."""
        self.page.locator(".head .picture").nth(stage).scroll_into_view_if_needed()
        at = self.page.evaluate(
            """([row, column, stage]) => {
              const { picture } = document.getElementById("regard").viewer.stages[stage];
              const { x, y } = picture.layout.at(row, column);
              const edge = picture.canvas.getBoundingClientRect();
              return [edge.left + x - picture.box.x, edge.top + y - picture.box.y];
            }""",
            [row, column, stage],
        )
        return at[0], at[1]

    def point(self, row: int, column: int = 0, stage: int = 0) -> None:
        self.page.mouse.move(*self.places(row, column, stage))

    def click(self, row: int, column: int = 0) -> None:
        self.page.mouse.click(*self.places(row, column))

    def view(self, name: str) -> None:
        self.page.click(f'[data-choice=view] [data-value="{name}"]')
        self.page.wait_for_selector(f'.head .picture[data-view="{name}"]')

    def color(self, x: float, y: float) -> tuple[int, ...]:
        """Return the colour at a point of the screen, after all pending drawing is done."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        shot = self.page.screenshot(clip={"x": x, "y": y, "width": 1, "height": 1})
        return Image.open(io.BytesIO(shot)).convert("RGB").getpixel((0, 0))

    def becomes(self, x: float, y: float, low: int, high: int) -> None:
        """Wait until the sum of red, green and blue at a point is between `low` and `high`; drawing is asynchronous."""
        for _ in range(BROWSER_MILLISECONDS // 50):
            if low <= sum(self.color(x, y)) <= high:
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"the colour at {x}, {y} stayed {self.color(x, y)}, expected a sum of {low} to {high}")

    def bars(self, stage: int = 0) -> list[tuple[str, float]]:
        rows = self.page.locator(".token").nth(stage).locator("li button").all_inner_texts()
        return [(" ".join(row.split()[:-1]), float(row.split()[-1])) for row in rows]


def opened(browser, allowed: tuple[str, ...] = (), **options) -> tuple[object, list[str]]:
    """Return a new tab, and lists that collect its errors and network requests."""
    context = browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, "color_scheme": "light", **options})
    context.set_default_timeout(BROWSER_MILLISECONDS)
    page, messages = context.new_page(), []
    local = ("file:", "blob:", "data:", "about:", *allowed)
    context.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    context.on("weberror", lambda error: messages.append(str(error.error)))
    context.on("request", lambda request: request.url.startswith(local) or messages.append(f"request: {request.url}"))
    page.on("dialog", lambda dialog: (messages.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    return page, messages


def saved(tab: Tab, kind: str) -> tuple[str, bytes]:
    with tab.expect_download() as download:
        tab.page.click(f'[data-save="{kind}"]')
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def texts(tab) -> list[str]:
    """Return every text that the current picture draws, in the order of drawing."""
    return tab.evaluate(
        """() => {
          const found = [];
          const clip = (x, y, wide, high, paint) => paint();
          const paper = { rect() {}, image() {}, clip, text: (said) => found.push(said) };
          const { layout, box } = document.getElementById("regard").viewer.stages[0].picture;
          layout.draw(paper, { ...box, width: 4000, height: 4000 });
          return found;
        }"""
    )
