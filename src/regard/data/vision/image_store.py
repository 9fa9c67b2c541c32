"""A cache on disk of decoded pictures of one size, which are read one by one in constant memory.

The file `pixels.bin` holds the pictures one after another, (3, height, width) bytes each. The file `rows.bin` holds one
row for each picture: a digest of its source (path, size and modification time of the image file) and a checksum of its
pixels. New pictures are appended to `pixels.bin` first and then to `rows.bin`. Therefore a process that was killed can
continue where it stopped, only changed files are decoded again, and several lists of pictures can share one store.
"""

import fcntl
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.data_files import DataError
from regard.data.vision.image_files import MOST_PIXELS, Pixels, decode

Progress = Callable[[int, int], None]
# Arrays of byte strings of 16 bytes. NumPy drops trailing zero bytes on both sides of a comparison, which stays exact.
Digests = NDArray[Any]

_VERSION = 1
_CHUNK = 64
_ROW = np.dtype([("source", "S16"), ("check", "<u4")])


@dataclass(frozen=True, eq=False)
class ImageStore:
    """Decoded pictures on disk: `store[i]` is picture i of `paths`, (3, height, width); created by `store_images`.

    `faults` maps the index of each file that could not be decoded to the reason; accessing such a picture raises
    `DataError`.
    """

    folder: Path
    size: tuple[int, int]
    paths: Sequence[Path]
    rows: NDArray[np.int64]  # the index of each picture in pixels.bin; -1 for a picture that could not be decoded
    checks: NDArray[np.uint32]
    faults: Mapping[int, str]
    decoded: int  # the number of pictures that were not in the store and were decoded when it was opened
    _descriptor: "_Descriptor" = field(repr=False)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> Pixels:
        """Return a copy of the picture with index `place` in `paths`.

        The picture is read from the file, not memory-mapped, so that it does not count as memory of the process later.
        """
        if not -len(self) <= place < len(self):
            raise IndexError(f"picture {place} of a store of {len(self)}")
        place %= len(self)
        if place in self.faults:
            raise DataError(self.faults[place])
        count = 3 * self.size[0] * self.size[1]
        content = os.pread(self._descriptor.number, count, int(self.rows[place]) * count)
        if len(content) != count or zlib.crc32(content) != self.checks[place]:
            raise DataError(f"{self.folder / 'pixels.bin'}: damaged at picture {place}; delete {self.folder}")
        return np.frombuffer(bytearray(content), np.uint8).reshape(3, *self.size)

    def __iter__(self) -> Iterator[Pixels]:
        return (self[place] for place in range(len(self)))

    def take(self, places: Sequence[int]) -> Pixels:
        """Return several pictures as one batch, (n, 3, height, width)."""
        batch = np.empty((len(places), 3, *self.size), np.uint8)
        for number, place in enumerate(places):
            batch[number] = self[place]
        return batch

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """Return the memory-mapped pixels.bin, (pictures in the file, 3, height, width), without verifying checksums.

        Picture i of the store is `pixels[rows[i]]`.
        """
        return np.memmap(self.folder / "pixels.bin", np.uint8, "r").reshape(-1, 3, *self.size)


class _Descriptor:
    """An open file, closed when the last store that uses it is deleted; it can be pickled for other processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = os.open(path, os.O_RDONLY)

    def __reduce__(self) -> tuple[type["_Descriptor"], tuple[Path]]:
        return _Descriptor, (self.path,)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def store_images(
    paths: Sequence[Path],
    cache: Path,
    *,
    size: tuple[int, int],
    fit: str = "crop",
    most_pixels: int = MOST_PIXELS,
    skip_faults: bool = False,
    progress: Progress = lambda done, total: None,
    threads: int = 2,
) -> ImageStore:
    """Return the pictures of these files at `size`, (height, width); pictures that are missing in `cache` are decoded.

    A file that cannot be decoded raises `DataError`; with `skip_faults` it is recorded in the store's `faults` instead.
    `progress` is called with the number of finished pictures and the total number. If two processes use the same cache,
    the second one waits until the first has decoded its pictures.
    """
    high, wide = size
    folder = Path(cache) / f"images-{high}x{wide}-{fit}-{_VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    # The digests are in an array, because a dictionary with an object for each picture would take most of the memory.
    wanted = np.fromiter((_digest(path) for path in paths), "S16", len(paths))
    opened = partial(_decoded, size=size, fit=fit, most_pixels=most_pixels)
    bad: dict[int, str] = {}
    decoded = 0
    with _alone(folder):
        missing = _first_of_each(wanted, np.flatnonzero(_rows_of(wanted, _rows(folder, 3 * high * wide)) < 0))
        progress(len(paths) - len(missing), len(paths))
        for places, results in _chunks(paths, missing, opened, threads):
            faults = {int(place): item for place, item in zip(places, results, strict=True) if isinstance(item, str)}
            good = [number for number, item in enumerate(results) if not isinstance(item, str)]
            decoded += _append(folder, wanted[places[good]], [results[number] for number in good])
            if faults and not skip_faults:
                raise DataError(next(iter(faults.values())))
            bad |= faults
            progress(len(paths) - len(missing) + decoded + len(bad), len(paths))
        known = _rows(folder, 3 * high * wide)
    rows = _rows_of(wanted, known)
    checks = np.append(known["check"], np.uint32(0))[rows]  # a missing picture has row -1, the index of the appended 0
    everywhere = {int(other): text for place, text in bad.items() for other in np.flatnonzero(wanted == wanted[place])}
    descriptor = _Descriptor(folder / "pixels.bin")
    return ImageStore(folder, size, paths, rows, checks, everywhere, decoded, descriptor)


def _rows_of(wanted: Digests, known: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each digest in `wanted` its row among the rows `known` of a store; -1 if it is missing."""
    if not len(known):
        return np.full(len(wanted), -1)
    order = np.argsort(known["source"])
    place = order[np.searchsorted(known["source"], wanted, sorter=order).clip(max=len(known) - 1)]
    return np.where(known["source"][place] == wanted, place, -1)


def _first_of_each(digests: Digests, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those indices in `places` at which a digest occurs for the first time, in order."""
    return places[np.sort(np.unique(digests[places], return_index=True)[1])]


def _digest(path: Path) -> bytes:
    """Return a digest, 16 bytes, of the path, the size and the modification time of an image file."""
    place = os.path.abspath(path)  # for a large store, resolving symbolic links would take most of the time
    try:
        known = os.stat(place)
        facts = f"{place}\n{known.st_size}\n{known.st_mtime_ns}"
    except OSError:
        facts = f"{place}\nmissing"
    return hashlib.blake2b(facts.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _decoded(path: Path, *, size: tuple[int, int], fit: str, most_pixels: int) -> Pixels | str:
    """Return the decoded picture, or the reason why it cannot be decoded."""
    try:
        return decode(path, size, fit=fit, most_pixels=most_pixels)
    except DataError as error:
        return str(error)


def _chunks(
    paths: Sequence[Path], missing: NDArray[np.int64], opened: Callable[[Path], Pixels | str], threads: int
) -> Iterator[tuple[NDArray[np.int64], list[Any]]]:
    """Yield the missing pictures in small chunks, as (indices, pictures or errors), decoded by several threads."""
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(0, len(missing), _CHUNK):
            places = missing[begin : begin + _CHUNK]
            yield places, list(pool.map(opened, [paths[place] for place in places]))


def _append(folder: Path, digests: Digests, pictures: Sequence[Pixels]) -> int:
    """Append pictures to pixels.bin and then their rows to rows.bin; return the number of appended pictures."""
    contents = [picture.tobytes() for picture in pictures]
    rows = np.empty(len(pictures), _ROW)
    rows["source"], rows["check"] = digests, [zlib.crc32(content) for content in contents]
    try:
        with (folder / "pixels.bin").open("ab") as pixels:
            pixels.writelines(contents)
        with (folder / "rows.bin").open("ab") as index:
            index.write(rows.tobytes())
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return len(contents)


def _rows(folder: Path, count: int) -> NDArray[Any]:
    """Return the rows of all pictures that are completely written.

    Incomplete data at the end of pixels.bin and rows.bin, left by a process that was killed while it wrote, is removed.
    """
    pixels, index = folder / "pixels.bin", folder / "rows.bin"
    for path in (pixels, index):
        path.touch()
    whole = min(pixels.stat().st_size // count, index.stat().st_size // _ROW.itemsize)
    for path, size in ((pixels, whole * count), (index, whole * _ROW.itemsize)):
        if path.stat().st_size != size:
            os.truncate(path, size)
    return np.fromfile(index, _ROW)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock for writing to the store; if the process is killed, the operating system releases the lock."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
