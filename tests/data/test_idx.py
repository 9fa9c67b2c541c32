"""Tests of reading idx files (MNIST's format): exact values, and error messages that name an invalid file."""

import gzip
import struct

import numpy as np
import pytest

from regard.data.data_files import DataError
from regard.data.vision.idx import load_mnist, read_idx, read_labelled

IMAGES = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)
CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def packed(array, code=None):
    code = CODES[array.dtype.str[1:]] if code is None else code
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize("wrap", [bytes, gzip.compress], ids=["plain", "gzipped"])
@pytest.mark.parametrize("kind", CODES)
def test_numbers_of_every_type_are_read(tmp_path, kind, wrap):
    array = (np.arange(2 * 3 * 5) - (0 if kind == "u1" else 7)).astype(kind).reshape(2, 3, 5)
    (tmp_path / "a").write_bytes(wrap(packed(array)))
    read = read_idx(tmp_path / "a")
    assert read.dtype == np.dtype(kind)
    np.testing.assert_array_equal(read, array)


BAD = {
    "empty": (b"", "not an idx file: it begins with nothing"),
    "wrong magic": (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "not an idx file: it begins with 89 50 4e 47"),
    "unknown type": (packed(LABELS, code=0x0A), "not an idx file: it begins with 00 00 0a 01"),
    "no axes": (b"\0\0\x08\0abc", "not an idx file"),
    "cut in the header": (packed(IMAGES)[:9], "truncated in the header"),
    "truncated": (packed(IMAGES)[:-1], "truncated: 5×7×3 needs 105 bytes, found 104"),
    "too long": (packed(IMAGES) + b"\0", "goes on after the 105 bytes of 5×7×3"),
    "absurd sizes": (b"\0\0\x08\x03" + b"\xff" * 12, "4294967295×4294967295×4294967295 is .* bytes, more than the"),
    "promises too much": (b"\0\0\x08\x01" + struct.pack(">I", 1 << 31), "truncated: 2147483648 needs"),
    "damaged gzip": (gzip.compress(packed(IMAGES))[:-9], "the gzip file is damaged"),
    "truncated in gzip": (gzip.compress(packed(IMAGES)[:50]), "truncated: 5×7×3 needs 105 bytes, found 34"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_with_its_name(tmp_path, kind):
    content, message = BAD[kind]
    (tmp_path / "bad-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=f"bad-idx3-ubyte: {message}"):
        read_idx(tmp_path / "bad-idx3-ubyte")


def test_a_bound_may_be_given(tmp_path):
    (tmp_path / "a").write_bytes(packed(IMAGES))
    with pytest.raises(DataError, match="5×7×3 is 105 bytes, more than the 104 allowed"):
        read_idx(tmp_path / "a", most_bytes=104)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="nothing: cannot be read: No such file"):
        read_idx(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES, LABELS[:4], "labels: 4 labels for the 5 pictures of .*images"),
        (IMAGES[0], LABELS, "images: expected pictures as bytes on 3 axes, found uint8 on 2"),
        (IMAGES.astype("f4"), LABELS, "images: expected pictures as bytes on 3 axes, found float32 on 3"),
        (IMAGES, IMAGES, "labels: expected labels as bytes on 1 axis, found uint8 on 3"),
        (IMAGES[:0], LABELS[:0], "images: the file has no pictures"),
    ],
    ids=["counts", "axes", "type", "labels are pictures", "none"],
)
def test_pictures_and_labels_must_belong_together(tmp_path, images, labels, message):
    (tmp_path / "images").write_bytes(packed(images))
    (tmp_path / "labels").write_bytes(packed(labels))
    with pytest.raises(DataError, match=message):
        read_labelled(tmp_path / "images", tmp_path / "labels")


@pytest.mark.parametrize("name", ["{}-{}-idx{}-ubyte", "{}-{}.idx{}-ubyte", "{}-{}-idx{}-ubyte.gz"])
def test_the_files_of_mnist_are_found_by_their_usual_names(tmp_path, name):
    wrap = gzip.compress if name.endswith("gz") else bytes
    for part, count in (("train", 5), ("t10k", 3)):
        (tmp_path / name.format(part, "images", 3)).write_bytes(wrap(packed(IMAGES[:count])))
        (tmp_path / name.format(part, "labels", 1)).write_bytes(wrap(packed(LABELS[:count])))
    loaded = load_mnist(tmp_path)
    assert (len(loaded["train"]), len(loaded["test"])) == (5, 3)
    np.testing.assert_array_equal(loaded["train"].images, IMAGES)
    np.testing.assert_array_equal(loaded["test"].labels, LABELS[:3])


def test_a_folder_without_the_files_says_which_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"no file train-images-idx3-ubyte \(or \.gz\)"):
        load_mnist(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_mnist(tmp_path / "nothing")
