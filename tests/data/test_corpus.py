"""Tests of corpora on disk: random access, constant memory, no incomplete files after an interruption."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from regard.data.data_files import DataError
from regard.data.text.corpus import encode, index, open_text
from regard.data.text.parallel_text import Limits, Tsv, TwoFiles

TEXTS = [("one", "一"), ("two 🐭 words", "两 个 词"), ("three", "三"), ("a b c d e f", "长")]


def rows(folder: Path) -> TwoFiles:
    source, target = folder / "a.en", folder / "a.zh"
    source.write_text("".join(f"{pair[0]}\n" for pair in TEXTS) + "\n", encoding="utf-8")
    target.write_text("".join(f"{pair[1]}\n" for pair in TEXTS) + "x\n", encoding="utf-8")
    return TwoFiles(source, target)


def test_any_pair_by_its_number(tmp_path):
    corpus = index(rows(tmp_path), tmp_path / "cache")
    assert len(corpus) == 4
    assert list(corpus) == TEXTS
    assert corpus[3] == corpus[-1] == TEXTS[3]
    assert corpus[1] == TEXTS[1]
    assert dict(corpus.report.skipped) == {"empty": 1}
    assert isinstance(corpus.offsets, np.memmap)
    for wrong in (4, -5):
        with pytest.raises(IndexError, match=f"pair {wrong} of a corpus of 4"):
            corpus[wrong]


def test_the_index_is_made_once_and_again_when_a_file_changes(tmp_path):
    first = index(rows(tmp_path), tmp_path / "cache")
    mark = first.directory / "pairs.bin"
    written = mark.stat().st_mtime_ns
    files = TwoFiles(tmp_path / "a.en", tmp_path / "a.zh")
    again = index(files, tmp_path / "cache")
    assert again.directory == first.directory
    assert mark.stat().st_mtime_ns == written
    assert list(open_text(again.directory)) == TEXTS
    assert len(index(files, tmp_path / "cache", limits=Limits(longest=3))) == 3
    with (tmp_path / "a.en").open("a") as more:
        more.write("five\n")
    with (tmp_path / "a.zh").open("a") as more:
        more.write("五\n")
    assert index(files, tmp_path / "cache")[4] == ("five", "五")


def test_a_failed_pass_leaves_nothing_behind(tmp_path):
    (tmp_path / "t.tsv").write_bytes(b"a\tb\n" * 5000 + b"c\n")
    with pytest.raises(DataError, match=r"t\.tsv:5001"):
        index(Tsv(tmp_path / "t.tsv"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(DataError, match="no such file"):
        index(Tsv(tmp_path / "none.tsv"), tmp_path / "cache")


def test_token_corpora_and_their_lengths(tmp_path):
    corpus = index(rows(tmp_path), tmp_path / "cache")

    def bytes_of(texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def length_of(texts: list[str]) -> list[list[int]]:
        return [[len(text)] * 2 for text in texts]

    tokens = encode(corpus, bytes_of, length_of, size=256, key="bytes", cache=tmp_path / "cache")
    assert len(tokens) == 4
    assert [bytes(source.tolist()).decode() for source, _ in tokens] == [source for source, _ in TEXTS]
    assert [target.tolist() for _, target in tokens] == [[1, 1], [5, 5], [1, 1], [1, 1]]
    assert tokens.lengths(0).tolist() == [len(source.encode()) for source, _ in TEXTS]
    assert tokens.lengths(1).tolist() == [2, 2, 2, 2]
    assert tokens[0][0].dtype == np.uint16
    large = encode(
        corpus, bytes_of, lambda texts: [[70_000] for _ in texts], size=70_001, key="x", cache=tmp_path / "c"
    )
    assert large[2][1].tolist() == [70_000]


def test_what_a_killed_pass_left_is_not_opened_and_goes_in_time(tmp_path):
    made = index(rows(tmp_path), tmp_path / "cache")
    draft = made.directory.with_name(f".{made.directory.name}-killed")
    young = made.directory.with_name(f".{made.directory.name}-young")
    made.directory.rename(draft)
    (draft / "pairs.bin").write_bytes(b"half")
    young.mkdir()
    os.utime(draft, (0, 0))
    again = index(TwoFiles(tmp_path / "a.en", tmp_path / "a.zh"), tmp_path / "cache")
    assert list(again) == TEXTS
    assert sorted((tmp_path / "cache").iterdir()) == sorted([again.directory, young])


def test_a_corpus_travels_to_other_processes(tmp_path):
    corpus = index(rows(tmp_path), tmp_path / "cache")
    assert list(pickle.loads(pickle.dumps(corpus))) == TEXTS


MEASURE = """
import json, resource, sys
from pathlib import Path
import numpy as np
from regard.data.text.corpus import index
from regard.data.text.parallel_text import TwoFiles
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
folder = Path(sys.argv[1])
before = peak()
corpus = index(TwoFiles(folder / "a.en", folder / "a.zh"), folder / "cache")
made = peak()
order = np.random.Generator(np.random.PCG64(0)).permutation(len(corpus))
length = sum(len(corpus[int(i)][0]) for i in order)
print(json.dumps([len(corpus), length, made - before, peak() - before]))
"""


@pytest.mark.process
def test_memory_stays_flat(tmp_path):
    count = 200_000
    line = "the quick brown fox jumps over the lazy dog and then sleeps for a very long time in the sun {}\n"
    with (tmp_path / "a.en").open("w") as source, (tmp_path / "a.zh").open("w") as target:
        for number in range(count):
            source.write(line.format(number))
            target.write(line.format(-number))
    size = sum((tmp_path / name).stat().st_size for name in ("a.en", "a.zh")) / 2**20
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    found, length, made, used = json.loads(done.stdout)
    assert found == count
    assert length == sum(len(line.format(number)) - 1 for number in range(count))
    # The corpus has more than 35 MiB on disk; in memory, only line offsets and a permutation (6 MiB) are held.
    assert size > 35
    assert made < 16
    assert used < 20
