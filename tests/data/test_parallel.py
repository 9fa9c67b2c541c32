"""Tests of reading parallel text: errors name file and line, and faulty pairs are skipped and counted if allowed."""

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from regard.data.data_files import DataError
from regard.data.text.corpus import index
from regard.data.text.parallel_text import Jsonl, Limits, Tsv, TwoFiles, count_words, find_rows, load_pairs, read_pairs


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def two(folder: Path, source: str | bytes, target: str | bytes) -> TwoFiles:
    return TwoFiles(write(folder / "a.en", source), write(folder / "a.zh", target))


def test_two_files_line_by_line(tmp_path):
    pairs, report = load_pairs(two(tmp_path, "one\ntwo words\n", "一\n两 个 词"))
    assert pairs == [("one", "一"), ("two words", "两 个 词")]
    assert (report.read, report.kept, dict(report.skipped)) == (2, 2, {})


def test_gzip_is_known_by_its_bytes(tmp_path):
    rows = two(tmp_path, gzip.compress(b"a\nb\n"), "甲\n乙\n")
    assert load_pairs(rows)[0] == [("a", "甲"), ("b", "乙")]


def test_bom_crlf_and_odd_line_breaks(tmp_path):
    rows = two(tmp_path, b"\xef\xbb\xbfone\r\ntwo\xe2\x80\xa8half\x0bway\r\n", b"\xef\xbb\xbf\xe4\xb8\x80\r\nzwei \r\n")
    assert load_pairs(rows)[0] == [("one", "一"), ("two\u2028half\x0bway", "zwei")]


def test_empty_lines_are_skipped_and_counted(tmp_path):
    pairs, report = load_pairs(two(tmp_path, "a\n\n  \nd\n", "1\n2\n\n4\n"))
    assert pairs == [("a", "1"), ("d", "4")]
    assert (report.read, report.kept, dict(report.skipped)) == (4, 2, {"empty": 2})
    assert str(report) == "4 lines read, 2 pairs kept; skipped: 2 empty"


def test_blank_lines_at_the_end_of_one_file_are_no_disagreement(tmp_path):
    assert len(load_pairs(two(tmp_path, "a\nb\n\n\n", "1\n2\n"))[0]) == 2


@pytest.mark.parametrize(
    ("source", "target", "shorter", "longer"),
    [
        ("a\nb\nc\nd\n", "1\n2\n", "a.zh:2", "a.en goes on to line 4"),
        ("a\n", "1\n\n3\n", "a.en:1", "a.zh goes on to line 3"),
    ],
)
def test_misaligned_files_are_an_error_with_both_places(tmp_path, source, target, shorter, longer):
    with pytest.raises(DataError) as caught:
        load_pairs(two(tmp_path, source, target))
    assert f"{tmp_path}/{shorter}: the file ends here" in str(caught.value)
    assert longer in str(caught.value)


def test_bad_utf8_names_file_line_and_byte(tmp_path):
    rows = two(tmp_path, "fine\nfine\n", b"gut\nschlecht \xff\n")
    with pytest.raises(DataError, match=r"a\.zh:2: not UTF-8: byte 0xff at byte 10"):
        load_pairs(rows)


def test_utf16_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a\.en:1: the file is UTF-16"):
        load_pairs(two(tmp_path, "text\n".encode("utf-16"), "text\n"))


def test_a_damaged_gzip_names_the_line(tmp_path):
    # Pseudo-random numbers compress little, so that the truncated gzip file ends in the middle of the lines.
    text = "".join(f"{number * 7919 % 104729}\n" for number in range(20000)).encode()
    rows = two(tmp_path, gzip.compress(text)[:-3000], text)
    with pytest.raises(DataError, match=r"a\.en:\d\d+: the gzip file is damaged"):
        load_pairs(rows)


def test_empty_and_missing_files_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"a\.en and .*a\.zh: the files are empty"):
        load_pairs(two(tmp_path, "", ""))
    with pytest.raises(DataError, match=r"t\.tsv: the file is empty"):
        load_pairs(Tsv(write(tmp_path / "t.tsv", "")))
    with pytest.raises(DataError, match=r"none\.tsv: cannot be read: No such file"):
        load_pairs(Tsv(tmp_path / "none.tsv"))
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        load_pairs(Tsv(tmp_path))
    with pytest.raises(DataError, match=r"no pair is left \(2 lines read, 0 pairs kept; skipped: 2 empty\)"):
        load_pairs(two(tmp_path, "\n\n", "a\nb\n"))


def test_limits_by_length_and_ratio(tmp_path):
    rows = two(tmp_path, "a b c\na\na b c d e f\nb c\n", "一二三\na b c d\na b c d e f\nb\n")
    pairs, report = load_pairs(rows, limits=Limits(shortest=2, longest=5, ratio=2.0))
    assert pairs == [("a b c", "一二三")]
    assert dict(report.skipped) == {"too long": 1, "too short": 2}
    _, report = load_pairs(rows, limits=Limits(ratio=2.0))
    assert dict(report.skipped) == {"ratio": 1}
    with pytest.raises(ValueError, match="1 ≤ shortest ≤ longest"):
        Limits(shortest=5, longest=4)
    with pytest.raises(ValueError, match="ratio is of the longer to the shorter"):
        Limits(ratio=0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("나는 학교에 갑니다", 3),  # Korean text is split at spaces, Chinese and Japanese text into characters
        ("我去学校。", 5),
        ("私は学校へ行く", 7),
        ("時々 二〇二六", 6),
        ("𠮷野家", 3),
        ("Tom追Jerry", 3),
    ],
)
def test_words_of_scripts_with_and_without_spaces(text, words):
    assert count_words(text) == words


def test_tsv_columns_header_and_short_rows(tmp_path):
    path = write(tmp_path / "t.tsv", "en\tzh\na\t甲\n\nb\t乙\n")
    pairs, report = load_pairs(Tsv(path, header=True))
    assert pairs == [("a", "甲"), ("b", "乙")]
    assert dict(report.skipped) == {"empty": 1}
    assert dict(report.ignored) == {}
    assert load_pairs(Tsv(write(tmp_path / "u.tsv", "x\ty\tz\n"), columns=(2, 0)))[0] == [("z", "x")]
    with pytest.raises(DataError, match=r"t\.tsv:2: expected at least 3 columns parted by tabs, found 2"):
        load_pairs(Tsv(path, columns=(0, 2), header=True))


def test_other_columns_are_counted_and_reported(tmp_path):
    path = write(tmp_path / "t.tsv", "a\t甲\tCC-BY\tx\n\nb\t乙\t\t\n\t丙\tCC-BY\tx\n")
    pairs, report = load_pairs(Tsv(path))
    assert pairs == [("a", "甲"), ("b", "乙")]
    assert dict(report.ignored) == {"columns 3 and 4": 3}
    assert str(report) == "4 lines read, 2 pairs kept; skipped: 2 empty; ignored: columns 3 and 4 of 3 lines"
    assert dict(load_pairs(Tsv(path, columns=(0, 3)))[1].ignored) == {"columns 2 and 3": 3}
    assert str(index(Tsv(path), tmp_path / "cache").report) == str(report)
    assert str(index(Tsv(path), tmp_path / "cache").report) == str(report), "as it was kept"


@pytest.mark.parametrize(
    ("rows", "line", "fault"),
    [
        ("a\tb\tc\na\tb\n", 2, "expected 3 columns parted by tabs as in line 1, found 2"),
        ("a\tb\n\na\tb\tc\n", 3, "expected 2 columns parted by tabs as in line 1, found 3"),
        ("\na\tb\na\tb\t\n", 3, "expected 2 columns parted by tabs as in line 2, found 3"),
        ("a\tb\na\n", 2, "expected at least 2 columns parted by tabs, found 1"),
    ],
)
def test_a_row_of_another_width_is_an_error(tmp_path, rows, line, fault):
    path = write(tmp_path / "t.tsv", rows)
    with pytest.raises(DataError, match=rf"t\.tsv:{line}: {fault}$"):
        load_pairs(Tsv(path))
    with pytest.raises(DataError, match=rf"t\.tsv:{line}: {fault}$"):
        index(Tsv(path), tmp_path / "cache")


def test_an_empty_cell_is_an_empty_side(tmp_path):
    path = write(tmp_path / "t.tsv", "\tz\na\tb\n")
    pairs, report = load_pairs(Tsv(path))
    assert pairs == [("a", "b")]
    assert dict(report.skipped) == {"empty": 1}


def test_jsonl_fields_and_faults(tmp_path):
    lines = [{"source": "a", "target": "甲", "id": 1}, {"source": "b\nc", "target": "乙"}]
    path = write(tmp_path / "d.jsonl", "\n".join(json.dumps(line) for line in lines))
    assert load_pairs(Jsonl(path))[0] == [("a", "甲"), ("b\nc", "乙")]
    path = write(tmp_path / "e.jsonl", '{"en": "a", "de": "b"}\n')
    assert load_pairs(Jsonl(path, fields=("de", "en")))[0] == [("b", "a")]
    with pytest.raises(DataError, match=r"e\.jsonl:1: expected a text in the field 'source'; the object has de, en"):
        load_pairs(Jsonl(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"source": "a", ', "not JSON: .* at character 1[67]"),
        ('["a", "b"]', "expected a JSON object, found list"),
        ('{"source": 3, "target": "b"}', "expected a text in the field 'source'"),
        ('{"source": "a", "target": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_jsonl_names_the_line_of_a_fault(tmp_path, line, message):
    path = write(tmp_path / "d.jsonl", '{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"d\.jsonl:2: " + message):
        load_pairs(Jsonl(path))


def test_formats_are_found_by_number_and_suffix():
    assert find_rows([Path("a.tsv.gz")]) == Tsv(Path("a.tsv.gz"))
    assert find_rows([Path("a.jsonl")]) == Jsonl(Path("a.jsonl"))
    assert find_rows([Path("a.en"), Path("a.de")]) == TwoFiles(Path("a.en"), Path("a.de"))
    with pytest.raises(DataError, match=r"a\.parquet: one file must be \.tsv or \.jsonl"):
        find_rows([Path("a.parquet")])
    with pytest.raises(DataError, match="expected two files or one, found 3"):
        find_rows([Path("a"), Path("b"), Path("c")])


def test_reading_is_lazy(tmp_path):
    rows = two(tmp_path, b"a\n\xff\n", "1\n2\n")
    found = read_pairs(rows, Counter())
    assert next(found) == ("a", "1")
    with pytest.raises(DataError, match=r"a\.en:2"):
        next(found)


@pytest.mark.parametrize("words", [3, 100])
def test_a_line_of_too_many_characters_is_too_long(tmp_path, words):
    most = 100 * words
    rows = two(tmp_path, f"a\n{'x' * most}\n{'x' * (most + 1)}\nb\n", f"1\n{'y' * most}\n2\n{'y' * (most + 1)}\n")
    pairs, report = load_pairs(rows, limits=Limits(longest=words))
    assert pairs == [("a", "1"), ("x" * most, "y" * most)]
    assert dict(report.skipped) == {"too long": 2}
    assert len(load_pairs(rows)[0]) == 4


def jsonl(*pairs: tuple[str, str]) -> str:
    return "\n".join(json.dumps({"source": source, "target": target}) for source, target in pairs)


def three(folder: Path, kind: str, text: str) -> TwoFiles | Tsv | Jsonl:
    """Write three sentence pairs, the second with the given text, to files of this kind; return their reader."""
    table = f"a\t1\nc\t{text}\nb\t3"
    match kind:
        case "source":
            return two(folder, f"a\n{text}\nb", "1\n2\n3")
        case "target":
            return two(folder, "a\n2\nb", f"1\n{text}\n3")
        case "jsonl":
            return Jsonl(write(folder / "t.jsonl", jsonl(("a", "1"), (text, "2"), ("b", "3"))))
        case "gzip":
            return Tsv(write(folder / "t.tsv", gzip.compress(table.encode())))
    return Tsv(write(folder / "t.tsv", table))


@pytest.mark.parametrize("kind", ["source", "target", "tsv", "jsonl", "gzip"])
@pytest.mark.parametrize("megabytes", [1, 3])
def test_a_line_beyond_all_bounds_is_never_held(tmp_path, kind, megabytes):
    rows = three(tmp_path, kind, "x" * (megabytes << 20))
    name = rows.files[kind == "target"].name
    pairs, report = load_pairs(rows, limits=Limits(longest=100))
    assert pairs == [("a", "1"), ("b", "3")]
    assert dict(report.skipped) == {"too long": 1}
    with pytest.raises(DataError, match=rf"{name}:2: a line of more than 1,048,576 bytes$"):
        load_pairs(rows)


def test_a_long_line_is_passed_over_in_little_memory(tmp_path):
    rows = Tsv(write(tmp_path / "t.tsv", b"a\tb\n" + b"x" * 30_000_000 + b"\tb\nc\td\n"))
    tracemalloc.start()
    try:
        assert load_pairs(rows, limits=Limits(longest=100))[0] == [("a", "b"), ("c", "d")]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8e6
