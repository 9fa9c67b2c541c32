"""The Canadian Hansards as a folder to train on, with gold word alignments for evaluation.

    python benchmarks/hansards.py CORPUS OUT
    regard train translation --data OUT --set data.target=fr --out RUN
    python benchmarks/alignments.py RUN

CORPUS holds train/train.{en,fr}.gz, the debates, and gold/enfr.{src-tgt,gold}, 447 sentences with links drawn by people
(Och and Ney 2003). The debates' French has no accents, and the gold text splits contractions: "du" is "de le" there,
"l'an" is "le an". The texts in both languages are converted to the form of the gold text: lower case, no accents, one
token per word. The sentences of the debates have at most 18 words, the gold sentences up to 30, so every other pair of
neighbouring sentences is joined into one line.
"""

import gzip
import re
import sys
import unicodedata
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

HELD = 1000  # number of pairs for validation
_CLITIC = re.compile(r"\b(l|d|c|j|n|s|m|t|qu|jusqu|lorsqu|puisqu|quoiqu)'(?=\w)")
_FULL = {"l": "le", "d": "de", "c": "ce", "j": "je", "n": "ne", "s": "se", "m": "me", "t": "te"}
_JOINED = {"du": "de le", "des": "de les", "au": "a le", "aux": "a les"}
_TOKEN = re.compile(r"'s\b|\w+(?:\.\w+)*|[^\w\s]")
_ABBREVIATED = re.compile(r"\b(mr|mrs|ms|hon|dr|st|m|no)\.")


def folded(text: str) -> str:
    """Return text in lower case, without accents."""
    apart = unicodedata.normalize("NFD", text.lower().replace("’", "'"))
    return "".join(letter for letter in apart if not unicodedata.combining(letter))


def english(text: str) -> list[str]:
    """Return the words of an English line, tokenised as in the gold text."""
    return _cut(folded(text).replace("n't ", " not "))


def french(text: str) -> list[str]:
    """Return the words of a French line, with clitics and contractions expanded."""
    text = _CLITIC.sub(lambda match: _FULL.get(match[1], f"{match[1]}e") + " ", folded(text))
    return " ".join(_JOINED.get(word, word) for word in _cut(text)).split()


def _cut(text: str) -> list[str]:
    marked = _ABBREVIATED.sub(r"\1․", text)  # a full stop of an abbreviation stays with its word
    words = re.findall(r"\w+․|" + _TOKEN.pattern, marked)
    return [word.replace("․", ".") for word in words]


def debates(corpus: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the tokenised sentence pairs of the debates in their order."""
    folder = corpus / "train"
    with gzip.open(folder / "train.en.gz", "rt") as left, gzip.open(folder / "train.fr.gz", "rt") as right:
        for source, target in zip(left, right, strict=True):
            pair = english(source), french(target)
            if all(pair):
                yield pair


def joined(pairs: Iterator[tuple[list[str], list[str]]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield two sentence pairs as they are, then the next two joined into one pair, and so on."""
    for first in pairs:
        group = [first, *islice(pairs, 3)]
        yield from group[:2]
        if group[2:]:
            source, target = (list(chain.from_iterable(side)) for side in zip(*group[2:], strict=True))
            yield source, target


def write(corpus: Path, out: Path) -> None:
    """Write the folder: train, val and test in both languages, and the gold links of test."""
    out.mkdir(parents=True)
    rows = list(joined(debates(corpus)))
    for name, part in (("val", rows[:HELD]), ("train", rows[HELD:])):
        for side, language in ((0, "en"), (1, "fr")):
            text = "".join(" ".join(row[side]) + "\n" for row in part)
            (out / f"{name}.{language}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    gold = [line.split("|||") for line in (corpus / "gold/enfr.src-tgt").read_text().splitlines()]
    for side, language in ((0, "en"), (1, "fr")):
        (out / f"test.{language}").write_text("".join(" ".join(folded(row[side]).split()) + "\n" for row in gold))
    (out / "test.en-fr.links").write_text((corpus / "gold/enfr.gold").read_text())
    print(f"{len(rows) - HELD:,} lines to train on, {HELD:,} to validate, {len(gold)} with gold links, in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), Path(sys.argv[2]))
