"""Tests of reading lists of recordings with transcripts: file layouts and error messages."""

import json

import pytest

from regard.data.audio.transcripts import load_transcripts
from regard.data.data_files import DataError


def sounds(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def test_a_tsv_with_a_header_and_sounds_beside(tmp_path):
    sounds(tmp_path, "a.wav", "b.flac", "c.wav")
    (tmp_path / "transcripts.tsv").write_text("path\ttext\na.wav\tOne two\nb\tthree\n")
    found = load_transcripts(tmp_path)
    assert [(one.sound.name, one.text) for one in found.train] == [("a.wav", "One two"), ("b.flac", "three")]
    assert found.train[1].where == f"{tmp_path / 'transcripts.tsv'}:3"
    assert str(found.report) == "2 lines read, 2 pairs kept; skipped: 1 sound without transcript"
    assert found.files == (tmp_path / "transcripts.tsv",)


def test_parts_of_json_lines_with_times(tmp_path):
    sounds(tmp_path / "clips", "a.wav", "b.wav")
    for part, name in (("train", "a"), ("test", "b")):
        row = {"sound": f"{name}.wav", "text": "one two", "times": [[0, 0.5], [0.6, 1]]}
        (tmp_path / f"{part}.jsonl").write_text(json.dumps(row) + "\n")
    found = load_transcripts(tmp_path)
    assert [one.times for one in (*found.train, *found.test)] == [((0.0, 0.5), (0.6, 1.0))] * 2
    assert found.valid == ()


def test_librispeech_as_it_is_unpacked(tmp_path):
    for part in ("train-clean-100", "dev-clean", "test-clean"):
        chapter = tmp_path / "LibriSpeech" / part / "19" / "198"
        sounds(chapter, "19-198-0000.flac", "19-198-0001.flac")
        (chapter / "19-198.trans.txt").write_text("19-198-0000 NORTHANGER ABBEY\n19-198-0001 THIS LITTLE WORK\n")
    found = load_transcripts(tmp_path / "LibriSpeech")
    assert [len(part) for part in (found.train, found.valid, found.test)] == [2, 2, 2]
    assert (found.valid[0].text, found.valid[0].sound.parent.parts[-3]) == ("NORTHANGER ABBEY", "dev-clean")
    alone = load_transcripts(tmp_path / "LibriSpeech" / "test-clean")
    assert len(alone.test) == 2


FAULTS = [
    ("transcripts.tsv", "a.wav\tone\nmissing.wav\ttwo\n", "2: no sound 'missing.wav' in ", "transcript without sound"),
    ("transcripts.tsv", "a.wav\tone\na.wav\n", "2: expected at least 2 columns", "faulty"),
    ("transcripts.jsonl", '{"sound": "a.wav", "text": "one"}\n{"sound": 3}\n', "2: expected an object with", "faulty"),
    ("transcripts.jsonl", '{"sound": "a.wav", "text": "one"}\nnonsense\n', "2: not JSON", "faulty"),
    (
        "transcripts.jsonl",
        '{"sound": "a.wav", "text": "one"}\n{"sound": "a.wav", "text": "one two", "times": [[0, 1]]}\n',
        "2: expected 'times' to have [start, end] in seconds for each of 2 words",
        "faulty",
    ),
]


@pytest.mark.parametrize(("name", "text", "message", "reason"), FAULTS)
def test_a_fault_is_an_error_with_its_line_or_a_counted_skip(name, text, message, reason, tmp_path):
    sounds(tmp_path, "a.wav")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        load_transcripts(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name}:{message}")
    assert load_transcripts(tmp_path, skip_faults=True).report.skipped == {reason: 1}


def test_a_sound_without_text_is_counted(tmp_path):
    sounds(tmp_path, "a.wav", "b.wav")
    (tmp_path / "transcripts.tsv").write_text("a.wav\tone\nb.wav\t\n")
    assert load_transcripts(tmp_path).report.skipped["empty"] == 1


def test_a_folder_without_transcripts_is_an_error(tmp_path):
    sounds(tmp_path, "a.wav")
    with pytest.raises(DataError, match=r"the folder has no train\.tsv or train\.jsonl or transcripts\.tsv"):
        load_transcripts(tmp_path)
