"""Tests of the generated reviews: gold words, splits without common texts, reproducibility by seed."""

from itertools import pairwise

import pytest

from regard.data.text.tokens import cut
from regard.data.worlds import review_words, reviews
from regard.data.worlds.reviews import CLASSES, splits, text_of, unseen

# A negation and the words of two opinions with the same label: all three are decisive for the label.
_AGREEING = "scarcely sincere cheap"
_NEVER = "never excellent"
LANGUAGES = ("en", "zh")


def gold(review):
    return [review.words[place] for place in sorted(review.decisive)]


def made(language="en", labels="sentiment", count=200, seed=5):
    return list(reviews.reviews(seed, count=count, labels=labels, language=language))


def said_by(words, language):
    """Return the label that the lexicon gives to gold words; None if the words are not the gold words of exactly one
    opinion."""
    entries = review_words.GRAMMARS[language].entries
    text = "".join(words)
    opinions = [
        (entry, label)
        for label in ("positive", "negative")
        for entry in entries[label]
        if (entry in words if language == "en" else entry in text)
    ]
    measured = [label for mark, label in zip(("too", "太", "enough", "够"), _MEASURED, strict=True) if mark in words]
    if len(opinions) + len(measured) != 1:
        return None
    if measured:
        return measured[0]
    entry, label = opinions[0]
    if text.count(entry) != 1:
        return None
    negated = text != entry
    return {"positive": "negative", "negative": "positive"}[label] if negated else label


_MEASURED = ("negative", "negative", "positive", "positive")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_gold_words_alone_say_the_label(language):
    judged = [(review, said_by(gold(review), language)) for review in made(language)]
    assert sum(label is not None for _, label in judged) > 160
    for review, label in judged:
        assert label in (None, review.label), review


@pytest.mark.parametrize(
    ("language", "text", "label", "expected"),
    [
        ("en", "My reliable teacher came too. The cast was rather impressive.", "positive", "impressive"),
        ("en", "The design isn't extremely memorable. It was not made in the station.", "negative", "isn't memorable"),
        ("en", "We found the chapter truly remarkable, but anyone could call the acting silly.", "negative", "silly"),
        ("en", "The bread was empty but I would not call the photography tiresome.", "positive", "not tiresome"),
        ("en", "The cast was not delightful, yet the chapter seems refreshing to me.", "positive", "refreshing"),
        ("en", "The lobby is witty, although the garden seems flat to me.", "positive", "witty"),
        ("en", "The cast was never excellent, even though I find the photography polished.", "negative", _NEVER),
        ("en", "The keyboard was far too loud, although the manual is really lovely.", "negative", "too loud"),
        ("en", "We went there but not on my birthday. The room is so delightful.", "positive", "delightful"),
        ("en", "The kitchen is scarcely sincere, and anyone could call the style cheap.", "negative", _AGREEING),
        ("zh", "虽然故事太大了，大堂一点也不平淡。", "positive", "不平淡"),
        ("zh", "咖啡很刺耳，虽然我们觉得音乐非常周到。", "negative", "刺耳"),
        ("zh", "虽然剧本实在太慢，但是没人会说面包幼稚。", "positive", "没人幼稚"),
        ("zh", "我们去过，但不是星期二。泳池刚好够甜。", "positive", "够甜"),
    ],
)
def test_the_gold_of_given_sentences(written, language, text, label, expected):
    """The expected labels and gold words were determined by hand from the texts of the reviews."""
    review = written[language][text]
    assert review.label == label
    assert (" " if language == "en" else "").join(gold(review)) == expected


@pytest.fixture(scope="module")
def written():
    return {
        language: {
            text_of(review.words, language): review
            for review in reviews.reviews(3, count=40, language=language, lengths=(8, longest))
        }
        for language, longest in (("en", 16), ("zh", 20))
    }


@pytest.mark.parametrize("language", LANGUAGES)
def test_subjective_is_who_holds_the_opinion(language):
    own = review_words.GRAMMARS[language].entries["own"] + review_words.GRAMMARS[language].entries["own_object"]
    for review in made(language, "subjectivity", 60):
        holder = (" " if language == "en" else "").join(gold(review))
        assert (holder in own) == (review.label == "subjective"), review


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("labels", CLASSES)
def test_parts_share_no_text_and_longer_is_longer(labels, language):
    parts = splits(3, train=100, valid=20, test=20, longer=10, labels=labels, language=language)
    texts = [{review.words for review in part} for part in (parts.train, parts.valid, parts.test, parts.longer)]
    assert [len(part) for part in texts] == [100, 20, 20, 10]
    assert len(set.union(*texts)) == 150
    assert min(len(words) for words in texts[3]) > max(len(words) for part in texts[:3] for words in part)
    assert {review.label for review in parts.train} == set(CLASSES[labels])
    assert all(review.decisive for part in (parts.train, parts.longer) for review in part)


def test_the_same_seed_gives_the_same_reviews_and_another_one_others():
    sizes = {"train": 50, "valid": 5, "test": 5, "longer": 5}
    assert splits(1, **sizes) == splits(1, **sizes)
    assert splits(1, **sizes) != splits(2, **sizes)


def test_training_never_has_a_pair_that_is_kept_out():
    negations = {*review_words.ENGLISH.entries["not"], "isn't", "didn't", "nobody"}
    opinions = {*review_words.ENGLISH.entries["positive"], *review_words.ENGLISH.entries["negative"]}

    def pairs(part):
        for review in part:
            words = gold(review)
            yield from ((a, b) for a, b in pairwise(words) if a in negations and b in opinions)

    parts = splits(4, train=1000, valid=10, test=200)
    assert not any(unseen(*pair) for pair in pairs(parts.train))
    assert any(unseen(*pair) for pair in pairs(parts.test))


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_tokenizer_finds_the_words_of_a_written_review(language):
    by = "words" if language == "en" else "characters"
    for review in made(language, count=50):
        assert tuple(token.text for token in cut(text_of(review.words, language), by)) == review.words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (9, 5)}, "lengths must be"),
        ({"beyond": (20, 40)}, "beyond must be longer than lengths"),
    ],
)
def test_what_cannot_be_asked_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        splits(1, train=1, valid=1, test=1, **options)
