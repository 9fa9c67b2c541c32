"""Tests of word and sub-word tokenisers: BPE has no unknown tokens, decoding inverts encoding, saved files restore a
tokeniser."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data.data_files import DataError
from regard.data.text.bpe import SMALLEST, Codes, Subwords, train_bpe
from regard.data.text.vocabulary import Vocabulary

TEXTS = ["Tom chases Jerry .", "the cat chases the mouse", "汤姆 追逐 杰瑞 。", "der Hund läuft schnell"] * 5
SUBWORDS = train_bpe(TEXTS, size=400)


@pytest.mark.slow
@given(st.text())
def test_any_text_comes_back(text):
    numbers = SUBWORDS.encode(text)
    assert SUBWORDS.decode(numbers) == text
    assert all(3 <= number < SUBWORDS.size for number in numbers)


@pytest.mark.parametrize(
    "text", ["", " ", "  two  blanks ", "tab\tline\n\r\n", "\x00", "<eos> <pad>", "🧑‍🤝‍🧑 e\u0301", "\u2028", "ﷺ"]
)
def test_odd_texts_come_back(text):
    assert SUBWORDS.decode(SUBWORDS.encode(text)) == text


def test_marks_in_a_text_are_text():
    assert not {0, 1, 2} & set(SUBWORDS.encode("a <eos> b <pad> <bos>"))


def test_frequent_words_are_one_piece_and_unseen_names_survive():
    assert len(SUBWORDS.encode("Tom chases Jerry")) == 3
    assert SUBWORDS.decode(SUBWORDS.encode("Przybylski 追逐 Ñandú")) == "Przybylski 追逐 Ñandú"


def test_decoding_stops_at_the_end():
    numbers = SUBWORDS.encode("Tom")
    assert SUBWORDS.decode([1, *numbers, 2, *numbers, 0, 0]) == "Tom"


@given(st.lists(st.text(st.characters(exclude_categories=("Z", "C")), min_size=1, max_size=6), min_size=1, max_size=8))
def test_pieces_belong_to_their_words(words):
    numbers, owners = SUBWORDS.pieces(words)
    assert owners == sorted(owners)
    assert set(owners) == set(range(len(words)))
    assert SUBWORDS.decode(numbers) == " ".join(words)
    for word, text in enumerate(words):
        own = [number for number, owner in zip(numbers, owners, strict=True) if owner == word]
        assert SUBWORDS.decode(own).strip(" ") == text


def test_pieces_of_words_written_together():
    numbers, owners = SUBWORDS.pieces(["Tom", "chases"], separator="")
    assert SUBWORDS.decode(numbers) == "Tomchases"
    assert set(owners) == {0, 1}
    assert SUBWORDS.pieces([]) == ([], [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Tom chases Przybylski .", ("Tom", "chases", "Przybylski", ".")),
        ("der Hund läuft", ("der", "Hund", "läuft")),
        ("汤姆 追逐 杰瑞", ("汤姆", "追逐", "杰瑞")),  # each of these words is one sub-word of the vocabulary
        ("天空 是蓝色的", ("天", "空", "是", "蓝", "色", "的")),  # no learned merge joins these characters
        ("猫追Tom。", ("猫", "追", "Tom。")),
        ("  two  blanks\u3000here \t", ("two", "blanks", "here")),
        ("🐭 e\u0301", ("🐭", "e\u0301")),
        ("", ()),
        (" \u3000 ", ()),
    ],
)
def test_words_of_numbers(text, words):
    numbers = SUBWORDS.encode(text)
    found, owners = SUBWORDS.words(numbers)
    assert found == words
    assert owners == sorted(owners)
    assert set(owners) == set(range(len(words)))
    assert len(owners) == (len(numbers) if words else 0)


@given(st.lists(st.integers(0, SUBWORDS.size - 1), max_size=30))
def test_words_of_any_numbers_are_those_of_their_text(numbers):
    found, owners = SUBWORDS.words(numbers)
    kept = [number for number in numbers if number > 2]
    assert "".join(found) == "".join(SUBWORDS.decode(kept).split())
    assert len(owners) == (len(numbers) if found else 0)
    assert owners == sorted(owners)


def test_a_saved_tokenizer_is_the_same(tmp_path):
    SUBWORDS.save(tmp_path / "tokenizer.json")
    loaded = Subwords.load(tmp_path / "tokenizer.json")
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    for text in ("Tom <eos> läuft", "杰瑞🐭"):
        assert loaded.encode(text) == SUBWORDS.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.key == SUBWORDS.key
    assert loaded.key != train_bpe(TEXTS, size=300).key
    assert (loaded.size, loaded.pad, loaded.bos, loaded.eos) == (SUBWORDS.size, 0, 1, 2)
    with pytest.raises(FileNotFoundError, match=r"none\.json: no such tokenizer"):
        Subwords.load(tmp_path / "none.json")


def test_training_is_the_same_every_time():
    assert train_bpe(TEXTS, size=400).key == SUBWORDS.key


def test_many_texts_at_once_are_as_one_by_one():
    assert SUBWORDS.encode_all(TEXTS[:4]) == [SUBWORDS.encode(text) for text in TEXTS[:4]]


def test_the_smallest_vocabulary_is_the_bytes():
    smallest = train_bpe(TEXTS, size=SMALLEST)
    assert smallest.size == SMALLEST
    assert len(smallest.encode("汤姆")) == 6
    with pytest.raises(ValueError, match="size must be at least 259"):
        train_bpe(TEXTS, size=258)


def test_shared_and_separate_codes(tmp_path):
    other = train_bpe(["nur Deutsch"] * 5, size=300)
    shared, separate = tmp_path / "shared", tmp_path / "separate"
    shared.mkdir()
    separate.mkdir()
    Codes(SUBWORDS, SUBWORDS).save(shared)
    Codes(SUBWORDS, other).save(separate)
    assert [path.name for path in shared.iterdir()] == ["tokenizer.json"]
    loaded = Codes.load(shared)
    assert loaded.source is loaded.target
    loaded = Codes.load(separate)
    assert (loaded.source.key, loaded.target.key) == (SUBWORDS.key, other.key)


def test_a_vocabulary_numbers_words_by_frequency():
    vocabulary = Vocabulary.build([("b", "a"), ("b", "c"), ("b", "a", "d")])
    assert vocabulary.words == ("b", "a", "c", "d")
    assert vocabulary.size == 8
    assert vocabulary.encode(("a", "zebra", "d")) == [5, 3, 7]
    assert vocabulary.decode([1, 5, 3, 7, 2, 4]) == ("a", "<unk>", "d")
    assert vocabulary.pieces(("a", "b")) == ([5, 4], [0, 1])
    assert Vocabulary.build([("b", "a"), ("b",)], size=1).words == ("b",)


def test_a_saved_vocabulary_is_the_same(tmp_path):
    vocabulary = Vocabulary(("汤姆", "'s", "了", "。", "Tom"))
    vocabulary.save(tmp_path / "tokenizer.json")
    loaded = Vocabulary.load(tmp_path / "tokenizer.json")
    assert loaded == vocabulary
    assert loaded.numbers == vocabulary.numbers
    SUBWORDS.save(tmp_path / "bpe.json")
    with pytest.raises(ValueError, match="not a vocabulary"):
        Vocabulary.load(tmp_path / "bpe.json")
    with pytest.raises(ValueError, match="a word stands twice"):
        Vocabulary(("a", "a"))


LONG = {
    "one word": "ab" * 3000,
    "between others": f"Tom {'x' * 1700} Jerry {'追' * 501} .",
    "just too long": "a" * 501,
    "just not": "a" * 500,
    "blanks": " " * 2000,
    "emoji": "🐭" * 700,
    "marks": "e\u0301" * 700,
}


@pytest.mark.parametrize("name", LONG)
def test_long_words_come_back(name):
    text = LONG[name]
    numbers = SUBWORDS.encode(text)
    assert SUBWORDS.decode(numbers) == text
    assert SUBWORDS.encode_all(["Tom", text, ""]) == [SUBWORDS.encode("Tom"), numbers, []]
    words = text.split()
    numbers, owners = SUBWORDS.pieces(words)
    for word, written in enumerate(words):
        own = [number for number, owner in zip(numbers, owners, strict=True) if owner == word]
        assert SUBWORDS.decode(own).strip(" ") == written


def test_no_sub_word_is_learned_of_a_word_without_end():
    """In a long repeated text, each merge doubles the length of a sub-word: without a limit on the length of words, a
    sub-word would have thousands of characters."""
    learned = train_bpe(["ab" * 20_000] * 2, size=400)
    assert max(len(token) for token in learned.model.get_vocab()) <= 500


def test_what_fails_while_texts_are_read_is_said():
    def texts():
        yield "Tom"
        raise DataError("a.en:2: not UTF-8")

    with pytest.raises(DataError, match=r"a\.en:2: not UTF-8"):
        train_bpe(texts(), size=300)
