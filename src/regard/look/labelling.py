"""Selection of records by name or pattern, and assignment of labels to the sequences of their batches."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from regard.look.attention_records import Record
from regard.look.labels import Labels


def named(records: Sequence[Record], name: str) -> list[Record]:
    """Return the records with exactly that name; if there are none, those whose names match it as a pattern."""
    return [record for record in records if record.name == name] or [
        record for record in records if fnmatchcase(record.name, name)
    ]


def plans(
    records: Sequence[Record],
    what: str,
    labels: Sequence[Labels],
    *,
    batch: int | Sequence[int] | None,
    strictly: bool,
) -> list[tuple[Record, list[Labels | None]]]:
    """Return the records that have as many rows (or columns) as there are labels, each with a list of its new labels.

    The list has one entry for each sequence of the record. With `strictly`, records of another length are an error.
    """
    lengths = {len(entry) for entry in labels}
    if len(lengths) > 1:
        raise ValueError(
            f"{what} has from {min(lengths)} to {max(lengths)} labels for its sequences, which are padded to one "
            "length: give names for the padding too, or (tokenizer, encoding), whose attention mask tells it"
        )
    [length] = lengths
    sizes = [record.queries if what == "rows" else record.keys for record in records]
    fit = [record for record, size in zip(records, sizes, strict=True) if size == length]
    if not fit or (strictly and len(fit) < len(records)):
        raise ValueError(f"{what} has {length} labels, but the records have {sorted(set(sizes))} {what}")
    return [(record, _plan(record, what, labels, batch)) for record in fit]


def _plan(
    record: Record, what: str, labels: Sequence[Labels], batch: int | Sequence[int] | None
) -> list[Labels | None]:
    """Return the new labels of a record as a list with one entry for each sequence of its batch."""
    if batch is not None:
        items = [batch] if isinstance(batch, int) else list(batch)
        if len(labels) not in (1, len(items)):
            raise ValueError(f"{what} has labels for {len(labels)} sequences, but batch names {len(items)}")
        axes = [record.labels(batch=item) for item in range(record.batch)]
        plan = [entry.rows if what == "rows" else entry.columns for entry in axes]
        for place, item in enumerate(items):
            record.labels(batch=item)  # this call raises IndexError if the batch has no sequence with the index `item`
            plan[item] = labels[place if len(labels) > 1 else 0]
        return plan
    if len(labels) == record.batch:
        return list(labels)
    if len(labels) == 1:
        raise ValueError(
            f"{what} has the labels of one sequence, but {record.name!r} has {record.batch}: give labels for each of "
            f"them (a list of lists, or (tokenizer, encoding)), or say which: batch=0, or batch=range({record.batch}) "
            "if all of them have the same"
        )
    raise ValueError(f"{what} has labels for {len(labels)} sequences, but {record.name!r} has {record.batch}")


def in_a_row(parts: Sequence[Labels | None]) -> Labels | None:
    """Return the labels of several attention calls, concatenated; None if a call has no labels or has extra data."""
    if any(part is None or part.extra for part in parts):
        return None
    known = [part for part in parts if part is not None]
    items = tuple(item for part in known for item in part.items)
    shown: list[int] = []
    start = 0
    for part in known:
        shown += [start + n for n in (range(len(part)) if part.shown is None else part.shown)]
        start += len(part)
    return Labels(known[0].kind, items, shown=tuple(shown) if len(shown) < len(items) else None)
