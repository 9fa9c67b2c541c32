"""Speed and memory of the image loaders: pictures with captions, with questions, and idx files. Prints the table of
docs/vqa.md.

python benchmarks/images.py                              # 1,000, 10,000 and 100,000 pictures of 128 × 96 pixels
python benchmarks/images.py --count 2000 --width 500     # larger pictures, fewer of them
python benchmarks/images.py --json images.json           # the figures as JSON too

For each count a temporary folder gets that number of JPEG and PNG files, copies of 200 distinct ones. Each row of the
table is measured in a separate process. Memory is the peak of this process above its use after the imports, so it
includes the lists of files. Reading is in random order, in batches of 64. The files were just written: the first pass
reads them from the system's page cache, not from the disk.
"""

import argparse
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
from PIL import Image

from regard.data.vision.captions import load_captions
from regard.data.vision.idx import read_labelled
from regard.data.vision.image_questions import load_image_questions
from regard.data.vision.image_store import ImageStore, store_images

DIFFERENT = 200
BATCH = 64


def encoded(width: int) -> list[tuple[str, bytes]]:
    """Return suffixes and contents of distinct picture files: four JPEG for each PNG, smooth colours with some
    noise."""
    draw = np.random.default_rng(1)
    files = []
    for number in range(DIFFERENT):
        coarse = Image.fromarray(draw.integers(0, 256, (6, 8, 3), np.uint8))
        smooth = np.asarray(coarse.resize((width, width * 3 // 4), Image.Resampling.BICUBIC), np.int16)
        picture = np.clip(smooth + draw.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)
        suffix, kind = (".png", "PNG") if number % 5 == 4 else (".jpg", "JPEG")
        with io.BytesIO() as file:
            Image.fromarray(picture).save(file, kind)
            files.append((suffix, file.getvalue()))
    return files


def write(folder: Path, count: int, width: int) -> None:
    """Write pictures, their captions as TSV, questions as JSONL and as one JSON array, and an idx file."""
    files = encoded(width)
    (folder / "images").mkdir()
    names = [f"{number:06}{files[number % DIFFERENT][0]}" for number in range(count)]
    for number, name in enumerate(names):
        (folder / "images" / name).write_bytes(files[number % DIFFERENT][1])
        if not number % 500:
            progress(f"{count:,} pictures: {number:,} written")
    (folder / "captions.tsv").write_text("".join(f"{name}\tA picture .\n" for name in names), encoding="utf-8")
    questions = [{"image": name, "question": "What colour is it?", "answer": "red"} for name in names]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in questions), encoding="utf-8")
    (folder / "array.json").write_text(json.dumps(questions), encoding="utf-8")
    for name, axes in (("pictures", (count, 28, 28)), ("labels", (count,))):
        header = bytes([0, 0, 8, len(axes)]) + np.array(axes, ">u4").tobytes()
        (folder / f"{name}.idx").write_bytes(header + bytes(int(np.prod(axes))))


def memory(name: str) -> float:
    """Return MiB of this process: "VmRSS" now, "VmHWM" at its peak; NaN if the system does not report them."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name)), float("nan"))


def stored(folder: Path, size: int) -> ImageStore:
    """Return the pictures of the captions file; pictures that are not in the cache are decoded."""
    paths = [one.image for one in load_captions(folder).train]
    return store_images(paths, folder / "cache", size=(size, size))


def first(folder: Path, size: int) -> int:
    """Run the first pass: every picture is decoded."""
    return stored(folder, size).decoded


def cached(folder: Path, size: int) -> int:
    """Run the second pass: every picture comes from the cache."""
    store = stored(folder, size)
    assert not store.decoded
    return len(store)


def read(folder: Path, size: int) -> int:
    """Run the second pass, and then load every picture once, as in an epoch of training."""
    store = stored(folder, size)
    order = list(range(len(store)))
    random.Random(1).shuffle(order)
    for start in range(0, len(order), BATCH):
        store.take(order[start : start + BATCH])
    return len(store)


def captions(folder: Path, size: int) -> int:
    """Load the captions with the paths of their pictures; return their number."""
    return len(load_captions(folder).train)


def questions(folder: Path, size: int) -> int:
    """Load questions, one object per line."""
    return len(load_image_questions(folder / "questions.jsonl").train)


def array(folder: Path, size: int) -> int:
    """Load questions, all in one JSON array."""
    return len(load_image_questions(folder / "array.json").train)


def captioning(folder: Path, size: int) -> int:
    """Load all training data of captioning; the pictures come from the cache."""
    from regard.tasks.captioning.config import CaptioningConfig, DataSettings
    from regard.tasks.captioning.files import make_material

    config = CaptioningConfig(data=DataSettings(files=(folder,), picture=size))
    return sum(1 for _ in make_material(config, folder / "cache", None, lambda text: None).records)


def vqa(folder: Path, size: int) -> int:
    """Load all training data of visual question answering; the pictures come from the cache."""
    from regard.tasks.vqa.config import DataSettings, VqaConfig
    from regard.tasks.vqa.material import make_material

    config = VqaConfig(data=DataSettings(files=(folder / "questions.jsonl",), picture=size))
    return sum(1 for _ in make_material(config, folder / "cache", None, lambda text: None).records)


def idx(folder: Path, size: int) -> int:
    """Load pictures of 28 × 28 bytes as an array."""
    return len(read_labelled(folder / "pictures.idx", folder / "labels.idx"))


STAGES: dict[str, Callable[[Path, int], int]] = {
    "captions, TSV": captions,
    "questions, JSONL": questions,
    "questions, JSON array": array,
    "pictures, first time": first,
    "pictures, cached": cached,
    "pictures, cached and all read": read,
    "captioning: records, all read": captioning,
    "vqa: records, all read": vqa,
    "idx, 28 × 28": idx,
}


def measured(stage: str, folder: Path, size: int) -> dict[str, Any]:
    """Measure one row of the table in this process; return the seconds and the peak memory of this row."""
    import regard.tasks.captioning.files
    import regard.tasks.vqa.material  # noqa: F401

    before, start = memory("VmRSS"), time.perf_counter()
    count = STAGES[stage](folder, size)
    seconds = time.perf_counter() - start
    extra = max(0.0, memory("VmHWM") - before)
    return {"stage": stage, "count": count, "seconds": round(seconds, 3), "extra_mib": round(extra, 1)}


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, nargs="+", default=[1000, 10_000, 100_000], help="pictures")
    parser.add_argument("--width", type=int, default=128, help="of the files, in pixels; the height is three quarters")
    parser.add_argument("--size", type=int, default=48, help="side at which pictures are cached")
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for count in chosen.count:
        with tempfile.TemporaryDirectory() as place:
            write(Path(place), count, chosen.width)
            for stage in STAGES:
                progress(f"{count:,} pictures: {stage}")
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    figures.append(pool.submit(measured, stage, Path(place), chosen.size).result())
    progress("")
    names = " | ".join(f"{count:,}" for count in chosen.count)
    for title, figure in (
        ("pictures a second", lambda row: f"{row['count'] / row['seconds']:,.0f}"),
        ("peak extra memory, MiB", lambda row: f"{row['extra_mib']:.0f}"),
    ):
        print(f"\n| {title} | {names} |\n|---|{'--:|' * len(chosen.count)}")
        for stage in STAGES:
            cells = " | ".join(figure(row) for row in figures if row["stage"] == stage)
            print(f"| {stage} | {cells} |")
    if chosen.json:
        content = {"width": chosen.width, "size": chosen.size, "figures": figures}
        chosen.json.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
