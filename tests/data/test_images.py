"""Tests of decoding pictures to RGB at a requested size, of errors that name the file, and of the image store."""

import io
import os
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard.data.data_files import DataError
from regard.data.vision.image_files import decode
from regard.data.vision.image_store import store_images

RED, BLUE = (200, 30, 40), (20, 60, 210)


def halves(width=37, height=23, mode="RGB"):
    """Return a picture that is red on the left and blue on the right."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image.convert(mode)


def saved(image, suffix, **options):
    stream = io.BytesIO()
    image.save(stream, suffix, **options)
    return stream.getvalue()


def png_header(width, height):
    """Return a PNG file whose header declares this size, without the pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 1000)
    parts = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (body, data)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def wide_values():
    values = np.zeros((23, 37), np.uint16)
    values[:, 18:] = 40_000
    return Image.fromarray(values)


def animation():
    return saved(halves(), "GIF", save_all=True, append_images=[Image.new("RGB", (37, 23), (0, 255, 0))] * 3)


def transparent(mode):
    image = halves(mode="RGBA")
    image.paste((0, 0, 0, 0), (18, 0, 37, 23))
    return saved(image.convert(mode) if mode != "P" else image.quantize(4), "PNG")


COLOURED = {
    "png": lambda: saved(halves(), "PNG"),
    "jpeg": lambda: saved(halves(), "JPEG", quality=98, subsampling=0),
    "palette": lambda: saved(halves().quantize(8), "PNG"),
    "cmyk": lambda: saved(halves(mode="CMYK"), "JPEG", quality=98),
    "cmyk tiff": lambda: saved(halves(mode="CMYK"), "TIFF"),
    "animated gif": animation,
    "webp": lambda: saved(halves(), "WEBP", lossless=True),
    "bmp": lambda: saved(halves(), "BMP"),
    "alpha, opaque": lambda: saved(halves(mode="RGBA"), "PNG"),
}


@pytest.mark.parametrize("kind", COLOURED)
def test_a_picture_of_any_kind_becomes_rgb(kind):
    pixels = decode(COLOURED[kind]())
    assert pixels.shape == (3, 23, 37)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    np.testing.assert_allclose(pixels[:, 11, 8], RED, atol=12)
    np.testing.assert_allclose(pixels[:, 11, 28], BLUE, atol=12)


@pytest.mark.parametrize(
    ("content", "left", "right"),
    [
        (lambda: saved(wide_values(), "PNG"), 0, 40_000 >> 8),
        (lambda: saved(wide_values(), "TIFF"), 0, 40_000 >> 8),
        (lambda: saved(halves(mode="L").convert("I"), "TIFF"), 82, 65),
        (lambda: saved(halves(mode="L"), "PNG"), 82, 65),
        (lambda: saved(Image.fromarray(np.arange(37)[None].repeat(23, 0) > 18), "PNG"), 0, 255),
    ],
    ids=["16-bit png", "16-bit tiff", "8 of 32 bits", "grey", "one bit"],
)
def test_grey_of_any_depth_becomes_rgb(content, left, right):
    pixels = decode(content())
    assert pixels.shape == (3, 23, 37)
    np.testing.assert_allclose(pixels[:, 11, 8], left, atol=1)
    np.testing.assert_allclose(pixels[:, 11, 28], right, atol=1)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode):
    pixels = decode(transparent(mode))
    np.testing.assert_array_equal(pixels[:, 11, 28], 255)
    assert pixels[:, 11, 8].max() < 220


@pytest.mark.parametrize(
    ("orientation", "top_left", "bottom_right"),
    [(turn, BLUE, RED) if turn in (2, 3, 7, 8) else (turn, RED, BLUE) for turn in range(1, 9)],
)
@pytest.mark.parametrize("size", [None, (40, 40)], ids=["own size", "resized"])
def test_exif_orientation_turns_a_picture_upright(orientation, top_left, bottom_right, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode(saved(halves(), "JPEG", exif=exif, quality=98, subsampling=0), size)
    if size is None:
        assert pixels.shape == ((3, 23, 37) if orientation < 5 else (3, 37, 23))
    np.testing.assert_allclose(pixels[:, 2, 2], top_left, atol=12)
    np.testing.assert_allclose(pixels[:, -3, -3], bottom_right, atol=12)


def test_crop_fills_the_size_and_letterbox_shows_everything():
    content = saved(halves(80, 40), "PNG")
    cropped, boxed = decode(content, (20, 20)), decode(content, (20, 20), fit="letterbox")
    np.testing.assert_allclose(cropped[:, 0, 3], RED, atol=8)
    np.testing.assert_allclose(cropped[:, -1, -4], BLUE, atol=8)
    np.testing.assert_array_equal(boxed[:, :5], 128)
    np.testing.assert_array_equal(boxed[:, 15:], 128)
    np.testing.assert_allclose(boxed[:, 10, 3], RED, atol=8)


@pytest.mark.parametrize("size", [(1, 300), (300, 1), (1, 1), (7, 5)], ids=str)
@pytest.mark.parametrize("fit", ["crop", "letterbox"])
def test_every_shape_fits(size, fit):
    assert decode(saved(Image.new("RGB", size), "PNG"), (11, 13), fit=fit).shape == (3, 11, 13)


def test_a_large_jpeg_is_as_its_small_self():
    large = decode(saved(halves(1600, 1600), "JPEG"), (32, 32))
    small = decode(saved(halves(32, 32), "PNG"), (32, 32))
    np.testing.assert_allclose(large[:, :, :14].astype(int), small[:, :, :14], atol=10)


BAD = {
    "empty": (lambda: b"", "empty"),
    "truncated jpeg": (lambda: COLOURED["jpeg"]()[:-200], "cannot be decoded: .*truncated"),
    "truncated png": (lambda: saved(Image.effect_noise((60, 60), 90), "PNG")[:900], "cannot be decoded"),
    "text": (lambda: b"image,caption\n1.png,a cat\n", "not a picture that can be read; formats: AVIF, BMP, GIF"),
    "html as jpg": (lambda: b"<html>404 Not Found</html>", "not a picture"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not a picture"),
    "100 megapixels": (lambda: png_header(10_000, 10_000), "too many pixels.*100000000 pixels"),
    "bomb": (lambda: png_header(60_000, 60_000), "too many pixels"),
    "float pixels": (lambda: saved(Image.new("F", (4, 4)), "TIFF"), "float pixels; expected 8 or 16 bits"),
    "32 bits": (lambda: saved(Image.new("I", (4, 4), 1 << 20), "TIFF"), "from 1048576 to 1048576; expected 8 or 16"),
    "negative": (lambda: saved(Image.new("I", (4, 4), -5), "TIFF"), "from -5 to -5"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_picture_is_an_error_with_its_name(kind, tmp_path):
    content, message = BAD[kind]
    path = tmp_path / "bad.png"
    path.write_bytes(content())
    with pytest.raises(DataError, match=f"bad.png: .*{message}"):
        decode(path, (8, 8))
    with pytest.raises(DataError, match=f"^upload 3: .*{message}"):
        decode(content(), (8, 8), name="upload 3")


def test_a_missing_file_and_a_folder_are_errors_with_their_names(tmp_path):
    with pytest.raises(DataError, match=r"none\.png: no such file"):
        decode(tmp_path / "none.png")
    with pytest.raises(DataError, match=f"{tmp_path.name}: .*directory"):
        decode(tmp_path)


def test_fewer_pixels_may_be_allowed():
    with pytest.raises(DataError, match=r"37×23 is 851 pixels, more than the 850 allowed"):
        decode(COLOURED["png"](), most_pixels=850)


def test_the_bound_of_pillow_is_honoured_where_it_is_lower(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(DataError, match="too many pixels"):
        decode(COLOURED["png"]())


@pytest.mark.parametrize(
    "exif",
    [{0x0112: 77}, b"Exif\0\0no such thing", b"Exif\0\0MM\0*\0\0\0\x08\0\x09"],
    ids=["unknown number", "garbage", "cut"],
)
def test_damaged_orientation_is_no_reason_to_refuse_a_picture(exif):
    if isinstance(exif, dict):
        [(tag, value)] = exif.items()
        exif = Image.Exif()
        exif[tag] = value
    assert decode(saved(halves(), "JPEG", exif=exif)).shape == (3, 23, 37)


@pytest.mark.parametrize("options", [{"size": (0, 4)}, {"size": (4, 4), "fit": "squeeze"}], ids=["size", "fit"])
def test_wrong_settings_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        decode(COLOURED["png"](), **options)


# Tests of the image store.


@pytest.fixture
def folder(tmp_path):
    """Return a folder with seven pictures, each of a single grey value."""
    for number in range(7):
        Image.new("RGB", (20, 30), (number * 10,) * 3).save(tmp_path / f"{number}.png")
    return tmp_path


def files(folder):
    return sorted(folder.glob("*.png"))


def test_a_store_gives_what_decoding_gives(folder):
    paths = files(folder)
    store = store_images(paths, folder / "cache", size=(5, 7))
    assert len(store) == store.decoded == 7
    for path, picture in zip(paths, store, strict=True):
        np.testing.assert_array_equal(picture, decode(path, (5, 7)))
    np.testing.assert_array_equal(store.take([6, 0, 6])[:, 0, 0, 0], [60, 0, 60])
    np.testing.assert_array_equal(store[-1], store[6])
    with pytest.raises(IndexError, match="picture 7 of a store of 7"):
        store[7]


def test_the_file_is_one_memory_mapped_array(folder):
    store = store_images(files(folder), folder / "cache", size=(5, 7))
    assert isinstance(store.pixels.base, np.memmap)
    assert store.pixels.shape == (7, 3, 5, 7)
    np.testing.assert_array_equal(store.pixels[store.rows[4]], store[4])
    assert not store.pixels.flags.writeable


def test_pictures_are_decoded_once(folder):
    first = store_images(files(folder), folder / "cache", size=(5, 7))
    again = store_images(files(folder)[::-1], folder / "cache", size=(5, 7))
    assert (first.decoded, again.decoded) == (7, 0)
    np.testing.assert_array_equal(again[0], first[6])


def test_a_picture_listed_twice_is_stored_once(folder):
    paths = files(folder)
    store = store_images([paths[3], paths[1], paths[3]], folder / "cache", size=(5, 7))
    assert store.decoded == 2
    assert [int(picture[0, 0, 0]) for picture in store] == [30, 10, 30]


@pytest.mark.parametrize("change", ["new file", "new content", "touched"])
def test_only_what_changed_is_decoded_again(folder, change):
    store_images(files(folder), folder / "cache", size=(5, 7))
    if change == "new file":
        Image.new("RGB", (4, 4), (99,) * 3).save(folder / "9.png")
    elif change == "new content":
        Image.new("RGB", (24, 24), (99,) * 3).save(folder / "2.png")
    else:
        os.utime(folder / "2.png", ns=(1, 1))
    store = store_images(files(folder), folder / "cache", size=(5, 7))
    assert store.decoded == 1
    for path, picture in zip(files(folder), store, strict=True):
        np.testing.assert_array_equal(picture, decode(path, (5, 7)))


@pytest.mark.parametrize("other", [{"size": (7, 5)}, {"size": (5, 7), "fit": "letterbox"}], ids=["size", "fit"])
def test_another_size_or_fit_is_another_store(folder, other):
    store_images(files(folder), folder / "cache", size=(5, 7))
    assert store_images(files(folder), folder / "cache", **other).decoded == 7


def test_a_pass_that_was_killed_goes_on_where_it_stopped(folder):
    made = store_images(files(folder), folder / "cache", size=(5, 7))
    # The store's files as a killed process leaves them: rows.bin has 3.5 of 7 rows, pixels.bin has 5.5 of 7 pictures.
    with (made.folder / "rows.bin").open("r+b") as rows:
        rows.truncate(3 * 20 + 9)
    with (made.folder / "pixels.bin").open("r+b") as pixels:
        pixels.truncate(5 * 105 + 50)
    again = store_images(files(folder), folder / "cache", size=(5, 7))
    assert again.decoded == 4
    for path, picture in zip(files(folder), again, strict=True):
        np.testing.assert_array_equal(picture, decode(path, (5, 7)))


def test_a_fault_stops_with_the_file_and_what_was_done_is_kept(folder):
    (folder / "3.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"3\.png: not a picture"):
        store_images(files(folder), folder / "cache", size=(5, 7))
    (folder / "3.png").unlink()
    assert store_images(files(folder), folder / "cache", size=(5, 7)).decoded == 0


def test_faults_are_skipped_and_listed(folder):
    paths = files(folder)
    (folder / "3.png").write_bytes(b"no picture")
    (folder / "5.png").unlink()
    store = store_images(paths, folder / "cache", size=(5, 7), skip_faults=True)
    assert sorted(store.faults) == [3, 5]
    assert "5.png: no such file" in store.faults[5]
    assert int(store[6][0, 0, 0]) == 60
    with pytest.raises(DataError, match=r"3\.png: not a picture"):
        store[3]


def test_a_damaged_store_is_noticed(folder):
    store = store_images(files(folder), folder / "cache", size=(5, 7))
    with (store.folder / "pixels.bin").open("r+b") as pixels:
        pixels.seek(105 * int(store.rows[2]) + 17)
        pixels.write(b"\xff")
    assert store[1].shape == (3, 5, 7)
    with pytest.raises(DataError, match=r"pixels\.bin: damaged at picture 2; delete"):
        store[2]


def test_progress_is_reported_to_the_end(folder):
    calls = []
    store_images(files(folder), folder / "cache", size=(5, 7), progress=lambda done, total: calls.append((done, total)))
    assert calls[0] == (0, 7)
    assert calls[-1] == (7, 7)


def test_a_store_may_be_sent_to_another_process(folder):
    store = store_images(files(folder), folder / "cache", size=(5, 7))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(store))[4], store[4])


def test_no_pictures_make_an_empty_store(tmp_path):
    store = store_images([], tmp_path / "cache", size=(5, 7))
    assert len(store) == 0
    assert list(store) == []


def test_reading_does_not_grow_with_the_store(tmp_path):
    """While every picture of a large store is loaded in turn, the memory of the process does not grow."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system does not report the memory of a process")
    paths = [tmp_path / f"{number}.png" for number in range(300)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (number % 256,) * 3).save(path)
    store = store_images(paths, tmp_path / "cache", size=(256, 256))
    assert store[0].shape == (3, 256, 256)
    before = int(statm.read_text().split()[1])
    for number, picture in enumerate(store):  # the store's 300 pictures have 59 MB of pixels together
        assert int(picture[0, 0, 0]) == number % 256
    assert (int(statm.read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE") < 20 << 20
