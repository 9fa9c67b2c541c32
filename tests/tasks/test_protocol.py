"""Tests of the `Task` protocol: every task works with the same commands, and so does the task of the documentation."""

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ninth_task import added
from safetensors.torch import load_file
from tiny_runs import NAMES, one_line, regard, tiny, tiny_settings

import forked
import regard as package
from regard.tasks.catalog import TASKS
from regard.tasks.config_overrides import configure
from regard.tasks.inputs import from_arguments, named
from regard.tasks.task import Input, InputError, SettingError
from regard.train.run_directory import Run

pytestmark = pytest.mark.slow  # the tests are slow because their fixtures train models


LOADED = """
import json, sys, regard
[found] = regard.load(sys.argv[1]).predict([sys.argv[2:] if len(sys.argv) > 3 else sys.argv[2]])
print(json.dumps(found.record()))
"""


class Runs:
    """A run of a few steps of each task, trained at its first use; all pytest-xdist workers share the runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Path:
        run = self.folder / name
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (run / "result.json").exists():
                done = regard("train", name, *tiny_settings(name), "--out", run)
                assert done.exit_code == 0, done.output
        return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tasks"
    folder.mkdir(exist_ok=True)
    return Runs(folder)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_every_task_has_the_presets_that_commands_take_by_default(name, preset):
    task = TASKS[name]
    assert configure(task, preset, [], {}).preset == preset
    assert task.presets[preset].about


@pytest.mark.parametrize("name", NAMES)
def test_a_result_has_the_figures_that_the_task_declares(runs, name):
    result = json.loads((runs[name] / "result.json").read_text())
    assert set(result) >= {"task", "data", "metrics", "attention", "faithfulness", "seconds", "parameters", "command"}
    declared = {figure.name for figure in TASKS[name].figures}
    numbers = {key for part in ("metrics", "attention") for key in result[part] if TASKS[name].figure(key)}
    assert numbers
    assert numbers <= declared
    figures = {key: TASKS[name].figure(key) for part in ("metrics", "attention") for key in result[part]}
    values = {**result["metrics"], **result["attention"]}
    assert all(values[key] >= 0.0 for key, figure in figures.items() if figure)
    shares = [key for key, figure in figures.items() if figure and figure.percent and figure.better == "higher"]
    # These metrics are at most 1; error rates are not among them, because inserted words may raise them above 1.
    assert all(values[key] <= 1.0 for key in shares)


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_run_answers_with_a_record_and_a_trace(runs, name, tmp_path):
    loaded = package.load(runs[name])
    given = tiny(name).given(tmp_path)
    [found] = loaded.predict([given if len(given) > 1 else given[0]])
    assert isinstance(found.answer, str)
    assert found.answer in found.line
    assert json.loads(json.dumps(found.record()))
    trace = found.trace()
    assert trace is not None
    weights = trace.records[0].weights(head=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)))
    assert loaded.weights == "final weights"


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_loaded_in_a_fresh_process(runs, name, tmp_path):
    given = tiny(name).given(tmp_path)
    [here] = package.load(runs[name]).predict([given if len(given) > 1 else given[0]])
    command = [sys.executable, "-c", LOADED, str(runs[name]), *given]
    done = forked.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(here.record()))


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_arguments_and_json_lines(runs, name, tmp_path):
    given = tiny(name).given(tmp_path)
    done = regard("predict", runs[name], *given, "--json")
    assert done.exit_code == 0, done.output
    record = dict(zip([one.name for one in TASKS[name].inputs], given, strict=True))
    command = [sys.executable, "-m", "regard", "predict", str(runs[name]), "--json"]
    lines = f"{json.dumps(record)}\n{json.dumps({'wrong': 1})}\n"
    piped = forked.run(command, input=lines)
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
def test_options_of_another_task_are_refused(runs, name, tmp_path):
    done = regard("predict", runs[name], *tiny(name).given(tmp_path), "--beam", "2")
    if "beam" in TASKS[name].options:
        assert done.exit_code == 0
    else:
        one_line(done, f"--beam is not an option of {name}")
    with pytest.raises(SettingError, match="has no option 'colour'"):
        package.load(runs[name], colour="red")


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_by_its_directory_alone_and_ends_the_same(runs, name, tmp_path):
    command = [sys.executable, "-m", "regard", "train", name, *tiny_settings(name), "--out", "run"]
    with forked.Process(command, cwd=tmp_path) as process:
        while process.poll() is None and not list(tmp_path.glob("run/checkpoints/step-*/manifest.json")):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    again = [sys.executable, "-m", "regard", "train", "--resume", "run"]
    done = forked.run(again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    resumed, direct = (load_file(run / "model.safetensors") for run in (tmp_path / "run", runs[name]))
    assert set(resumed) == set(direct)
    assert all(torch.equal(resumed[key], direct[key]) for key in direct)


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_run_answers_with_its_best_checkpoint_and_says_so(runs, name, tmp_path):
    shutil.copytree(runs[name], tmp_path / "run")
    (tmp_path / "run/model.safetensors").unlink()
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    del manifest["files"]["model.safetensors"]
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    best = json.loads((Run.open(runs[name]).checkpoints.path(6) / "state.json").read_text())["course"]["best_step"]
    loaded = package.load(tmp_path / "run")
    assert loaded.weights == f"weights of step {best}: training was interrupted after step 6"
    expected = load_file(runs[name] / f"checkpoints/step-{best:06d}/model.safetensors")
    own = loaded.predictor.network.state_dict()
    assert all(torch.equal(own[key], expected[key]) for key in expected)


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


@pytest.fixture(scope="module")
def ninth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of the task that docs/add-a-task.md describes, with fewer steps than on that page."""
    folder = tmp_path_factory.mktemp("ninth")
    with added(folder):
        few = ("steps=100", "validate_every=100", "data.train=2000", "data.test=100", "beta=0.001", "penalty=entropy")
        settings = [word for one in few for word in ("--set", one)]
        done = regard("train", "largest", "--preset", "tiny", *settings, "--out", folder / "run")
        assert done.exit_code == 0, done.output
        assert "pointing" in done.output
        yield folder / "run"


def test_the_task_of_the_page_learns(ninth):
    result = json.loads((ninth / "result.json").read_text())
    assert result["metrics"]["accuracy"] > 0.9
    assert result["attention"]["pointing"] > 0.9
    assert result["faithfulness"]["attended"] > result["faithfulness"]["random"] + 1
    assert "largest" in regard("tasks").output


def test_the_task_of_the_page_answers(ninth, tmp_path):
    done = regard("predict", ninth, "3714", "90", "--look", tmp_path / "page.html")
    assert done.output.startswith("7\n9\n")  # these answers are the ones that docs/add-a-task.md shows
    assert (tmp_path / "page.html").is_file()
    [found] = package.load(ninth).predict(["3714"])
    assert found.trace().records[0].column_labels.items == ("3", "7", "1", "4")
    bad = regard("predict", ninth, "two", "4")
    assert bad.exit_code == 1
    assert "input 0: expected a row of digits: not answered" in bad.output


def test_the_task_of_the_page_is_evaluated_also_on_files(ninth, tmp_path):
    (tmp_path / "rows.txt").write_text("91\n907\n")
    done = regard("evaluate", ninth, "--data", tmp_path / "rows.txt", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["metrics"] == {"accuracy": 1.0}


def test_the_task_of_the_page_has_a_page_and_goes_on(ninth, tmp_path):
    assert regard("look", ninth, "--out", tmp_path / "page.html").exit_code == 0
    done = regard("train", "--resume", ninth, "--set", "steps=102")
    assert done.exit_code == 0, done.output
    assert json.loads((ninth / "result.json").read_text())["steps"] == 102


def test_commands_know_no_task():
    """No module of `cli`, `studio` and `look` names a task, so that a new task needs no change there."""
    root = Path(package.__file__).parent
    names = [path.parent.name for path in root.glob("tasks/*/task.py")]
    assert len(names) >= 3
    for folder in ("cli", "studio", "look"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not [name for name in names if f"tasks.{name}" in text], path
    assert os.path.isdir(root / "tasks")
