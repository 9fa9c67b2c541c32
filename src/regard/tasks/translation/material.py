"""The training and evaluation data of translation: the built-in sentences, or the user's files."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regard.data.data_files import DataError
from regard.data.packed import Lazy
from regard.data.text.alignment import Gold, Links, read_links
from regard.data.text.bpe import Codes, train_bpe
from regard.data.text.bpe_dropout import MergeDropout
from regard.data.text.corpus import TextCorpus, TokenCorpus, encode, index
from regard.data.text.parallel_text import Limits, find_rows, load_pairs
from regard.data.text.vocabulary import Vocabulary
from regard.data.token_batches import Ids
from regard.data.worlds import sentence_pairs as world
from regard.data.worlds.grammar.sentences import Pair
from regard.tasks.task import Material
from regard.tasks.translation.codec import Coder, PieceCoder, WordCoder
from regard.tasks.translation.config import DataSettings, TranslationConfig


@dataclass(frozen=True)
class Example:
    """A validation or test pair: the words of the source, the reference translation, and gold word links if known."""

    source: tuple[str, ...]
    reference: str
    target: tuple[str, ...] = ()
    links: Links = frozenset()
    possible: Links = frozenset()


def make_material(config: TranslationConfig, cache: Path, codec: Coder | None, say: Callable[[str], None]) -> Material:
    """Return the data of a run; files get an index in the folder `cache`; without a `codec`, a new one is built."""
    if config.data.files:
        return file_material(config.data, cache, codec.codes if isinstance(codec, PieceCoder) else None, say=say)
    return world_material(config.data, codec if isinstance(codec, WordCoder) else None)


def world_material(settings: DataSettings, known: WordCoder | None = None) -> Material:
    """Return sentence pairs of the built-in grammar with their gold links; `known` is an existing codec."""
    _, longest = settings.lengths
    try:
        parts = world.splits(
            settings.seed,
            train=settings.train,
            valid=settings.valid,
            test=settings.test,
            longer=settings.longer,
            lengths=settings.lengths,
            beyond=(longest + 1, longest + max(1, longest // 2)),
        )
    except ValueError as error:
        raise DataError(f"the built-in world: {error} (data.lengths, data.train, data.longer)") from error
    coder = known or WordCoder(
        Vocabulary.build(pair.source for pair in parts.train), Vocabulary.build(pair.target for pair in parts.train)
    )
    train = [(coder.source.encode(pair.source), coder.goal.encode(pair.target)) for pair in parts.train]
    return Material(
        coder,
        train,
        _lengths(train),
        *([_example(pair) for pair in part] for part in (parts.valid, parts.test, parts.longer)),
        about=f"{len(parts.train):,} sentences of the built-in world, English to Chinese",
        example="Tom chases Jerry",
    )


def _example(pair: Pair) -> Example:
    return Example(pair.source, world.chinese_text(pair.target), pair.target, pair.links, pair.possible)


def _lengths(pairs: Sequence[tuple[Ids, Ids]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    source, target = ([len(pair[side]) + 1 for pair in pairs] for side in (0, 1))
    return np.array(source, np.int32), np.array(target, np.int32)


def file_material(
    settings: DataSettings, cache: Path, known: Codes | None = None, *, say: Callable[[str], None] = lambda _: None
) -> Material:
    """Return the data of the user's files, which are indexed once in the folder `cache`.

    `known` is an existing sub-word codec; if it is None, sub-words are learned from the training texts. Indexing takes
    a minute for a million lines; `say` is called with progress messages.
    """
    train, valid, test = _parts(settings)
    limits = Limits(longest=settings.longest, ratio=settings.ratio)
    say(f"reading {' and '.join(path.name for path in train)}")
    corpus = index(find_rows(train), cache, limits=limits)
    say(str(corpus.report))
    rows, held = split_by_source(
        corpus,
        settings.valid if not valid else 0,
        settings.test if not test else 0,
    )
    if held[0] or held[1]:
        say(f"{len(rows):,} pairs to learn from, {len(held[0]):,} to validate and {len(held[1]):,} to test by")
    if known is None:
        say(f"learning {settings.vocabulary:,} sub-words")
    codes = known or _trained(corpus, rows, settings)
    say("texts into sub-words")
    cuts = _cut(corpus, codes, settings, cache)
    source, target = ([cut.lengths(side)[rows] + 1 for cut in cuts] for side in (0, 1))
    judged_by = _examples(test, settings) if test else held[1]
    return Material(
        PieceCoder(codes),
        Lazy(len(cuts) * len(rows), lambda place: cuts[place // len(rows)][int(rows[place % len(rows)])]),
        (np.concatenate(source), np.concatenate(target)),
        _examples(valid) if valid else held[0],
        judged_by,
        [],
        about=f"{len(rows):,} pairs ({corpus.report})",
        example=_short(judged_by),
    )


def _short(examples: Sequence[Example]) -> str | None:
    """Return a short source sentence as the example input of a run: the first quartile by length of 50 sentences."""
    few = sorted((example.source for example in examples[:50] if example.source), key=len)
    return " ".join(few[len(few) // 4]) if few else None


def _cut(corpus: TextCorpus, codes: Codes, settings: DataSettings, cache: Path) -> list[TokenCorpus]:
    """Return the corpus as sub-words; with `merge_dropout` also in random segmentations, which the seed determines."""
    size, sides = max(codes.source.size, codes.target.size), (codes.source, codes.target)
    key = "".join(side.key for side in sides)
    corpora = [encode(corpus, *(side.encode_all for side in sides), size=size, key=key, cache=cache)]
    share = settings.merge_dropout
    if share > 0.0:
        loose = "".join(side.loosened(share).key for side in sides)
        for number in range(1, settings.cuts):
            draws = [
                MergeDropout(side, share, seed=f"{settings.seed} {number} {name}")
                for side, name in zip(sides, ("source", "target"), strict=True)
            ]
            # With `by_content`, the cache key is a hash of the texts, not of their file. Random segmentations written
            # by an earlier version of regard cannot be reproduced, so the stored ones must be reused.
            corpora.append(
                encode(
                    corpus,
                    *(draw.encode_all for draw in draws),
                    size=size,
                    key=f"{loose}{number}",
                    cache=cache,
                    by_content=True,
                )
            )
    return corpora


def input_files(config: TranslationConfig) -> list[Path]:
    """Return every data file that a run uses, including its file of gold links."""
    settings = config.data
    if not settings.files:
        return []
    train, valid, test = _parts(settings)
    beside = _links_beside(test[0], settings) if test else None
    return [*train, *valid, *test, *([beside[0]] if beside else [])]


def examples_of(paths: Sequence[Path], config: TranslationConfig, codec: Coder) -> tuple[list[Example], str]:
    """Return the test pairs of other files, and a description; of a folder, the test files are read."""
    return _examples_of(paths, config.data), ", ".join(map(str, paths))


def _examples_of(paths: Sequence[Path], settings: DataSettings) -> list[Example]:
    if len(paths) == 1 and Path(paths[0]).is_dir():
        _, _, test = _parts(settings.model_copy(update={"files": tuple(paths)}))
        if not test:
            raise DataError(f"{paths[0]}: no test files in it")
        return _examples(test, settings)
    return _examples([Path(path) for path in paths], settings)


def _examples(paths: Sequence[Path], settings: DataSettings | None = None) -> list[Example]:
    """Return the pairs of these files as test examples; with `settings`, also with gold word links."""
    pairs, _ = load_pairs(find_rows(list(paths)))
    examples = [Example(tuple(source.split()), target) for source, target in pairs]
    if settings is None or (beside := _links_beside(paths[0], settings)) is None:
        return examples
    path, reversed_ = beside
    gold = read_links(path, first=settings.first_word)
    return _linked(examples, [one.reversed() for one in gold] if reversed_ else gold, path, settings.first_word)


def _links_beside(path: Path, settings: DataSettings) -> tuple[Path, bool] | None:
    """Return the file of gold links beside a file such as test.en, and whether each link names the target word first.

    The links of test.en (or test.en.gz) are in test.en-fr.links, which serves both directions of translation, or in
    test.links, in which a link names the source word first. The result is None if neither file exists.
    """
    bare = path.with_name(path.name.removesuffix(".gz"))
    there, back = f".{settings.source}-{settings.target}", f".{settings.target}-{settings.source}"
    for way, reversed_ in ((there, False), (back, True), ("", False)):
        for name in (f"{bare.stem}{way}.links", f"{bare.stem}{way}.links.gz"):
            if (links := bare.with_name(name)).is_file():
                return links, reversed_
    return None


def _linked(examples: list[Example], gold: list[Gold], path: Path, first: int) -> list[Example]:
    if len(gold) != len(examples):
        raise DataError(f"{path}: {len(gold)} lines of links for {len(examples)} pairs; each pair needs a line")
    linked = []
    for number, (example, links) in enumerate(zip(examples, gold, strict=True), 1):
        target = tuple(example.reference.split())
        beyond = [link for link in links.possible if link[0] >= len(example.source) or link[1] >= len(target)]
        if beyond:
            left, right = (place + first for place in min(beyond))
            sizes = f"{len(example.source)} and {len(target)} words"
            raise DataError(
                f"{path}:{number}: a link {left}-{right}, but the pair has {sizes} (data.first_word={first})"
            )
        linked.append(replace(example, target=target, links=links.sure, possible=links.possible))
    return linked


def _parts(settings: DataSettings) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the training, validation and test files: single files are for training; in a folder, file names decide."""
    files = [Path(path) for path in settings.files]
    if not (len(files) == 1 and files[0].is_dir()):
        return files, [], []
    folder = files[0]
    parts = [_named(folder, names, settings) for names in (("train",), ("val", "dev"), ("test",))]
    if not parts[0]:
        wanted = f"train*.{settings.source} beside a train*.{settings.target}"
        raise DataError(f"{folder}: no {wanted} in it, and no train*.tsv or train*.jsonl")
    return parts[0], parts[1], parts[2]


def _named(folder: Path, names: tuple[str, ...], settings: DataSettings) -> list[Path]:
    def these(suffix: str) -> list[Path]:
        return sorted(
            path
            for path in folder.iterdir()
            if path.name.startswith(names) and path.name.removesuffix(".gz").endswith(f".{suffix}")
        )

    sides = [these(settings.source), these(settings.target)]
    if all(sides):
        return [sides[0][0], sides[1][0]]
    single = [*these("tsv"), *these("jsonl")]
    return single[:1]


def split_by_source(
    corpus: TextCorpus, valid: int, test: int
) -> tuple[NDArray[np.int64], tuple[list[Example], list[Example]]]:
    """Return the rows of the training pairs, and held-out validation and test examples.

    All pairs with equal source sentences are in one split (training, validation or test).
    """
    if not valid and not test:
        return np.arange(len(corpus)), ([], [])
    # A hash per pair takes less memory than the texts; equal source sentences have equal hashes.
    places = np.fromiter((_place(source) for source, _ in corpus), np.float64, len(corpus))
    sources, first = np.unique(places, return_index=True)
    if len(sources) < 2 * (valid + test):
        some = f"{len(corpus):,} pairs with {len(sources):,} different sources are"
        raise DataError(
            f"{some} too few to hold out {valid} and {test}: {2 * (valid + test):,} different sources are needed, so "
            "that at least half of them are for training; set data.valid and data.test to smaller numbers, or give "
            "more pairs"
        )
    examples = [
        Example(tuple(source.split()), target) for source, target in (corpus[int(n)] for n in first[: valid + test])
    ]
    # the training rows exclude all lines whose source sentence is held out
    rows = np.flatnonzero(~np.isin(places, sources[: valid + test]))
    return rows, (examples[:valid], examples[valid:])


def _place(text: str) -> float:
    """Return a hash of a text between 0 and 1, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) / 2**56


def _trained(corpus: TextCorpus, rows: NDArray[np.int64], settings: DataSettings) -> Codes:
    def texts(sides: tuple[int, ...]) -> Iterator[str]:
        for row in rows:
            pair = corpus[int(row)]
            yield from (pair[side] for side in sides)

    if settings.shared:
        both = train_bpe(texts((0, 1)), size=settings.vocabulary)
        return Codes(both, both)
    return Codes(train_bpe(texts((0,)), size=settings.vocabulary), train_bpe(texts((1,)), size=settings.vocabulary))
