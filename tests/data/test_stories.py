"""Tests of the generated stories: the answer follows from the sentences, its words occur twice, splits are disjoint."""

import re

import pytest

from regard.data.text.passages import Passage, words
from regard.data.worlds.stories import Story, example, splits, stories, written

MOVE = re.compile(r"(\w+) (?:went|moved|walked|ran|travelled) to the (\w+) \.")
TAKE = re.compile(r"(\w+) (?:took|picked up|grabbed|got) the (\w+) \.")
DROP = re.compile(r"(\w+) (?:dropped|put down|left) the (\w+) \.")
GIVE = re.compile(r"(\w+) (?:gave|handed|passed) the (\w+) to (\w+) \.")
COUNT = re.compile(r"There are (?:now )?(\w+) (\w+) in the (\w+) \.")


def facts(story: Story) -> dict[str, tuple[str, int]]:
    """Return every possible question about a story with its answer and the number of the sentence with the answer.

    The story is processed line by line, independently of the generator.
    """
    known: dict[str, tuple[str, int]] = {}
    visits: dict[str, list[tuple[str, int]]] = {}
    holder: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(" ".join(sentence) for sentence in story.sentences):
        if found := MOVE.fullmatch(line):
            person, place = found.groups()
            visits.setdefault(person, []).append((place, number))
            known[f"Where is {person} ?"] = f"the {place}", number
            if len(visits[person]) > 1:
                before, when = visits[person][-2]
                known[f"Where was {person} before the {place} ?"] = f"the {before}", when
        elif found := TAKE.fullmatch(line):
            holder[found[2]] = found[1], number
        elif found := GIVE.fullmatch(line):
            holder[found[2]] = found[3], number
            known[f"Who gave the {found[2]} to {found[3]} ?"] = found[1], number
        elif found := DROP.fullmatch(line):
            person, _ = holder.pop(found[2])
            assert person == found[1]
            known.pop(f"Who has the {found[2]} ?", None)
        elif found := COUNT.fullmatch(line):
            known[f"How many {found[2]} are in the {found[3]} ?"] = found[1], number
        for thing, (person, taken) in holder.items():
            place, visit = visits[person][-1]
            known[f"Where is the {thing} ?"] = f"the {place}", visit
            known[f"Who has the {thing} ?"] = person, taken
            known[f"What is {person} carrying ?"] = f"the {thing}", taken
    return known


MADE = list(stories(5, count=300, sentences=(4, 12)))


def test_the_answer_is_what_a_line_by_line_reading_finds():
    for story in MADE:
        answer, sentence = facts(story)[" ".join(story.question)]
        assert (" ".join(story.answer), story.answering) == (answer, sentence), story.passage


def test_every_kind_of_question_is_asked():
    assert {story.question[:2] for story in MADE} == {
        *(("Where", "is"), ("Where", "was"), ("Who", "has"), ("Who", "gave"), ("What", "is"), ("How", "many"))
    }


def test_the_words_of_the_answer_occur_in_another_sentence_too():
    for story in MADE:
        answer = written(story.answer)
        assert sum(answer in written(sentence) for sentence in story.sentences) > 1, story.passage


def test_the_answer_is_often_neither_the_first_nor_the_last_occurrence():
    """Always selecting the first, or the last, occurrence of the answer's words must not find most answers."""
    first = last = 0
    for story in MADE:
        words, answer = story.words, story.answer
        starts = [i for i in range(len(words)) if words[i : i + len(answer)] == answer]
        first, last = first + (starts[0] == story.span[0]), last + (starts[-1] == story.span[0])
    assert first < 0.75 * len(MADE)
    assert last < 0.65 * len(MADE)


def test_the_answering_sentence_is_among_the_supporting_ones():
    for story in MADE:
        assert story.answering in story.support
        assert list(story.support) == sorted(set(story.support))


def test_stories_are_cut_into_the_words_they_are_made_of():
    for story in [example(), *MADE[:50]]:
        passage = Passage.of(story.passage)
        assert passage.words == story.words
        assert words(written(story.question)) == story.question
        assert passage.between(*story.span) == written(story.answer)


def test_splits_share_no_story_and_longer_ones_are_longer():
    made = splits(2, train=400, valid=60, test=70, longer=30, sentences=(2, 4), beyond=(5, 6))
    parts = [made.train, made.valid, made.test, made.longer]
    assert [len(part) for part in parts] == [400, 60, 70, 30]
    assert len({story.sentences for part in parts for story in part}) == 560
    assert {len(story.sentences) for part in parts[:3] for story in part} <= {2, 3, 4}
    assert {len(story.sentences) for story in made.longer} <= {5, 6}


def test_the_seed_decides():
    once, again = (splits(3, train=20, valid=5, test=5, longer=5) for _ in range(2))
    assert once == again
    assert once.train != splits(4, train=20, valid=5, test=5, longer=5).train


def test_more_training_stories_leave_the_test_as_it_is():
    assert splits(3, train=10, valid=5, test=5).test == splits(3, train=50, valid=5, test=5).test


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="2 ≤ fewest ≤ most"):
        stories(1, count=1, sentences=(1, 4))
    with pytest.raises(ValueError, match="beyond must be longer than sentences"):
        splits(1, train=1, valid=1, test=1, sentences=(5, 9), beyond=(9, 12))
