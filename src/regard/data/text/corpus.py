"""Parallel text larger than memory: read and checked once, then accessed pair by pair in constant memory.

The first pass writes the pairs that are not skipped into one file (`pairs.bin`), and their offsets into another
(`offsets.npy`), which is memory-mapped. The pairs are read with `pread`, not memory-mapped, so that the pages read do
not count as memory of the process.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regard.data.checksums import check, write_checksums
from regard.data.data_files import DataError
from regard.data.text.parallel_text import EVERYTHING, Couple, Limits, Report, Rows, read_pairs, report

Ids = NDArray[np.integer]
_VERSION = 1
_CHUNK = 1 << 16
_CHARACTERS = 1 << 19  # a list of texts is encoded as soon as it has this number of characters
_ABANDONED = 24 * 3600


@dataclass(frozen=True, eq=False)
class TextCorpus:
    """Pairs of sentences on disk: `corpus[i]` is (source, target), `len(corpus)` is the number of pairs.

    The function `index` creates a `TextCorpus`; `report` counts the lines read and the pairs kept and skipped.
    """

    directory: Path
    offsets: NDArray[np.int64]
    report: Report
    _file: "_File"

    def __len__(self) -> int:
        return len(self.offsets) // 2

    def __getitem__(self, position: int) -> Couple:
        source, target = _read(self._file, self.offsets, _place(position, len(self)))
        return source.decode("utf-8"), target.decode("utf-8")

    def __iter__(self) -> Iterator[Couple]:
        return (self[position] for position in range(len(self)))


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """Pairs of sentences as token numbers on disk: `corpus[i]` is (source, target), each an array.

    The function `encode` creates a `TokenCorpus`.
    """

    directory: Path
    offsets: NDArray[np.int64]
    dtype: np.dtype[np.integer]
    _file: "_File"

    def __len__(self) -> int:
        return len(self.offsets) // 2

    def __getitem__(self, position: int) -> tuple[Ids, Ids]:
        source, target = _read(self._file, self.offsets, _place(position, len(self)))
        return np.frombuffer(source, self.dtype), np.frombuffer(target, self.dtype)

    def __iter__(self) -> Iterator[tuple[Ids, Ids]]:
        return (self[position] for position in range(len(self)))

    def lengths(self, side: int) -> NDArray[np.int32]:
        """Return the number of tokens of each source (`side` 0) or target (`side` 1), as an array in memory."""
        starts, ends = self.offsets[side:-1:2], self.offsets[side + 1 :: 2]
        size = self.dtype.itemsize
        lengths = np.empty(len(self), np.int32)
        for first in range(0, len(self), _CHUNK):
            part = slice(first, first + _CHUNK)
            lengths[part] = (ends[part] - starts[part]) // size
        return lengths


def index(rows: Rows, cache: Path, *, limits: Limits = EVERYTHING) -> TextCorpus:
    r"""Return the sentence pairs of the reader `rows` as a `TextCorpus`, stored in the folder `cache`.

    The first call creates the corpus; later calls open the stored one, as long as the files that `rows` reads are
    unchanged. An incomplete corpus is never opened: if the process was killed while it was written, it is created
    again.

    >>> from regard.data.text.parallel_text import Tsv
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.tsv").write_text("Tom sleeps\t汤姆睡觉\n\nTom laughs\t汤姆笑\n", encoding="utf-8")
    >>> corpus = index(Tsv(folder / "a.tsv"), folder / "cache")
    >>> corpus[1], str(corpus.report)
    (('Tom laughs', '汤姆笑'), '3 lines read, 2 pairs kept; skipped: 1 empty')
    """
    known = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in map(_present, rows.files)]
    # False is the value of a former option, which is still hashed, so that the names of existing cache folders stay
    # valid.
    name = _name("text", known, repr(rows), asdict(limits), False)

    def write(folder: Path) -> None:
        tally: Counter[str] = Counter()
        pairs = read_pairs(rows, tally, limits=limits)
        _store(folder, ((source.encode(), target.encode()) for source, target in pairs))
        (folder / "report.json").write_text(json.dumps(asdict(report(tally))), encoding="utf-8")

    return open_text(_cached(Path(cache), name, write))


def open_text(directory: Path) -> TextCorpus:
    """Return the text corpus stored in a directory, which must be complete."""
    counts = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    return TextCorpus(directory, _offsets(directory), Report(**counts), _File(directory / "pairs.bin"))


Encode = Callable[[list[str]], Sequence[Sequence[int]]]


def encode(
    corpus: TextCorpus,
    source: Encode,
    target: Encode,
    *,
    size: int,
    key: str,
    cache: Path,
    by_content: bool = False,
) -> TokenCorpus:
    """Return a corpus of texts as a corpus of token numbers, created in the folder `cache` at the first call.

    `source` and `target` map a list of texts to lists of token numbers below `size`; `key` is a hash of these two
    tokenizers. With `by_content` the stored corpus is identified by the texts instead of by their files' paths and
    times, so that a random encoding is reused if the files were copied or touched.
    """
    dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
    name = _name("tokens", _digest(corpus) if by_content else corpus.directory.name, key, str(dtype))

    def write(folder: Path) -> None:
        _store(folder, _encoded(corpus, source, target, dtype))
        (folder / "dtype.json").write_text(json.dumps(dtype.name), encoding="utf-8")

    folder = _cached(Path(cache), name, write)
    return TokenCorpus(folder, _offsets(folder), dtype, _File(folder / "pairs.bin"))


def _digest(corpus: TextCorpus) -> str:
    with (corpus.directory / "pairs.bin").open("rb") as pairs:
        return hashlib.file_digest(pairs, "sha256").hexdigest()


def _encoded(
    corpus: TextCorpus, source: Encode, target: Encode, dtype: np.dtype[np.integer]
) -> Iterator[tuple[bytes, bytes]]:
    for chunk in _chunks(corpus):
        left, right = source([pair[0] for pair in chunk]), target([pair[1] for pair in chunk])
        for source_ids, target_ids in zip(left, right, strict=True):
            yield np.asarray(source_ids, dtype).tobytes(), np.asarray(target_ids, dtype).tobytes()


def _chunks(pairs: Iterable[Couple]) -> Iterator[list[Couple]]:
    """Yield the pairs in lists of at most 1,024, fewer for long texts.

    The lists are short because a signal, such as Ctrl-C, is handled only after all texts of one list are encoded.
    """
    chunk: list[Couple] = []
    characters = 0
    for pair in pairs:
        chunk.append(pair)
        characters += len(pair[0]) + len(pair[1])
        if len(chunk) == 1024 or characters >= _CHARACTERS:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk


def _store(folder: Path, pairs: Iterator[tuple[bytes, bytes]]) -> None:
    """Write the sentences of all pairs one after the other to pairs.bin, and to offsets.npy a 0 and the byte offset at
    which each sentence ends."""
    end = 0
    with (folder / "pairs.bin").open("wb") as data, (folder / "ends.raw").open("wb") as ends:
        ends.write(np.int64(0).tobytes())
        while chunk := list(islice(pairs, 4096)):
            sides = list(chain.from_iterable(chunk))
            data.write(b"".join(sides))
            places = end + np.cumsum([len(side) for side in sides], dtype=np.int64)
            ends.write(places.tobytes())
            end = int(places[-1])
    _as_array(folder / "ends.raw", folder / "offsets.npy")


def _as_array(raw: Path, path: Path) -> None:
    """Convert a file of raw 64-bit integers to a .npy file, which can be memory-mapped."""
    count = raw.stat().st_size // 8
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.int64)), "fortran_order": False, "shape": (count,)}
    with path.open("wb") as stream, raw.open("rb") as numbers:
        np.lib.format.write_array_header_1_0(stream, header)
        shutil.copyfileobj(numbers, stream)
    raw.unlink()


def _offsets(directory: Path) -> NDArray[np.int64]:
    return np.load(directory / "offsets.npy", mmap_mode="r")


class _File:
    """A file for random access by several threads and forked processes at once; it has no shared read position."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)

    def part(self, start: int, end: int) -> bytes:
        return os.pread(self._descriptor, end - start, start)

    def __reduce__(self) -> tuple[type["_File"], tuple[Path]]:
        return _File, (self._path,)

    def __del__(self) -> None:
        os.close(self._descriptor)


def _read(file: _File, offsets: NDArray[np.int64], position: int) -> tuple[bytes, bytes]:
    start, middle, end = (int(place) for place in offsets[2 * position : 2 * position + 3])
    both = file.part(start, end)
    return both[: middle - start], both[middle - start :]


def _place(position: int, count: int) -> int:
    if not -count <= position < count:
        raise IndexError(f"pair {position} of a corpus of {count}")
    return position % count


def _present(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    return path


def _name(kind: str, *facts: object) -> str:
    return f"{kind}-{hashlib.sha256(json.dumps([_VERSION, *facts]).encode()).hexdigest()[:20]}"


def _cached(cache: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return the folder `name` in the cache; if it does not exist, it is created by `write(folder)`.

    A new cache folder is written under a temporary name and renamed when it is complete.
    """
    folder = cache / name
    if folder.is_dir():
        check(folder)
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Temporary folders remain if a process is killed. A recent temporary folder may belong to a process that is still
    # writing.
    for old in cache.glob(f".{name}-*"):
        if time.time() - old.stat().st_mtime > _ABANDONED:
            shutil.rmtree(old, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        write(draft)
        write_checksums(draft)
        draft.rename(folder)
    except OSError:
        # The rename fails if another process has created the same folder meanwhile; both folders have the same
        # contents.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
