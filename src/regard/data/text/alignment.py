"""Word alignments: functions that read gold alignments, derive alignments from attention weights, and score them."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.data.data_files import DataError
from regard.data.text.lines import lines

Link = tuple[int, int]
Links = Collection[Link]

_LINK = re.compile(r"(\d+)(-|p)(\d+)(-[PS])?")


@dataclass(frozen=True, slots=True)
class Gold:
    """The gold alignment of one sentence pair: links (source word, target word), counted from 0.

    `possible` includes the links in `sure`.
    """

    sure: frozenset[Link]
    possible: frozenset[Link]

    def reversed(self) -> "Gold":
        """Return the alignment with the links reversed, as (target word, source word)."""
        return Gold(frozenset(link[::-1] for link in self.sure), frozenset(link[::-1] for link in self.possible))


def parse_links(text: str, *, first: int = 1) -> Gold:
    """Return the gold alignment that a line of a file describes.

    `i-j` is a sure link and `ipj` (or `i-j-P`) a possible link of source word i and target word j; in the line, words
    are counted from `first`.

    >>> gold = parse_links("1-1 2p1 3-2")
    >>> sorted(gold.sure), sorted(gold.possible)
    ([(0, 0), (2, 1)], [(0, 0), (1, 0), (2, 1)])
    """
    sure: set[Link] = set()
    possible: set[Link] = set()
    for part in text.split():
        match = _LINK.fullmatch(part)
        if match is None:
            raise ValueError(f"expected links such as 1-2 or 1p2, found {part!r}")
        left, sort, right, suffix = match.groups()
        link = (int(left) - first, int(right) - first)
        if min(link) < 0:
            raise ValueError(f"words are counted from {first}, found {part!r}")
        possible.add(link)
        if sort == "-" and suffix != "-P":
            sure.add(link)
    return Gold(frozenset(sure), frozenset(possible))


def read_links(path: Path, *, first: int = 1) -> list[Gold]:
    """Return the gold alignments in a file, one for each line; an empty line is a sentence without links."""
    alignments = []
    for line in lines(path):
        try:
            if line.fault:
                raise ValueError(line.fault)
            alignments.append(parse_links(line.text, first=first))
        except ValueError as error:
            raise DataError(f"{path}:{line.number}: {error}") from error
    return alignments


def alignment_error_rate(predicted: Iterable[Links], sure: Iterable[Links], possible: Iterable[Links]) -> float:
    """Return the alignment error rate of all sentences together, 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|).

    A is the set of predicted links, S of the sure and P of the possible gold links; sure links also count as possible
    (Och and Ney 2003).

    >>> alignment_error_rate([{(0, 0), (1, 1)}], [{(0, 0)}], [{(0, 0), (1, 1)}])
    0.0
    >>> alignment_error_rate([{(0, 0), (2, 1)}], [{(0, 0), (1, 1)}], [set()])
    0.5
    """
    agreed = total = 0
    for links, certain, allowed in zip(predicted, sure, possible, strict=True):
        links, certain = set(links), set(certain)
        agreed += len(links & certain) + len(links & (certain | set(allowed)))
        total += len(links) + len(certain)
    return 1 - agreed / total if total else 0.0


def words_of_weights(
    weights: Float[Tensor, "t s"], *, source: Sequence[int] | None = None, target: Sequence[int] | None = None
) -> Float[Tensor, "words others"]:
    """Return attention weights between words, given the weights (target, source) between their sub-words.

    The weights are summed over the sub-words of a source word and averaged over the sub-words of a target word.
    `source` and `target` hold for each sub-word the index of its word; None means that each token is a word. Columns
    and rows beyond these sub-words, such as those of end marks, are removed, and the remaining weights are not
    renormalised.

    >>> weights = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]])
    >>> words_of_weights(weights, source=[0, 1, 1], target=[0, 0])
    tensor([[0.2500, 0.7500]])
    """
    columns = list(range(weights.shape[1])) if source is None else list(source)
    rows = list(range(weights.shape[0])) if target is None else list(target)
    if len(columns) > weights.shape[1] or len(rows) > weights.shape[0]:
        raise ValueError(f"weights are {tuple(weights.shape)}, but {len(rows)} × {len(columns)} pieces are given")
    merged = weights.new_zeros(len(rows), max(columns, default=-1) + 1)
    merged.index_add_(1, torch.tensor(columns, dtype=torch.long, device=weights.device), _part(weights, rows, columns))
    owners = torch.tensor(rows, dtype=torch.long, device=weights.device)
    counts = torch.bincount(owners, minlength=max(rows, default=-1) + 1).clamp(min=1)
    return merged.new_zeros(len(counts), merged.shape[1]).index_add_(0, owners, merged) / counts[:, None]


def _part(weights: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    return weights[: len(rows), : len(columns)]


def links_from_weights(
    weights: Float[Tensor, "t s"],
    *,
    source: Sequence[int] | None = None,
    target: Sequence[int] | None = None,
    least: float = 0.0,
) -> set[Link]:
    """Return a link (source word, target word) from each target word to the source word that it attends to most.

    A target word whose largest weight is not above `least` has no link. `source` and `target` are passed to
    `words_of_weights`: for each token, the index of its word.

    >>> sorted(links_from_weights(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])))
    [(0, 0), (2, 1)]
    """
    merged = words_of_weights(weights, source=source, target=target)
    if not merged.numel():
        return set()
    best, place = merged.max(dim=1)
    return {
        (column, row)
        for row, (weight, column) in enumerate(zip(best.tolist(), place.tolist(), strict=True))
        if weight > least
    }


def joined_links(
    forward: Links, backward: Links, *, way: Literal["intersection", "union", "grow"] = "grow"
) -> set[Link]:
    """Return the combined links (source, target) of two models, one for each direction (after Och and Ney 2003).

    `backward` are the links of the target-to-source model, converted to (source, target). The method "grow" starts from
    the links that both models have, which are accepted; it then accepts links of either model that are adjacent to an
    accepted link and whose source or target word has no link yet.

    >>> sorted(joined_links({(0, 0), (1, 1), (1, 2)}, {(0, 0), (1, 1), (3, 4)}))
    [(0, 0), (1, 1), (1, 2)]
    """
    if way not in ("intersection", "union", "grow"):
        raise ValueError(f"way must be intersection, union or grow, got {way!r}")
    first, second = set(forward), set(backward)
    if way != "grow":
        return first & second if way == "intersection" else first | second
    links, left = first & second, sorted(first ^ second)
    while True:
        sources, targets = {link[0] for link in links}, {link[1] for link in links}
        new = next((link for link in left if _grows(link, links, sources, targets)), None)
        if new is None:
            return links
        links.add(new)
        left.remove(new)


def _grows(link: Link, links: set[Link], sources: set[int], targets: set[int]) -> bool:
    """Return whether one of the link's words has no accepted link and an accepted link is adjacent, also diagonally."""
    if link[0] in sources and link[1] in targets:
        return False
    return any((link[0] + i, link[1] + j) in links for i in (-1, 0, 1) for j in (-1, 0, 1))
