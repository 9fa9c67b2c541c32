"""The description of a trace as JSON, which the page loads before any attention map."""

import math
from typing import Any

from regard.look.rollout_records import KIND as ROLLOUT
from regard.look.viewer.page_data import Odd, about, one_of, sentences
from regard.studio.examples import Example
from regard.studio.limits import within
from regard.studio.map_tiles import is_sampled

LISTED = 256  # largest number of sequences in the menu of the page
FEW = 4_000_000  # the entropy of each head is computed only if the record has at most this many attention weights


def described(example: Example, batch: int = 0) -> dict[str, Any]:
    """Return the description of one sequence of a trace: its records with shapes and labels, and which have a model."""
    count = max(1, example.trace.sequences)
    within(batch, 0, count - 1, "batch")
    listed = range(max(batch + 1, min(count, LISTED)))
    description = about(example.shown, batch=batch, sequences=listed)
    if len(listed) < count:
        description["dropped"].append(
            f"sequences {len(listed)} to {count - 1} of the batch are too many to choose from"
        )
    for whole, entry in zip(example.shown.records, description["records"], strict=True):
        item, record = one_of(whole, batch)
        entry["model"] = record.name in example.models
        entry["batch"], entry["item"] = whole.batch, item
        if is_sampled(record):
            sampled = "The picture of the whole map, and each coarse part of it, reads some rows of every block."
            entry["note"] = sentences(entry["note"], sampled)
        # The entropy of an attention rollout is not computed, because it would require all weights of all layers.
        if record.kind != ROLLOUT and record.heads * record.queries * record.keys <= FEW:
            entropy = record.entropy().mean(-1).tolist()
            entry["entropy"] = [round(value, 4) if math.isfinite(value) else None for value in entropy]
            entry["note"] = sentences(entry["note"], Odd.of(record.weights()).sentence())
    return description
