"""Tests of driving logs: parsing, errors with file and line, training and test parts that do not overlap."""

from pathlib import Path

import pytest
from PIL import Image

from regard.data.data_files import DataError
from regard.data.driving.driving_log import history, load_driving_log, split_blocks

HEADER = "center,left,right,steering,throttle,brake,speed"


def write_log(folder: Path, lines: list[str], pictures: int = 3, images: str = "center") -> Path:
    (folder / images).mkdir(exist_ok=True)
    for number in range(pictures):
        Image.new("RGB", (4, 2), (number, 0, 0)).save(folder / images / f"f{number}.png")
    (folder / "driving_log.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def line(number: int, steering: object = 0.5, name: str | None = None) -> str:
    return f"{name or f'f{number}.png'},l.png,r.png,{steering},0.8,0.1,30.0"


def test_a_log_is_read_by_the_names_of_its_columns(tmp_path):
    lines = ["brake,steering,image,throttle", "0.1,-0.25,f1.png,0.8"]
    log = load_driving_log(write_log(tmp_path, lines))
    [frame] = log.frames
    assert frame.image == tmp_path / "center/f1.png"
    assert frame.controls == (-0.25, 0.8, 0.1)
    assert frame.line == 2


def test_a_log_of_the_simulator_has_no_header(tmp_path):
    log = load_driving_log(write_log(tmp_path, [line(0), line(1, "-1e-2")]))
    assert [one.controls[0] for one in log.frames] == [0.5, -0.01]
    assert log.about == "2 lines read, 2 frames kept"


@pytest.mark.parametrize("name", ["/home/other/IMG/f2.png", "C:\\Users\\other\\IMG\\f2.png", "center/f2.png"])
def test_a_path_of_another_machine_is_matched_by_its_file_name(tmp_path, name):
    log = load_driving_log(write_log(tmp_path, [HEADER, line(2, name=name)]))
    assert log.frames[0].image.resolve() == (tmp_path / "center/f2.png").resolve()


@pytest.mark.parametrize("images", ["IMG", "images", "."])
def test_pictures_stand_beside_the_log_or_in_a_folder_there(tmp_path, images):
    log = load_driving_log(write_log(tmp_path, [HEADER, line(0)], images=images) / "driving_log.csv")
    assert log.frames[0].image.is_file()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(1, "left"), "driving_log.csv:3: steering must be a finite number, got 'left'"),
        (line(1, "nan"), "driving_log.csv:3: steering must be a finite number, got 'nan'"),
        (line(1, ""), "driving_log.csv:3: steering must be a finite number, got ''"),
        (line(9), "driving_log.csv:3: no picture 'f9.png' in"),
        ("f1.png,l.png", "driving_log.csv:3: expected at least 6 columns, found 2"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, bad, message):
    folder = write_log(tmp_path, [HEADER, line(0), bad, line(2)])
    with pytest.raises(DataError) as error:
        load_driving_log(folder)
    assert message in str(error.value)
    log = load_driving_log(folder, skip_faults=True)
    assert [one.line for one in log.frames] == [2, 4]
    assert sum(log.skipped.values()) == 1
    assert "skipped: 1 " in log.about
    assert history(log.frames, 1, 5) == [1]  # the frame before the skipped line is not part of the history


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a,b,c", "1,2,3"], "driving_log.csv:1: expected a header with 'steering'"),
        (["center,steering,brake", "f0.png,0,0"], "driving_log.csv:1: expected a column throttle"),
        (["steering,throttle,brake", "0,0,0"], "driving_log.csv:1: expected a column center or image"),
        ([HEADER], "no frame is left"),
    ],
)
def test_a_log_that_is_none_is_refused(tmp_path, lines, message):
    with pytest.raises(DataError, match=r"driving_log\.csv") as error:
        load_driving_log(write_log(tmp_path, lines))
    assert message in str(error.value)


def test_a_folder_without_a_log_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"expected driving_log\.csv"):
        load_driving_log(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        load_driving_log(tmp_path / "nothing")


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("gap", [0, 5, 19])
def test_blocks_are_apart_by_the_gap(seed, gap):
    parts = split_blocks(1013, block=50, gap=gap, valid=120, test=80, seed=seed)
    part_of = {place: name for name in ("train", "valid", "test") for place in getattr(parts, name)}
    # No frame is in two of the parts for training, validation and test.
    assert len(part_of) == len(parts.train) + len(parts.valid) + len(parts.test)
    for place, name in part_of.items():
        assert {part_of.get(other, name) for other in range(place - gap, place)} <= {name}
    assert 120 - 3 * gap <= len(parts.valid) <= 163
    assert 80 - 2 * gap <= len(parts.test) <= 113


def test_the_seed_alone_decides_the_blocks():
    def made(seed: int) -> object:
        return split_blocks(1000, block=50, gap=5, valid=100, test=100, seed=seed)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_too_few_frames_for_blocks_are_refused():
    with pytest.raises(DataError, match="too few for three blocks of 50"):
        split_blocks(90, block=50, gap=5, valid=10, test=10, seed=1)
