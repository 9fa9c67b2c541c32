"""BPE-dropout with a seed: random segmentations of a text into sub-words, reproducible from the seed."""

import json
from collections.abc import Sequence
from itertools import pairwise
from random import Random

from regard.data.text.bpe import Subwords, parts_of


class MergeDropout:
    """An encoder with BPE-dropout (Provilkov et al. 2020, algorithm 1).

    At every step each possible merge is skipped with probability `share`; of the remaining merges, the one that was
    learned first is applied. The tokenizers library does the same, but its random generator cannot be seeded.

    >>> from regard.data.text.bpe import train_bpe
    >>> subwords = train_bpe(["Tom chases Jerry"] * 4, size=300)
    >>> subwords.encode_all(["Tom chases"]) == MergeDropout(subwords, 0.0, seed="1").encode_all(["Tom chases"])
    True
    >>> some, again = (MergeDropout(subwords, 0.5, seed="1").encode_all(["Tom chases"] * 9) for _ in range(2))
    >>> some == again, len({tuple(numbers) for numbers in some}) > 1
    (True, True)
    """

    def __init__(self, subwords: Subwords, share: float, *, seed: str) -> None:
        described = json.loads(subwords.model.to_str())["model"]
        self._numbers: dict[str, int] = described["vocab"]
        merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in described["merges"]]
        self._ranks = {merge: rank for rank, merge in enumerate(merges)}
        self._cutter = subwords.model.pre_tokenizer
        self._share = share
        self._draw = Random(seed).random

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of many texts; the random generator is not reset between calls."""
        return [[n for part in parts_of(text) for n in self._part(part)] for text in texts]

    def _part(self, text: str) -> list[int]:
        return [number for word, _ in self._cutter.pre_tokenize_str(text) for number in self._word(word)]

    def _word(self, word: str) -> list[int]:
        ranks, draw, share = self._ranks, self._draw, self._share
        parts = list(word)
        while len(parts) > 1:
            best, place = len(ranks), -1
            for left, pair in enumerate(pairwise(parts)):
                rank = ranks.get(pair)
                if rank is not None and draw() >= share and rank < best:
                    best, place = rank, left
            if place < 0:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return [self._numbers[part] for part in parts]
