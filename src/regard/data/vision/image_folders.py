"""Finds the pictures that a data file refers to, and the data files for training, validation and test."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from regard.data.data_files import DataError
from regard.data.vision.image_files import SUFFIXES

PARTS = ("train", "valid", "test")
# The file names, without suffix, under which each split of a data set is searched.
NAMES = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}
# The largest number of cached file names. Adjacent entries often name the same picture, so a small cache is enough, and
# the limit bounds its memory for large data sets.
_REMEMBERED = 4096
_FOLDERS = ("images", "Images", "Flicker8k_Dataset", "Flickr8k_Dataset")


class ImageFolders:
    """Finds picture files by name in several folders; recent results are cached."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._known: dict[str, str | None] = {}

    @classmethod
    def beside(cls, folder: Path) -> "ImageFolders":
        """Return an object that searches for pictures in subfolders of `folder`, such as `images`, then in `folder`."""
        return cls([*(folder / name for name in _FOLDERS if (folder / name).is_dir()), folder])

    def find(self, name: str) -> Path | None:
        """Return the path of the picture with this name, or None; `name` may lack the suffix."""
        if name not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[name] = next(filter(os.path.isfile, self._candidates(name)), None) if name else None
        path = self._known[name]
        return None if path is None else Path(path)

    def _candidates(self, name: str) -> Iterator[str]:
        for folder in self.folders:
            yield os.path.join(folder, name)
            if not os.path.splitext(name)[1]:
                yield from (os.path.join(folder, f"{name}{suffix}") for suffix in (".png", ".jpg", ".jpeg"))

    def images(self) -> Iterator[Path]:
        """Yield the picture files of the first folder, recognised by their suffix, without storing their list."""
        with os.scandir(self.folders[0]) as entries:
            yield from (Path(entry.path) for entry in entries if os.path.splitext(entry.name)[1].lower() in SUFFIXES)

    def __str__(self) -> str:
        return " or ".join(map(str, self.folders))


def part_files(path: Path, name: str, suffixes: Sequence[str]) -> dict[str, Path]:
    """Return the data file of each split ("train", "valid", "test") at `path`.

    A single file is the split "train". A folder has one file for each split, with the name of the split, or one called
    `name`, which is the split "train". The file names end in one of `suffixes`, optionally followed by .gz.
    """
    known = [*suffixes, *(f"{suffix}.gz" for suffix in suffixes)]
    if path.is_file():
        if not path.name.endswith(tuple(known)):
            raise DataError(f"{path}: the name must end in {' or '.join(suffixes)} (or .gz of them)")
        return {"train": path}
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")

    def first(stems: Sequence[str]) -> Path | None:
        return next(
            (path / f"{stem}{end}" for stem in stems for end in known if (path / f"{stem}{end}").is_file()), None
        )

    files = {part: file for part in PARTS if (file := first(NAMES[part]))}
    if "train" not in files and (file := first([name])):
        files["train"] = file
    if "train" not in files and "test" not in files:
        wanted = " or ".join(f"{stem}{suffix}" for stem in ("train", name) for suffix in suffixes)
        raise DataError(f"{path}: the folder has no {wanted}")
    return files
