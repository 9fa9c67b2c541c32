"""Several predictions joined into one trace, so that one page shows the attention maps of all of them."""

from collections.abc import Sequence

from regard.look.attention_records import Record
from regard.look.trace import Trace
from regard.look.viewer.page_data import BETWEEN
from regard.tasks.task import Prediction, View

_LONGEST = 80  # largest number of characters of a prediction's title in the name of an attention map


def joined_trace(predictions: Sequence[Prediction], view: View, title: str | None = None) -> Trace | None:
    """Return a `Trace` with the attention maps of all predictions; None if no prediction has attention weights.

    The name of a map is the number and the title of its prediction. The title of a prediction is its answer; in visual
    question answering, the title also contains the question.
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
