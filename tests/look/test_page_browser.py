"""Tests of the page in a real browser: display, pointer, keys and export."""

import base64
import io
import json
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tabs import CHROMIUM, saved, softmax, texts

from regard.look.labels import Labels, glimpses, patches
from regard.look.trace import Trace
from regard.look.viewer.page import FOLDER, page
from regard.look.viewer.page_data import pack

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested in a browser: install playwright")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NO CHROMIUM: not one view of the page was tested in a browser"
)

WORDS = ("The", "quick", "brown", "fox", "did", "not", "jump", "over", "it", ".", "fox")
EVIL = "<img src=x onerror=alert(1)>"


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


WEIGHTS = {f"encoder.{n}.attention": softmax(5, 11, 11).roll(n, 0) for n in range(3)}
LONG = softmax(2, 601, 521)


def encoder(title: str = "A small encoder", turn: int = 0) -> Trace:
    words = Labels("tokens", WORDS)
    given = {name: weights.roll(turn, 0) for name, weights in WEIGHTS.items()}
    trace = Trace.from_weights(given, title=title, rows=words, columns=words)
    trace.dropped.append("encoder.3: over the limit of 64 MiB")
    trace.records[0].note = "dropout was active: the check cannot apply"
    return trace


def caption() -> Trace:
    picture = np.full((60, 80, 3), 200)
    grid = Labels("patches", tuple(f"{n // 4},{n % 4}" for n in range(12)), {"image": png(picture), "grid": (3, 4)})
    weights = torch.full((1, 2, 12), 0.02)
    # The first word attends to the top left patch, the second one to the bottom right patch.
    weights[0, 0, 0] = weights[0, 1, 11] = 0.78
    return Trace.from_weights({"decoder": weights}, title="Caption", rows=["cat", "dog"], columns=grid)


def drawn() -> Trace:
    """Return attention maps (a `Trace`) of two words over a white picture of 48 × 48 pixels with four cells."""
    weights = torch.tensor([[[0.8, 0.1, 0.05, 0.05], [0.2, 0.2, 0.2, 0.4]]])
    words = Labels("tokens", ("cat", "dog"), {"probability": [0.5, 0.75]})
    picture = patches(png(np.full((48, 48, 3), 255)), (2, 2))
    return Trace.from_weights({"decoder": weights}, title="Drawn", rows=words, columns=picture)


def painted() -> Trace:
    """Return attention maps (a `Trace`) of an image that was generated from words: the queries are patches, the keys
    are words."""
    grid = Labels("patches", tuple(map(str, range(12))), {"image": png(np.full((60, 80, 3), 200)), "grid": (3, 4)})
    weights = torch.full((1, 12, 3), 0.1)
    weights[0, 0, 0], weights[0, 11, 2] = 0.9, 0.9
    return Trace.from_weights({"unet": weights}, title="Painted", rows=grid, columns=["cat", "and", "dog"])


def vision() -> Trace:
    """Return attention maps (a `Trace`) of patches that attend to patches, after two tokens that are not part of the
    image."""
    labels = patches(png(np.full((60, 80, 3), 200)), (3, 4), special=["[CLS]", "[REG]"])
    weights = torch.full((1, 14, 14), 0.02)
    # The class token attends to the top left patch; the last patch attends to the class token.
    weights[0, 0, 2] = weights[0, 13, 0] = 0.74
    return Trace.from_weights({"vit": weights}, title="Vision", rows=labels, columns=labels)


def spoken() -> Trace:
    frames = Labels("frames", tuple(map(str, range(50))), {"spectrogram": png(np.full((20, 50), 255)), "seconds": 0.02})
    weights = torch.zeros(1, 3, 50)
    for symbol, start in enumerate((5, 20, 40)):
        weights[0, symbol, start : start + 4] = 0.25
    return Trace.from_weights({"decoder": weights}, title="Speech", rows=["y", "e", "s"], columns=frames)


def traffic() -> Trace:
    places = {"x": [0, 30, -18], "y": [0, 0, 4], "heading": [0, 0, 0.1], "speed": [25, 17, 28]}
    objects = Labels("objects", ("ego", "truck", "car"), places)
    weights = torch.tensor([[[0.2, 0.7, 0.1]]])
    return Trace.from_weights({"policy": weights}, title="Traffic", rows=["ego"], columns=objects)


def driven() -> Trace:
    """Return attention maps (a `Trace`) of three steps of a drive: a lorry ahead in all, and a pedestrian from the
    second step on."""
    extra = {
        "x": [40, 0, 41, 30, 42, 30], "y": [0, 0, 0, 3, 0, 1.5], "heading": [0, 0, 0, -1.57, 0, -1.57],
        "speed": [5, 0, 5, 0, 5, 1.5], "length": [8, 0, 8, 0.5, 8, 0.5], "width": [2.4, 0, 2.4, 0.5, 2.4, 0.5],
        "present": [1, 0, 1, 1, 1, 1], "ego": [0, 0, 0, 10, 10, 0, 0, 10, 15, 0, 0, 5],
        "lanes": [-5.25, -1.75, 1.75], "crossings": [60], "zebras": [30], "ramps": [],
    }  # fmt: skip
    weights = torch.tensor([[[1.0, 0.0], [0.8, 0.2], [0.1, 0.9]]])
    columns = Labels("objects", ("lorry", "pedestrian"), extra)
    return Trace.from_weights({"drive": weights}, rows=["0 s hold", "1 s hold", "2 s brake"], columns=columns)


def gazed() -> Trace:
    """Return attention maps (a `Trace`) of three glimpses of an image at two scales: one in the centre and two at the
    top left."""
    grid = patches(png(np.full((60, 80, 3), 90)), (3, 4))
    places = [(0.5, 0.5), (0.25, 0.25), (0.27, 0.25)]
    seen = [[np.full((4, 4), shade), np.full((4, 4), shade)] for shade in (0.0, 0.5, 1.0)]
    rows = glimpses(["7 0.42", "4 0.90", EVIL], places, seen, [0.1, 0.2])
    return Trace.from_weights({"gaze": softmax(1, 3, 12)}, title="Gaze", rows=rows, columns=grid)


def strange() -> Trace:
    labels = (EVIL, "</script><script>alert(2)</script>", '"&\u202e', "", "=1+1")
    return Trace.from_weights({EVIL: softmax(1, 5, 5)}, title=EVIL, rows=labels, columns=labels)


def batch() -> Trace:
    """Return attention maps (a `Trace`) of two sentences; the second is shorter and has a label with HTML markup."""
    weights = softmax(2, 2, 4, 4)
    weights[1, ..., 3] = 0
    words = [
        Labels("tokens", ("The", "cat", "sat", "down")),
        Labels("tokens", ("It", EVIL, "rains", "[PAD]"), shown=(0, 1, 2)),
    ]
    return Trace.from_weights({"encoder": weights}, title="Two sentences", rows=words, columns=words)


def broken() -> Trace:
    weights = softmax(1, 4, 4).clone()
    weights[0, 1, 2], weights[0, 2, 0], weights[0, 3, 3] = float("nan"), -0.5, float("inf")
    return Trace.from_weights({"layer": weights}, title="Broken", rows=list("abcd"), columns=list("wxyz"))


TRACES: dict[str, Callable[[], Trace | list[Trace]]] = {
    "encoder": encoder,
    "caption": caption,
    "drawn": drawn,
    "painted": painted,
    "vision": vision,
    "spoken": spoken,
    "traffic": traffic,
    "driven": driven,
    "gazed": gazed,
    "strange": strange,
    "batch": batch,
    "broken": broken,
    "long": lambda: Trace.from_weights({"attention": LONG}, title="Long"),
    "two": lambda: [encoder("One model"), encoder("Another model", 1)],
    "empty": lambda: Trace("Nothing", [], ["the model has no attention"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name, make in TRACES.items():
        (folder / f"{name}.html").write_text(page(make()), encoding="utf-8")
    return folder


def test_the_first_look(visit):
    tab = visit("encoder")
    assert tab.text("h1") == "A small encoder"
    assert tab.text(".head h2") == "encoder 0 · head 0"
    # The overview has a small map for each of five heads and their mean in each of three layers, and one for the
    # rollout.
    assert tab.locator('[role="gridcell"]').count() == 3 * (5 + 1) + 1
    assert "No check" in tab.text(".facts")
    assert "Dropout was active: the check cannot apply." in tab.text(".notes")
    assert "encoder.3: over the limit of 64 MiB" in tab.text(".dropped")
    assert re.search(r"within ±[\d.e−]+ of the model's", tab.text(".head"))
    received = WEIGHTS["encoder.0.attention"][0].mean(0)
    assert tab.bars()[0] == (WORDS[received.argmax()], pytest.approx(received.max().item(), abs=5e-4))


def test_pointing_at_a_cell_tells_its_words_and_weight(visit):
    tab = visit("encoder")
    for row, column in ((3, 1), (0, 10), (9, 4)):
        tab.point(row, column)
        expected = WEIGHTS["encoder.0.attention"][0, row, column].item()
        assert tab.text(".readout").startswith(f"“{WORDS[row]}” → “{WORDS[column]}”")
        assert float(tab.text(".readout strong")) == pytest.approx(expected, abs=5e-4)
    tab.mouse.move(5, 5)
    assert tab.text(".readout").startswith("Point to read")


def test_the_deepest_cell_has_the_deepest_colour(visit):
    tab = visit("encoder")
    weights = WEIGHTS["encoder.0.attention"][0]
    darkness = []
    for place in (int(weights.argmax()), int(weights.argmin())):
        x, y = tab.places(place // 11, place % 11)
        darkness.append(sum(tab.color(x + 12, y + 12)))
    assert darkness[0] < darkness[1] - 200


def test_from_thumbnails_to_a_head_to_a_token(visit):
    tab = visit("encoder")
    tab.page.click('[data-record="2"][data-head="3"]')
    tab.until(".head h2", "encoder 2 · head 3")
    assert tab.get_attribute('[data-record="2"][data-head="3"]', "aria-selected") == "true"
    tab.click(6, 2)
    weights = WEIGHTS["encoder.2.attention"][3, 6]
    assert tab.text(".token h3") == "“jump”"
    best = weights.topk(11)
    assert [word for word, _ in tab.bars()] == [WORDS[n] for n in best.indices]
    assert [value for _, value in tab.bars()] == pytest.approx(best.values.tolist(), abs=5e-4)
    tab.locator(".token").get_by_text("is looked at by").click()
    assert tab.text(".token h3") == "“brown”"
    assert tab.bars()[0][1] == pytest.approx(WEIGHTS["encoder.2.attention"][3, :, 2].max().item(), abs=5e-4)


def test_a_lock_stays_until_it_is_lifted(visit):
    tab = visit("encoder")
    tab.click(3, 1)
    tab.mouse.move(5, 5)
    assert tab.text(".readout").startswith("“fox” → “quick”")
    assert "locked" in tab.text(".readout")
    tab.click(3, 1)
    tab.mouse.move(5, 5)
    assert tab.text(".readout").startswith("Point to read")
    tab.click(4, 2)
    tab.keyboard.press("Escape")
    tab.mouse.move(5, 5)
    assert tab.text(".readout").startswith("Point to read")


def test_arrow_keys_move_the_lock(visit):
    tab = visit("encoder")
    tab.locator(".head .picture").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowLeft"):
        tab.keyboard.press(key)
    told = tab.text(".readout")
    assert told.startswith("“brown” → ")
    row, column = tab.evaluate("Object.values(document.getElementById('regard').viewer.state.get('locked'))")
    expected = WEIGHTS["encoder.0.attention"][0, row, column].item()
    assert float(tab.text(".readout strong")) == pytest.approx(expected, abs=5e-4)
    tab.keyboard.press("End")
    assert "→ “fox”" in tab.text(".readout")
    tab.keyboard.press("Home")
    assert "→ “The”" in tab.text(".readout")


def test_heads_are_chosen_by_keys(visit):
    tab = visit("encoder")
    tab.locator('[role="gridcell"][tabindex="0"]').focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith("encoder 1, head 1")
    tab.until(".head h2", "encoder 1 · head 1")


def test_tab_goes_through_in_the_order_of_reading(visit):
    tab = visit("encoder")
    seen = []
    for _ in range(12):
        tab.keyboard.press("Tab")
        seen.append(
            tab.evaluate(
                """() => { const on = document.activeElement;
                return on.closest("[data-choice]")?.dataset.choice ?? on.getAttribute("role") ?? on.dataset.save
                  ?? on.type }"""
            )
        )
    tools = ["view", "select-one", "button", "button", "search"]
    assert seen == ["language", "theme", *tools, "overview-0", "gridcell", "shared-0", "several-0", "copy"]


def test_the_focus_stays_where_it_is_used(visit):
    tab = visit("encoder")
    for selector in ('button[aria-label="Larger"]', "select", '.token [data-here="3"]'):
        tab.locator(selector).focus()
        tab.keyboard.press("ArrowDown" if selector == "select" else "Enter")
        assert tab.evaluate("(selector) => document.activeElement.matches(selector)", selector), selector


def test_everything_has_a_name_for_screen_readers(visit):
    tab = visit("encoder")
    nameless = tab.evaluate(
        """() => [...document.querySelectorAll("button, input, select, [tabindex='0']")].filter((element) =>
          !(element.getAttribute("aria-label") || element.innerText.trim() || element.labels?.length))
          .map((element) => element.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    assert "Heat map of encoder 0, head 0: 11 queries by 11 keys" in tab.get_attribute(".head .picture", "aria-label")
    assert tab.get_attribute(".readout", "role") == "status"
    assert tab.get_attribute("html", "lang") == "en"


def test_chinese_and_back_and_remembered(visit):
    tab = visit("encoder")
    tab.click(3, 1)
    tab.page.click('[data-value="zh"]')
    assert tab.text('[data-choice="view"]').split() == ["热图", "连线", "文本"]
    assert tab.text(".head h2") == "编码器 0 · 头 0"
    assert tab.get_attribute("html", "lang") == "zh-CN"
    assert tab.evaluate("document.activeElement.dataset.value") == "zh"
    assert tab.text(".token h3") == "“fox”"  # the token that was selected before stays selected
    tab.reload()
    tab.wait_for_selector(".head .picture[data-view]")
    assert "未核对" in tab.text(".facts")
    tab.page.click('[data-value="en"]')
    assert "No check" in tab.text(".facts")


def test_dark_as_the_system_or_as_chosen(visit):
    tab = visit("encoder", color_scheme="dark")
    tab.becomes(3, 3, 0, 99)
    place = int(WEIGHTS["encoder.0.attention"][0].argmax())
    x, y = tab.places(place // 11, place % 11)
    tab.becomes(x + 12, y + 12, 551, 765)  # on a dark page, large weights have bright colours
    tab.page.click('[data-value="light"]')
    tab.becomes(3, 3, 765, 765)
    tab.becomes(x + 12, y + 12, 0, 349)
    tab.reload()
    tab.wait_for_selector(".head .picture[data-view]")
    tab.becomes(3, 3, 765, 765)


def test_the_language_is_kept_in_the_address_where_there_is_no_storage(visit):
    tab = visit("encoder", locale="en")
    tab.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('none') } })")
    tab.reload()
    tab.wait_for_selector(".head .picture[data-view]")
    tab.page.click('[data-value="zh"]')
    tab.reload()
    tab.wait_for_selector(".head .picture[data-view]")
    assert "未核对" in tab.text(".facts")


def test_nothing_moves_under_the_pointer(visit):
    tab = visit("encoder", viewport={"width": 1000, "height": 900})
    before = tab.locator(".head .picture").bounding_box()
    tab.point(3, 1)
    assert tab.locator(".head .picture").bounding_box() == before
    tab.click(3, 1)
    assert tab.locator(".head .picture").bounding_box() == before


def test_where_nothing_may_be_stored_all_works_and_the_language_lasts_as_long_as_the_page(visit, folder):
    """A notebook displays the page in a sandboxed iframe, which has no access to the browser's storage."""
    tab = visit("encoder")
    text = (folder / "encoder.html").read_text(encoding="utf-8")
    tab.evaluate(
        """(text) => { const frame = document.createElement("iframe"); frame.setAttribute("sandbox", "allow-scripts");
        Object.assign(frame, { srcdoc: text, width: 1200, height: 900 }); document.body.replaceChildren(frame) }""",
        text,
    )
    frame = tab.frame_locator("iframe")
    frame.locator('[data-value="zh"]').click()
    assert frame.locator(".facts").inner_text().startswith("未核对")
    frame.locator('[data-record="1"][data-head="2"]').click()
    assert frame.locator(".facts").inner_text().startswith("未核对")


def test_lines_show_what_a_row_looks_at(visit):
    tab = visit("encoder")
    tab.view("lines")
    x, y = tab.places(3)
    tab.mouse.click(x - 20, y)
    best = WEIGHTS["encoder.0.attention"][0, 3].argmax()
    assert tab.text(".readout").startswith("“fox” looks at")
    assert tab.text(".readout strong").startswith(f"{WORDS[best]} ")
    tab.keyboard.press("ArrowDown")
    assert tab.text(".token h3") == "“did”"


def test_text_is_tinted_by_what_it_receives_and_by_what_is_chosen(visit):
    tab = visit("encoder")
    tab.view("text")
    received = WEIGHTS["encoder.0.attention"][0].mean(0)
    shades = {}
    for n in (int(received.argmax()), int(received.argmin())):
        x, y = tab.places(n)
        shades[n] = sum(tab.color(x + 3, y - 10))
    assert shades[int(received.argmax())] < shades[int(received.argmin())] - 100
    x, y = tab.places(5)
    tab.mouse.click(x + 10, y)
    assert tab.text(".token h3") == "“not”"
    weights = WEIGHTS["encoder.0.attention"][0, 5]
    deep, pale = (tab.places(int(n)) for n in (weights.argmax(), weights.argmin()))
    assert sum(tab.color(deep[0] + 3, deep[1] - 10)) < sum(tab.color(pale[0] + 3, pale[1] - 10)) - 150


def test_search_marks_and_goes_from_match_to_match(visit):
    tab = visit("encoder")
    tab.fill('input[type="search"]', "FO")
    assert tab.text(".find span") == "2"
    tab.keyboard.press("Enter")
    assert tab.text(".find span") == "1 of 2"
    assert tab.text(".token h3") == "“fox”"
    assert tab.text(".token .line .quiet") == "position 3"
    tab.keyboard.press("Enter")
    assert tab.text(".token .line .quiet") == "position 10"
    tab.fill('input[type="search"]', "zebra")
    assert tab.text(".find span") == "not found"


def test_colour_can_be_lifted_and_taken_row_by_row(visit):
    tab = visit("encoder")
    weights = WEIGHTS["encoder.0.attention"][0]
    row = int(weights.amax(-1).argmin())  # the query whose largest weight is the smallest of all queries
    x, y = tab.places(row, int(weights[row].argmax()))
    linear = sum(tab.color(x + 12, y + 12))
    tab.select_option("select", "root")
    root = sum(tab.color(x + 12, y + 12))
    tab.select_option("select", "row")
    by_row = sum(tab.color(x + 12, y + 12))
    assert linear > root > by_row
    assert "largest of each row" in tab.text(".legend")


def test_zoom_enlarges_and_scrolls(visit):
    tab = visit("long")
    before = tab.evaluate("document.querySelector('.head .filler').clientWidth")
    for _ in range(3):
        tab.page.click('button[aria-label="Larger"]')
    assert tab.evaluate("document.querySelector('.head .filler').clientWidth") > 4 * before
    tab.evaluate("document.querySelector('.head .picture').scrollTo(1800, 2000)")
    tab.point(300, 260)
    assert tab.text(".readout").startswith("“300” → “260”")


def test_save_csv(visit):
    name, data = saved(visit("encoder"), "csv")
    assert name == "A-small-encoder-encoder-0-head-0.csv"
    lines = [line.split(",") for line in data.decode("utf-8-sig").split("\r\n")]
    assert lines[0] == ["", *WORDS]
    assert [line[0] for line in lines[1:]] == list(WORDS)
    values = torch.tensor([[float(cell) for cell in line[1:]] for line in lines[1:]])
    torch.testing.assert_close(values, WEIGHTS["encoder.0.attention"][0], atol=2e-4, rtol=0)


def test_save_png_is_the_picture_with_its_title(visit):
    name, data = saved(visit("encoder"), "png")
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    assert name.endswith("-heatmap.png")
    assert min(picture.size) > 600
    colors = {color for _, color in picture.getcolors(2**20)}
    assert (0, 64, 160) in colors  # the darkest colour of the scale is #0040a0
    assert picture.getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize("view", ["heatmap", "lines", "text"])
def test_save_svg_has_words_and_title(visit, view):
    tab = visit("encoder")
    tab.view(view)
    name, data = saved(tab, "svg")
    root = ET.fromstring(data)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert name.endswith(f"-{view}.svg")
    assert {"encoder 0 · head 0", "A small encoder · No check", *WORDS} <= set(texts)


def test_copy_the_locked_row(visit):
    tab = visit("encoder", permissions=["clipboard-read", "clipboard-write"])
    tab.click(3, 1)
    # The page removes the message "Copied" after a while: long timers are disabled, so that a slow machine still sees
    # it.
    tab.evaluate("{ const soon = setTimeout; window.setTimeout = (call, ms) => (ms < 2000 ? soon(call, ms) : 0) }")
    tab.page.click('[data-save="copy"]')
    tab.until(".told", "Copied")
    first, second = tab.evaluate("navigator.clipboard.readText()").split("\n")[:2]
    best = WEIGHTS["encoder.0.attention"][0, 3].max(-1)
    assert first == "key\tweight"
    assert second.split("\t")[0] == WORDS[best.indices]
    assert float(second.split("\t")[1]) == pytest.approx(best.values.item(), abs=1e-4)


def test_heads_by_entropy_and_distance(visit):
    tab = visit("encoder")
    tab.locator(".overview").get_by_text("Entropy and distance").click()
    tab.locator(".overview .picture").focus()
    tab.keyboard.press("ArrowRight")
    tab.until(".head h2", "encoder 0 · head 1")
    weights = WEIGHTS["encoder.0.attention"][1]
    entropy = -(weights * weights.log()).sum(-1).mean().item()
    place = torch.arange(11)
    distance = (weights * (place[:, None] - place).abs()).sum(-1).mean().item()
    said = tab.text(".measures p")
    assert said == f"encoder 0, head 1: entropy {float(f'{entropy:.3g}'):g}, distance {float(f'{distance:.3g}'):g}"


def test_an_image_is_lit_where_each_word_looks(visit):
    tab = visit("caption")
    assert tab.text('[data-choice="view"] [aria-checked="true"]') == "Image"
    edge = tab.locator(".head .picture canvas").bounding_box()
    corners = {"top left": (edge["x"] + 12, edge["y"] + 12), "bottom right": (edge["x"] + 388, edge["y"] + 288)}
    bright = {}
    for word, name in enumerate(("cat", "dog")):
        x, y = tab.places(word)
        tab.mouse.click(x + 30, y + 30)
        tab.mouse.move(5, 5)
        assert tab.text(".token h3") == f"“{name}”"
        bright[name] = {corner: sum(tab.color(*at)) for corner, at in corners.items()}
    assert bright["cat"]["top left"] > bright["cat"]["bottom right"] + 200
    assert bright["dog"]["bottom right"] > bright["dog"]["top left"] + 200
    tab.keyboard.press("ArrowLeft")
    assert tab.text(".token h3") == "“cat”"
    drawing = saved(tab, "svg")[1]
    # The SVG draws the picture three times, an overlay on each, and the colour scale once.
    assert drawing.count(b"<use") == 7
    # The SVG embeds four images: the picture once, an overlay for each of two words, and the colour scale.
    assert drawing.count(b"<image") == 4


def clear(tab, x: float, y: float) -> float:
    """Return the brightness of the large picture at a position (from 0 to 1); white means that the overlay is
    transparent there."""
    edge = tab.locator(".head .picture canvas").bounding_box()
    # The picture has 432 pixels a side: it is enlarged by the factor 9.
    return sum(tab.color(edge["x"] + x * 432, edge["y"] + y * 432)) / 765


def test_a_map_is_interpolated_or_shown_cell_by_cell(visit):
    tab = visit("drawn")
    smooth = [clear(tab, x, 0.25) for x in (0.25, 0.375, 0.49, 0.51, 0.625, 0.75)]
    assert smooth == sorted(smooth, reverse=True)
    assert smooth[2] - smooth[3] < 0.05 < smooth[0] - smooth[2]
    # The overlay is transparent at the centre of the cell with the largest weight.
    assert smooth[0] == pytest.approx(1, abs=0.02)
    tab.page.click('[data-choice=veil] [data-value="cells"]')
    cells = [clear(tab, x, 0.25) for x in (0.02, 0.25, 0.49, 0.51, 0.75, 0.98)]
    assert cells[0] == cells[1] == cells[2] == pytest.approx(1, abs=0.02)
    assert cells[3] == cells[4] == cells[5] < 0.6


def test_words_have_a_scale_of_their_own_or_share_one(visit):
    tab = visit("drawn")
    tab.mouse.click(*(at + 40 for at in tab.places(1)))
    tab.mouse.move(5, 5)
    assert {"dog", "largest weight 0.400 · probability 0.75", "0", "0.2", "0.4"} <= set(texts(tab))
    assert clear(tab, 0.75, 0.75) == pytest.approx(1, abs=0.02)
    tab.page.select_option("[data-here=scale]", "linear")
    assert {"0", "0.4", "0.8", "largest weight 0.400 · probability 0.75"} <= set(texts(tab))
    assert clear(tab, 0.75, 0.75) == pytest.approx(1 - 0.5 * 190 / 255 * (1 - 22 / 255), abs=0.03)


def test_pointing_at_the_picture_reads_the_weight_of_the_word_shown(visit):
    tab = visit("drawn")
    edge = tab.locator(".head .picture canvas").bounding_box()
    # Before a word is chosen, the page shows the word with the largest weight.
    tab.mouse.move(edge["x"] + 320, edge["y"] + 320)
    assert tab.text(".readout").startswith("“cat” → “1,1”")
    tab.mouse.click(*(at + 40 for at in tab.places(1)))
    tab.mouse.move(edge["x"] + 320, edge["y"] + 320)
    assert tab.text(".readout").split() == ["“dog”", "→", "“1,1”", "0.400"]


def test_the_picture_of_all_words_is_saved(visit):
    tab = visit("drawn")
    name, data = saved(tab, "png")
    assert name.endswith(".png")
    picture = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    # The saved picture has two pixels for each pixel of the screen.
    white = (picture[150:-100, 60:900].sum(-1) > 750).mean()
    assert 0.05 < white < 0.95
    drawing = ET.fromstring(saved(tab, "svg")[1])
    words = [part.text for part in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"cat", "dog", "0.800", "0.400", "largest weight 0.800 · probability 0.50"} <= set(words)
    embedded = [part for part in drawing.iter("{http://www.w3.org/2000/svg}image") if part.get("width") == "48"]
    assert len(embedded) == 1  # the picture is drawn three times but embedded only once


def test_the_gaze_is_a_numbered_path_with_the_patches_it_saw(visit):
    tab = visit("gazed")
    assert tab.text('[data-choice="view"] [aria-checked="true"]') == "Gaze"
    assert "numbered from 0" in tab.text(".notes")
    edge = tab.locator(".head .picture canvas").bounding_box()
    patch = [(edge["x"] + 440 + 32 + 34 + 30, edge["y"] + 4 + 76 * n + 30) for n in range(3)]
    # Each of the three glimpses shows its patch at the finest scale in another shade of grey.
    assert [tab.color(*at)[0] for at in patch] == [0, 128, 255]
    # This point is on the left edge of the outline of glimpse 0.
    x, y = edge["x"] + 440 * (0.5 - 0.05), edge["y"] + 330 * 0.5 - 11
    before = tab.color(x, y)
    tab.mouse.click(*patch[0])
    tab.mouse.move(5, 5)
    assert tab.text(".token h3") == "“7 0.42”"
    assert tab.color(x, y) != before
    tab.keyboard.press("ArrowDown")
    assert tab.text(".token h3") == "“4 0.90”"


def test_the_gaze_is_saved_as_drawn_in_chinese_and_in_the_dark(visit):
    tab = visit("gazed", color_scheme="dark")
    tab.page.click('[data-choice="language"] >> text=中文')
    assert tab.text('[data-choice="view"] [aria-checked="true"]') == "视线"
    name, data = saved(tab, "svg")
    root = ET.fromstring(data)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert name.endswith("-gaze.svg")
    # The number of each glimpse is drawn twice: on the image and in the list beside it.
    assert [text for text in texts if text in ("0", "1", "2")] == ["0", "1", "2", "0", "1", "2"]
    assert EVIL[:15] in " ".join(texts)
    assert data.count(b"<image") == 7  # the page draws the image once, and two patches for each of three glimpses
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    # The first three circles mark locations, the others surround the numbers, which must not overlap.
    numbers = circles[3:6]
    assert min(abs(a - c) + abs(b - d) for n, (a, b) in enumerate(numbers) for c, d in numbers[:n]) >= 20
    picture = Image.open(io.BytesIO(saved(tab, "png")[1])).convert("RGB")
    assert sum(picture.getpixel((1, 1))) < 120


def test_an_image_painted_from_words_has_a_map_for_each_word(visit):
    tab = visit("painted")
    assert tab.text('[data-choice="view"] [aria-checked="true"]') == "Image"
    edge = tab.locator(".head .picture canvas").bounding_box()
    tab.locator(".head .picture").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        tab.keyboard.press(key)
    assert tab.text(".readout").startswith("“dog” receives")
    top, bottom = ((edge["x"] + 12, edge["y"] + 12), (edge["x"] + 388, edge["y"] + 288))
    assert sum(tab.color(*bottom)) > sum(tab.color(*top)) + 200
    tab.keyboard.press("Home")
    assert sum(tab.color(*top)) > sum(tab.color(*bottom)) + 200


def test_positions_without_names_are_counted_in_round_numbers(visit):
    found = [int(text) for text in texts(visit("long")) if text.isdigit()]
    assert found.count(0) == 2
    assert set(found) == set(range(0, 601, 50)) or set(found) == set(range(0, 601, 100))


def test_a_map_that_nearly_fits_the_window_is_made_to(visit):
    tab = visit("encoder", viewport={"width": 1400, "height": 620})
    scrolled, seen = tab.evaluate(
        "() => { const { scrollHeight, clientHeight } = document.querySelector('.head .picture.held');"
        " return [scrollHeight, clientHeight]; }"
    )
    assert scrolled <= seen
    assert "." in texts(tab)  # the page shows the label of the last token, a full stop
    # The page shows the weights as numbers such as ".25".
    assert any(text.startswith(".") and text[1:].isdigit() for text in texts(tab))


def test_tokens_that_are_none_of_the_image_stand_beside_it(visit):
    tab = visit("vision")
    assert tab.text('[data-choice="view"] [aria-checked="true"]') == "Image"
    edge = tab.locator(".head .picture canvas").bounding_box()
    chips = tab.evaluate(
        """() => {
          const found = [];
          const paper = { rect() {}, image() {}, clip() {}, text: (said, x, y) => found.push([said, x, y]) };
          const { layout } = document.getElementById("regard").viewer.stages[0].picture;
          layout.draw(paper, { x: 0, y: 0, width: 2000, height: 2000 });
          return found;
        }"""
    )
    said = [text for text, *_ in chips]
    scale = ["0", "0.37", "0.74"]
    assert said == ["“[CLS]” looks at", "largest weight 0.740", *scale, "[CLS]", "0.020", "[REG]", "0.020"]
    places = {text: (edge["x"] + x, edge["y"] + y) for text, x, y in chips}
    # Before a choice, the page shows the attention of the class token, which is at the top left patch.
    corners = ((edge["x"] + 12, edge["y"] + 12), (edge["x"] + 400, edge["y"] + 300))
    assert sum(tab.color(*corners[0])) > sum(tab.color(*corners[1])) + 200
    tab.mouse.click(*places["[REG]"])
    assert tab.text(".token h3") == "“[REG]”"
    tab.keyboard.press("End")
    assert tab.text(".token h3") == "“2,3”"
    assert tab.bars()[0] == ("[CLS]", 0.74)
    tab.mouse.move(*places["[CLS]"])
    assert "“[CLS]” looks at" in tab.text(".readout")
    assert saved(tab, "svg")[1].count(b"[CLS]") >= 1


def test_sound_tells_the_time_of_each_symbol(visit):
    tab = visit("spoken")
    assert tab.text('[data-choice="view"] [aria-checked="true"]') == "Sound"
    x, y = tab.places(1)
    tab.mouse.click(x + 12, y)
    tab.mouse.move(5, 5)
    assert tab.text(".token h3") == "“e”"
    assert "0.40–0.48 s" in tab.text(".readout")
    edge = tab.locator(".head .picture canvas").bounding_box()
    wide = edge["width"]
    heard, silent = (tab.color(edge["x"] + share * wide, edge["y"] + 40) for share in (0.46, 0.9))
    # The overlay of the white spectrogram is transparent at the frames that the symbol attends to.
    assert sum(heard) > sum(silent) + 300
    assert b"<image" in saved(tab, "svg")[1]


def drawn_texts(tab) -> set[str]:
    root = ET.fromstring(saved(tab, "svg")[1])
    return {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}


def test_a_drive_is_replayed_with_a_slider(visit):
    tab = visit("driven")
    assert tab.text('[data-choice="view"] [aria-checked="true"]') == "Road"
    tab.locator(".player input").fill("1")
    assert "1 s hold" in tab.text(".player")
    assert {"lorry  0.80", "pedestrian  0.20", "10.0 m/s", "1 s hold"} <= drawn_texts(tab)
    tab.locator(".player input").focus()
    tab.keyboard.press("ArrowRight")
    assert {"lorry  0.10", "pedestrian  0.90", "5.0 m/s", "2 s brake"} <= drawn_texts(tab)
    tab.page.click(".player button")  # at the last row, the play button starts again from the first row
    tab.until(".player output", "2 s brake")
    tab.until(".player button", "Play")


def test_an_object_of_a_drive_has_a_name_a_weight_and_a_speed(visit):
    tab = visit("driven")
    tab.locator(".player input").fill("2")
    x, y = tab.evaluate(
        """() => { const { layout } = document.getElementById("regard").viewer.stages[0].picture;
        for (let x = 0; x < layout.width; x += 3) for (let y = 0; y < layout.height; y += 3)
          if (layout.hit(x, y)?.column === 1) return [x, y]; }"""
    )
    edge = tab.locator(".head .picture canvas").bounding_box()
    tab.mouse.move(edge["x"] + x + 3, edge["y"] + y + 3)
    assert all(part in tab.text(".readout") for part in ("“2 s brake” → “pedestrian”", "0.900", "1.5 m/s"))


def test_a_scene_from_above(visit):
    tab = visit("traffic")
    assert tab.text('[data-choice="view"] [aria-checked="true"]') == "Scene"
    assert "Seen from above" in tab.text(".notes")
    ego = tab.places(0)
    scale = tab.evaluate(
        """() => { const { layout } = document.getElementById("regard").viewer.stages[0].picture;
        const find = (column) => { for (let x = 0; x < layout.width; x += 3) for (let y = 0; y < layout.height; y += 3)
          if (layout.hit(x, y)?.column === column) return [x, y]; };
        return [find(1), find(2)] }"""
    )
    edge = tab.locator(".head .picture canvas").bounding_box()
    (truck_x, truck_y), (car_x, _) = scale
    tab.mouse.move(edge["x"] + truck_x + 4, edge["y"] + truck_y + 2)
    assert "“truck”" in tab.text(".readout")
    assert "17 m/s" in tab.text(".readout")
    # Objects ahead are to the right, objects behind to the left.
    assert truck_x + edge["x"] > ego[0] > car_x + edge["x"]
    texts = [element.text for element in ET.fromstring(saved(tab, "svg")[1]).iter("{http://www.w3.org/2000/svg}text")]
    assert {"truck  0.700", "ego  0.200", "car  0.100"} <= set(texts)


def test_a_long_map_is_pooled_and_says_so(visit):
    tab = visit("long")
    assert "A map of 601 × 521 is too large to keep whole" in tab.text(".head")
    tab.click(300, 200)
    row = tab.evaluate("document.getElementById('regard').viewer.state.get('locked').row")
    best = LONG[0, row].topk(12)
    tab.wait_for_selector(".token li button")
    assert [int(word) for word, _ in tab.bars()] == best.indices.tolist()
    assert [value for _, value in tab.bars()] == pytest.approx(best.values.tolist(), abs=5e-4)
    column = int(best.indices[0])
    tab.page.click(f'.token li[data-index="{column}"] button')
    tab.mouse.move(5, 5)
    assert float(tab.text(".readout strong")) == pytest.approx(best.values[0].item(), abs=5e-4)
    lines = saved(tab, "csv")[1].decode("utf-8-sig").split("\r\n")
    assert lines[0] == "row,row label,key,key label,weight"
    first = LONG[0, 0].max(-1)
    assert lines[1].split(",")[2] == str(int(first.indices))


def test_two_traces_side_by_side(visit):
    tab = visit("two")
    assert tab.locator(".trace").all_inner_texts() == ["One model", "Another model"]
    tab.locator('[data-record="1"][data-head="2"]').first.click()
    for head in tab.locator(".head h2").all():
        playwright.expect(head).to_have_text("encoder 1 · head 2")
    tab.point(4, 7, stage=1)
    told = tab.locator(".readout strong").all_inner_texts()
    first = WEIGHTS["encoder.1.attention"]
    expected = [first[2, 4, 7].item(), first.roll(1, 0)[2, 4, 7].item()]
    assert [float(value) for value in told] == pytest.approx(expected, abs=5e-4)
    # Both traces are drawn with the same colour scale.
    assert tab.locator(".legend").all_inner_texts()[0] == tab.locator(".legend").all_inner_texts()[1]


def test_what_a_trace_says_is_only_text(visit):
    tab = visit("strange")
    assert tab.text("h1") == EVIL
    assert tab.text(".head h2").startswith(EVIL)
    tab.click(0, 1)
    assert tab.text(".token h3").startswith("“<img src=x")
    tab.fill('input[type="search"]', "<img")
    tab.keyboard.press("Enter")
    tab.page.click('[data-value="zh"]')
    assert tab.locator("img").count() == 0
    assert tab.locator("body script:not([type='text/plain'])").count() == 1
    svg = saved(tab, "svg")[1]
    assert b"<img" not in svg
    assert ET.fromstring(svg) is not None
    name, data = saved(tab, "csv")
    assert name.startswith("img-src-x-onerror-alert-1")
    last = data.decode("utf-8-sig").split("\r\n")[-1]
    assert last.startswith("'=1+1,")  # the label is escaped, so that a spreadsheet does not evaluate it as a formula


def test_a_trace_of_nothing_says_so(visit):
    tab = visit("empty", wait=".stage p")
    assert "no records" in tab.text(".stage")
    assert "the model has no attention" in tab.text(".dropped")


@pytest.mark.parametrize("name", ["encoder", "caption", "spoken", "traffic", "driven", "two"])
def test_narrow_screens_need_no_scrolling_sideways(visit, name):
    tab = visit(name, viewport={"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


# Tests of the viewer's modules with the security policy of the studio, and with a source that has tiles of higher
# resolution.


class Served(SimpleHTTPRequestHandler):
    policy = "default-src 'none'; script-src 'self'; style-src 'self'"
    extra: dict[str, str] = {}  # noqa: RUF012

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", self.policy)
        super().end_headers()

    def do_GET(self) -> None:
        if self.path not in self.extra:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/javascript" if self.path.endswith(".js") else "text/html")
        self.end_headers()
        self.wfile.write(self.extra[self.path].encode())
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[str]:
    trace = Trace.from_weights({"attention": LONG}, title="Served")
    packed = pack(trace)
    start = f"""
      import {{ MemorySource }} from "./source.js";
      import {{ mount }} from "./viewer.js";
      const packs = {json.dumps([base64.b64encode(data).decode() for data in packed.records])};
      const source = new MemorySource({json.dumps(packed.about)}, packs, []);
      source.finer = true;
      source.tile = async (record, head, row0, column0, rows, columns) => ({{
        row0, column0, rows, columns, rowBlock: 1, columnBlock: 1, highest: 0.5, error: 0,
        values: new Float32Array(rows * columns).fill(0.125),
      }});
      mount(document.getElementById("place"), [source], {{ header: false, language: "zh", theme: "dark" }});
    """
    Served.extra = {
        "/start.js": start,
        "/": '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="style.css">'
        '<body><div id="place"></div><script type="module" src="start.js"></script>',
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Served, directory=str(FOLDER)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_served_under_a_strict_policy_with_tiles(visit, served):
    tab = visit("served", address=served)
    assert tab.locator("h1").count() == 0  # the embedding page has its own header
    assert tab.text(".legend + .notes").startswith("601 × 521 的整图以汇聚方式显示")
    for _ in range(3):
        tab.page.click('button[aria-label="放大"]')
    edge = tab.locator(".head .picture").bounding_box()
    tab.mouse.move(edge["x"] + 200, edge["y"] + 200)
    tab.until(".readout strong", "0.125")  # the weight from the tile, not the mean from the pooled map


# Tests of pages with several sequences, and with missing weights.


def test_the_reader_chooses_a_sequence_of_the_batch(visit):
    tab = visit("batch")
    tab.point(3, 3)
    assert tab.text(".readout").startswith("“down” → “down”")
    options = tab.locator("[data-here=sequence] option").all_inner_texts()
    assert options == ["0: The cat sat down", f"1: It {EVIL} rains"]
    tab.locator("[data-here=sequence]").select_option(index=1)
    playwright.expect(tab.locator(".facts")).to_contain_text("3 × 3")
    assert tab.locator("[data-here=sequence]").evaluate("(list) => list.selectedIndex") == 1
    tab.point(2, 0)
    assert tab.text(".readout").startswith("“rains” → “It”")
    tab.locator("[data-here=sequence]").select_option(index=0)
    playwright.expect(tab.locator(".facts")).to_contain_text("4 × 4")


def test_one_sequence_needs_no_choice(visit):
    assert visit("encoder").locator("[data-here=sequence]").count() == 0


def test_weights_that_are_none_are_shown_as_what_they_are(visit):
    tab = visit("broken")
    shown = {}
    for row, column in ((1, 2), (2, 0), (3, 3)):
        x, y = tab.places(row, column)
        shown[row] = tab.color(x + 20, y - 20)
        tab.point(row, column)
        shown[row, "text"] = tab.text(".readout strong")
    assert [shown[row, "text"] for row in (1, 2, 3)] == ["NaN", "−0.500", "∞"]
    assert shown[1] == shown[3]
    red, _, blue = shown[2]
    assert red > blue  # negative weights have a warm colour, other weights a cool one
    assert "NaN, ±∞" in tab.text(".legend")
    assert "1 are NaN, 1 infinite, 1 negative" in tab.text(".notes")
    tab.view("lines")
    tab.view("text")
