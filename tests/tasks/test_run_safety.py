"""Tests that no setting is ignored, that changed data is an error, and that a run is locked while a process writes."""

import fcntl
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from tiny_runs import FILES, contents, copy, data_of, one_line, regard, train, write_files

from regard.train.directory_lock import locked
from regard.train.run_directory import Run, RunError
from regard.train.weight_files import read_tensors
from time_limits import HANG_SECONDS

pytestmark = pytest.mark.slow  # the tests are slow because their fixtures train models


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run and the two files it was trained on, text.en and text.de."""
    folder = tmp_path_factory.mktemp("runs")
    done = train(folder / "run", FILES, *data_of(write_files(folder)))
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model=transformer", "attention=bilinear"], ["model.attention", "model.kind=recurrent", "transformer"]),
        (["model=transformer", "order=luong"], ["model.order", "model.kind=recurrent"]),
        (["model=transformer", "cell=lstm"], ["model.cell", "model.kind=recurrent"]),
        (["model=transformer", "embedding=8"], ["model.embedding", "model.kind=recurrent"]),
        (["model=transformer", "input_feeding=true"], ["model.input_feeding", "model.kind=recurrent"]),
        (["input_feeding=true"], ["model.input_feeding", "model.order=luong", "bahdanau"]),
        (["reach=3"], ["model.reach", "model.attention=local-m or model.attention=local-p", "additive"]),
        (["heads=2"], ["model.heads", "model.kind=transformer", "recurrent"]),
        (["feed_forward=32"], ["model.feed_forward", "model.kind=transformer"]),
        (["positions=rotary"], ["model.positions", "model.kind=transformer"]),
        (["norm=post"], ["model.norm", "model.kind=transformer"]),
        (["inner_dropout=0.1"], ["model.inner_dropout", "model.kind=transformer"]),
        (["vocabulary=300"], ["data.vocabulary", "files", "empty"]),
        (["longest=20"], ["data.longest", "files"]),
        (["merge_dropout=0.1"], ["data.merge_dropout", "files"]),
        (["data.target=fr"], ["data.target", "files"]),
        (["ema_decay=0.9"], ["train.ema_decay", "train.average=ema", "none"]),
        (["average_last=3"], ["train.average_last", "train.average=checkpoints"]),
        (["schedule=constant", "final_share=0.1"], ["train.final_share", "train.schedule=cosine", "constant"]),
    ],
    ids=lambda value: value[-1] if "=" in value[-1] else "",
)
def test_a_setting_without_effect_is_an_error(settings, words, tmp_path):
    done = train(tmp_path / "run", ("--preset", "tiny"), *(f"--set={setting}" for setting in settings))
    one_line(done, "has no effect", *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["data.train=100", "lengths=[3, 5]"])
def test_files_have_no_settings_of_the_world(setting, tmp_path):
    done = train(tmp_path / "run", ("--preset", "tiny"), f"--set={setting}", *data_of(write_files(tmp_path)))
    one_line(done, "has no effect", "the built-in world", "text.en")


def test_cuts_need_merge_dropout(tmp_path):
    done = train(tmp_path / "run", ("--preset", "tiny"), "--set=cuts=3", *data_of(write_files(tmp_path)))
    one_line(done, "data.cuts has no effect", "data.merge_dropout above 0")


def test_what_has_no_effect_is_not_recorded(made):
    config = json.loads((made / "run/config.json").read_text())
    assert not {"attention", "order", "cell", "embedding", "input_feeding"} & set(config["model"])
    assert {"heads", "positions", "size"} <= set(config["model"])
    assert not {"train", "lengths", "cuts"} & set(config["data"])


def test_data_paths_are_recorded_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    done = train(Path("run"), FILES, *data_of([Path("text.en"), Path("text.de")]))
    assert done.exit_code == 0, done.output
    files = json.loads((tmp_path / "run/config.json").read_text())["data"]["files"]
    assert files == [str(tmp_path / "text.en"), str(tmp_path / "text.de")]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(tmp_path / "run", elsewhere / "run")
    monkeypatch.chdir(elsewhere)
    assert regard("evaluate", "run", "--json").exit_code == 0
    (tmp_path / "text.de").rename(tmp_path / "gone.de")
    one_line(regard("evaluate", "run"), str(tmp_path / "text.de"), "is missing")


def shifted(path: Path) -> None:
    """Replace every letter of a file by the next one, which keeps the numbers of lines, words and bytes."""
    text = path.read_text()
    path.write_text("".join(chr((ord(a) - 96) % 26 + 97) if a.isalpha() else a for a in text))


@pytest.mark.parametrize("change", [shifted, lambda path: path.write_text(path.read_text() * 2)], ids=["same", "more"])
@pytest.mark.parametrize("command", ["resume", "evaluate", "look"])
def test_changed_data_is_an_error_and_changes_nothing(made, tmp_path, change, command):
    files = write_files(tmp_path)
    done = train(tmp_path / "run", FILES, *data_of(files))
    assert done.exit_code == 0, done.output
    before = contents(tmp_path / "run")
    spoken = regard("predict", tmp_path / "run", "the lazy dog").output
    for path in files:
        change(path)
    if command == "resume":
        done = train(tmp_path / "run", FILES, *data_of(files), "--resume", "--set", "steps=6")
        one_line(done, "contents of", "text.en have changed", "--accept-changed-data")
    elif command == "evaluate":
        one_line(regard("evaluate", tmp_path / "run"), "contents of", "text.en have changed", "--data")
    else:
        one_line(regard("look", tmp_path / "run", "--out", tmp_path / "page.html"), "text.en have changed")
    assert contents(tmp_path / "run") == before
    assert regard("predict", tmp_path / "run", "the lazy dog").output == spoken


@pytest.mark.parametrize("change", [shifted, lambda path: path.write_text(path.read_text() * 2)], ids=["same", "more"])
def test_changed_data_is_accepted_with_the_tokenizer_of_the_run(tmp_path, change):
    files = write_files(tmp_path)
    assert train(tmp_path / "run", FILES, *data_of(files)).exit_code == 0
    tokenizer = (tmp_path / "run/tokenizer.json").read_bytes()
    for path in files:
        change(path)
    more = ("--resume", "--set", "steps=6", "--accept-changed-data")
    done = train(tmp_path / "run", FILES, *data_of(files), *more)
    assert done.exit_code == 0, (done.output, done.exception)
    assert (tmp_path / "run/tokenizer.json").read_bytes() == tokenizer
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 6
    assert regard("evaluate", tmp_path / "run", "--json").exit_code == 0


def test_files_that_were_only_touched_are_the_same(made, tmp_path):
    files = write_files(tmp_path)
    assert train(tmp_path / "run", FILES, *data_of(files)).exit_code == 0
    for path in files:
        os.utime(path, (1_000_000_000, 1_000_000_000))
    done = train(tmp_path / "run", FILES, *data_of(files), "--resume")
    assert done.exit_code == 0, done.output


def test_a_run_without_a_record_of_its_data_goes_on(tmp_path):
    """A run of an earlier version has no manifest.json and no data.json; resuming the run adds both files."""
    files = write_files(tmp_path)
    assert train(tmp_path / "run", FILES, *data_of(files)).exit_code == 0
    weights = read_tensors(tmp_path / "run/model.safetensors")[0]
    for name in ("manifest.json", "data.json"):
        (tmp_path / "run" / name).unlink()
    assert regard("predict", tmp_path / "run", "a dog").exit_code == 0
    done = train(tmp_path / "run", FILES, *data_of(files), "--resume")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run/data.json").is_file()
    again = read_tensors(tmp_path / "run/model.safetensors")[0]
    assert all((again[name] == value).all() for name, value in weights.items())
    assert regard("predict", tmp_path / "run", "a dog").exit_code == 0


def test_a_refused_process_changes_nothing(made, tmp_path):
    run = copy(made / "run", tmp_path / "run")
    before = contents(run)
    with (run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        files = (made / "text.en", made / "text.de")
        done = train(run, FILES, *data_of(files), "--resume", "--set", "steps=7")
        one_line(done, "another process is training in")
    assert contents(run) == before


def start(folder: str, number: int, gate, found) -> None:
    gate.wait()
    try:
        with Run.training(Path(folder), {"number": number}):
            found.put(("won", number))
            gate.wait()
    except RunError as error:
        found.put((str(error), number))
        gate.wait()


def test_a_directory_that_another_process_begins_is_locked_and_not_foreign(tmp_path):
    with locked(tmp_path):
        (tmp_path / "data.json").write_text("{}")  # a new run writes data.json before config.json
        with (
            pytest.raises(RunError, match="another process is training in"),
            Run.training(tmp_path, {"task": "translation"}),
        ):
            pass
    with pytest.raises(RunError, match="holds files but no config"), Run.training(tmp_path, {"task": "translation"}):
        pass
    assert (tmp_path / "data.json").read_text() == "{}"


@pytest.mark.process
def test_of_two_processes_that_start_at_once_one_wins(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["regard.train.run_directory"])
    for attempt in range(5):
        folder, gate, found = tmp_path / str(attempt), context.Barrier(2), context.Queue()
        processes = [context.Process(target=start, args=(str(folder), number, gate, found)) for number in (1, 2)]
        for process in processes:
            process.start()
        said = dict([found.get(timeout=HANG_SECONDS), found.get(timeout=HANG_SECONDS)])
        for process in processes:
            process.join()
        winner = said.pop("won")
        assert len(said) == 1
        assert next(iter(said)).startswith(("another process is training in", f"{folder} holds a run already"))
        assert Run.open(folder).config() == {"number": winner}


def test_an_error_before_training_leaves_a_directory_as_it_was(tmp_path):
    (tmp_path / "run").mkdir()
    paths = write_files(tmp_path)
    paths[1].write_text("one\n")
    one_line(train(tmp_path / "run", FILES, *data_of(paths)), "text.de")
    assert [path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")] == []


def test_two_runs_with_merge_dropout_draw_the_same_cuts(tmp_path):
    files = write_files(tmp_path)
    settings = (*FILES, "--set", "merge_dropout=0.3", "--set", "cuts=3")
    for name in ("one", "two"):
        done = train(tmp_path / name, settings, *data_of(files))
        assert done.exit_code == 0, done.output
    one, two = (contents(tmp_path / name) for name in ("one", "two"))
    assert one["model.safetensors"] == two["model.safetensors"]
    assert {name: data for name, data in one.items() if name.startswith("data/")} == {
        name: data for name, data in two.items() if name.startswith("data/")
    }
