"""A vocabulary of whole words, which maps each word to a token number."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIALS = (PAD, BOS, EOS, UNKNOWN)


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary of words; the token numbers 0 to 3 are padding, the begin mark, the end mark and unknown words.

    >>> vocabulary = Vocabulary(("Tom", "chases", "Jerry"))
    >>> vocabulary.encode(("Jerry", "chases", "Spike")), vocabulary.decode((1, 6, 5, 4, 2, 0))
    ([6, 5, 3], ('Jerry', 'chases', 'Tom'))
    """

    words: tuple[str, ...]
    numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    pad = 0
    bos = 1
    eos = 2
    unknown = 3

    def __post_init__(self) -> None:
        numbers = {word: number for number, word in enumerate((*SPECIALS, *self.words))}
        if len(numbers) != len(SPECIALS) + len(self.words):
            raise ValueError("a word stands twice in the vocabulary, or is one of " + " ".join(SPECIALS))
        object.__setattr__(self, "numbers", numbers)

    @classmethod
    def build(cls, sentences: Iterable[Sequence[str]], *, size: int | None = None, rarest: int = 1) -> "Vocabulary":
        """Return a vocabulary of the words that occur at least `rarest` times in these sentences, at most `size` words.

        The most frequent words come first; words of equal frequency are in alphabetical order.
        """
        counts = Counter(word for sentence in sentences for word in sentence)
        frequent = [word for word, count in counts.items() if count >= rarest]
        ordered = sorted(frequent, key=lambda word: (-counts[word], word))
        return cls(tuple(ordered[:size]))

    @property
    def size(self) -> int:
        return len(self.numbers)

    def encode(self, words: Sequence[str]) -> list[int]:
        return [self.numbers.get(word, self.unknown) for word in words]

    def decode(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Return the words of these token numbers up to the first end mark, without padding and begin marks."""
        words = []
        for number in numbers:
            if number == self.eos:
                break
            if number not in (self.pad, self.bos):
                words.append(UNKNOWN if number == self.unknown else self.words[number - len(SPECIALS)])
        return tuple(words)

    def pieces(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the token numbers of these words, and the index of the word of each token.

        Each word is one token. `Subwords.pieces` has the same signature, but returns several tokens for some words.
        """
        return self.encode(words), list(range(len(words)))

    def save(self, path: Path) -> None:
        """Write the vocabulary as a tokenizer.json, the format of the tokenizers library."""
        model = Tokenizer(WordLevel(vocab=self.numbers, unk_token=UNKNOWN))
        model.pre_tokenizer = WhitespaceSplit()
        model.add_special_tokens(list(SPECIALS))
        model.save(str(path))

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Return the vocabulary stored in a tokenizer.json that `save` wrote."""
        numbers = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
        ordered = sorted(numbers, key=lambda word: numbers[word])
        if tuple(ordered[: len(SPECIALS)]) != SPECIALS:
            raise ValueError(f"{path}: not a vocabulary: its first words must be {' '.join(SPECIALS)}")
        return cls(tuple(ordered[len(SPECIALS) :]))
