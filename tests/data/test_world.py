"""Tests of the generated sentence pairs: correct English, valid links, Chinese determined by the English sentence,
splits without common sentences."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from regard.data.worlds.grammar.lexicon import ADJECTIVES, INTRANSITIVE, NAMES, NOUNS, TRANSITIVE
from regard.data.worlds.sentence_pairs import Pair, chinese_text, english_text, example, sentences, splits, words


def written(seed: int, count: int, shortest: int = 3, longest: int = 30) -> list[Pair]:
    return list(sentences(seed, count=count, lengths=(shortest, longest)))


@pytest.fixture(scope="module")
def sample() -> list[Pair]:
    return written(11, 6000)


# Five forms of each verb: base, third person, past, past participle, -ing. They are written out here, independently of
# the rules under test.
FORMS = """
chase chases chased chased chasing / bite bites bit bitten biting / see sees saw seen seeing
find finds found found finding / catch catches caught caught catching / meet meets met met meeting
lose loses lost lost losing / break breaks broke broken breaking / like likes liked liked liking
love loves loved loved loving / hate hates hated hated hating / know knows knew known knowing
need needs needed needed needing / miss misses missed missed missing / trust trusts trusted trusted trusting
help helps helped helped helping / visit visits visited visited visiting / thank thanks thanked thanked thanking
invite invites invited invited inviting / follow follows followed followed following / hug hugs hugged hugged hugging
watch watches watched watched watching / feed feeds fed fed feeding / wash washes washed washed washing
clean cleans cleaned cleaned cleaning / cook cooks cooked cooked cooking / eat eats ate eaten eating
drink drinks drank drunk drinking / buy buys bought bought buying / sell sells sold sold selling
read reads read read reading / write writes wrote written writing / carry carries carried carried carrying
use uses used used using / repair repairs repaired repaired repairing / open opens opened opened opening
close closes closed closed closing / drive drives drove driven driving / ride rides rode ridden riding
wear wears wore worn wearing / play plays played played playing / study studies studied studied studying
teach teaches taught taught teaching / speak speaks spoke spoken speaking / build builds built built building
steal steals stole stolen stealing / draw draws drew drawn drawing / push pushes pushed pushed pushing
sing sings sang sung singing / sleep sleeps slept slept sleeping / run runs ran run running
swim swims swam swum swimming / laugh laughs laughed laughed laughing / cry cries cried cried crying
dance dances danced danced dancing / work works worked worked working / rest rests rested rested resting
wait waits waited waited waiting / smile smiles smiled smiled smiling / walk walks walked walked walking
shout shouts shouted shouted shouting / exercise exercises exercised exercised exercising
give gives gave given giving / lend lends lent lent lending / send sends sent sent sending
tell tells told told telling / put puts put put putting / hide hides hid hidden hiding / sit sits sat sat sitting
stand stands stood stood standing / lie lies lay lain lying / go goes went gone going / come comes came come coming
return returns returned returned returning / live lives lived lived living / have has had had having
say says said said saying / think thinks thought thought thinking / believe believes believed believed believing
hope hopes hoped hoped hoping / ask asks asked asked asking / want wants wanted wanted wanting
order orders ordered ordered ordering
"""
TABLE = [tuple(entry.split()) for line in FORMS.strip().splitlines() for entry in line.split(" / ")]
BASE = {entry[0] for entry in TABLE}
THIRD = {entry[1] for entry in TABLE}
PARTICIPLE = {entry[3] for entry in TABLE}
GERUND = {entry[4] for entry in TABLE}
VERBAL = {form for entry in TABLE for form in entry}

SINGULAR = {"he", "she", *(part for name in NAMES for part in name.split()[-1:])}
PLURAL = {"I", "you", "we", "they"}


def test_tom_chases_jerry():
    pair = example()
    assert pair.source == ("Tom", "chases", "Jerry")
    assert pair.target == ("汤姆", "追逐", "杰瑞")
    assert pair.links == pair.possible == {(0, 0), (1, 1), (2, 2)}


@pytest.mark.slow
def test_its_words_are_those_of_the_grammar(sample):
    asked = example().source
    translations = {
        (pair.source[i], pair.target[j]) for pair in sample for i, j in pair.links if pair.source[i] in asked
    }
    assert translations == {("Tom", "汤姆"), ("chases", "追逐"), ("Jerry", "杰瑞")}


def test_every_verb_has_the_forms_of_the_table():
    import regard.data.worlds.grammar.lexicon as lexicon

    groups = [*TRANSITIVE, *INTRANSITIVE, lexicon.LIVING, lexicon.HAVING]
    for name in ("GIVING", "SENDING", "PUTTING", "STAYING", "GOING", "SAYING", "ASKING"):
        groups += getattr(lexicon, name)
    found = {(verb.base, verb.third, verb.past, verb.participle, verb.gerund) for verb in groups}
    assert found == set(TABLE)


def test_auxiliaries_are_followed_by_the_right_form(sample):
    checked = Counter()
    for pair in sample:
        for place, word in enumerate(pair.source[:-1]):
            rest = [other for other in pair.source[place + 1 :] if other != "not"]
            if word in ("will", "can", "must", "should") and rest[0] in VERBAL | {"be"}:
                assert rest[0] in BASE | {"be"}, english_text(pair.source)
                checked["modal"] += 1
            if word in ("does", "do", "did") and pair.source[place + 1] == "not":
                assert rest[0] in BASE | {"plan"}, english_text(pair.source)
                checked["do"] += 1
            if word in ("has", "have") and rest[0] in VERBAL - {"clean"}:
                assert rest[0] in PARTICIPLE, english_text(pair.source)
                checked["have"] += 1
            if word in ("am", "is", "are") and rest[0] in VERBAL - {"clean"}:
                assert rest[0] in GERUND, english_text(pair.source)
                checked["be"] += 1
            if word in ("wants", "plans"):
                assert "to" in rest, english_text(pair.source)
                checked["to"] += 1
    assert all(checked[name] > 20 for name in ("modal", "do", "have", "be", "to")), checked


def test_verbs_agree_with_pronouns_and_names(sample):
    """Check the agreement of subject and verb in the first two words of each generated sentence."""
    singular_verbs = (THIRD | {"is", "has", "does", "was", "wants", "plans"}) - BASE
    plural_verbs = BASE | {"are", "have", "do", "were", "am"}
    past = {entry[2] for entry in TABLE} | {"was", "were"}
    seen = Counter()
    for pair in sample:
        first, second = pair.source[:2]
        if first in SINGULAR and second in singular_verbs | plural_verbs | {"am", "are"} and second not in past:
            assert second in singular_verbs, english_text(pair.source)
            seen["singular"] += 1
        if first in PLURAL and second in singular_verbs | plural_verbs and second not in past:
            assert second in plural_verbs, english_text(pair.source)
            assert second != "am" or first == "I"
            assert second != "are" or first != "I"
            seen["plural"] += 1
    assert min(seen["singular"], seen["plural"]) > 60, seen


@pytest.mark.slow
def test_nouns_agree_with_their_determiners(sample):
    plurals = {noun.plural for table in NOUNS.values() for noun in table}
    singulars = {noun.singular for table in NOUNS.values() for noun in table}
    adjectives = {word.english for word in ADJECTIVES} | {"very"}
    numbers = {"two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "many", "these", "those", "few"}
    seen = Counter()
    for pair in sample:
        for place, word in enumerate(pair.source):
            following = [other for other in pair.source[place + 1 :] if other not in adjectives]
            if not following or following[0] not in plurals | singulars:
                continue
            if word in ("a", "an", "this") or (word == "that" and following[0] in singulars):
                assert following[0] in singulars, english_text(pair.source)
                seen["one"] += 1
            if word in numbers:
                assert following[0] in plurals | {"cups", "bottles"}, english_text(pair.source)
                seen["many"] += 1
            if word in ("a", "an"):
                assert (word == "an") == (pair.source[place + 1][0] in "aeiou"), english_text(pair.source)
    assert min(seen.values()) > 300, seen


def test_measure_words_belong_to_their_nouns(sample):
    measures = {noun.chinese: noun.measure for table in NOUNS.values() for noun in table}
    seen = 0
    for pair in sample:
        for count, measure, noun in zip(pair.target, pair.target[1:], pair.target[2:], strict=False):
            if count in "一两三四五六七八九十这那" and noun in measures:
                assert measure == measures[noun], chinese_text(pair.target)
                seen += 1
    assert seen > 300


def test_links_are_within_range_and_every_word_has_its_place(sample):
    for pair in sample:
        assert pair.links <= pair.possible
        assert all(0 <= i < len(pair.source) and 0 <= j < len(pair.target) for i, j in pair.possible)
        assert {j for _, j in pair.possible} == set(range(len(pair.target))), pair


def test_content_words_are_surely_linked_and_function_words_may_not_be(sample):
    free = {"the", "a", "an", "and", "to", "on", "in", "at", "of", "for", "that", "there", "be", "more", "by"}
    free |= {"is", "are", "am", "was", "were", "do", "does", "did"}
    for pair in sample:
        linked = {i for i, _ in pair.links}
        loose = {word for i, word in enumerate(pair.source) if i not in linked}
        assert loose <= free, (loose - free, english_text(pair.source))


@pytest.fixture(scope="module")
def short() -> dict[tuple[str, ...], Pair]:
    return {pair.source: pair for pair in written(2, 6000, 3, 5)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("english", "chinese", "aligned"),
    [
        ("who did we thank ?", "我们 感谢 了 谁 ？", "who-谁 we-我们 thank-感谢 ?-？"),
        ("did she not dance ?", "她 没有 跳舞 吗 ？", "did-没有 she-她 not-没有 dance-跳舞 ?-？"),
        ("Tom has not worked", "汤姆 还 没有 工作", "Tom-汤姆 has-还 not-没有 worked-工作"),
        ("who is chasing you ?", "谁 在 追逐 你 ？", "who-谁 is-在 chasing-追逐 you-你 ?-？"),
        ("where is Li Ming ?", "李明 在 哪里 ？", "where-哪里 Li-李明 Ming-李明 ?-？"),
        ("Bob 's grandfather slept .", "鲍勃 的 爷爷 睡觉 了 。", "Bob-鲍勃 's-的 grandfather-爷爷 slept-睡觉 .-。"),
        ("they visited my uncle", "他们 拜访 了 我 叔叔", "they-他们 visited-拜访 my-我 uncle-叔叔"),
        ("Anna has two phones .", "安娜 有 两 部 手机 。", "Anna-安娜 has-有 two-两 phones-手机 .-。"),
        ("Jack is younger than her", "杰克 比 她 年轻", "Jack-杰克 younger-年轻 than-比 her-她"),
        ("do not thank Jerry .", "不要 感谢 杰瑞 。", "do-不要 not-不要 thank-感谢 Jerry-杰瑞 .-。"),
    ],
)
def test_sentences_translated_and_aligned_by_hand(short, english, chinese, aligned):
    pair = short[tuple(english.split())]
    assert pair.target == tuple(chinese.split())
    assert {f"{pair.source[i]}-{pair.target[j]}" for i, j in pair.links} == set(aligned.split())


@pytest.mark.slow
def test_the_chinese_is_a_function_of_the_english():
    known: dict[tuple[str, ...], Pair] = {}
    again = 0
    for seed in range(3):
        for pair in written(seed, 2500, 3, 5):
            other = known.setdefault(pair.source, pair)
            again += other is not pair
            assert other == pair
    assert again > 200


@pytest.mark.parametrize(
    ("word", "least"),
    [
        *(("了", 400), ("在", 400), ("会", 100), ("不", 200), ("没有", 150), ("吗", 100), ("谁", 30), ("什么", 15)),
        *(("哪里", 15), ("被", 30), ("把", 40), ("比", 30), ("的", 300), ("已经", 40), ("因为", 40), ("只", 60)),
    ],
)
def test_the_grammar_is_all_there(sample, word, least):
    assert sum(word in pair.target for pair in sample) >= least


def test_time_and_place_come_before_the_verb(sample):
    seen = 0
    for pair in sample:
        when = {"昨天", "昨晚", "上周", "去年"} & set(pair.target)
        if when and {"in", "at"} & set(pair.source) and "，" not in pair.target and pair.target.count("了") == 1:
            order = [pair.target.index(word) for word in (*when, "在", "了") if word in pair.target]
            assert order == sorted(order), chinese_text(pair.target)
            seen += len(order) == 3
    assert seen > 2


def test_several_hundred_words_and_every_length(sample):
    english = Counter(word for pair in sample for word in pair.source)
    chinese = Counter(word for pair in sample for word in pair.target)
    assert len(english) >= 300
    assert len(chinese) >= 300
    assert {len(pair.source) for pair in sample} == set(range(3, 31))
    assert len({pair.source for pair in sample}) == len(sample)


@pytest.mark.usefixtures("as_installed")
def test_splits_do_not_overlap_in_either_language():
    made = splits(5, train=600, valid=200, test=200, longer=50)
    parts = (made.train, made.valid, made.test, made.longer)
    assert [len(part) for part in parts] == [600, 200, 200, 50]
    for side in ("source", "target"):
        texts = [{getattr(pair, side) for pair in part} for part in parts]
        assert len(set.union(*texts)) == sum(map(len, texts)) == 1050
    assert max(len(pair.source) for pair in made.train) <= 30 < min(len(pair.source) for pair in made.longer)
    assert made.test[0] == example()


@pytest.mark.usefixtures("as_installed")
def test_the_test_pairs_do_not_depend_on_the_size_of_training():
    assert splits(5, train=10, valid=20, test=30).test == splits(5, train=90, valid=20, test=30).test


@pytest.mark.process
def test_the_same_seed_gives_the_same_pairs_in_every_process():
    code = (
        "from regard.data.worlds.sentence_pairs import sentences; import hashlib;"
        "text = repr([(p.source, p.target, sorted(p.links), sorted(p.possible)) for p in sentences(4, count=60)]);"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    found = set()
    for seed in ("0", "1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        found.add(done.stdout)
    text = repr([(p.source, p.target, sorted(p.links), sorted(p.possible)) for p in sentences(4, count=60)])
    assert found == {hashlib.sha256(text.encode()).hexdigest() + "\n"}
    assert [p.source for p in sentences(5, count=50)] != [p.source for p in sentences(4, count=50)]


def test_impossible_wishes_are_refused():
    with pytest.raises(ValueError, match="3 ≤ shortest ≤ longest"):
        sentences(1, count=5, lengths=(2, 9))
    with pytest.raises(ValueError, match="beyond must be longer"):
        splits(1, train=1, valid=1, test=1, beyond=(20, 40))


@pytest.mark.usefixtures("as_installed")
def test_running_out_of_sentences_is_an_error(monkeypatch):
    class Stuck(Random):
        def random(self) -> float:
            return 0.125

    monkeypatch.setattr("regard.data.worlds.sentence_pairs.Random", Stuck)
    found = sentences(1, count=2)
    assert next(found)
    with pytest.raises(ValueError, match="too few sentences of 3 to 30 words: 1 missing"):
        next(found)


def test_text_as_people_type_it(sample):
    assert " ".join(words("Tom doesn't chase the dog’s cat, he can't.")) == (
        "Tom does not chase the dog 's cat , he can not ."
    )
    assert words("The cat sleeps") == ("the", "cat", "sleeps")
    assert words("") == ()
    for pair in sample[:500]:
        assert words(english_text(pair.source)) == pair.source
