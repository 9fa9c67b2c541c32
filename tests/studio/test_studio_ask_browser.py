"""Tests of the studio in a real browser: predictions of runs, and the page of a run."""

import io
import json
import re
import sys
import wave
from pathlib import Path

import pytest
from conftest_studio import counts, running, says
from studio_runs import SCENE, Stub, beginning, png, task_of, translator

from regard.studio.translation_api import open_run
from regard.tasks.catalog import TASKS
from regard.tasks.config_overrides import configure
from regard.tasks.task import Input
from regard.tasks.training import train
from regard.train.progress_display import Silent
from regard.train.run_directory import Run

sys.path.insert(0, str(Path(__file__).parent.parent / "tasks"))
from picture_task import ASKED

NASTY = "<img src=x onerror=alert(1)>"
FILE = {"name": "red.png", "mimeType": "image/png", "buffer": png(5, 3)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return translator(tmp_path_factory.mktemp("runs") / "trained")


@pytest.fixture(scope="module")
def live(trained: Path, tmp_path_factory: pytest.TempPathFactory):
    none = translator(tmp_path_factory.mktemp("none") / "none", attention="none")
    begun = beginning(trained, tmp_path_factory.mktemp("begun") / "begun")
    (begun / "README.md").write_text(
        f"# {NASTY}\n\n| | |\n|---|---|\n| a\\|b | {NASTY} |\n\n- {NASTY}\n\n```\n{NASTY}\n```\n"
    )
    other = Stub("other", ready=False)
    with running([open_run(trained), open_run(none), open_run(begun), Stub(), Stub("second"), other]) as found:
        yield found


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory):
    """A studio with two runs of a task about pictures, each with its own example."""
    folder = tmp_path_factory.mktemp("pictured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "asked", ASKED)
        for name in ("asked", "again"):
            train(ASKED, configure(ASKED, "small", [], {}), folder / name, progress=Silent())
        with running([open_run(folder / "asked"), open_run(folder / "again")]) as found:
            yield found


def ask(page) -> None:
    page.get_by_role("button", name="Ask", exact=True).click()


def test_a_run_is_asked_its_example_and_shows_answer_and_map(visit, live, trained):
    page = visit("/#/ask", at=live)
    expected = open_run(trained).ask({"source": page.locator("[data-input=source]").input_value()})
    says(page.locator(".answer .said"), expected.answer)
    says(page.locator(".answer .sure"), "score")
    page.locator("[data-input=source]").fill("Tom chases Jerry")
    page.keyboard.press("Enter")
    says(page.locator(".holder .facts"), "× 3")
    page.locator(".answer summary").click()
    says(page.locator(".answer pre"), '"source": "Tom chases Jerry"')
    counts(page.locator(".faithful"), 0)


def test_views_begin_with_runs_and_name_the_demonstrations(visit, live, trained):
    page = visit("/#/views", at=live)
    says(page.locator('.picker a[aria-current="true"]'), "trained")
    example = json.loads((trained / "result.json").read_text())["example"]
    says(page.locator(".stage"), example.split()[0])
    assert page.locator("h2").all_inner_texts()[:2] == ["Runs", "Demonstrations"]


def test_two_runs_answer_side_by_side(visit, live):
    page = visit("/#/ask/3", at=live)
    says(page.locator("[data-name=compare]"), "second")
    options = page.locator("[data-name=compare] option").all_inner_texts()
    # The page offers only runs with the same inputs for a comparison.
    assert options == ["nothing", "second · picture", "other · picture"]
    page.locator("[data-input=image]").set_input_files(FILE)
    page.locator("[data-input=question]").fill("How wide?")
    page.locator("[data-name=compare]").select_option("4")
    says(page.locator(".answer").nth(0), "stub: 5 pixels wide")
    says(page.locator(".answer").nth(1), "second: 5 pixels wide")
    says(page.locator(".answer").nth(1), "probability 0.88")
    says(page.locator(".stages.two .stage").nth(1), "second · second: 5 pixels wide")


def test_a_run_that_cannot_answer_does_not_keep_the_other_from_it(visit, live):
    page = visit("/#/ask/3", at=live)
    page.visit.allowed.append("409")
    page.locator("[data-input=image]").set_input_files(FILE)
    page.locator("[data-input=question]").fill("How wide?")
    page.locator("[data-name=compare]").select_option("5")
    says(page.locator(".notice"), "other cannot answer yet")
    says(page.locator(".answer").nth(0), "stub: 5 pixels wide")
    says(page.locator(".answer").nth(1).locator(".failure"), "other cannot answer yet")


def test_a_run_without_attention_says_so(visit, live):
    page = visit("/#/ask/1", at=live)
    says(page.locator(".answer"), "This run has no attention")
    counts(page.locator(".holder"), 0)


def test_a_run_in_training_says_that_it_cannot_answer(visit, live):
    page = visit("/#/ask/2", at=live)
    says(page.locator(".notice"), "begun cannot answer yet: its training has written no checkpoint.")
    counts(page.locator(".answer"), 0)


@pytest.mark.parametrize(
    ("task", "fill", "message", "invalid"),
    [
        (SCENE, {"scene": "{"}, "scene is not JSON", 1),
        (SCENE, {"scene": ""}, "Every input must be filled in", 0),
        (task_of(Input("question", "text", "Question")), {"question": "?"}, "question has no words", 1),
    ],
    ids=["a broken scene", "nothing", "the run refuses"],
)
def test_what_is_wrong_is_said_in_place(visit, task, fill, message, invalid):
    with running([Stub(task=task)]) as studio:
        page = visit("/#/ask", at=studio)
        page.visit.allowed.append("400")
        for name, text in fill.items():
            page.locator(f"[data-input={name}]").fill(text)
        ask(page)
        says(page.locator("form .failure"), message)
        counts(page.locator("[aria-invalid=true]"), invalid)
        page.close()  # the page must not send requests after the studio stops


def test_a_file_is_dropped(visit, live):
    page = visit("/#/ask/3", at=live)
    data = page.evaluate_handle(
        """(bytes) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
          return data;
        }""",
        list(png(4, 2)),
    )
    page.locator(".opener").dispatch_event("drop", {"dataTransfer": data})
    says(page.locator(".seen"), "dropped.png")
    page.locator("[data-input=question]").fill("How wide?")
    ask(page)
    says(page.locator(".answer .said"), "stub: 4 pixels wide")


def test_an_image_is_pasted(visit, live):
    page = visit("/#/ask/3", at=live)
    page.locator("[data-input=question]").fill("How wide?")
    page.evaluate(
        """(bytes) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], "image.png", { type: "image/png" }));
          document.body.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
        }""",
        list(png(6, 2)),
    )
    says(page.locator(".seen"), "image.png")
    ask(page)
    says(page.locator(".answer .said"), "stub: 6 pixels wide")


def test_a_run_begins_with_the_picture_of_its_example(visit, pictured):
    page = visit("/#/ask", at=pictured)
    says(page.locator(".seen"), "example of asked")
    says(page.locator(".answer").nth(0), "(bright?)")
    says(page.locator(".holder .facts"), "2 × 4")
    counts(page.locator(".seen img.drawn"), 1)
    page.wait_for_selector('.picture[data-view="image"]')
    page.locator("[data-input=image]").set_input_files(FILE)
    says(page.locator(".seen"), "red.png")
    page.locator("[data-input=question]").fill("red?")
    page.locator("[data-name=compare]").select_option("1")
    says(page.locator(".answer").nth(1), "(red?)")
    counts(page.locator('.stages.two .picture[data-view="image"]'), 2)
    page.locator("[data-name=example]").click()
    says(page.locator(".seen"), "example of asked")
    says(page.locator(".answer").nth(1), "(bright?)")


def test_a_picture_that_cannot_be_read_is_said_in_one_line(visit, pictured):
    page = visit("/#/ask", at=pictured)
    page.visit.allowed.append("400")
    says(page.locator(".answer").nth(0), "(bright?)")
    page.locator("[data-input=image]").set_input_files({**FILE, "buffer": png(5, 3)[:40]})
    ask(page)
    says(page.locator("form > .failure"), "the picture: not a picture that can be read")
    counts(page.locator(".answer"), 0)


def test_a_file_that_is_too_large_is_not_sent(visit, live):
    page = visit("/#/ask/3", at=live)
    large = {**FILE, "buffer": bytes(17 * 2**20)}
    page.locator("[data-input=image]").set_input_files(large)
    says(page.locator(".upload .failure"), "the file has 17 MB; at most 16 can be sent")


def test_text_from_outside_is_never_markup(visit):
    with running([Stub(NASTY), Stub("two")]) as studio:
        page = visit("/#/ask", at=studio)
        page.locator("[data-input=image]").set_input_files({**FILE, "name": NASTY})
        page.locator("[data-input=question]").fill(NASTY)
        ask(page)
        says(page.locator(".answer .said"), NASTY)
        says(page.locator(".holder .facts"), "1 × 5")
        counts(page.locator("img[src=x]"), 0)
        page.close()  # the page must not send requests after the studio stops


def test_what_was_asked_survives_another_language_and_colour(visit, live):
    page = visit("/#/ask", at=live)
    page.locator("[data-input=source]").fill("Tom chases Jerry")
    ask(page)
    says(page.locator(".holder .facts"), "× 3")
    page.get_by_role("radio", name="中文").click()
    says(page.locator("h1"), "提问")
    says(page.locator(".question"), "句子")
    says(page.locator(".map h2").first, "它看了哪里")
    page.get_by_role("radio", name="深色").click()
    counts(page.locator("html[data-theme=dark]"), 1)
    says(page.locator(".holder .facts"), "× 3")
    assert page.locator("[data-input=source]").input_value() == "Tom chases Jerry"


def test_a_recording_is_a_wav_file(visit, live):
    page = visit("/#/ask", at=live)
    head = page.evaluate(
        """async () => {
          const { encoded } = await import("/static/recorder.js");
          const bytes = new Uint8Array(await encoded(Float32Array.from([0, 1, -1]), 16000).arrayBuffer());
          return [...bytes];
        }"""
    )
    with wave.open(io.BytesIO(bytes(head))) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getsampwidth()) == (1, 16000, 2)
        assert sound.readframes(3) == b"\x00\x00\xff\x7f\x01\x80"


def test_no_run_was_given(visit):
    for section in ("ask", "runs"):
        says(visit(f"/#/{section}").locator(".none"), "regard studio RUN")


# Tests of the page of a run.


def test_the_page_of_a_run_shows_curves_result_and_configuration(visit, live):
    page = visit("/#/runs/0", at=live)
    says(page.locator(".head"), "Training has ended.")
    says(page.locator(".head"), "Answers with: final weights.")
    says(page.locator(".figures"), "alignment error rate ↓")
    assert re.search(r"\d+\.\d %", page.locator(".figures tr", has_text="alignment error rate").first.inner_text())
    counts(page.locator("svg[data-figure=loss]"), 1)
    names = page.locator("svg[data-figure]").evaluate_all("(all) => all.map((one) => one.dataset.figure)")
    assert names[0] == "loss"
    assert {"bleu", "learning_rate"} <= set(names)
    assert page.locator("svg[data-figure=loss] polyline").count() == 2
    page.locator("summary", has_text="Configuration").click()
    says(page.locator(".settings"), "train.steps")
    page.locator("summary", has_text="Model card").click()
    says(page.locator(".markdown"), "A translator")


def test_a_curve_is_read_step_by_step_with_the_keyboard(visit, live):
    page = visit("/#/runs/0", at=live)
    chart = page.locator("svg[data-figure=loss]")
    chart.focus()
    page.keyboard.press("ArrowRight")
    says(page.locator(".curve").first.locator(".readout"), "Step 1:")
    page.keyboard.press("ArrowRight")
    says(page.locator(".curve").first.locator(".readout"), "Step 2:")


def test_curves_follow_a_run_that_trains(visit, trained, tmp_path):
    begun = beginning(trained, tmp_path / "begun")
    with running([open_run(begun)]) as studio:
        page = visit("/#/runs", at=studio)
        says(page.locator(".head"), "Training has not ended")
        says(page.locator(".curve .readout"), "training 1.333")
        Run.open(begun).metrics.add({"kind": "train", "step": 4, "loss": 0.25})
        says(page.locator(".curve .readout"), "training 0.25")
        says(page.locator(".rest"), "The result is written when training ends.")
        page.close()  # the page sends a request every few seconds, so it is closed before the studio stops


def test_a_model_card_is_never_markup(visit, live):
    page = visit("/#/runs/2", at=live)
    page.locator("summary", has_text="Model card").click()
    says(page.locator(".markdown h3"), NASTY)
    says(page.locator(".markdown li"), NASTY)
    says(page.locator(".markdown pre"), NASTY)
    assert page.locator(".markdown tr").all_inner_texts() == [f"a|b\t{NASTY}"]
    counts(page.locator("img[src=x]"), 0)


def test_from_the_page_of_a_run_to_asking_it(visit, live):
    page = visit("/#/runs/1", at=live)
    page.get_by_role("link", name="Ask this run").click()
    says(page.locator("h1"), "Ask")
    assert page.locator("[data-name=run]").input_value() == "1"
    page.get_by_role("link", name="Curves, result and card").click()
    says(page.locator(".head h2"), "none")


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
@pytest.mark.parametrize("path", ["/#/ask", "/#/runs/0"])
def test_pages_fit_every_width(visit, live, width, path):
    page = visit(path, at=live)
    page.set_viewport_size({"width": width, "height": 900})
    says(page.locator(".holder .facts, .figures").first, " ")
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_both_languages_have_every_word(visit, live):
    page = visit("/#/runs/0", at=live)
    assert page.evaluate("import('/static/words.js').then((words) => words.missing())") == []
    page.get_by_role("radio", name="中文").click()
    says(page.locator(".figures"), "对齐错误率")
    says(page.locator(".head"), "回答所用权重：最终权重。")
