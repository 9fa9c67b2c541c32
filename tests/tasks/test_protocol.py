"""The protocol of tasks: every task through the same commands, and a ninth task in one record."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ninth_task import SUMS
from safetensors.torch import load_file
from tiny_runs import one_line, regard

import regard as package
from regard.tasks.catalog import TASKS
from regard.tasks.inputs import from_arguments, named
from regard.tasks.task import Input, InputError, SettingError
from regard.train.run import Run

FEW = ("--preset", "tiny", "--set", "steps=6", "--set", "validate_every=2", "--set", "warmup=1", "--set", "longer=2")
SMALL = ("--set", "data.train=80", "--set", "data.valid=6", "--set", "data.test=6", "--set", "model.size=8")
ASKED = {
    "translation": ("Tom chases Jerry",),
    "sentiment": ("The film is not bad.",),
    "reading": ("Emma took the ball. Emma went to the kitchen.", "Where is the ball?"),
    "vqa": (str(Path(__file__).parents[2] / "docs/images/studio-image-light.png"), "What colour is the circle?"),
}
MORE = {"sentiment": ("--set", "features=4"), "translation": ("--set", "lengths=[3, 8]")}
NAMES = sorted(ASKED)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of a few steps of each task."""
    folder, found = tmp_path_factory.mktemp("tasks"), {}
    for name in NAMES:
        done = regard("train", name, *FEW, *SMALL, *MORE.get(name, ()), "--out", folder / name)
        assert done.exit_code == 0, done.output
        found[name] = folder / name
    return found


def test_every_task_is_tried_here():
    assert set(TASKS) == set(ASKED)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_has_the_figures_that_the_task_declares(runs, name):
    result = json.loads((runs[name] / "result.json").read_text())
    assert set(result) >= {"task", "data", "metrics", "attention", "faithfulness", "seconds", "parameters", "command"}
    declared = {figure.name for figure in TASKS[name].figures}
    numbers = {key for part in ("metrics", "attention") for key in result[part] if TASKS[name].figure(key)}
    assert numbers
    assert numbers <= declared
    assert all(0.0 <= result["metrics"][key] <= 100.0 for key in result["metrics"] if TASKS[name].figure(key))


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_run_answers_with_a_record_and_a_trace(runs, name):
    loaded = package.load(runs[name])
    given = ASKED[name] if len(ASKED[name]) > 1 else ASKED[name][0]
    [found] = loaded.predict([given])
    assert isinstance(found.answer, str)
    assert found.answer in found.line
    assert json.loads(json.dumps(found.record()))
    trace = found.trace()
    assert trace is not None
    weights = trace.records[0].weights(head=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)))
    assert loaded.weights == "final weights"


@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_arguments_and_json_lines(runs, name):
    done = regard("predict", runs[name], *ASKED[name], "--json")
    assert done.exit_code == 0, done.output
    record = dict(zip([one.name for one in TASKS[name].inputs], ASKED[name], strict=True))
    command = [sys.executable, "-m", "regard", "predict", str(runs[name]), "--json"]
    lines = f"{json.dumps(record)}\n{json.dumps({'wrong': 1})}\n"
    piped = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in piped.stdout.splitlines()]
    first = json.loads(done.stdout)
    assert {key: first[key] for key in first if key in ("answer", "translation")} == {
        key: answers[0][key] for key in first if key in ("answer", "translation")
    }
    assert len(answers) == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ["evaluate", "look"])
def test_a_run_is_enough(runs, name, command, tmp_path):
    out = ("--out", tmp_path / "page.html") if command == "look" else ("--json",)
    done = regard(command, runs[name], *out)
    assert done.exit_code == 0, done.output
    if command == "look":
        assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    else:
        assert json.loads(done.stdout)["task"] == name


@pytest.mark.parametrize("name", NAMES)
def test_options_of_another_task_are_refused(runs, name):
    done = regard("predict", runs[name], *ASKED[name], "--beam", "2")
    if name == "translation":
        assert done.exit_code == 0
    else:
        one_line(done, f"--beam is not an option of {name}")
    with pytest.raises(SettingError, match="has no option 'colour'"):
        package.load(runs[name], colour="red")


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_by_its_directory_alone_and_ends_the_same(runs, name, tmp_path):
    command = [sys.executable, "-m", "regard", "train", name, *FEW, *SMALL, *MORE.get(name, ()), "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not list(tmp_path.glob("run/checkpoints/step-*/manifest.json")):
            pass
        process.send_signal(signal.SIGKILL)
    again = [sys.executable, "-m", "regard", "train", "--resume", "run"]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = subprocess.run([*command[:-1], "whole"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert whole.returncode == 0, whole.stderr
    resumed, direct = (load_file(tmp_path / one / "model.safetensors") for one in ("run", "whole"))
    assert all(torch.equal(resumed[key], direct[key]) for key in direct)


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_run_answers_with_its_best_checkpoint_and_says_so(runs, name, tmp_path):
    import shutil

    shutil.copytree(runs[name], tmp_path / "run")
    (tmp_path / "run/model.safetensors").unlink()
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    del manifest["files"]["model.safetensors"]
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    best = json.loads((Run.open(runs[name]).checkpoints.path(6) / "state.json").read_text())["course"]["best_step"]
    loaded = package.load(tmp_path / "run")
    assert loaded.weights == f"weights of step {best}: training was interrupted after step 6"
    expected = load_file(runs[name] / f"checkpoints/step-{best:06d}/model.safetensors")
    own = getattr(loaded.predictor, "network", None) or loaded.predictor.model
    assert all(torch.equal(own.state_dict()[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("alone", "expected passage and question, got 1 value"),
        (("a", "b", "c"), "expected passage and question, got 3 values"),
        ({"passage": "a"}, "expected passage and question, got passage"),
        ({"passage": "a", "question": "b", "more": 1}, "expected passage and question, got passage, question, more"),
        (("a", 7), "question must be text, got int"),
    ],
)
def test_inputs_that_do_not_fit_are_named(given, message):
    with pytest.raises(InputError, match=message):
        named(TASKS["reading"].inputs, given)


def test_a_text_may_be_the_path_of_a_file(tmp_path):
    (tmp_path / "story.txt").write_text("Tom ran.")
    [found] = from_arguments(TASKS["reading"].inputs, [str(tmp_path / "story.txt"), "Who ran?"])
    assert found == {"passage": "Tom ran.", "question": "Who ran?"}
    [plain] = from_arguments((Input("text", "text", "Text"),), [str(tmp_path / "story.txt")])
    assert plain == {"text": str(tmp_path / "story.txt")}


def test_a_ninth_task_is_one_record_and_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "sums", SUMS)
    done = regard("train", "sums", "--out", tmp_path / "run", "--set", "penalty=entropy")
    assert done.exit_code == 0, done.output
    assert "accuracy" in done.output
    [found] = package.load(tmp_path / "run").predict(["123"])
    assert found.answer in ("even", "odd")
    assert regard("predict", tmp_path / "run", "22", "--look", tmp_path / "page.html").exit_code == 0
    bad = regard("predict", tmp_path / "run", "two", "4")
    assert bad.exit_code == 1
    assert "text 1: expected digits: not answered" in bad.output
    assert regard("tasks").output.count("sums") >= 1


def test_commands_know_no_task():
    """Nothing above `tasks` says the name of one, so that a new task needs no line there."""
    root = Path(package.__file__).parent
    names = [path.parent.name for path in root.glob("tasks/*/task.py")]
    assert len(names) >= 3
    for folder in ("cli", "studio", "look"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not [name for name in names if f"tasks.{name}" in text], path
    assert os.path.isdir(root / "tasks")
