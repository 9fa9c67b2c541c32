"""Byte-level BPE sub-words, trained on the user's own text. They can encode any text without an unknown token."""

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tokenizers import Encoding, Tokenizer
from tokenizers.decoders import ByteLevel as FromBytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from regard.data.text.parallel_text import UNSPACED
from regard.data.text.vocabulary import BOS, EOS, PAD

_SPECIALS = (PAD, BOS, EOS)
_LONGEST_WORD = 500
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD}}}(?=\S)")
SMALLEST = 256 + len(_SPECIALS)


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter in a token of byte-level BPE stands for.

    A printable byte is written as the character with the same code point; the other bytes are written as the characters
    from code point 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


@dataclass(frozen=True, eq=False)
class Subwords:
    """A tokenizer that maps texts to numbers of sub-words (Sennrich et al. 2016, on bytes as in GPT-2).

    The numbers 0 to 2 are padding, the begin mark and the end mark. decode(encode(text)) = text, for any text.

    >>> subwords = train_bpe(["Tom chases Jerry"] * 4, size=300)
    >>> subwords.decode(subwords.encode("Jerry 追逐 Tom 🐭"))
    'Jerry 追逐 Tom 🐭'
    """

    model: Tokenizer

    pad = 0
    bos = 1
    eos = 2

    def __post_init__(self) -> None:
        specials = tuple(self.model.id_to_token(number) for number in range(len(_SPECIALS)))
        if specials != _SPECIALS:
            raise ValueError(f"the first tokens must be {' '.join(_SPECIALS)}, not {specials}")
        # The string "<eos>" inside a text must be encoded as text, not as the end mark. The tokenizer's file does not
        # store this setting, so it is set after each load.
        self.model.encode_special_tokens = True

    @property
    def size(self) -> int:
        return self.model.get_vocab_size(with_added_tokens=True)

    @property
    def key(self) -> str:
        """Return a hash of the tokenizer; equal tokenizers have equal hashes."""
        return hashlib.sha256(self.model.to_str().encode()).hexdigest()[:20]

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of a text."""
        return [number for part in parts_of(text) for number in self._encoded(part).ids]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of many texts, computed on all cores."""
        parts = [parts_of(text) for text in texts]
        flat = [part for pieces in parts for part in pieces]
        encodings = iter(self.model.encode_batch_fast(flat, add_special_tokens=False))
        return [[number for _ in pieces for number in next(encodings).ids] for pieces in parts]

    def _encoded(self, text: str) -> Encoding:
        return self.model.encode(text, add_special_tokens=False)

    def loosened(self, dropout: float) -> "Subwords":
        """Return a copy with BPE-dropout (Provilkov et al. 2020): each merge is skipped with probability `dropout`.

        A word then has many segmentations, from which a model learns the word's morphemes better. The tokenizers
        library samples the merges, and its random generator cannot be seeded.

        >>> subwords = train_bpe(["Tom chases Jerry"] * 4, size=300)
        >>> loose = subwords.loosened(1.0)
        >>> len(subwords.encode("Tom")), len(loose.encode("Tom")), subwords.decode(loose.encode("Tom"))
        (1, 3, 'Tom')
        """
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be from 0 to 1, got {dropout}")
        described = json.loads(self.model.to_str())
        described["model"]["dropout"] = dropout
        return Subwords(Tokenizer.from_str(json.dumps(described)))

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text of these token numbers, up to the first end mark."""
        tokens = []
        for number in numbers:
            if number == self.eos:
                break
            if number not in (self.pad, self.bos):
                tokens.append(number)
        return self.model.decode(tokens, skip_special_tokens=True)

    def label(self, number: int) -> str:
        """Return a readable form of a sub-word; bytes that are only part of a character are written in hexadecimal.

        >>> subwords = train_bpe(["Tom"], size=270)
        >>> [subwords.label(number) for number in subwords.encode("To追")]
        ['T', 'o', '<E8>', '<BF>', '<BD>']
        """
        text = self.decode([number])
        if "\ufffd" not in text:
            return text
        raw = bytes(_byte_letters()[letter] for letter in self.model.id_to_token(number) or "")
        letters = raw.decode("utf-8", "surrogateescape")  # an invalid byte n becomes the character DC00 + n
        return "".join(f"<{ord(a) - 0xDC00:02X}>" if "\udc80" <= a <= "\udcff" else a for a in letters)

    def pieces(self, words: Sequence[str], *, separator: str = " ") -> tuple[list[int], list[int]]:
        """Return the token numbers of the joined words, and the index of the word that each token belongs to.

        >>> subwords = train_bpe(["Tom chases Jerry"] * 4, size=270)
        >>> subwords.pieces(("Tom", "jumps"))[1]
        [0, 1, 1, 1, 1, 1, 1]
        """
        numbers: list[int] = []
        lasts: list[int] = []  # the character position in the joined text at which each token ends
        start = 0
        for part in parts_of(separator.join(words)):
            encoding = self._encoded(part)
            numbers += encoding.ids
            lasts += [start + last for _, last in encoding.offsets]
            start += len(part)
        ends = []
        end = 0
        for word in words:
            end += len(word)
            ends.append(end)
            end += len(separator)
        owners = []
        word = 0
        for last in lasts:
            # A token belongs to the word in which it ends, because a blank is part of the token of the word after it.
            while word < len(ends) - 1 and last > ends[word]:
                word += 1
            owners.append(word)
        return numbers, owners

    def words(self, numbers: Sequence[int]) -> tuple[tuple[str, ...], list[int]]:
        """Return the words that these token numbers spell, and the index of the word of each number.

        Words are separated by blanks. A Chinese or Japanese character is also a word, unless a sub-word joins it with
        its neighbours: a word always consists of whole sub-words. If there are no words, the function returns two empty
        sequences.

        >>> subwords = train_bpe(["Tom sees", "追逐 追逐"] * 4, size=300)
        >>> subwords.words(subwords.encode("Tom saw 追逐杰瑞"))
        (('Tom', 'saw', '追逐', '杰', '瑞'), [0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 4, 4])
        """
        raw = [self._bytes(number) for number in numbers]
        # With surrogateescape each invalid byte becomes one character, so that the byte offset of every character is
        # known.
        letters = b"".join(raw).decode("utf-8", "surrogateescape")
        places = {0: 0}  # maps each byte offset where a character begins to the index of this character
        end = 0
        for place, letter in enumerate(letters, 1):
            end += len(letter.encode("utf-8", "surrogateescape"))
            places[end] = place
        starts = [0]
        owners: list[int] = []
        byte = 0
        for piece in raw:
            place = places.get(byte)
            if piece and place is not None and _begins_word(letters, starts[-1], place):
                starts.append(place)
            owners.append(len(starts) - 1)
            byte += len(piece)
        if len(starts) > 1 and not letters[starts[-1] :].strip():  # trailing blanks belong to the last word
            starts.pop()
            owners = [min(owner, len(starts) - 1) for owner in owners]
        spans = zip(starts, [*starts[1:], len(letters)], strict=True)
        words = tuple(_shown(letters[start:stop].strip()) for start, stop in spans)
        return (words, owners) if words[0] else ((), [])

    def _bytes(self, number: int) -> bytes:
        """Return the bytes of a sub-word; a special token such as padding has no bytes."""
        if number < len(_SPECIALS):
            return b""
        return bytes(_byte_letters()[letter] for letter in self.model.id_to_token(number) or "")

    def save(self, path: Path) -> None:
        self.model.save(str(path))

    @classmethod
    def load(cls, path: Path) -> "Subwords":
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such tokenizer")
        return cls(Tokenizer.from_file(str(path)))


def _begins_word(letters: str, start: int, place: int) -> bool:
    """Return whether a new word begins at character `place`, given that the previous word began at `start`."""
    if not letters[start:place].strip():  # only white space since `start`, which belongs to the next word
        return False
    before, here = letters[place - 1], letters[place]
    return before.isspace() or here.isspace() or bool(UNSPACED.match(before) or UNSPACED.match(here))


def _shown(letters: str) -> str:
    """Return the letters with each invalid byte, a surrogate escape, replaced by U+FFFD."""
    return letters.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def train_bpe(texts: Iterable[str], *, size: int = 8000) -> Subwords:
    """Return BPE sub-words with a vocabulary of at most `size`, trained on these texts.

    Pass the texts of both languages for a shared tokenizer, or train one tokenizer for each language. A signal such as
    Ctrl-C ends the training at once; the tokenizers library alone would delay the signal until training is complete.
    """
    if size < SMALLEST:
        raise ValueError(f"size must be at least {SMALLEST}, for 256 bytes and {len(_SPECIALS)} marks; it is {size}")
    model = Tokenizer(BPE())
    model.pre_tokenizer = ByteLevel(add_prefix_space=False, trim_offsets=False)
    model.decoder = FromBytes()
    trainer = BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(_SPECIALS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    _interruptible(lambda stop: model.train_from_iterator(_until(stop, texts), trainer))
    return Subwords(model)


def parts_of(text: str) -> list[str]:
    """Return the text cut into strings in which no word is longer than 500 characters; most texts are not cut.

    The tokenizers library takes time quadratic in the length of a word.

    >>> [len(part) for part in parts_of("short " + "x" * 1200 + " short")]
    [506, 500, 206]
    """
    if len(text) <= _LONGEST_WORD or not _LONG_WORD.search(text):
        return [text]
    places = [0, *(match.end() for match in _LONG_WORD.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def _until(stop: threading.Event, texts: Iterable[str]) -> Iterator[str]:
    """Yield the strings into which `parts_of` cuts each text; raise InterruptedError when the event `stop` is set."""
    for text in texts:
        if stop.is_set():
            raise InterruptedError("learning sub-words was stopped")
        yield from parts_of(text)


def _interruptible(work: Callable[[threading.Event], None]) -> None:
    """Run `work` in a thread, so that an exception raised by a signal handler is not delayed until `work` is done.

    After an exception of a signal handler, the event that `work` got as its argument is set. Native code cannot be
    stopped: the thread that runs it continues until the process ends.
    """
    failed: list[BaseException] = []
    stop = threading.Event()

    def run() -> None:
        try:
            work(stop)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="learning sub-words", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except BaseException:
        stop.set()
        thread.join(0.5)  # when the event is set, a thread that is still reading texts ends at once
        raise
    if failed:
        raise failed[0]


@dataclass(frozen=True, eq=False)
class Codes:
    """The sub-words of the source and of the target language; a single object for both if they share a tokenizer."""

    source: Subwords
    target: Subwords

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, and also tokenizer.target.json if the target language has a tokenizer of its own."""
        self.source.save(directory / "tokenizer.json")
        if self.target is not self.source:
            self.target.save(directory / "tokenizer.target.json")

    @classmethod
    def load(cls, directory: Path) -> "Codes":
        source = Subwords.load(directory / "tokenizer.json")
        other = directory / "tokenizer.target.json"
        return cls(source, Subwords.load(other) if other.is_file() else source)
