"""Selects records by name or pattern, and assigns labels to the sequences of a batch."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from regard.look.attention_records import Record
from regard.look.labels import Labels


def named(records: Sequence[Record], name: str) -> list[Record]:
    """Return the records of exactly that name; if there are none, those that match it as a pattern."""
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
    """Return the records that the labels fit, each with its new labels. With `strictly`, all records must fit."""
    lengths = {len(one) for one in labels}
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
    """Return the new labels of each sequence of a record."""
    if batch is not None:
        items = [batch] if isinstance(batch, int) else list(batch)
        if len(labels) not in (1, len(items)):
            raise ValueError(f"{what} has labels for {len(labels)} sequences, but batch names {len(items)}")
        axes = [record.labels(batch=item) for item in range(record.batch)]
        plan = [one.rows if what == "rows" else one.columns for one in axes]
        for place, item in enumerate(items):
            record.labels(batch=item)  # raises if the batch has no such sequence
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
    """Return the labels of calls whose rows are joined; None if one of them has none."""
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
