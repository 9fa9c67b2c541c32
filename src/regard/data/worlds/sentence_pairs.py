"""The built-in data of translation: any number of generated English and Chinese sentence pairs with gold alignments.

The Chinese sentence is a function of the English one. Sure links of an alignment join words that translate each other;
possible links join function words without a counterpart in the other language (the, do; 了, 的).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from regard.data.worlds.grammar.lexicon import NAMES
from regard.data.worlds.grammar.sentences import Pair, compose, pair
from regard.data.worlds.random_choices import Made, Splits, Within, split, tokens


def example() -> Pair:
    """Return a fixed example: an English sentence with its Chinese translation and word alignment.

    >>> pair = example()
    >>> english_text(pair.source), chinese_text(pair.target), sorted(pair.links)
    ('Tom chases Jerry', '汤姆追逐杰瑞', [(0, 0), (1, 1), (2, 2)])
    """
    english = tokens("Tom chases Jerry")
    chinese = [Made(word, (token,)) for word, token in zip(("汤姆", "追逐", "杰瑞"), english, strict=True)]
    return pair(english, chinese)


def sentences(seed: int, *, count: int, lengths: tuple[int, int] = (3, 30)) -> Iterator[Pair]:
    """Return distinct pairs whose English side has `lengths` words, given as (shortest, longest).

    The same seed gives the same pairs on every machine.

    >>> for pair in sentences(7, count=2, lengths=(5, 9)):
    ...     print(english_text(pair.source), chinese_text(pair.target))
    Do not drive the taxi. 不要开出租车。
    Who wants to go to the station? 谁想去车站？
    """
    low, high = lengths
    if not 3 <= low <= high:
        raise ValueError(f"lengths must be (shortest, longest) with 3 ≤ shortest ≤ longest, not {lengths}")
    return _distinct(Random(f"{seed} {low} {high}"), count, lengths, set())


def splits(
    seed: int,
    *,
    train: int,
    valid: int,
    test: int,
    longer: int = 0,
    lengths: tuple[int, int] = (3, 30),
    beyond: tuple[int, int] = (31, 45),
) -> Splits[Pair]:
    """Return training, validation and test pairs of `lengths` English words, and the pairs `longer` of `beyond` words.

    No English sentence and no Chinese sentence is in two splits. If `lengths` includes three words, "Tom chases Jerry"
    is the first test sentence and never a training sentence.

    >>> parts = splits(1, train=50, valid=10, test=10, longer=5)
    >>> [len(part) for part in (parts.train, parts.valid, parts.test, parts.longer)], parts.test[0] == example()
    ([50, 10, 10, 5], True)
    """
    if beyond[0] <= lengths[1]:
        raise ValueError(f"beyond must be longer than lengths, not {beyond} after {lengths}")
    first = [example()] if lengths[0] <= 3 and test else []
    seen: set[tuple[str, ...]] = {side for pair in first for side in (pair.source, pair.target)}

    def part(name: str, count: int, within: Within) -> Iterator[Pair]:
        return _distinct(Random(f"{seed} {name} {within}"), count, within, seen)

    parts = split(part, (train, valid, test - len(first), longer), lengths, beyond)
    return replace(parts, test=(*first, *parts.test))


def words(text: str) -> tuple[str, ...]:
    """Return the words of English text, normalised like the generated pairs: contractions expanded, capitals in names.

    >>> words("The teacher's dog didn't chase Tom.")
    ('the', 'teacher', "'s", 'dog', 'did', 'not', 'chase', 'Tom', '.')
    """
    text = text.replace("’", "'")
    for short, full in _CONTRACTIONS.items():
        text = text.replace(short, full)
    for mark in (".", ",", "?", "!"):
        text = text.replace(mark, f" {mark} ")
    pieces = text.replace("'s", " 's").split()
    if pieces and pieces[0] not in _CAPITALS:
        pieces[0] = pieces[0].lower()
    return tuple(pieces)


def english_text(words: Sequence[str]) -> str:
    """Return English words as text: Tom's dog sleeps.

    >>> english_text(("the", "cat", "sees", "Tom", "'s", "dog", "."))
    "The cat sees Tom's dog."
    """
    text = " ".join(words)
    for mark in (".", ",", "?", "'s"):
        text = text.replace(f" {mark}", mark)
    return text[:1].upper() + text[1:]


def chinese_text(words: Sequence[str]) -> str:
    """Return Chinese words as text, without spaces.

    >>> chinese_text(("汤姆", "追逐", "杰瑞", "。"))
    '汤姆追逐杰瑞。'
    """
    return "".join(words)


# After this number of consecutive duplicates `_distinct` raises an error: there are hardly any new sentences.
_PATIENCE = 400
_TRIES = 3000  # after this number of consecutive sentences of a wrong length `_sentence` raises an error
_CONTRACTIONS = {"can't": "can not", "cannot": "can not", "won't": "will not", "n't": " not", "I'm": "I am"}
_CAPITALS = {"I", *(word for name in NAMES for word in name.split())}


def _distinct(random: Random, count: int, lengths: tuple[int, int], seen: set[tuple[str, ...]]) -> Iterator[Pair]:
    """Yield pairs of which neither sentence is in `seen`, and add the two sentences of each pair to `seen`."""
    tries = 0
    while count > 0:
        pair = _sentence(random, lengths)
        tries += 1
        if pair.source in seen or pair.target in seen:
            if tries > _PATIENCE:
                raise ValueError(f"there are too few sentences of {lengths[0]} to {lengths[1]} words: {count} missing")
            continue
        seen.update((pair.source, pair.target))
        yield pair
        count -= 1
        tries = 0


def _sentence(random: Random, lengths: tuple[int, int]) -> Pair:
    """Return one sentence pair. The desired length is sampled first, so that long sentences are not rare."""
    low, high = lengths
    for _ in range(_TRIES):
        candidate = compose(random, low + int((high - low + 1) * random.random() ** 1.6))
        if low <= len(candidate.source) <= high:
            return candidate
    raise ValueError(f"there are hardly any sentences of {low} to {high} words")
