"""Tests of picture files as inputs of a run: on the command line, on standard input, in Python."""

import json
import shlex
import struct
import zlib
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
from picture_task import ASKED, BRIGHT, picture
from PIL import Image
from typer.testing import CliRunner

import regard as package
from regard.cli import app
from regard.tasks.catalog import TASKS
from regard.tasks.example_files import example_arguments, example_file, store_example
from regard.tasks.task import Input, InputError
from regard.train.run_directory import Run

RED = (200, 30, 30)


def regard(*arguments: object, stdin: str | None = None):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return CliRunner().invoke(app, [str(one) for one in arguments], input=stdin, catch_exceptions=False)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module", autouse=True)
def tasks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "bright", BRIGHT)
        patch.setitem(TASKS, "asked", ASKED)
        yield


@pytest.fixture(scope="module")
def runs(tasks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Train a run of each of two picture tasks; return its directory and the output of its training by task name."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for name in ("bright", "asked"):
        done = regard("train", name, "--preset", "small", "--out", folder / name)
        assert done.exit_code == 0, done.output
        found[name] = folder / name, done.stdout
    return found


def _halves(left: tuple[int, ...], right: tuple[int, ...]) -> Image.Image:
    """Return a picture whose left and right half have the given colours."""
    image = Image.new("RGB", (32, 32), left)
    image.paste(right, (16, 0, 32, 32))
    return image


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _large(path: Path) -> None:
    """Write a PNG file whose header declares 100 megapixels, which must never be decoded."""
    head = struct.pack(">IIBBBBB", 10_000, 10_000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", b"") + _chunk(b"IEND", b""))


def _exif(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF orientation 6: the left side of the stored picture is displayed at the top
    _halves(RED, (0, 0, 255)).save(path, exif=exif, quality=95, subsampling=0)


def _truncated(path: Path) -> None:
    _halves(RED, (0, 0, 255)).save(path)
    path.write_bytes(path.read_bytes()[:60])


BLUE = (0, 0, 255)
SIDE_BY_SIDE = [RED, BLUE, RED, BLUE]
GOOD = {
    "16 bits.png": (lambda path: Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(path), [(156,) * 3] * 4),
    "CMYK.jpg": (lambda path: Image.new("CMYK", (20, 20), (0, 0, 0, 255)).save(path), [(0, 0, 0)] * 4),
    "moving.gif": (
        lambda path: _halves(RED, BLUE).save(path, save_all=True, append_images=[Image.new("RGB", (32, 32))]),
        SIDE_BY_SIDE,
    ),
    "palette.png": (lambda path: _halves(RED, BLUE).quantize(4).save(path), SIDE_BY_SIDE),
    "turned.jpg": (_exif, [RED, RED, BLUE, BLUE]),
    "clear.png": (lambda path: Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(path), [(255,) * 3] * 4),
}
BAD = {
    "missing.png": (lambda path: None, "no such file"),
    "truncated.png": (_truncated, "cannot be decoded"),
    "large.png": (_large, "too many pixels"),
    "empty.png": (lambda path: path.write_bytes(b""), "the file is empty"),
    "folder": (lambda path: path.mkdir(), "a directory; expected a picture"),
    "text.png": (lambda path: path.write_text("no picture"), "not a picture that can be read"),
    "two\nlines.png": (lambda path: None, "no such file"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_picture_of_any_kind_is_read(runs, tmp_path, name):
    make, expected = GOOD[name]
    make(tmp_path / name)
    done = regard("predict", runs["bright"][0], tmp_path / name, "--json")
    assert done.exit_code == 0, done.stderr
    cells = np.array(json.loads(done.stdout)["cells"])
    assert np.abs(cells - np.array(expected)).max() <= 12


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", BAD)
def test_a_picture_that_cannot_be_read_leaves_the_others_alone(runs, tmp_path, name, as_json):
    make, reason = BAD[name]
    make(tmp_path / name)
    Image.new("RGB", (20, 20), "white").save(tmp_path / "white.png")
    given = [tmp_path / "white.png", tmp_path / name, tmp_path / "white.png"]
    done = regard("predict", runs["bright"][0], *given, *(["--json"] if as_json else []))
    assert done.exit_code == 1
    [said] = done.stderr.splitlines()
    assert said.startswith(f"regard: input 1: {str(tmp_path / name).replace(chr(10), ' ')}: ")
    assert reason in said
    first, failed, last = done.stdout.split("\n")[:-1]
    assert first == last != ""
    assert (json.loads(failed)["error"] in said) if as_json else failed == ""


def test_a_picture_with_a_question(runs, tmp_path):
    Image.new("RGB", (20, 20), "white").save(tmp_path / "a.png")
    run = runs["asked"][0]
    done = regard("predict", run, tmp_path / "a.png", "dark?", tmp_path / "no.png", "x?", tmp_path / "a.png", "y?")
    assert done.exit_code == 1
    first, failed, last = done.stdout.splitlines()
    assert ("(dark?)" in first, failed, "(y?)" in last) == (True, "", True)
    assert "input 1: " in done.stderr
    assert "no.png: no such file" in done.stderr
    alone = regard("predict", run, tmp_path / "a.png")
    assert (alone.exit_code, alone.stderr) == (
        2,
        "regard: expected IMAGE QUESTION for each input, got 1 value\n",
    )


def test_lines_of_json_name_files(runs, tmp_path):
    Image.new("RGB", (20, 20), "white").save(tmp_path / "a.png")
    good = json.dumps({"image": str(tmp_path / "a.png"), "question": "dark?"})
    bad = ['{"image": "a.png"}', '{"image": 3, "question": "x"}', '{"image": "", "question": "x"}', "a.png", "{"]
    done = regard("predict", runs["asked"][0], "--json", stdin="\n".join([good, *bad, good]) + "\n")
    assert done.exit_code == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == lines[-1]
    assert [line["error"].partition(": ")[2].partition(":")[0] for line in lines[1:-1]] == [
        "expected image and question, got image",
        "image must be the path or the bytes of a file, got int",
        "image is empty",
        'expected a JSON object {"image"',
        "not JSON",
    ]


def test_lines_are_paths_where_the_picture_is_all(runs, tmp_path):
    Image.new("RGB", (20, 20), "white").save(tmp_path / "a.png")
    lines = [str(tmp_path / "a.png"), json.dumps({"image": str(tmp_path / "a.png")}), '{"photo": "a.png"}']
    done = regard("predict", runs["bright"][0], stdin="\n".join(lines))
    first, second, failed = done.stdout.split("\n")[:-1]
    assert (first == second != "", failed, done.exit_code) == (True, "", 1)
    assert "line 3: expected image, got photo" in done.stderr


def test_paths_and_bytes_in_python(runs, tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (20, 20), "white").save(path)
    loaded = package.load(runs["bright"][0])
    given = [path, str(path), path.read_bytes(), {"image": path}, b"no picture", b"", 3]
    *good, broken, empty, number = loaded.answers(given)
    assert len({one.answer for one in good}) == 1
    assert [str(one) for one in (broken, empty, number)] == [
        "the picture: not a picture that can be read; formats: AVIF, BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP",
        "image is empty: expected the path or the bytes of a file",
        "image must be the path or the bytes of a file, got int",
    ]
    with pytest.raises(InputError, match="input 1: the picture: "):
        loaded.predict([path, b"no picture"])
    assert loaded.predict(path.read_bytes())[0].answer == good[0].answer


# Tests of the example input that a run stores.


@pytest.mark.parametrize("name", ["bright", "asked"])
def test_the_example_is_a_file_of_the_run_and_its_command_works(runs, name):
    run, printed = runs[name]
    with Image.open(run / "example.png") as image:
        assert (np.asarray(image).transpose(2, 0, 1) == picture(135)).all()
    kept = {"image": "example.png"} | ({"question": "bright?"} if name == "asked" else {})
    assert Run.open(run).result()["example"] == kept
    Run.open(run).manifest.check("example.png")
    command = next(line for line in printed.splitlines() if "regard predict" in line)
    done = regard(*shlex.split(command)[1:])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == package.load(run).predict([{**kept, "image": run / "example.png"}])[0].answer


TEXT, IMAGE = Input("question", "text", "Question"), Input("image", "image", "Image")


@pytest.mark.parametrize("example", ["Who?", ["Who?"], {"question": "Who?"}, None], ids=["text", "list", "map", "none"])
def test_an_example_of_text_is_stored_as_it_is(tmp_path, example):
    run = Run.create(tmp_path / "run", {"task": "x"})
    before = sorted(run.path.iterdir())
    assert store_example((TEXT,), example, run) == example
    assert sorted(run.path.iterdir()) == before
    assert example_arguments((TEXT,), example, run.path) == ([] if example is None else ["Who?"])


@pytest.mark.parametrize("name", ["/etc/passwd", "../example.png", "config.json", 3, None])
def test_no_other_file_is_opened_as_an_example(tmp_path, name):
    for file in ("example.png", "config.json"):
        (tmp_path / file).write_bytes(b"x")
    assert example_file(IMAGE, {"image": name}, tmp_path) is None
    assert example_file(IMAGE, ["example.png"], tmp_path) is None
    assert example_file(IMAGE, {"image": "example.png"}, tmp_path) == tmp_path / "example.png"
