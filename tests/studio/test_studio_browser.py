"""Tests of every view of the studio in a real browser, with mouse and keyboard.

The fixture `visit` also asserts that the console has no messages and that no request left the machine.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from conftest_studio import counts, running, says

from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.tasks.hypotheses import Answer, Hypothesis

NASTY = "<img src=x onerror=alert(1)>"


def cell(page, stage: str, row: int, column: int):
    return page.locator(f'table[aria-label="{stage}"] [data-row="{row}"][data-column="{column}"]')


def choose(page, name: str, value: str) -> None:
    page.locator(f'[data-name="{name}"]').select_option(value)


# Tests of the playground.


def test_it_opens_with_the_worked_example(visit):
    page = visit()
    says(page.locator("h1"), "Playground")
    says(cell(page, "Scores", 0, 0), "34.64")
    says(cell(page, "Scores", 0, 1), "8.66")
    says(cell(page, "Weights", 0, 0), "1.0000")
    assert cell(page, "Weights", 0, 0).get_attribute("aria-label") == "汤姆 → Tom: 1.0000"
    says(page.locator(".stage").nth(0).locator(".work"), "10·5 + 5·0 + 10·1 = 60; 60 / √3 = 34.641")
    says(page.locator(".stage").nth(2).locator(".work"), "1.000 · [5, 0, 1] = [5, ≈0, 1]")
    assert page.locator("math").count() == 3
    says(page.locator("pre"), "score=regard.ScaledDot()")


def test_score_normaliser_and_temperature_are_chosen_live(visit):
    page = visit()
    choose(page, "score", "cosine")
    says(cell(page, "Scores", 0, 0), "0.7845")
    says(page.locator(".stage").nth(0).locator(".work"), "60 / (15 · 5.099) = 0.7844")
    choose(page, "normalize", "sparsemax")
    says(page.locator("pre"), "regard.Sparsemax()")
    says(page.locator(".stage").nth(1).locator(".work"), "τ =")
    choose(page, "normalize", "sigmoid")
    says(cell(page, "Weights", 0, 0), "0.6866")
    page.locator('[data-name="temperature"]').focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    says(page.locator("output"), "10")
    says(cell(page, "Scores", 0, 0), "0.07845")
    choose(page, "normalize", "hard")
    says(cell(page, "Weights", 0, 1), "0.0000")
    choose(page, "score", "bilinear")
    page.locator("summary").click()
    assert page.locator("table.numbers td").count() == 9
    choose(page, "score", "additive")
    says(page.locator("pre"), "query @ W_q, key @ W_k, value")


def test_masks_and_an_empty_row(visit):
    page = visit()
    choose(page, "mask", "padding")
    says(cell(page, "Weights", 0, 2), "–")
    assert cell(page, "Weights", 0, 2).get_attribute("aria-label") == "汤姆 → Jerry: masked: may not be attended"
    page.locator('[data-name="length"]').fill("0")
    says(page.locator(".stage").nth(1).locator(".work"), "nothing to attend: the output is zero")
    choose(page, "mask", "causal")
    says(cell(page, "Weights", 0, 1), "–")
    choose(page, "mask", "window")
    says(cell(page, "Weights", 0, 1), "0.0000")


def test_numbers_are_typed_stepped_and_dragged(visit):
    page = visit()
    choose(page, "score", "dot")
    says(cell(page, "Scores", 0, 0), "60")
    first = page.get_by_label("Tom, component 0")
    first.fill("1")
    says(cell(page, "Scores", 0, 0), "20")
    first.press("ArrowUp")
    says(cell(page, "Scores", 0, 0), "25")
    first.fill("x")
    assert first.get_attribute("aria-invalid") == "true"
    second = page.get_by_label("chases, component 0")
    box = second.bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 10, box["y"] - 70, steps=8)
    page.mouse.up()
    assert float(second.input_value()) == pytest.approx(2, abs=0.3)
    dragged = float(second.input_value())
    says(cell(page, "Scores", 0, 1), f"{10 * dragged + 15:g}")


def test_arrows_are_dragged_and_moved_by_keys(visit):
    page = visit()
    choose(page, "score", "dot")
    says(cell(page, "Scores", 0, 0), "60")
    tip = page.locator(".arrow.key .tip").first
    tip.focus()
    page.keyboard.press("ArrowLeft")
    says(cell(page, "Scores", 0, 0), "55")
    assert page.get_by_label("Tom, component 0").input_value() == "4.5"
    box = page.locator(".arrow.query .tip").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] - 60, box["y"] + 5, steps=6)
    page.mouse.up()
    assert float(page.get_by_label("汤姆, component 0").input_value()) < 9


def test_vectors_come_and_go_and_values_can_differ(visit):
    page = visit()
    page.get_by_text("+ Add a key").click()
    says(page.locator('table[aria-label="Weights"] thead'), "k3")
    page.get_by_role("button", name="Remove chases").click()
    says(page.locator('table[aria-label="Weights"] thead'), "k3")
    counts(page.locator('table[aria-label="Weights"] thead th'), 4)  # a column for each of three keys and for the sum
    page.get_by_text("Values are the keys").click()
    page.locator(".vectors.value input.number").first.fill("77")
    says(page.locator('table[aria-label="Output"]'), "77")
    page.get_by_role("button", name="One component more").click()
    says(page.locator(".stage").nth(0).locator(".work"), "√4")
    choose(page, "heads", "2")
    says(page.locator('[role="radiogroup"][aria-label="Head"]'), "Head 1")
    page.get_by_role("button", name="Tom and Jerry").click()
    says(cell(page, "Scores", 0, 0), "34.64")


def test_names_of_arrows_do_not_cover_each_other(visit):
    page = visit("/#/playground")
    page.locator(".plane .output .name").wait_for(state="visible")
    boxes = [name.bounding_box() for name in page.locator(".plane .name").all()]
    frame = page.locator(".plane").bounding_box()
    assert len(boxes) == 5  # labels of a query, three keys and the output
    for n, one in enumerate(boxes):
        assert frame["x"] <= one["x"]
        assert one["x"] + one["width"] <= frame["x"] + frame["width"]
        for other in boxes[n + 1 :]:
            across = min(one["x"] + one["width"], other["x"] + other["width"]) - max(one["x"], other["x"])
            down = min(one["y"] + one["height"], other["y"] + other["height"]) - max(one["y"], other["y"])
            # The boxes may overlap by 4 pixels, because a line of text is higher than its letters.
            assert across <= 0 or down <= 4


def test_numbers_of_a_sentence_fit_their_cells(visit):
    page = visit("/#/playground")
    page.get_by_role("radio", name="Sentence").click()
    page.locator(".vectors .number[readonly]").first.wait_for()
    cut = page.locator(".vectors .number[readonly]").evaluate_all(
        "(cells) => cells.filter((cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.value)"
    )
    assert cut == []
    assert page.locator(".vectors .number[readonly]").nth(1).get_attribute("title") == "−1.16"
    assert page.locator(".vectors .number[readonly]").nth(1).input_value() == "−1.2"


def test_a_sentence_asks_itself(visit):
    page = visit()
    page.get_by_role("radio", name="Sentence").click()
    says(page.locator('table[aria-label="Weights"] tbody'), "Jerry")
    assert page.locator('table[aria-label="Weights"] tbody tr').count() == 7
    page.locator("#sentence").fill(f"one two {NASTY}")
    says(page.locator('table[aria-label="Weights"] tbody'), "onerror")
    assert page.locator("table img").count() == 0
    choose(page, "heads", "4")
    page.get_by_role("radio", name="Head 3").click()
    choose(page, "mask", "causal")
    says(cell(page, "Weights", 0, 1), "–")


def test_keys_walk_over_the_cells(visit):
    page = visit()
    says(cell(page, "Scores", 0, 0), "34.64")
    cell(page, "Weights", 0, 0).focus()
    page.keyboard.press("ArrowRight")
    says(page.locator(".stage").nth(0).locator(".work"), "汤姆 · chases: 10·0 + 5·1 + 10·1 = 15")
    assert page.evaluate("document.activeElement.dataset.column") == "1"


def test_names_are_text_never_markup(visit):
    page = visit()
    name = page.get_by_label("Name of key 0")
    name.fill(NASTY)
    says(page.locator('table[aria-label="Scores"] thead'), "<img src")
    says(page.locator(".stage").nth(0).locator(".work"), NASTY)
    assert page.locator("main img, .section img").count() == 0


def test_a_refusal_is_shown_in_words(visit):
    page = visit()
    says(cell(page, "Scores", 0, 0), "34.64")
    page.visit.allowed.append("400 (Bad Request)")
    page.get_by_role("radio", name="Sentence").click()
    page.locator("#sentence").fill("a " * 40)
    says(page.locator(".failure"), "That did not work: text must have from 1 to 32 words, got 40")


# Tests of language, colours and the frame of the page.


def test_chinese_and_dark_are_remembered(visit):
    page = visit()
    page.get_by_role("radio", name="中文").click()
    says(page.locator("h1"), "演练场")
    says(page.locator(".stage").nth(1).locator("h2"), "权重")
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    page.get_by_role("radio", name="深色").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 30)"
    page.reload()
    says(page.locator("h1"), "演练场")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    for name in ("视图", "翻译", "记录"):
        page.get_by_role("link", name=name, exact=True).click()
        says(page.locator("h1"), name)


def test_the_system_colours_are_followed(visit):
    page = visit(color_scheme="dark")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.emulate_media(color_scheme="light")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
    page.get_by_role("radio", name="Dark").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_both_languages_say_everything(visit):
    page = visit()
    assert page.evaluate("import('/static/words.js').then((words) => words.missing())") == []


def test_a_reader_with_a_keyboard_gets_everywhere(visit):
    page = visit()
    says(cell(page, "Scores", 0, 0), "34.64")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent"))
    assert {"Views", "English", "Vectors", "Tom, component 0", "Remove Tom"} <= seen
    page.get_by_role("link", name="Views").focus()
    page.keyboard.press("Enter")
    says(page.locator("h1"), "Views")


# Tests of the views of example traces.


def test_the_image_has_a_map_for_each_word(visit):
    page = visit("/#/views/image")
    says(page.locator(".readout"), "“ball” looks at")
    says(page.locator(".faithful"), "Better than random by")
    says(page.locator(".faithful h2"), "For “ball”, head 0")
    before = page.locator(".picture canvas").first.evaluate("(canvas) => canvas.toDataURL().length")
    page.locator(".picture").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => !document.querySelector('.readout').textContent.includes('ball')")
    assert page.locator(".picture canvas").first.evaluate("(canvas) => canvas.toDataURL().length") != before
    assert page.locator('.faithful svg[role="img"]').count() == 2
    assert "this map" in page.locator('.faithful svg[data-kind="deletion"]').get_attribute("aria-label")


@pytest.mark.parametrize(
    ("name", "sentence", "best"),
    [
        ("sound", "“a” looks at", "0.1"),
        ("sentiment", "“positive” looks at", "wonderful"),
        ("reading", "“end” looks at", "Montreal"),
        ("scene", "“brake” looks at", "lorry, braking"),
    ],
)
def test_each_kind_has_its_view(visit, name, sentence, best):
    page = visit(f"/#/views/{name}")
    says(page.locator(".readout"), sentence)
    says(page.locator(".readout"), best)
    says(page.locator(".faithful"), "Better than random by")
    assert page.locator(".picture canvas").first.evaluate("(c) => c.width > 200 && c.height > 60")


def test_from_one_view_to_the_next_and_another_head(visit):
    page = visit("/#/views/sentiment")
    says(page.locator(".faithful h2"), "For “positive”, head 0")
    page.locator(".heads button[data-head='1']").first.click()
    says(page.locator(".faithful h2"), "For “positive”, head 1")
    page.get_by_role("radio", name="中文").click()
    says(page.locator(".faithful h2"), "“positive”，头 1")  # a change of language keeps the selected row and head
    page.get_by_role("link", name="交通").click()
    says(page.locator(".readout"), "lorry, braking")


def test_a_view_is_saved(visit):
    page = visit("/#/views/sentiment")
    says(page.locator(".readout"), "wonderful")
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    text = download.value.path().read_text(encoding="utf-8-sig")
    assert "wonderful" in text.splitlines()[0]
    assert text.splitlines()[1].startswith("positive,")


# Tests of the list of traces.


def test_no_trace_yet(visit):
    page = visit("/#/traces")
    says(page.locator(".section"), "No trace yet.")


@pytest.fixture(scope="module")
def full():
    """A studio with two traces: a long one, and one whose names contain HTML."""
    place = torch.arange(1500)
    near = (-(place[:, None] - place).abs() / 3.0).softmax(-1)
    tokens = Labels("tokens", tuple(f"t{n}" for n in range(1500)))
    long = Trace.from_weights({"deep": torch.stack([near, near.flip(1)])}, title="long", rows=tokens, columns=tokens)
    names = Labels("tokens", (NASTY, "b"))
    hostile = Trace.from_weights({NASTY: torch.eye(2)[None]}, title=NASTY, rows=names, columns=names)
    with running((), [long, hostile]) as found:
        yield found


def test_a_long_map_is_scrolled(visit, full):
    page = visit("/#/traces/trace-1", at=full)
    says(page.locator(".section"), "deep")
    for _ in range(5):
        page.get_by_role("button", name="Larger").click()
    with page.expect_response(lambda response: re.search(r"/tile\?.*row=", response.url)) as tile:
        page.locator(".picture").first.evaluate("(element) => element.scrollTo(4000, 4000)")
    assert tile.value.ok
    says(page.locator(".faithful"), "A trace keeps where a model looked, not the model")


def test_two_traces_stand_side_by_side(visit, full):
    page = visit("/#/traces/trace-2", at=full)
    says(page.locator(".holder"), NASTY)
    choose(page, "beside", "sentiment")
    counts(page.locator(".holder .stage"), 2)
    says(page.locator(".holder .stage").nth(1), "class → words")
    choose(page, "beside", "")
    counts(page.locator(".holder .stage"), 1)


def test_hostile_names_are_shown_as_they_are(visit, full):
    page = visit("/#/traces/trace-2", at=full)
    says(page.locator(".picker"), NASTY)
    says(page.locator(".holder"), NASTY)
    page.locator(".picture").first.focus()
    page.keyboard.press("ArrowDown")
    page.get_by_role("radio", name="中文").click()
    says(page.locator(".holder"), NASTY)
    assert page.locator(".section img").count() == 0


def test_a_file_is_opened_and_closed(visit, tmp_path):
    page = visit("/#/traces")
    path = Trace.from_weights({"cross": torch.eye(3)[None]}, title="from a file", rows=["x", "y", "z"]).save(
        tmp_path / "a.trace"
    )
    page.locator('input[type="file"]').set_input_files(path)
    says(page.locator(".picker"), "from a file")
    says(page.locator(".holder"), "cross")
    page.visit.allowed.append("400 (Bad Request)")
    page.locator('input[type="file"]').set_input_files(
        {"name": "bad", "mimeType": "", "buffer": io.BytesIO(b"no trace").getvalue()}
    )
    says(page.locator(".failure"), "That did not work: this is not a trace that can be opened")
    page.get_by_role("button", name="Close from a file").click()
    says(page.locator(".section"), "No trace yet.")


# Tests of translation.


def word(page, text: str, side: int = 0):
    return page.locator(f'.answer[data-side="{side}"] button.word', has_text=text)


def test_a_translation_with_its_alignment(visit):
    page = visit("/#/translate")
    says(page.locator(".answer"), "昨天")
    assert page.locator("button.word").all_inner_texts() == ["昨天", "大", "狗", "看见了", "小", "猫"]
    strongest = page.evaluate(
        "[...document.querySelectorAll('.pair path[data-target=\"0\"]')]"
        ".sort((a, b) => b.getAttribute('stroke-width') - a.getAttribute('stroke-width'))[0].dataset.source"
    )
    assert strongest == "7"  # source word 7 is "yesterday"
    word(page, "昨天").hover()
    faded = page.locator('.pair path[data-target="1"]').first.get_attribute("stroke-opacity")
    assert float(faded) < 0.2
    assert word(page, "昨天").get_attribute("aria-label").startswith("“昨天” looks at yesterday 0.7")
    page.locator('[data-name="source"]').fill("Tom chases Jerry")
    says(page.locator(".answer"), "汤姆")
    assert page.locator("button.word").all_inner_texts() == ["汤姆", "追逐", "杰瑞"]


def test_a_word_is_forced_and_released(visit):
    page = visit("/#/translate")
    page.locator('[data-name="source"]').fill("Tom chases Jerry")
    word(page, "追逐").click()
    says(page.locator(".instead h2"), "Instead of “追逐”")
    says(page.locator(".faithful h2"), "For “追逐”")
    says(page.locator(".faithful .verdict"), "Better than random by")
    page.locator(".others button", has_text="追").nth(1).click()
    says(page.locator(".answer .small"), "Forced: 汤姆 追")
    assert page.locator("button.word").all_inner_texts() == ["汤姆", "追", "杰瑞"]
    assert page.locator("button.word.forced").count() == 2
    page.get_by_role("button", name="Release").click()
    says(page.locator("button.word").nth(1), "追逐")
    word(page, "汤姆").click()
    page.get_by_label("Another word").fill(NASTY)
    page.keyboard.press("Enter")
    says(page.locator("button.word").first, "<img src=x")
    assert page.locator(".section img").count() == 0


def test_hypotheses_are_looked_through(visit):
    page = visit("/#/translate")
    page.locator('[data-name="source"]').fill("Tom chases Jerry")
    says(page.locator(".beam").first, "汤姆 追逐 杰瑞")
    page.locator(".beam").nth(1).click()
    says(page.locator("button.word").nth(1), "杰瑞")
    page.locator('[data-name="beams"]').fill("2")
    counts(page.locator(".beam"), 2)


@dataclass(frozen=True)
class Fixed:
    """A stand-in for a trained translator that returns one fixed answer for every input."""

    name: str
    source: tuple[str, ...]
    tokens: tuple[str, ...]

    def translate(self, text: str, *, beams: int, forced: Sequence[str] = ()) -> Answer:
        weights = torch.full((len(self.tokens), len(self.source)), 1 / len(self.source))
        return Answer(self.source, (Hypothesis(self.tokens, -1.0, weights, ((),) * len(self.tokens)),))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Fixed("two", ("Tom", "ru", "ns"), ("汤姆", "跑")), "the runs cut the source into different pieces (2 and 3)"),
        (Fixed("two", ("Tom", "ran"), ("汤姆", "跑")), "the runs cut the source into different pieces (2 and 2)"),
        (Fixed("two", ("Tom", "runs"), ("他", "走")), "no place has the same word"),
        (Fixed("two", ("Tom", "runs"), ()), "no place has the same word"),
    ],
)
def test_runs_that_cannot_be_compared_are_said_to_be(visit, other, reason):
    with running([Fixed("one", ("Tom", "runs"), ("汤姆", "跑")), other]) as studio:
        page = visit("/#/translate", at=studio)
        says(page.locator(".answer").first, "汤姆")
        choose(page, "compare", "1")
        says(page.locator(".section"), f"weights cannot be compared: {reason}.")
        assert "0.000" not in page.locator(".section p").all_inner_texts()


def test_a_sequence_of_a_batch_is_chosen(visit):
    weights = torch.rand(2, 1, 4, 4)
    words = [Labels("tokens", tuple("abcd")), Labels("tokens", ("_", NASTY, "y", "z"), shown=(1, 2, 3))]
    trace = Trace.from_weights({"layer": weights}, title="Two", rows=words, columns=words)
    with running([], [trace]) as studio:
        page = visit("/#/traces", at=studio)
        says(page.locator(".facts"), "4 × 4")
        page.locator("[data-here=sequence]").select_option(index=1)
        says(page.locator(".facts"), "3 × 3")
        says(page.locator("[data-here=sequence]"), f"1: {NASTY} y z")
        assert page.locator(".holder img").count() == 0
        grids = page.evaluate("document.querySelector('.holder').viewer.stages[0].model.map.values.length")
    assert grids == 9


def test_two_runs_are_compared(visit):
    page = visit("/#/translate")
    says(page.locator(".answer"), "昨天")
    choose(page, "compare", "1")
    says(page.locator('.answer[data-side="1"] h2').first, "toy, sparsemax")
    says(page.locator(".section"), "Same words at 6 of 6 places; weights differ by 0.0")
    word(page, "昨天", 1).click()
    page.locator('.answer[data-side="1"] .others button').nth(1).click()
    says(page.locator(".section"), "Same words at 4 of 6 places")
    assert page.locator('.answer[data-side="0"] .word.other').count() == 2
