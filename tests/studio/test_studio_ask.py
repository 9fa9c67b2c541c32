"""Tests of runs of any task over HTTP: predictions, and the data of the studio's page of a run."""

import base64
import json
import math
import shutil
import struct
from pathlib import Path

import pytest
from conftest_studio import Studio, running
from studio_runs import PICTURE, SCENE, Stub, beginning, png, task_of, translator

from regard.studio.limits import Limits
from regard.studio.server import serve
from regard.studio.translation_api import open_run
from regard.tasks.task import Input

pytestmark = pytest.mark.slow

IMAGE = base64.b64encode(png()).decode()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return translator(tmp_path_factory.mktemp("runs") / "trained")


@pytest.fixture(scope="module")
def live(trained: Path, tmp_path_factory: pytest.TempPathFactory):
    """A studio with four runs: trained, trained without attention, before its first checkpoint, and about pictures."""
    none = translator(tmp_path_factory.mktemp("none") / "none", attention="none")
    begun = beginning(trained, tmp_path_factory.mktemp("begun") / "begun")
    with running([open_run(trained), open_run(none), open_run(begun), Stub()]) as found:
        yield found


def ask(studio: Studio, run: int, **inputs: str):
    return studio.post("/api/ask", {"run": run, "inputs": inputs})


def refused(answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]


# Tests of the list of runs.


def test_runs_are_listed_with_what_they_are_asked(live: Studio):
    found = live.get("/api/runs").json
    assert not found["toys"]
    first, none, begun, stub = found["runs"]
    assert first["inputs"] == [{"name": "source", "kind": "text", "label": "Sentence", "long": False}]
    assert [one["kind"] for one in stub["inputs"]] == ["image", "text"]
    assert (first["name"], first["task"], first["translates"], first["scores"]) == (
        "trained",
        "translation",
        True,
        True,
    )
    assert [one["ready"] for one in (first, none, begun, stub)] == [True, True, False, True]
    assert (begun["translates"], stub["translates"]) == (False, False)


def test_an_example_to_begin_with_comes_from_the_result(live: Studio, trained: Path):
    example = json.loads((trained / "result.json").read_text())["example"]
    first, _, begun, stub = live.get("/api/runs").json["runs"]
    assert first["example"] == {"source": example}
    assert begun["example"] is stub["example"] is None


def test_toys_translate_where_no_run_does():
    with running([Stub()]) as found:
        listed = found.get("/api/runs").json
        answer = found.post("/api/translate", {"run": 1, "text": "Tom chases Jerry"})
        other = found.post("/api/translate", {"run": 0, "text": "Tom chases Jerry"})
    assert listed["toys"]
    assert [one["translates"] for one in listed["runs"]] == [False, True, True]
    assert answer.json["beams"][0]["tokens"] == ["汤姆", "追逐", "杰瑞"]
    assert refused(other) == (404, "run 0 does not translate")


def test_a_trained_run_still_translates_interactively(live: Studio):
    answer = live.post("/api/translate", {"run": 0, "text": "Tom chases Jerry", "beams": 2})
    assert answer.status == 200
    assert answer.json["source"] == ["Tom", "chases", "Jerry"]


# Tests of predictions.


def test_text_is_answered(live: Studio, trained: Path):
    answer = ask(live, 0, source="Tom chases Jerry").json
    assert (
        answer["answer"]
        == answer["record"]["translation"]
        == open_run(trained).ask({"source": "Tom chases Jerry"}).answer
    )
    assert math.isfinite(answer["record"]["score"])


def test_the_map_of_an_answer_is_served_as_every_trace(live: Studio):
    answer = ask(live, 0, source="Tom chases Jerry").json
    about = live.get(f"/api/traces/{answer['trace']}/records").json
    [record] = about["records"]
    assert about["labels"][record["columns"]]["items"] == ["Tom", "chases", "Jerry"]
    row = live.get(f"/api/traces/{answer['trace']}/rows?record=0&row=0")
    assert struct.unpack("<3f", row.body) == pytest.approx(answer["record"]["weights"][0], abs=1e-5)


def test_finished_runs_have_a_view_of_their_own_example(live: Studio, trained: Path):
    example = json.loads((trained / "result.json").read_text())["example"]
    listed = {one["id"]: one["title"] for one in live.get("/api/traces").json["traces"] if one["origin"] == "run"}
    assert listed == {"run-0": "trained", "run-1": "none"}  # a run before its first checkpoint has no example
    about = live.get("/api/traces/run-0/records").json
    assert about["labels"][about["records"][0]["columns"]]["items"] == example.split()
    assert refused(live.get("/api/traces/run-1/records")) == (404, "none has no attention to show")


def test_a_run_without_attention_has_no_map(live: Studio):
    answer = ask(live, 1, source="Tom chases Jerry").json
    assert answer["trace"] is None
    assert answer["record"]["weights"] is None


def test_two_runs_answer_the_same_input(live: Studio):
    answers = [ask(live, run, source="Tom chases Jerry").json["record"] for run in (0, 1)]
    assert {one["source"] for one in answers} == {"Tom chases Jerry"}


def test_an_image_reaches_the_predictor_as_bytes():
    stub = Stub()
    with running([stub]) as found:
        answer = ask(found, 0, image=IMAGE, question="How wide?").json
    assert stub.asked == [{"image": png(), "question": "How wide?"}]
    assert answer["answer"] == "stub: 3 pixels wide"
    assert answer["record"] == {"answer": answer["answer"], "probability": 0.875, "size": [3, 2], "odd": None}


def test_a_scene_reaches_the_predictor_as_an_object():
    stub = Stub(task=SCENE)
    with running([stub]) as found:
        answer = ask(found, 0, scene='{"cars": [1, 2]}').json
    assert stub.asked == [{"scene": {"cars": [1, 2]}}]
    assert answer["trace"] is None


@pytest.mark.parametrize(
    ("inputs", "status", "reason"),
    [
        ({}, 400, "expected image and question, got nothing"),
        ({"image": IMAGE}, 400, "expected image and question, got image"),
        ({"image": IMAGE, "text": "?"}, 400, "expected image and question, got image, text"),
        ({"image": "/etc/passwd", "question": "a"}, 400, "image must be a file in base64"),
        ({"image": IMAGE + "\n", "question": "a"}, 400, "image must be a file in base64"),
        ({"image": IMAGE[:-1], "question": "a"}, 400, "image must be a file in base64"),
        ({"image": "图", "question": "a"}, 400, "image must be a file in base64"),
        ({"image": "", "question": "a"}, 400, "image is empty"),
        ({"image": "AAAA", "question": "a"}, 400, "cannot identify image file"),
        ({"image": IMAGE, "question": "?"}, 400, "question has no words"),
        ({"image": IMAGE, "question": "a" * 41}, 413, "question must have at most 40 characters, got 41"),
        ({"image": "A" * 2004, "question": "a"}, 413, "image must have at most 1500 bytes, got about 1503"),
    ],
    ids=[
        "nothing", "one missing", "another name", "a path", "a line break", "cut", "not ASCII", "empty",
        "not an image", "the run refuses", "a long text", "a large file",
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_answered_are_refused(inputs, status, reason):
    with running([Stub()], limits=Limits(upload=1500, passage=40)) as found:
        answer = ask(found, 0, **inputs)
    assert answer.status == status
    assert reason in answer.json["error"]


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        ("{", "scene is not JSON"),
        ('"/etc/passwd"', "scene must be a JSON object or list, got str"),
        ("3", "scene must be a JSON object or list, got int"),
        ("[" * 50_000, "scene is not JSON"),
    ],
    ids=["broken", "a path", "a number", "too deep"],
)
def test_a_scene_must_be_an_object(scene, reason):
    stub = Stub(task=SCENE)
    with running([stub]) as found:
        answer = ask(found, 0, scene=scene)
    assert answer.status == 400
    assert answer.json["error"].startswith(reason)
    assert stub.asked == []


def test_a_question_larger_than_its_limit_is_not_read(studio: Studio):
    with running([Stub()], limits=Limits(question=2000)) as found:
        answer = ask(found, 0, image="A" * 4000, question="a")
    assert refused(answer)[0] == 413
    assert "the body must have at most 2000 bytes" in answer.json["error"]


@pytest.mark.parametrize("number", [9, 1000])
def test_an_unknown_run_is_refused(live: Studio, number):
    assert refused(ask(live, number, source="a")) == (404, f"there is no run {number} that can be asked")


def test_a_question_must_be_json(live: Studio):
    body = json.dumps({"run": 0, "inputs": {"source": "a"}})
    assert live.post("/api/ask", body, content_type="text/plain").status == 415
    assert live.post("/api/ask", {"run": 0, "inputs": {"source": 3}}).status == 400
    assert live.post("/api/ask", {"run": 0, "inputs": {"source": "a"}, "path": "x"}).status == 400


def test_another_site_may_not_ask(live: Studio):
    answer = live.post("/api/ask", {"run": 0, "inputs": {"source": "a"}}, origin="http://evil.example")
    assert answer.status == 403


def test_traces_of_answers_are_bounded():
    with running([Stub()], limits=Limits(answers=2)) as found:
        ids = [ask(found, 0, image=IMAGE, question="a").json["trace"] for _ in range(4)]
        kept = [one["id"] for one in found.get("/api/traces").json["traces"] if one["origin"] == "answer"]
        oldest = found.get(f"/api/traces/{ids[0]}/records")
    assert kept == ids[2:]
    assert oldest.status == 404


# Tests of the page of a run.


def test_the_page_of_a_run(live: Studio, trained: Path):
    page = live.get("/api/runs/0").json
    result = json.loads((trained / "result.json").read_text())
    assert (page["name"], page["task"], page["finished"], page["weights"]) == (
        "trained",
        "translation",
        True,
        "final weights",
    )
    bleu = next(one for one in page["figures"] if one["name"] == "bleu" and one["part"] == "test")
    assert (bleu["label"], bleu["percent"], bleu["value"]) == ("BLEU", False, result["metrics"]["bleu"])
    aer = next(one for one in page["figures"] if one["name"] == "aer" and one["part"] == "longer")
    assert (aer["percent"], aer["better"]) == (True, "lower")
    settings = {one["name"]: one["value"] for one in page["config"]}
    assert (settings["train.steps"], settings["model.size"]) == ("4", "8")
    assert page["facts"]["steps"] == 4
    assert page["card"] == (trained / "README.md").read_text()


def test_curves_of_a_run(live: Studio, trained: Path):
    found = live.get("/api/runs/0/curves").json
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    series = {(one["kind"], one["name"]): one["points"] for one in found["series"]}
    for kind, name in (("train", "loss"), ("validation", "loss"), ("validation", "bleu")):
        assert series[kind, name] == [[line["step"], line[name]] for line in lines if line["kind"] == kind]
    assert not {name for _, name in series} & {"step", "epoch", "tokens", "seconds", "kind"}
    assert found["more"] is False


def test_a_run_in_training_shows_curves_and_cannot_answer(live: Studio):
    page = live.get("/api/runs/2").json
    assert (page["ready"], page["finished"], page["weights"], page["figures"]) == (False, False, None, [])
    assert page["changed"] >= 0
    [loss] = live.get("/api/runs/2/curves").json["series"]
    assert loss["points"] == [[1, 4.0], [2, 2.0], [3, pytest.approx(4 / 3)]]
    words = "begun cannot answer yet: its training has written no checkpoint"
    assert refused(ask(live, 2, source="Tom chases Jerry")) == (409, words)


def test_a_run_answers_once_it_has_a_checkpoint(trained: Path, tmp_path: Path):
    begun = beginning(trained, tmp_path / "begun")
    run = open_run(begun)
    with running([run]) as found:
        assert ask(found, 0, source="Tom").status == 409
        for path in trained.glob("tokenizer*.json"):
            run.run.manifest.write(path.name, path.read_text())
        shutil.copytree(trained / "checkpoints", begun / "checkpoints")
        assert ask(found, 0, source="Tom").status == 200
        listed, page = found.get("/api/runs").json["runs"][0], found.get("/api/runs/0").json
    assert (listed["ready"], listed["translates"]) == (True, True)
    assert page["weights"].startswith("weights of step ")


def test_curves_follow_a_file_that_grows_and_is_cut(trained: Path, tmp_path: Path):
    begun = beginning(trained, tmp_path / "begun")
    run = open_run(begun).run
    whole = (begun / "metrics.jsonl").read_bytes()

    def steps(found: Studio) -> list[float]:
        [loss] = found.get("/api/runs/0/curves").json["series"]
        return [step for step, _ in loss["points"]]

    with running([open_run(begun)]) as found:
        assert steps(found) == [1, 2, 3]
        with (begun / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "step": 4, "lo')  # the last line of the file is incomplete
        assert steps(found) == [1, 2, 3]
        (begun / "metrics.jsonl").write_bytes(whole)
        run.metrics.add({"kind": "train", "step": 4, "loss": 1.0})
        assert steps(found) == [1, 2, 3, 4]
        run.metrics.cut(len(whole) - 1)
        run.metrics.add({"kind": "train", "step": 33, "loss": 1.0})
        run.metrics.add({"kind": "train", "step": 44, "loss": 1.0})
        assert steps(found) == [1, 2, 33, 44]


def test_curves_of_many_lines_are_bounded(trained: Path, tmp_path: Path):
    begun = beginning(trained, tmp_path / "begun")
    lines = (f'{{"kind": "train", "step": {step}, "loss": {step / 7}}}\n' for step in range(30_000))
    (begun / "metrics.jsonl").write_text("".join(lines) + '"text"\n[]\n{"step": "x"}\nno JSON\n')
    with running([open_run(begun)], limits=Limits(metrics=200_000, points=100)) as found:
        answers = [found.get("/api/runs/0/curves").json]
        while answers[-1]["more"]:
            answers.append(found.get("/api/runs/0/curves").json)
    assert 5 < len(answers) < 12
    [loss] = answers[-1]["series"]
    assert len(loss["points"]) <= 101
    assert loss["last"] == [29_999, pytest.approx(29_999 / 7)]
    assert all(value == pytest.approx(step / 7) for step, value in loss["points"])
    assert loss["points"][-1][0] <= 29_999


@pytest.mark.parametrize("path", ["/api/runs/9", "/api/runs/9/curves"])
def test_a_page_of_no_run_is_refused(live: Studio, path):
    assert live.get(path).status == 404


@pytest.mark.parametrize("path", ["/api/runs/x", "/api/runs/-1", "/api/runs/..%2f0", "/api/runs/x/curves"])
def test_the_number_of_a_run_is_a_number(live: Studio, path):
    assert live.get(path).status in (400, 404)


@pytest.mark.parametrize("path", ["/api/runs/3", "/api/runs/3/curves"])
def test_a_run_in_memory_has_no_page(live: Studio, path):
    assert live.get(path).status == 404


def test_a_damaged_result_does_not_hide_the_page(trained: Path, tmp_path: Path):
    begun = beginning(trained, tmp_path / "begun")
    (begun / "result.json").write_text("{")
    with running([open_run(begun)]) as found:
        page = found.get("/api/runs/0").json
    assert (page["finished"], page["figures"], page["example"]) == (False, [], None)


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("Tom", {"passage": "Tom"}),
        (["Tom is here.", "Who?"], {"passage": "Tom is here.", "question": "Who?"}),
        ({"question": "Who?", "passage": "Tom is here.", "more": 1}, {"passage": "Tom is here.", "question": "Who?"}),
        (None, None),
        (3, None),
        ([3, None], None),
    ],
    ids=["text", "pair", "names", "none", "number", "numbers"],
)
def test_the_example_of_a_result_fills_the_inputs(example, expected):
    from regard.studio.run_page import example as begin

    task = task_of(Input("passage", "text", "Passage", from_file=True), Input("question", "text", "Question"))
    assert begin(task, {"example": example}) == expected


def test_a_run_without_a_file_of_its_example_gives_none(live: Studio):
    assert [one["files"] for one in live.get("/api/runs").json["runs"]] == [[]] * 4
    for path in ("/api/runs/0/example/source", "/api/runs/0/example/..%2fconfig.json", "/api/runs/3/example/image"):
        assert live.get(path).status == 404


def test_an_example_never_names_a_file():
    from regard.studio.run_page import example as begin

    assert begin(PICTURE, {"example": ["/etc/passwd", "What?"]}) == {"question": "What?"}


def test_the_studio_serves_a_run_that_is_training(trained: Path, tmp_path: Path, monkeypatch):
    """`regard studio RUN` accepts a run that has no checkpoint yet; the test replaces the HTTP server."""
    import regard.studio.server as serving

    begun = beginning(trained, tmp_path / "begun")
    said: list[str] = []
    monkeypatch.setattr(serving, "server", lambda app: type("Server", (), {"run": lambda self, sockets: None})())
    serve([begun], port=0, say=said.append)
    assert said[-1] == "regard studio: stopped"


# Tests that no code of the studio names a task.


ROOT = Path(__file__).parents[2] / "src" / "regard"
TASK_FOLDERS = sorted(path.parent.name for path in (ROOT / "tasks").glob("*/__init__.py"))


@pytest.mark.parametrize(
    "path",
    [path for floor in ("studio", "cli", "look") for path in sorted((ROOT / floor).rglob("*.py"))],
    ids=lambda path: ".".join(path.relative_to(ROOT).with_suffix("").parts),
)
def test_no_task_is_imported_by_name(path: Path):
    import ast

    assert TASK_FOLDERS
    own = {f"regard.tasks.{folder}" for folder in TASK_FOLDERS}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        # Every string counts as a module name, because `importlib` imports modules by strings.
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        assert not [name for name in names if ".".join(name.split(".")[:3]) in own]
