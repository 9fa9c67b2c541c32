"""Reader of idx files, the format of MNIST, gzipped or not.

An idx file has two zero bytes, one byte for the type of the numbers and one for the number of axes; then the size of
each axis as a big-endian integer of 4 bytes; then the numbers (LeCun's page on MNIST, "The IDX file format"). The size
that the header states is limited before any number is read, and the file must have exactly that size.
"""

import math
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.data_files import DataError, opened

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_NAMES = {"train": "train", "test": "t10k"}
_MOST_AXES = 8
MOST_BYTES = 4 << 30


@dataclass(frozen=True, eq=False, slots=True)
class Labelled:
    """Pictures (n, height, width) and their labels (n,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.images)


def read_idx(path: Path, *, most_bytes: int = MOST_BYTES) -> NDArray[Any]:
    """Return the numbers of an idx file as an array in the byte order of this machine.

    A file that is truncated, too long, of another format, or holds more than `most_bytes` of numbers raises
    `DataError`.
    """
    path = Path(path)
    with opened(path) as stream:
        return _read(path, stream, most_bytes)


def read_labelled(images: Path, labels: Path) -> Labelled:
    """Return the pictures and labels of two idx files; raise `DataError` unless there is one label per picture."""
    pictures, marks = read_idx(images), read_idx(labels)
    if pictures.ndim != 3 or pictures.dtype != np.uint8:
        raise DataError(f"{images}: expected pictures as bytes on 3 axes, found {pictures.dtype} on {pictures.ndim}")
    if marks.ndim != 1 or marks.dtype != np.uint8:
        raise DataError(f"{labels}: expected labels as bytes on 1 axis, found {marks.dtype} on {marks.ndim}")
    if len(pictures) != len(marks):
        raise DataError(f"{labels}: {len(marks):,} labels for the {len(pictures):,} pictures of {images}")
    if not len(pictures):
        raise DataError(f"{images}: the file has no pictures")
    return Labelled(pictures, marks)


def load_mnist(folder: Path) -> dict[str, Labelled]:
    """Return the splits "train" and "test" of a folder with the four files of MNIST.

    The four files have MNIST's usual names, such as train-images-idx3-ubyte, and may be gzipped (.gz).
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    return {
        part: read_labelled(_file(folder, name, "images", 3), _file(folder, name, "labels", 1))
        for part, name in _NAMES.items()
    }


def _file(folder: Path, part: str, what: str, axes: int) -> Path:
    names = [f"{part}-{what}{mark}idx{axes}-ubyte{end}" for mark in ("-", ".") for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: no file {names[0]} (or .gz)")


def _read(path: Path, stream: BufferedIOBase, most_bytes: int) -> NDArray[Any]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or not 1 <= magic[3] <= _MOST_AXES:
        raise DataError(f"{path}: not an idx file: it begins with {magic.hex(' ') or 'nothing'}, expected 00 00 08 03")
    header = stream.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise DataError(f"{path}: truncated in the header")
    shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
    dtype = np.dtype(_TYPES[magic[2]])
    expected = math.prod(shape) * dtype.itemsize
    sizes = "×".join(map(str, shape))
    if expected > most_bytes:
        raise DataError(f"{path}: {sizes} is {expected:,} bytes, more than the {most_bytes:,} allowed")
    # The content is read in chunks, so that a wrong header that states gigabytes does not allocate them.
    content = bytearray()
    while len(content) <= expected and (part := stream.read(min(1 << 24, expected + 1 - len(content)))):
        content += part
    if len(content) < expected:
        raise DataError(f"{path}: truncated: {sizes} needs {expected:,} bytes, found {len(content):,}")
    if len(content) > expected:
        raise DataError(f"{path}: goes on after the {expected:,} bytes of {sizes}")
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)
