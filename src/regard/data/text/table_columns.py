"""Determines the text column and the label column of a table: as given, or guessed from the header or the cells."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from regard.data.data_files import DataError

TEXT_NAMES = (
    *("text", "sentence", "review", "content", "comment", "body", "message", "tweet", "document", "text_a", "phrase"),
    *("review_text", "reviewtext", "sentence1", "文本", "评论", "内容", "句子"),
)
LABEL_NAMES = (
    *("label", "labels", "sentiment", "class", "category", "polarity", "target", "rating", "stars", "score", "y"),
    *("标签", "类别", "情感"),
)


class Columns(NamedTuple):
    """The indices of the text and label columns, whether the first row is a header, and a message about the guess."""

    text: int
    label: int
    header: bool
    guess: str = ""


def find_columns(
    path: Path, rows: Sequence[Sequence[str]], *, text: str | None = None, label: str | None = None
) -> Columns:
    """Return the text and the label column of a table, given its first rows.

    `text` and `label` are names or numbers of columns; None means that the column is guessed. An unknown name or number
    raises `DataError`.

    >>> find_columns(Path("a.csv"), [["id", "review", "sentiment"], ["1", "Not bad.", "pos"]])
    Columns(text=1, label=2, header=True, guess="text is the column 'review', label is the column 'sentiment'")
    >>> find_columns(Path("a.tsv"), [["1", "not bad at all"], ["0", "dull from end to end"]]).label
    0
    """
    if not rows:
        raise DataError(f"{path}: the file is empty")
    first = [cell.strip() for cell in rows[0]]
    known = {name.casefold() for name in (*TEXT_NAMES, *LABEL_NAMES)}
    named = [name for name in (text, label) if name is not None and not name.isdigit()]
    header = bool(named) or any(cell.casefold() in known for cell in first)
    if header:
        places = [
            _by_name(path, first, text, TEXT_NAMES, "text"),
            _by_name(path, first, label, LABEL_NAMES, "label"),
        ]
        guesses = [
            f"{role} is the column {first[place]!r}"
            for role, place, given in (("text", places[0], text), ("label", places[1], label))
            if given is None
        ]
    else:
        places, guesses = _by_cells(path, rows, text, label)
    if places[0] == places[1]:
        raise DataError(f"{path}:1: text and label are the same column, {places[0]}: name them")
    return Columns(places[0], places[1], header, ", ".join(guesses))


def find_field(path: Path, line: int, names: Iterable[str], given: str | None, known: Sequence[str], role: str) -> str:
    """Return the name of the field that holds the text or the label (`role`) in a JSON record with the fields `names`.

    The result is the field name `given`, or if `given` is None, the first of the names `known` that the record has.
    """
    names = list(names)
    if given is not None:
        if given not in names:
            raise DataError(f"{path}:{line}: there is no {role} column {given!r}; the columns are {_list(names)}")
        return given
    folded = {name.strip().casefold(): name for name in reversed(names)}
    for name in known:
        if name in folded:
            return folded[name]
    raise DataError(
        f"{path}:{line}: no column is known to be the {role}; name one of {_list(names)} (data.{role}=NAME)"
    )


def _by_name(path: Path, header: list[str], given: str | None, known: Sequence[str], role: str) -> int:
    if given is not None and given not in header and given.isdigit():
        return _number(path, given, len(header), role)
    return header.index(find_field(path, 1, header, given, known, role))


def _number(path: Path, given: str, columns: int, role: str) -> int:
    if int(given) >= columns:
        raise DataError(f"{path}:1: there is no {role} column {given}; there are {columns}, from 0")
    return int(given)


def _by_cells(
    path: Path, rows: Sequence[Sequence[str]], text: str | None, label: str | None
) -> tuple[list[int], list[str]]:
    """Return the text column and the label column of a table without a header, and a message about the guess.

    The text is guessed to be the column with the most characters, and the label the other column with the fewest
    distinct values.
    """
    count = min(len(row) for row in rows)
    if count < 2:
        raise DataError(f"{path}:1: expected at least two columns, text and label, found {count}")
    guesses = []
    if text is None:
        lengths = [sum(len(row[column]) for row in rows) for column in range(count)]
        place = max(range(count), key=lambda column: lengths[column])
        guesses.append(f"text is column {place}")
    else:
        place = _number(path, text, count, "text")
    if label is None:
        others = [column for column in range(count) if column != place]
        mark = min(others, key=lambda column: (len({row[column] for row in rows}), column))
        guesses.append(f"label is column {mark}")
    else:
        mark = _number(path, label, count, "label")
    return [place, mark], [*guesses, "there is no header"] if guesses else []


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:40]) for name in names[:12])
    return shown + (" …" if len(names) > 12 else "") if names else "none"
