"""Takes screenshots of every view of the studio: python tests/studio/take_screenshots.py FOLDER [RUN] [all]

The files `studio-NAME-light.png` and so on are written to FOLDER. RUN is the directory of a trained translator, such as
`demo/run`; without it, the studio's built-in toy translators are shown. With `all`, every view is taken in light and
dark colours, in English and Chinese; otherwise only in the language and colours that the documentation shows.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from conftest_studio import ARGUMENTS, CHROMIUM, running
from measure_tiles import watched

from regard.look.labels import Labels
from regard.look.viewer.page import page
from regard.look.watch import watch
from regard.studio.translation_api import open_run


def sentence(page: Page) -> None:
    """Switch the playground from vectors to a sentence."""
    page.get_by_role("radio", name="Sentence").or_(page.get_by_role("radio", name="句子")).click()


def compare(page: Page) -> None:
    """Show two runs side by side and select a word in each."""
    page.locator("select").nth(1).select_option(index=2)
    for side in range(2):
        page.wait_for_timeout(900)
        page.locator(".pair").nth(side).get_by_role("button").first.click()


def coloured(page: Page) -> None:
    """Show three heads of a layer in different colours, and the weights of one word."""
    page.locator('[data-value="colours"]').click()
    for head in (2, 3, 4):
        page.locator(f'[data-record="0"][data-head="{head}"]').click()
    page.evaluate("document.getElementById('regard').viewer.state.set({ locked: { row: 6, column: null } })")


def warmer(page: Page) -> None:
    """Set the playground's softmax temperature to a value at which no key has a weight near 0."""
    page.locator("input[type=range]").first.evaluate(
        """(slider) => {
          slider.value = Number(slider.min) + 0.775 * (slider.max - slider.min);
          slider.dispatchEvent(new Event("input", { bubbles: true }));
          slider.dispatchEvent(new Event("change", { bubbles: true }));
        }"""
    )


# A page of the studio: its name, its address, the action before the screenshot, and whether the documentation shows it
# in dark colours.
View = tuple[str, str, Callable[[Page], None] | None, bool]
VIEWS: list[View] = [
    ("playground", "#/playground", warmer, False),
    ("sentence", "#/playground", sentence, False),
    ("image", "#/views/image", None, False),
    ("sound", "#/views/sound", None, False),
    ("sentiment", "#/views/sentiment", None, False),
    ("reading", "#/views/reading", None, False),
    ("scene", "#/views/scene", None, True),
    ("ask", "#/ask", None, False),
    ("run", "#/runs/0", None, False),
    ("translate", "#/translate", None, False),
    ("compare", "#/translate", compare, False),
    ("traces", "#/traces", None, False),
]


class Encoder(nn.Module):
    """A small Transformer encoder with larger random parameters than PyTorch's default, for sharper attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        layer = nn.TransformerEncoderLayer(48, 6, 96, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
        for parameter in self.encoder.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=1.6 / parameter.shape[-1] ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def standalone(path: Path) -> None:
    """Write the HTML page of an `Encoder` applied to a sentence."""
    sentence = "The quick brown fox did not jump over the lazy dog because it slept ."
    words = Labels("tokens", tuple(sentence.split()))
    model, place = Encoder(), torch.arange(len(words))[:, None] / torch.logspace(0, 2, 24)
    x = torch.cat([place.sin(), place.cos()], -1) * 1.5 + 0.7 * torch.randn(len(words), 48)
    with torch.no_grad(), watch(model, title="A small encoder") as trace:
        model(x[None])
    path.write_text(page(trace.label(rows=words, columns=words)), encoding="utf-8")


def take(browser: Browser, address: str, file: Path, act: Callable[[Page], None] | None, **options: Any) -> None:
    """Take a screenshot of a whole page, after the action `act` if one is given."""
    language, theme = options.pop("language", "en"), options.pop("theme", "light")
    context = browser.new_context(
        viewport={"width": 1280, "height": 860}, color_scheme=theme, locale=language, device_scale_factor=1, **options
    )
    tab = context.new_page()
    tab.goto(address)
    tab.wait_for_load_state("networkidle")
    tab.wait_for_timeout(600)
    if act is not None:
        act(tab)
        tab.wait_for_timeout(900)
    tab.mouse.move(2, 2)
    tab.wait_for_timeout(300)
    tab.screenshot(path=file, full_page=True)
    context.close()
    with Image.open(file) as picture:  # with a palette of 256 colours the file has a third of the bytes
        few = picture.convert("RGB").quantize(
            256, method=Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE
        )
    few.save(file, optimize=True)


def main(folder: Path, run: Path | None, everything: bool) -> None:
    """Take every view once, or in every language and colour scheme if `everything`.

    The comparison of two runs shows the two toy translators, because their answers differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    forms = [("light", "en"), ("dark", "en"), ("light", "zh"), ("dark", "zh")]
    runs = [open_run(run)] if run else []
    with (
        running(runs, [watched()]) as studio,
        running() as toys,
        sync_playwright() as driver,
        tempfile.TemporaryDirectory() as place,
    ):
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        alone = Path(place) / "page.html"
        standalone(alone)
        views: list[View] = [("page", alone.as_uri(), None, False), ("page-heads", alone.as_uri(), coloured, False)]
        for name, where, act, night in VIEWS:
            address = (toys if name == "compare" else studio).address
            views.append((f"studio-{name}", f"{address}/{where}", act, night))
        for name, address, act, night in views:
            for theme, language in forms if everything else [("dark" if night else "light", "en")]:
                mark = "" if name in ("page", "page-heads", "studio-translate") and not everything else f"-{theme}"
                file = folder / f"{name}{mark}{f'-{language}' if everything else ''}.png"
                take(browser, address, file, act, theme=theme, language=language)
        browser.close()


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "all"]
    main(Path(given[0]), Path(given[1]) if len(given) > 1 else None, "all" in sys.argv)
