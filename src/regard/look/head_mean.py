"""The mean of the attention weights over the heads of a record, as an additional last head."""

import torch
from torch import Tensor

from regard.look.attention_records import Record, Source
from regard.look.batch_items import stored


class WithMean:
    """A `Source` with the weights of another `Source`, and the mean of all heads as an additional last head."""

    def __init__(self, source: Source) -> None:
        self._source = source
        batch, self._heads, queries, keys = source.shape
        self._shape = (batch, self._heads + 1, queries, keys)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        if heads.stop <= self._heads:
            return self._source.rows(batch, heads, rows)
        weights = self._source.rows(batch, range(self._heads), rows)
        return torch.cat([weights[heads.start :], weights.mean(0, keepdim=True)])

    def holds(self) -> list[Tensor]:
        return self._source.holds()

    # The methods below return summaries that a trace file stores. The entropy of the mean of the heads is not the mean
    # of their entropies, so it is unknown (NaN).

    def received(self, batch: int) -> Tensor | None:
        known = stored(self._source, "received", batch)
        return None if known is None else torch.cat([known, known.mean(0, keepdim=True)])

    def entropy(self, batch: int) -> Tensor | None:
        known = stored(self._source, "entropy", batch)
        return None if known is None else torch.cat([known, torch.full_like(known[:1], torch.nan)])

    def overview(self, batch: int, head: int) -> Tensor | None:
        if head < self._heads:
            return stored(self._source, "overview", batch, head)
        known = [stored(self._source, "overview", batch, number) for number in range(self._heads)]
        maps = [overview for overview in known if overview is not None]
        return torch.stack(maps).mean(0) if maps else None

    @property
    def rest(self) -> Tensor | None:
        """Return for each row the sum of its weights that a trace file does not store, (batch, heads, rows).

        None is returned if all weights are known.
        """
        known = getattr(self._source, "rest", None)
        return None if known is None else torch.cat([known, known.mean(1, keepdim=True)], 1)


def with_mean(record: Record) -> Record:
    """Return the record with the mean over its heads as an additional last head; a record of one head is unchanged.

    >>> from regard.look.attention_records import Given
    >>> two = Record("layer", "given", Given(torch.tensor([[[[1.0, 0.0]], [[0.5, 0.5]]]])))
    >>> with_mean(two).weights(head=2)
    tensor([[0.7500, 0.2500]])
    """
    if record.heads == 1:
        return record
    axes = [record.labels(batch=item) for item in range(record.batch)]
    return Record(
        record.name,
        record.kind,
        WithMean(record.source),
        call=record.call,
        scale=record.scale,
        note=record.note,
        row_labels=[labels.rows for labels in axes],
        column_labels=[labels.columns for labels in axes],
    )
