"""Tests of heads and layers on the page in a browser: names, scales, means, several heads, rollout, whole words."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tabs import CHROMIUM, Tab, saved, softmax, texts

from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.look.viewer.page import page

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested in a browser: install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="NO CHROMIUM: no view of heads was tested in a browser")

LAYERS = [
    *(f"encoder.block.{n}.layer.0.SelfAttention" for n in range(2)),
    *(f"decoder.block.{n}.layer.{part}" for n in range(2) for part in ("0.SelfAttention", "1.EncDecAttention")),
]
SOURCE = ("the", "house", "is", "un", "·believ", "·ably", "green", ".")
TARGET = ("das", "Haus", "ist", "grün", "汤⟨1/2⟩", "汤⟨2/2⟩")
CROSS = softmax(3, len(TARGET), len(SOURCE))
# The weights of three heads over three tokens: uniform, each token to itself, and each token to the first one.
PLAIN = torch.stack([torch.full((3, 3), 1 / 3), torch.eye(3), torch.tensor([[1.0, 0, 0]] * 3)])


def translated() -> Trace:
    """Return attention maps (a `Trace`) of a T5 with two encoder and two decoder layers."""
    sizes = {"encoder": (SOURCE, SOURCE), "decoder": (TARGET, TARGET), "cross": (TARGET, SOURCE)}
    trace = Trace("T5")
    for name in LAYERS:
        kind = "cross" if name.endswith("EncDecAttention") else name.partition(".")[0]
        rows, columns = (Labels("tokens", words) for words in sizes[kind])
        weights = CROSS if kind == "cross" else softmax(3, len(rows), len(columns))
        trace.records += Trace.from_weights({name: weights}, rows=rows, columns=columns).records
    return trace


def plain() -> Trace:
    return Trace.from_weights(
        {f"layers.{n}.attention": PLAIN for n in range(2)}, title="Plain", rows=list("abc"), columns=list("abc")
    )


def sentences() -> Trace:
    answers = ["0. 汤姆 在 花园 里 追着 杰瑞，但是 杰瑞 跑得 更快", "1. 猫 坐"]
    trace = Trace("Where each word came from", parts={"en": "Sentences", "zh": "句子"})
    for answer in answers:
        trace.records += Trace.from_weights(
            {answer: softmax(1, 2, 4)}, rows=["猫", "坐"], columns=["The", "cat", "sat", "."]
        ).records
    return trace


def near() -> Trace:
    """Return attention maps (a `Trace`) of two heads; the entropy and the mean distance of the second are slightly
    smaller."""
    even = torch.full((6, 6), 1 / 6)
    return Trace.from_weights({"layers.0.attention": torch.stack([even, 0.9 * even + 0.1 * torch.eye(6)])})


TRACES: dict[str, Callable[[], Trace]] = {
    "translated": translated, "plain": plain, "sentences": sentences, "near": near,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    for name, make in TRACES.items():
        (folder / f"{name}.html").write_text(page(make()), encoding="utf-8")
    return folder


def layers(tab: Tab) -> list[str]:
    return tab.locator(".heads .name").all_inner_texts()


def test_layers_have_names_that_people_read(visit):
    tab = visit("translated")
    decoder = [f"decoder {n} {kind}" for n in range(2) for kind in ("self", "cross")]
    assert layers(tab) == ["encoder 0", "encoder 1", *decoder, "encoder rollout", "decoder self rollout"]
    assert tab.locator(".heads .name").nth(3).get_attribute("title") == LAYERS[3]
    tab.page.click('[data-record="3"][data-head="1"]')
    tab.until(".head h2", "decoder 0 cross · head 1")
    assert tab.text(".facts .path") == LAYERS[3]


def test_layers_have_names_in_chinese(visit):
    tab = visit("translated")
    tab.page.click('[data-choice=language] [data-value="zh"]')
    assert layers(tab)[:4] == ["编码器 0", "编码器 1", "解码器 0 自注意力", "解码器 0 交叉注意力"]


def test_heads_are_numbered_from_0_above_their_maps(visit):
    tab = visit("translated")
    assert tab.locator(".numbers [role=columnheader]").all_inner_texts() == ["", "mean", "0", "1", "2"]


def shade(tab: Tab, record: int, head: int, row: int = 0, column: int = 0) -> int:
    """Return the lightness of a cell of a thumbnail: the sum of its red, green and blue values."""
    return tab.evaluate(
        """([record, head, row, column]) => new Promise((done) => {
          const look = () => {
            const canvas = document.querySelector(`[data-record="${record}"][data-head="${head}"] canvas`);
            if (canvas.width !== 3) return setTimeout(look, 20);
            const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            copy.drawImage(canvas, 0, 0);
            const { data } = copy.getImageData(column, row, 1, 1);
            return done(data[0] + data[1] + data[2]);
          };
          look();
        })""",
        [record, head, row, column],
    )


def test_small_maps_share_a_scale_from_0_to_1(visit):
    """A weight of 1/3 has a lighter colour than a weight of 1, whatever the largest weight of its head is."""
    tab = visit("plain")
    uniform, sharp, away = shade(tab, 0, 0), shade(tab, 0, 1), shade(tab, 0, 1, 0, 1)
    assert sharp == 0 + 64 + 160  # the darkest colour of the scale is #0040a0
    assert away == 242 + 245 + 251  # the lightest colour of the scale is #f2f5fb
    assert sharp + 100 < uniform < away - 100
    assert tab.locator(".small-scale .ends span").all_inner_texts() == ["0", "0.25", "1"]
    tab.page.click('[data-choice="shared-0"] [data-value="own"]')
    # With a separate scale for each head, 1/3 is the largest weight and has the darkest colour.
    assert shade(tab, 0, 0) == sharp
    assert "largest of each head" in tab.text(".small-scale")


def test_the_mean_of_the_heads_is_beside_them(visit):
    tab = visit("plain")
    tab.page.click('[data-record="1"][data-head="3"]')
    tab.until(".head h2", "layer 1 · mean of 3 heads")
    tab.point(1, 0)  # the mean of three heads at this cell is (1/3 + 0 + 1) / 3
    assert float(tab.text(".readout strong")) == pytest.approx(4 / 9, abs=5e-4)
    assert saved(tab, "csv")[0] == "Plain-layer-1-mean-of-3-heads.csv"
    tab.locator('[role="gridcell"][tabindex="0"]').focus()
    tab.keyboard.press("ArrowRight")
    tab.until(".head h2", "layer 1 · head 0")
    tab.keyboard.press("ArrowLeft")
    tab.until(".head h2", "layer 1 · mean of 3 heads")


def test_the_rollout_is_one_map_below_the_layers(visit):
    tab = visit("plain")
    tab.page.click('[data-record="2"]')
    tab.until(".head h2", "rollout")
    layer = 0.5 * PLAIN.mean(0) + 0.5 * torch.eye(3)
    tab.point(2, 0)
    assert float(tab.text(".readout strong")) == pytest.approx((layer @ layer)[2, 0].item(), abs=5e-4)
    assert "Abnar and Zuidema 2020" in tab.text(".head .notes")
    assert "check" not in tab.text(".facts").lower()


def colours(tab: Tab) -> list[str]:
    """Return the colours of the drawn lines, the faintest first."""
    return tab.evaluate(
        """() => {
          const found = [];
          const paper = { rect() {}, image() {}, text() {}, clip: (x, y, wide, high, draw) => draw(),
            curve: (...given) => found.push(given[4].stroke) };
          const { layout, box } = document.getElementById("regard").viewer.stages[0].picture;
          layout.draw(paper, box);
          return found;
        }"""
    )


def test_several_heads_have_a_hue_each(visit):
    tab = visit("plain")
    tab.page.click('[data-choice="several-0"] [data-value="colours"]')
    tab.until(".head h2", "layer 0 · heads 0–2")
    tab.page.wait_for_selector('.head .picture[data-view="lines"]')
    assert tab.locator(".legend .key").all_inner_texts() == ["head 0", "head 1", "head 2"]
    hues = tab.locator(".legend .hue").evaluate_all("(all) => all.map((one) => getComputedStyle(one).backgroundColor)")
    assert len(set(hues)) == 3
    drawn = [colour.replace(",", ", ") for colour in colours(tab)]
    assert {hue: drawn.count(hue) for hue in hues} == {hues[0]: 9, hues[1]: 3, hues[2]: 3}
    tab.page.click('[data-record="0"][data-head="1"]')
    tab.until(".head h2", "layer 0 · heads 0, 2")
    assert len(colours(tab)) == 12


def test_a_cell_has_the_hue_of_the_head_that_has_most_there(visit):
    tab = visit("plain")
    tab.page.click('[data-choice="several-0"] [data-value="colours"]')
    tab.until(".head h2", "layer 0 · heads 0–2")
    tab.view("heatmap")
    first, itself, uniform = (
        tab.color(x + 20, y - 20) for x, y in (tab.places(2, 0), tab.places(1, 1), tab.places(0, 2))
    )
    assert len({first, itself, uniform}) == 3
    assert uniform[2] > uniform[0]  # the hue of head 0 is blue
    assert first[1] > max(first[0], first[2])  # the hue of head 2 is green
    assert itself[0] > max(itself[1], itself[2])  # the hue of head 1 is red
    tab.point(1, 0)
    assert "0: 0.33 1: 0.00 2: 1.00" in " ".join(tab.text(".readout").split())
    assert float(tab.text(".readout strong").removeprefix("mean ")) == pytest.approx(4 / 9, abs=5e-4)


def test_one_of_several_heads_always_stays(visit):
    tab = visit("plain")
    tab.page.click('[data-choice="several-0"] [data-value="colours"]')
    for head in (0, 1, 2):
        tab.page.click(f'[data-record="0"][data-head="{head}"]')
    tab.until(".head h2", "layer 0 · head 2")
    tab.page.click('[data-choice="several-0"] [data-value="one"]')
    tab.until(".head h2", "layer 0 · head 0")


def test_pieces_become_words_on_request(visit):
    """The weights of a word as a query are the mean over its pieces; its weight as a key is the sum over its pieces."""
    tab = visit("translated")
    tab.page.click('[data-record="3"][data-head="0"]')
    tab.until(".head h2", "decoder 0 cross · head 0")
    tab.page.click('[data-choice=words] [data-value="words"]')
    playwright.expect(tab.locator(".facts")).to_contain_text("5 × 6")
    assert {"unbelievably", "汤"} <= set(texts(tab))
    tab.point(4, 3)
    assert tab.text(".readout").startswith("“汤” → “unbelievably”")
    expected = CROSS[0, 4:6, 3:6].sum(-1).mean().item()
    assert float(tab.text(".readout strong")) == pytest.approx(expected, abs=1e-3)
    tab.page.click('[data-choice=words] [data-value="pieces"]')
    playwright.expect(tab.locator(".facts")).to_contain_text("6 × 8")


def test_both_sentences_are_shown_whole(visit):
    tab = visit("translated")
    assert tab.locator(".sentences dd").all_inner_texts() == ["the house is unbelievably green."]
    tab.page.click('[data-record="3"][data-head="0"]')
    tab.until(".head h2", "decoder 0 cross · head 0")
    assert tab.locator(".sentences dt").all_inner_texts() == ["Queries", "Keys"]
    assert tab.locator(".sentences dd").all_inner_texts() == ["das Haus ist grün汤", "the house is unbelievably green."]


def test_a_page_of_a_task_uses_the_words_of_the_task(visit):
    tab = visit("sentences")
    assert tab.text(".overview h2") == "Sentences"
    assert layers(tab) == [record.name for record in sentences().records]
    # The title of a record with one head does not contain a head number.
    assert tab.text(".head h2") == sentences().records[0].name
    clipped = tab.locator(".heads .name").evaluate_all(
        "(all) => all.filter((one) => one.scrollWidth > one.clientWidth).length"
    )
    assert clipped == 0
    tab.page.click('[data-choice=language] [data-value="zh"]')
    assert tab.text(".overview h2") == "句子"


@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("name", ["translated", "sentences"])
def test_nothing_is_cut_off_or_covered(visit, name, width):
    """No name is wider than its space, no two names overlap, and the page needs no horizontal scrolling."""
    tab = visit(name, viewport={"width": width, "height": 900})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    found = tab.evaluate(
        """() => {
          const all = (selector) => [...document.querySelectorAll(selector)];
          const cut = all(".name, .numbers span, h1, h2, .facts span, .choice button, .sentences dd")
            .filter((one) => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== "visible");
          const written = (one) => {
            const range = document.createRange();
            range.selectNodeContents(one);
            return range.getBoundingClientRect();
          };
          const { bottom } = document.querySelector(".heads").getBoundingClientRect(); // what is below is scrolled to
          const names = all(".numbers span, .heads .name").map(written).filter((box) => box.bottom <= bottom);
          const others = all(".tools > *, .save button").map((one) => one.getBoundingClientRect());
          const boxes = [...names, ...others].filter((box) => box.width);
          const apart = (a, b) => a.left >= b.right || b.left >= a.right || a.top >= b.bottom || b.top >= a.bottom;
          const over = boxes.filter((a, n) => boxes.some((b, m) => m > n && !apart(a, b)));
          return [cut.map((one) => one.textContent), over.length];
        }"""
    )
    assert found == [[], 0]


def test_the_last_slanted_name_has_room(visit):
    """Slanted column labels extend beyond the map to the right: the picture is wide enough for the last of them."""
    tab = visit("translated", viewport={"width": 390, "height": 844})
    right = tab.evaluate(
        """() => {
          const ends = [];
          const pen = document.createElement("canvas").getContext("2d");
          const text = (said, x, y, style) => {
            pen.font = `400 ${style.size}px system-ui`;
            if (style.turn) ends.push(x + pen.measureText(said).width * Math.SQRT1_2);
          };
          const paper = { rect() {}, image() {}, text, clip: (x, y, wide, high, draw) => draw() };
          const { layout, box } = document.getElementById("regard").viewer.stages[0].picture;
          layout.draw(paper, box);
          return [Math.max(...ends), box.width, ends.length];
        }"""
    )
    assert right[2] == len(SOURCE)
    assert right[0] <= right[1]


def test_a_small_map_says_its_precision_once(visit):
    tab = visit("plain")
    assert re.fullmatch(r"Values here are within ±[\d.e−]+ of the model's\.", tab.text(".legend + .notes"))


def test_the_name_of_a_head_covers_no_other_point(visit):
    tab = visit("near")
    tab.locator(".overview").get_by_text("Entropy and distance").click()
    # The layout of the picture is computed in the next animation frame.
    tab.page.wait_for_function("() => document.getElementById('regard').viewer.stages[0].overview.picture.layout")
    covered = tab.evaluate(
        """() => {
          const circles = [], names = [];
          const pen = document.createElement("canvas").getContext("2d");
          const text = (said, x, y, style) => {
            pen.font = `600 ${style.size}px system-ui`;
            if (style.weight === 600) names.push([x, x + pen.measureText(said).width, y]);
          };
          const paper = { rect() {}, text, circle: (x, y, radius, style) => style.fill && circles.push([x, y]) };
          const { layout } = document.getElementById("regard").viewer.stages[0].overview.picture;
          layout.draw(paper, {});
          const [[from, to, level]] = names;
          return [circles.length, circles.filter(([x, y]) => x > from && x < to && Math.abs(y - level) < 8).length];
        }"""
    )
    assert covered == [2, 0]
