"""Several predictions as one trace, so that one page shows them all."""

from collections.abc import Sequence

from regard.look.attention_records import Record
from regard.look.trace import Trace
from regard.look.viewer.page_data import BETWEEN
from regard.tasks.task import Prediction, View

_LONGEST = 80  # number of characters of a title in the name of a map


def joined_trace(predictions: Sequence[Prediction], view: View, title: str | None = None) -> Trace | None:
    """Return the maps of all predictions, named by number and title: the answer, in `vqa` with the question.

    Return None if no model has attention.
    """
    records: list[Record] = []
    dropped: list[str] = []
    for number, prediction in enumerate(predictions):
        trace = prediction.trace()
        if trace is None:
            continue
        dropped += [f"{number}. {text}" for text in trace.dropped]
        heading = trace.title if len(trace.title) <= _LONGEST else f"{trace.title[:_LONGEST]}…"
        for record in trace.records:
            record.name = f"{number}. {heading}" + (f"{BETWEEN}{record.name}" if len(trace.records) > 1 else "")
            records.append(record)
    return Trace(title or view.title, records, dropped, parts=view.parts) if records else None
