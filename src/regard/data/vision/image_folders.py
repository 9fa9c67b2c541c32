"""The folders with the pictures of a data file, and the files of each part of the data."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from regard.data.data_files import DataError
from regard.data.vision.image_files import SUFFIXES

PARTS = ("train", "valid", "test")
# Common names of the parts.
NAMES = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}
_REMEMBERED = 4096  # size of the cache: enough for the captions of one picture, bounded for large data
_FOLDERS = ("images", "Images", "Flicker8k_Dataset", "Flickr8k_Dataset")


class ImageFolders:
    """Finds pictures by their names in some folders; recent names are cached."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._known: dict[str, str | None] = {}

    @classmethod
    def beside(cls, folder: Path) -> "ImageFolders":
        """Return the folder of pictures in a folder of data, and that folder itself."""
        return cls([*(folder / name for name in _FOLDERS if (folder / name).is_dir()), folder])

    def find(self, name: str) -> Path | None:
        """Return the file of that name; its suffix is optional."""
        if name not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[name] = next(filter(os.path.isfile, self._candidates(name)), None) if name else None
        found = self._known[name]
        return None if found is None else Path(found)

    def _candidates(self, name: str) -> Iterator[str]:
        for folder in self.folders:
            yield os.path.join(folder, name)
            if not os.path.splitext(name)[1]:
                yield from (os.path.join(folder, f"{name}{suffix}") for suffix in (".png", ".jpg", ".jpeg"))

    def images(self) -> Iterator[Path]:
        """Iterate over the pictures in the first of the folders, by suffix, without storing the listing."""
        with os.scandir(self.folders[0]) as entries:
            yield from (Path(entry.path) for entry in entries if os.path.splitext(entry.name)[1].lower() in SUFFIXES)

    def __str__(self) -> str:
        return " or ".join(map(str, self.folders))


def part_files(path: Path, name: str, suffixes: Sequence[str]) -> dict[str, Path]:
    """Return the data files of a path by part: a file is "train"; a folder has a file per part, or one named `name`."""
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
