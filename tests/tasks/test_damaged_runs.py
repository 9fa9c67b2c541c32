"""Tests of errors: for a damaged run, an invalid setting or a full disk, commands print one line and exit with 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import FILES, WORLD, copy, data_of, one_line, regard, train, write_files

import forked
from regard.tasks.live_runs import open_run
from regard.train.run_directory import Run, RunError

pytestmark = pytest.mark.slow  # the tests are slow because their fixtures train models


TEXT = "the lazy dog 7"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run on two text files and a run on generated data; return the folder that contains the two runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name, settings, data in (("files", FILES, data_of(write_files(folder))), ("world", WORLD, ())):
        done = train(folder / name, settings, *data)
        assert done.exit_code == 0, done.output
    return folder


def flip(data: bytes) -> bytes:
    place = 2 * len(data) // 3
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGE = {
    "flipped": flip,
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "foreign": lambda data: b'{"name": "another tool", "version": 3}',
    "list": lambda data: b"[1, 2]",
    "binary": lambda data: bytes(range(256)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("world", name) for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer.target.json")),
        *(("files", name) for name in ("config.json", "model.safetensors", "tokenizer.json", "manifest.json")),
    ],
)
@pytest.mark.parametrize("manifest", [True, False], ids=["checked", "earlier"])
def test_a_damaged_file_is_named(made, tmp_path, kind, name, damage, manifest):
    """The error names the damaged file, even if the run, of an earlier version of regard, has no manifest of
    checksums."""
    if not manifest and (damage == "flipped" or name == "manifest.json"):
        pytest.skip("without checksums a changed byte cannot be seen")
    run = copy(made / kind, tmp_path / "run")
    path = run / name
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    if not manifest:
        (run / "manifest.json").unlink()
    one_line(regard("predict", run, TEXT), name)
    with pytest.raises((RunError, ValueError), match=f"{name}|is a run of None"):
        open_run(run)


@pytest.mark.parametrize("command", ["evaluate", "look"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "data.json", "pairs.bin", "offsets.npy"])
def test_a_flipped_byte_is_named_by_every_command(made, tmp_path, command, name):
    run = copy(made / "files", tmp_path / "run")
    path = next(run.glob("data/text-*")) / name if name in ("pairs.bin", "offsets.npy") else run / name
    path.write_bytes(flip(path.read_bytes()))
    more = ("--out", tmp_path / "page.html") if command == "look" else ()
    one_line(regard(command, run, *more), name)
    assert not (tmp_path / "page.html").exists()


def test_a_damaged_result_is_named(made, tmp_path):
    run = copy(made / "world", tmp_path / "run")
    (run / "result.json").write_text("{")
    one_line(regard("evaluate", run), "result.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_run_is_not_resumed(made, tmp_path, name):
    run = copy(made / "files", tmp_path / "run")
    (run / name).write_bytes(flip((run / name).read_bytes()))
    files = (made / "text.en", made / "text.de")
    one_line(train(run, FILES, *data_of(files), "--resume"), name)


def test_a_tokenizer_of_another_run_is_refused(made, tmp_path):
    run = copy(made / "files", tmp_path / "run")
    (run / "tokenizer.target.json").write_bytes((made / "world/tokenizer.target.json").read_bytes())
    one_line(regard("predict", run, TEXT), "tokenizer.target.json", "is not a file of this run")


def test_resuming_mends_damaged_weights(made, tmp_path):
    run = copy(made / "files", tmp_path / "run")
    before = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(flip(before))
    done = train(run, FILES, *data_of((made / "text.en", made / "text.de")), "--resume")
    assert done.exit_code == 0, done.output
    assert (run / "model.safetensors").read_bytes() == before


def test_a_config_that_does_not_fit_names_the_setting(made, tmp_path):
    run = copy(made / "world", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["model"]["size"] = "large"
    (run / "config.json").write_text(json.dumps(config))
    (run / "manifest.json").unlink()
    one_line(regard("predict", run, TEXT), "config.json", "model.size")


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("data.seed=-5", "data.seed"),
        (f"data.seed={2**63}", "data.seed"),
        ("train.seed=" + "9" * 5000, "train.seed"),
        ("train.seed=-1", "train.seed"),
        ("beam=100000", "decode.beam"),
        ("model.size=1000000000", "model.size"),
        ("model.layers=1000000", "model.layers"),
        ("data.train=1000000000000", "data.train"),
        ("data.valid=1000000000000", "data.valid"),
        ("lengths=[1, 1]", "1 to 1 words"),
        ("lengths=[9, 3]", "data.lengths"),
        ("lengths=[3, 1000000]", "data.lengths"),
        ("learning_rate=Infinity", "train.learning_rate"),
        ("betas=[0.9, 1.0]", "train.betas"),
        ("steps=" + "9" * 40, "train.steps"),
        ("watch=foo", "train.watch"),
        ("model.size=65536", "out of memory"),
        ("decoder_layers=99999999999", "model.decoder_layers"),
        ("length_penalty=1e308", "decode.length_penalty"),
    ],
    ids=lambda value: value[:28],
)
def test_a_hostile_setting_is_one_line(setting, word, tmp_path):
    more = ("--set", "layers=1000", "--set", "embedding=65536") if word == "out of memory" else ()
    one_line(train(tmp_path / "run", WORLD, "--set", setting, *more), word)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "word"),
    [("vocabulary=10", "data.vocabulary"), ("vocabulary=99999999999", "data.vocabulary"), ("heads=3", "model.heads")],
)
def test_a_hostile_setting_of_files_is_one_line(setting, word, tmp_path):
    one_line(train(tmp_path / "run", FILES, *data_of(write_files(tmp_path)), "--set", setting), word)


LIMITED = """
import resource, sys
from regard.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.argv = ["regard", *sys.argv[2:]]
main()
"""


def limited(size: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `regard` with a limit on the size of files, so that a write fails in the middle, as on a full disk."""
    return forked.run([sys.executable, "-c", LIMITED, str(size), *arguments])


@pytest.mark.process
@pytest.mark.parametrize("size", [200, 3000, 30_000])
def test_a_full_disk_is_one_line(tmp_path, size):
    done = limited(size, "train", "translation", *WORLD, "--out", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]


@pytest.mark.process
@pytest.mark.parametrize("command", ["look", "predict"])
def test_no_truncated_page_is_left_behind(made, tmp_path, command):
    page = tmp_path / "page.html"
    page.write_text("the page before")
    more = ("--out", page) if command == "look" else ("Tom chases Jerry", "--look", page)
    done = limited(20_000, command, made / "world", *more)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"{page}: File too large" in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "the page before"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    one_line(train(tmp_path / "file/run", WORLD), str(tmp_path / "file"))
    done = regard("train", "translation", *WORLD, "--out", "/proc/nothing/run")
    one_line(done, "/proc/nothing")


def test_a_run_in_progress_has_no_model_yet(tmp_path):
    run = Run.create(tmp_path / "run", {"task": "translation"})
    one_line(regard("predict", run.path, TEXT), "tokenizer.json")
