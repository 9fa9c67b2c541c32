"""Tests of reading captions from TSV, JSONL and Flickr8k's files; missing pictures are reported or counted."""

import gzip
import json

import pytest
from PIL import Image

from regard.data.data_files import DataError
from regard.data.vision.captions import load_captions


@pytest.fixture
def folder(tmp_path):
    """Return a folder with five pictures in its sub-folder `images`."""
    (tmp_path / "images").mkdir()
    for name in "abcde":
        Image.new("RGB", (4, 4)).save(tmp_path / "images" / f"{name}.jpg")
    return tmp_path


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def flickr(folder):
    write(
        folder / "Flickr8k.token.txt",
        *(f"{name}.jpg#{number}\tA {name} , {number} ." for name in "abcde" for number in range(2)),
    )
    write(folder / "Flickr_8k.trainImages.txt", "b.jpg", "a.jpg")
    write(folder / "Flickr_8k.devImages.txt", "c.jpg")
    write(folder / "Flickr_8k.testImages.txt", "d.jpg")
    return folder


def plain(items):
    return [(item.image.name, *item.captions) for item in items]


def test_captions_of_one_picture_are_together(folder):
    write(folder / "captions.tsv", "b.jpg\tA dog .", "a.jpg\tA cat .", "b.jpg\tA brown dog .")
    loaded = load_captions(folder)
    assert plain(loaded.train) == [("b.jpg", "A dog .", "A brown dog ."), ("a.jpg", "A cat .")]
    assert loaded.train[0].image == folder / "images" / "b.jpg"
    assert loaded.valid == loaded.test == ()
    assert str(loaded.report) == "3 lines read, 3 pairs kept; skipped: 3 image without caption"


@pytest.mark.parametrize("header", ["image\tcaption", "filename\ttext"])
def test_a_header_is_no_caption(folder, header):
    write(folder / "captions.tsv", header, "a.jpg\tA cat .")
    assert plain(load_captions(folder / "captions.tsv").train) == [("a.jpg", "A cat .")]


def test_jsonl_has_one_caption_or_several(folder):
    objects = [{"image": "a.jpg", "caption": "A cat ."}, {"image": "b", "captions": ["A dog .", "Dogs .", " "]}]
    write(folder / "captions.jsonl", *map(json.dumps, objects))
    loaded = load_captions(folder)
    assert plain(loaded.train) == [("a.jpg", "A cat ."), ("b.jpg", "A dog .", "Dogs .")]
    assert loaded.report.skipped["empty"] == 1


def test_gzipped_files_are_read(folder):
    with gzip.open(folder / "captions.tsv.gz", "wt", encoding="utf-8") as stream:
        stream.write("a.jpg\t一只猫\n")
    assert plain(load_captions(folder).train) == [("a.jpg", "一只猫")]


@pytest.mark.parametrize("valid", ["valid", "val", "dev"])
def test_a_file_a_part(folder, valid):
    for stem, name in (("train", "a"), (valid, "b"), ("test", "c")):
        write(folder / f"{stem}.tsv", f"{name}.jpg\tA {name} .")
    loaded = load_captions(folder)
    assert [plain(part) for part in (loaded.train, loaded.valid, loaded.test)] == [
        [("a.jpg", "A a .")],
        [("b.jpg", "A b .")],
        [("c.jpg", "A c .")],
    ]


def test_pictures_may_stand_beside_the_file(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    write(tmp_path / "mine.tsv", "x.png\tA cat .")
    assert load_captions(tmp_path / "mine.tsv").train[0].image == tmp_path / "x.png"


def test_flickr8k_is_read_with_its_lists(folder):
    loaded = load_captions(flickr(folder))
    assert plain(loaded.train) == [("b.jpg", "A b , 0 .", "A b , 1 ."), ("a.jpg", "A a , 0 .", "A a , 1 .")]
    assert [len(part) for part in (loaded.valid, loaded.test)] == [1, 1]
    assert str(loaded.report) == "10 lines read, 8 pairs kept; skipped: 2 in no list"


def test_captions_of_missing_pictures_that_no_list_names_do_no_harm(folder):
    """Flickr8k's caption file contains lines for a picture that does not exist: 2258277193_586949ec62.jpg.1#0."""
    flickr(folder)
    with (folder / "Flickr8k.token.txt").open("a") as stream:
        stream.write("gone.jpg.1#0\tSome people .\n")
    assert load_captions(folder).report.skipped["in no list"] == 3


FAULTS = {
    "caption without image": ("z.jpg\tA cow .", r"captions\.tsv:2: no picture 'z.jpg' in .*images or "),
    "no tab": ("a.jpg A cat .", r"captions\.tsv:2: expected at least 2 columns"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_names_file_and_line(folder, kind):
    line, message = FAULTS[kind]
    write(folder / "captions.tsv", "a.jpg\tA cat .", line, "b.jpg\tA dog .")
    with pytest.raises(DataError, match=message):
        load_captions(folder)
    report = load_captions(folder, skip_faults=True).report
    assert (report.read, report.kept) == (3, 2)
    assert report.skipped["caption without image" if "picture" in message else "faulty"] == 1


def test_bytes_that_are_no_text_are_a_fault(folder):
    (folder / "captions.tsv").write_bytes(b"a.jpg\tA cat .\nb.jpg\tcaf\xe9\n")
    with pytest.raises(DataError, match=r"captions\.tsv:2: not UTF-8"):
        load_captions(folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "expected an object with a text in the field 'image'"),
        ('{"image": 3, "caption": "A cat ."}', "expected an object with a text in the field 'image'"),
        ('{"image": "a.jpg"}', "expected a text in the field 'caption'"),
        ('{"image": "a.jpg", "captions": "A cat ."}', ".* or a list of texts in 'captions'"),
    ],
    ids=["no json", "a list", "image is a number", "no caption", "captions is a text"],
)
def test_a_faulty_object_names_its_line(folder, line, message):
    write(folder / "captions.jsonl", '{"image": "b.jpg", "caption": "A dog ."}', "", line)
    with pytest.raises(DataError, match=rf"captions\.jsonl:3: {message}"):
        load_captions(folder)
    assert load_captions(folder, skip_faults=True).report.skipped["faulty"] == 1


def test_a_listed_picture_without_a_caption_is_an_error_or_counted(folder):
    flickr(folder)
    Image.new("RGB", (4, 4)).save(folder / "images" / "f.jpg")
    write(folder / "Flickr_8k.testImages.txt", "d.jpg", "f.jpg")
    with pytest.raises(DataError, match=r"testImages\.txt:2: the picture has no caption in .*token\.txt"):
        load_captions(folder)
    loaded = load_captions(folder, skip_faults=True)
    assert loaded.report.skipped["image without caption"] == 1
    assert plain(loaded.test) == [("d.jpg", "A d , 0 .", "A d , 1 .")]


def test_a_listed_picture_that_is_not_there_is_an_error_with_the_line_of_its_caption(folder):
    flickr(folder)
    (folder / "images" / "c.jpg").unlink()
    with pytest.raises(DataError, match=r"token\.txt:5: no picture 'c.jpg'"):
        load_captions(folder)
    assert load_captions(folder, skip_faults=True).report.skipped["caption without image"] == 2


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: folder / "nothing", "no such file or folder"),
        (lambda folder: folder, r"the folder has no train\.tsv or train\.jsonl or captions\.tsv"),
        (lambda folder: write(folder / "captions.txt", "a.jpg A cat"), r"the name must end in \.tsv or \.jsonl"),
        (lambda folder: write(folder / "captions.tsv", ""), "no caption is left"),
        (lambda folder: write(folder / "Flickr8k.token.txt", "a.jpg#0\tA cat").parent, "no list of pictures"),
    ],
    ids=["missing", "no captions", "unknown suffix", "empty", "flickr8k without lists"],
)
def test_what_is_no_captions_says_what_was_expected(folder, prepare, message):
    with pytest.raises(DataError, match=message):
        load_captions(prepare(folder))
