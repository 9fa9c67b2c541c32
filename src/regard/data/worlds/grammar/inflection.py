"""Regular forms of English words: plurals, verb forms, comparatives, "a" or "an". Irregular forms are in `lexicon`."""

VOWELS = frozenset("aeiou")


def with_s(word: str) -> str:
    """Return the regular plural of a noun, or the third person singular of a verb; the two are formed by equal rules.

    >>> [with_s(word) for word in ("box", "story", "boy", "chase", "go")]
    ['boxes', 'stories', 'boys', 'chases', 'goes']
    """
    if word.endswith(("s", "x", "z", "ch", "sh", "o")):
        return word + "es"
    if word.endswith("y") and word[-2] not in VOWELS:
        return word[:-1] + "ies"
    return word + "s"


def with_ed(word: str) -> str:
    """Return the regular past of a verb.

    >>> [with_ed(word) for word in ("chase", "carry", "play", "hug", "open")]
    ['chased', 'carried', 'played', 'hugged', 'opened']
    """
    if word.endswith("e"):
        return word + "d"
    if word.endswith("y") and word[-2] not in VOWELS:
        return word[:-1] + "ied"
    return _doubled(word) + "ed"


def with_ing(word: str) -> str:
    """Return the present participle of a verb.

    >>> [with_ing(word) for word in ("chase", "run", "lie", "see", "open")]
    ['chasing', 'running', 'lying', 'seeing', 'opening']
    """
    if word.endswith("ie"):
        return word[:-2] + "ying"
    if word.endswith("e") and not word.endswith("ee"):
        return word[:-1] + "ing"
    return _doubled(word) + "ing"


def with_er(word: str) -> str:
    """Return the comparative of a short adjective, formed with "-er".

    >>> [with_er(word) for word in ("big", "happy", "new", "cute")]
    ['bigger', 'happier', 'newer', 'cuter']
    """
    if word.endswith("e"):
        return word + "r"
    if word.endswith("y"):
        return word[:-1] + "ier"
    return _doubled(word) + "er"


def article(following: str) -> str:
    """Return the article "a" or "an" for the word that follows.

    >>> article("apple"), article("red")
    ('an', 'a')
    """
    return "an" if following[0].lower() in VOWELS else "a"


def _doubled(word: str) -> str:
    """Return a word of one vowel that ends in vowel and consonant (not w, x, y) with this consonant doubled: run, runn.

    Any other word is returned unchanged.
    """
    single = sum(letter in VOWELS for letter in word) == 1
    if single and word[-1] not in VOWELS | set("wxy") and len(word) > 2 and word[-2] in VOWELS:
        return word + word[-1]
    return word
