"""What the page is told of a trace before it asks for any map."""

from typing import Any

from regard.look.page_data import about, sentences
from regard.studio.examples import Example
from regard.studio.tiles import is_sampled

FEW = 4_000_000  # weights of a record up to which its heads are summed up at once


def described(example: Example) -> dict[str, Any]:
    """Titles, shapes and labels, the entropy of heads where it is cheap, and which records have a model to ask."""
    found = about(example.trace)
    for record, entry in zip(example.trace.records, found["records"], strict=True):
        entry["model"] = record.name in example.models
        entry["batch"] = record.batch
        if is_sampled(record):
            sampled = "The picture of the whole map, and each coarse part of it, reads some rows of every block."
            entry["note"] = sentences(entry["note"], sampled)
        if record.heads * record.queries * record.keys <= FEW:
            entry["entropy"] = [round(value, 4) for value in record.entropy().mean(-1).nan_to_num().tolist()]
    return found
