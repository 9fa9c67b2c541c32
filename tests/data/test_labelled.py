"""Tests of reading labelled texts: common layouts, detected formats, and errors that name the file and the line."""

import gzip

import pytest

from regard.data.data_files import DataError
from regard.data.text.labelled import Asked, read_labelled
from regard.data.text.labelled_parts import load_parts
from regard.data.text.tokens import Span, build_coder, cut, phrases, sentences, summed
from regard.data.text.trees import phrases_of

BOTH = [("not bad", "pos"), ("dull", "neg")]


def written(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize(
    ("name", "content", "guess"),
    [
        ("a.csv", "id,review,sentiment\n1,not bad,pos\n2,dull,neg\n", "text is the column 'review'"),
        ("a.csv.gz", 'text,label\r\n"not bad",pos\r\ndull,neg\r\n', "label is the column 'label'"),
        ("a.csv", "\ufefftext,label\nnot bad,pos\ndull,neg\n", "text is the column 'text'"),
        ("a.tsv", "label\ttext_a\npos\tnot bad\nneg\tdull\n", "text is the column 'text_a'"),
        ("a.tsv", "pos\tnot bad\nneg\tdull\n", "label is column 0, there is no header"),
        ("a.tsv.gz", "not bad\tpos\ndull\tneg\n", "label is column 1"),
        ("a.jsonl", '{"content": "not bad", "class": "pos"}\n\n{"content": "dull", "class": "neg"}\n', "'content'"),
        ("stsa.train", "pos not bad\nneg dull\n", "the label is the first word of a line"),
        ("trees.txt", "(pos (2 not) (neg bad))\n(neg dull)\n", ""),
    ],
)
def test_a_file_is_read_and_what_was_guessed_is_reported(tmp_path, name, content, guess):
    path = written(tmp_path, name, content)
    reading = read_labelled(path)
    assert [(row.text, row.label) for row in reading.rows] == BOTH
    assert guess in reading.guess
    assert str(reading).startswith(f"{path}: ")


def test_columns_can_be_named(tmp_path):
    path = written(tmp_path, "a.csv", "text,title,label,mark\nx,not bad,9,pos\ny,dull,9,neg\n")
    reading = read_labelled(path, Asked(text="title", label="3"))
    assert [(row.text, row.label) for row in reading.rows] == BOTH
    assert not reading.guess


def test_places_name_the_line_where_a_row_begins(tmp_path):
    path = written(tmp_path, "a.csv", 'text,label\n"two\nlines, ""quoted""",pos\ndull,neg\n')
    rows = read_labelled(path).rows
    assert [row.place for row in rows] == [f"{path}:2", f"{path}:4"]
    assert rows[0].text == 'two\nlines, "quoted"'


def test_quotes_of_a_tsv_are_text(tmp_path):
    path = written(tmp_path, "a.tsv", 'label\ttext\n1\t"open\n0\tb\n')
    assert read_labelled(path).rows[0].text == '"open'


@pytest.mark.parametrize(
    ("name", "content", "asked", "message"),
    [
        ("a.csv", "text,label\na,1\nb\n", {}, r"a\.csv:3: expected at least 2 columns, found 1"),
        ("a.csv", "text,label\na,\n", {}, r"a\.csv:2: the label is empty"),
        ("a.csv", 'text,label\n"a,1\nb,2\n', {}, r"a\.csv:2: not CSV"),
        ("a.csv", "id,words\n1,a\n", {"label": "words"}, r"a\.csv:1: no column is known to be the text.*'id', 'words'"),
        ("a.csv", "text,label\na,1\n", {"label": "mood"}, r"a\.csv:1: there is no label column 'mood'"),
        ("a.tsv", "a\t1\nb\t2\n", {"label": "7"}, r"a\.tsv:1: there is no label column 7; there are 2"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "a", \n', {}, r"a\.jsonl:2: not JSON"),
        ("a.jsonl", '{"text": "a", "label": 1}\n[1]\n', {}, r"a\.jsonl:2: expected a JSON object, found list"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "a"}\n', {}, r"jsonl:2: expected a label .* found nothing"),
        ("a.jsonl", '{"text": 3, "label": 1}\n', {}, r"a\.jsonl:1: expected a text in the field 'text', found int"),
        ("a.jsonl", '{"text": "\\ud800", "label": 1}\n', {}, r"a\.jsonl:1: half of a surrogate pair"),
        ("a.tsv", b"text\tlabel\nok\t1\n\xff\xe9\t1\n", {}, r"a\.tsv:3: not UTF-8: byte 0xff"),
        ("a.tsv", "text\tlabel\nok\t1\n".encode("utf-16"), {}, r"a\.tsv:1: the file is UTF-16"),
        ("a.tsv", "text\tlabel\n" + "a" * 2000 + "\t1\n", {"longest": 999}, r"a\.tsv:2: the line is longer than 999"),
        ("a.tsv", "", {}, r"a\.tsv: the file is empty"),
        ("a.csv", "text,label\n", {}, r"a\.csv: "),
        ("a.txt", "(3 (2 not) (1 bad)\n", {}, r"a\.txt:1: not a tree: a bracket is not closed"),
        ("a.train", "1 good\nalone\n", {}, r"a\.train:2: expected a label, a blank and a text"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, name, content, asked, message):
    with pytest.raises(DataError, match=message):
        read_labelled(written(tmp_path, name, content), Asked(**asked))


def test_faults_are_errors_and_empty_texts_are_skipped(tmp_path):
    with pytest.raises(DataError, match=r"a\.tsv:4"):
        read_labelled(written(tmp_path, "a.tsv", b"text\tlabel\ngood\t1\n\t0\nbad\n\xff\t1\nbad\t0\n"))
    reading = read_labelled(written(tmp_path, "b.tsv", b"text\tlabel\ngood\t1\n\t0\nbad\t0\n"))
    assert reading.report.skipped == {"empty": 1}
    assert "3 rows read, 2 texts kept; skipped: 1 empty" in str(reading)


def test_a_damaged_gzip_file_is_named(tmp_path):
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"text\tlabel\n" + b"a\t1\n" * 5000)[:-12])
    with pytest.raises(DataError, match=r"a\.tsv\.gz:\d+: the gzip file is damaged"):
        read_labelled(path)


def test_labels_are_merged_and_left_out(tmp_path):
    path = written(tmp_path, "a.txt", "(4 (3 very) (3 good))\n(2 so)\n(0 bad)\n")
    reading = read_labelled(path, Asked(merge={"4": "p", "3": "p", "0": "n", "2": ""}, phrases=True))
    assert [(row.text, row.label) for row in reading.rows] == [
        ("very good", "p"),
        ("very", "p"),
        ("good", "p"),
        ("bad", "n"),
    ]
    assert reading.report.skipped == {"labelled 2": 1}


def test_a_tree_with_brackets_and_too_much():
    assert phrases_of("(2 (2 -LRB-) (2 a\\/b))")[0].text == "( a/b"
    with pytest.raises(ValueError, match="goes on after its end"):
        phrases_of("(2 a) (3 b)")


@pytest.mark.parametrize("dev", ["dev", "val", "valid", "validation"])
def test_a_folder_brings_its_parts(tmp_path, dev):
    for part in ("train", dev, "test"):
        written(tmp_path, f"{part}.tsv", f"label\ttext\n1\tgood {part}\n0\tbad {part}\n")
    written(tmp_path, "README.md", "not data")
    parts = load_parts([tmp_path])
    assert [part[0].text for part in (parts.train, parts.valid, parts.test)] == [
        "good train",
        f"good {dev}",
        "good test",
    ]
    assert parts.classes == ("0", "1")


def test_folders_of_text_files_are_classes(tmp_path):
    for label in ("pos", "neg"):
        for number in range(12):
            written(tmp_path, f"train/{label}/{number}.txt", f"{label}\nwords {number}")
            written(tmp_path, f"test/{label}/{number}.txt", f"{label} other {number}")
    parts = load_parts([tmp_path], valid=3)
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (22, 2, 24)
    assert parts.classes == ("neg", "pos")
    assert parts.test[0].place.endswith("neg/0.txt:1")
    assert {row.text for row in parts.train}.isdisjoint(row.text for row in parts.valid)


def test_several_sets_in_a_folder_are_chosen_by_their_common_name(tmp_path):
    for name in ("stsa.binary", "stsa.fine"):
        for part in ("train", "dev", "test"):
            written(tmp_path, f"{name}.{part}", "0 bad film\n1 good film\n")
    with pytest.raises(DataError, match=r"several data sets, name one: .*stsa\.binary, .*stsa\.fine"):
        load_parts([tmp_path])
    assert len(load_parts([tmp_path / "stsa.binary"]).train) == 2


def test_one_file_is_divided_by_text_and_the_seed_decides(tmp_path):
    rows = "".join(f"{n % 2}\ttext {n % 50}\n" for n in range(100))
    path = written(tmp_path, "a.tsv", "label\ttext\n" + rows)
    parts = load_parts([path], valid=5, test=4)
    texts = [{row.text for row in part} for part in (parts.train, parts.valid, parts.test)]
    assert [len(part) for part in texts] == [41, 5, 4]
    assert len(set.union(*texts)) == 50
    assert load_parts([path], valid=5, test=4) == parts
    assert load_parts([path], valid=5, test=4, seed=2) != parts


def test_an_unknown_label_in_the_test_part_is_named(tmp_path):
    written(tmp_path, "train.tsv", "label\ttext\n1\ta\n0\tb\n")
    written(tmp_path, "dev.tsv", "label\ttext\n1\ta\n")
    written(tmp_path, "test.tsv", "label\ttext\n1\ta\n3\tc\n")
    with pytest.raises(DataError, match=r"test\.tsv:3: the label '3' does not stand in training, which has 0, 1"):
        load_parts([tmp_path])


@pytest.mark.parametrize(
    ("content", "message"),
    [("1\ta b\n1\tc d\n1\te f\n", "expected 2 to 1000 labels"), ("1\ta b\n0\tc d\n", "too few texts")],
)
def test_what_cannot_be_learned_is_said(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        load_parts([written(tmp_path, "a.tsv", content)])


@pytest.mark.parametrize("name", ["nothing", "nowhere/nothing"])
def test_a_path_that_is_not_there(tmp_path, name):
    with pytest.raises(DataError, match="no"):
        load_parts([tmp_path / name])


def test_mixed_text_is_cut_into_characters_and_words():
    text = "这部DVD真不错, it's OK！"
    assert [token.text for token in cut(text, "characters")] == [*"这部", "dvd", *"真不错", ",", "it's", "ok", "！"]
    assert all(text[a:b].lower() == token for token, (a, b) in cut(text, "characters"))


@pytest.mark.parametrize("by", ["words", "characters", "subwords"])
def test_a_coder_keeps_places_and_comes_back_from_its_file(tmp_path, by):
    texts = ["The film isn't bad, 真的不错。", "Good film"]
    coder = build_coder(texts, by, size=400)
    coded = coder.encode(texts[0])
    assert len(coded.numbers) == len(coded.spans)
    assert texts[0][coded.spans[0].start : coded.spans[0].end] == "The"[: coded.spans[0].end]
    coder.save(tmp_path / "tokenizer.json")
    assert type(coder).load(tmp_path / "tokenizer.json", by).encode(texts[0]) == coded


def test_rare_words_are_unknown():
    coder = build_coder(["a a b", "b c"], "words", rarest=2)
    assert coder.encode("a b c d").numbers == [4, 5, coder.unknown, coder.unknown]


def test_weights_are_summed_over_phrases_and_sentences():
    text = "Good, but long. 很好。不行"
    spans = [token.span for token in cut(text, "characters")]
    weights = [1.0] * len(spans)
    assert [text[a:b] for a, b in sentences(text)] == ["Good, but long.", "很好。", "不行"]
    assert [text[a:b] for a, b in phrases(text)] == ["Good,", "but long.", "很好。", "不行"]
    assert summed(weights, spans, sentences(text)) == [5.0, 3.0, 2.0]
    assert summed(weights, spans, phrases(text)) == [2.0, 3.0, 3.0, 2.0]
    assert sentences("") == []
    assert summed([1.0], [Span(0, 1)], []) == []
