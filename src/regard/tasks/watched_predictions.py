"""Predictions with the self-attention of their network, in addition to the attention maps of their task."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.look.attention_records import Record
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.look.watch import watch
from regard.tasks.loading import Loaded
from regard.tasks.task import InputError, Prediction

MOST_WEIGHTS = 2**20  # largest number of self-attention weights of one prediction, over all heads and layers
_BYTES = 2**28  # largest number of bytes of queries and keys that are stored during one prediction


@dataclass(frozen=True, eq=False)
class Watched:
    """A prediction with the self-attention maps of its network; `dropped` lists messages about omitted layers."""

    prediction: Prediction
    layers: Sequence[Record]
    dropped: Sequence[str] = ()

    @property
    def answer(self) -> str:
        return self.prediction.answer

    @property
    def line(self) -> str:
        return self.prediction.line

    def record(self) -> dict[str, Any]:
        return self.prediction.record()

    def trace(self) -> Trace | None:
        """Return the attention maps of the task, followed by those of self-attention; None if there are no maps."""
        own = self.prediction.trace()
        layers = [copy.copy(layer) for layer in self.layers]
        if own is None:
            return Trace(self.answer, layers, self.dropped) if layers else None
        return Trace(own.title, [*own.records, *layers], [*own.dropped, *self.dropped])


def watched(loaded: Loaded, inputs: Sequence[Any], **options: Any) -> list[Prediction | InputError]:
    """Return one prediction for each input, in order, each with the self-attention maps of its network.

    Every attention call with equal numbers of queries and keys counts as self-attention, such as the layers of a
    Transformer encoder, or the self-matching of a passage. The positions of a self-attention map have the labels of an
    attention map of the task with the same number of positions.
    """
    return [_watched(loaded, one, options) for one in inputs]


def _watched(loaded: Loaded, given: Any, options: dict[str, Any]) -> Prediction | InputError:
    with watch(loaded.predictor.network, limit=_BYTES) as seen:
        [prediction] = loaded.answers([given], **options)
    if isinstance(prediction, InputError):
        return prediction
    own = prediction.trace()
    shown = [] if own is None else own.records
    square = [one for one in seen.records if one.batch == 1 and one.queries == one.keys > 1 and one.call == 0]
    layers = [one for one in square if not any(_same(one, other) for other in shown)]
    selected: list[Record] = []
    dropped: list[str] = []
    total = 0
    for layer in layers:
        total += layer.heads * layer.queries * layer.keys
        if total > MOST_WEIGHTS:
            dropped.append(
                f"{layer.name!r} did not fit: a page shows {MOST_WEIGHTS:,} weights of self-attention an answer"
            )
            continue
        labels = _labels(shown, layer.keys)
        layer.row_labels = layer.column_labels = labels
        selected.append(layer)
    return Watched(prediction, selected, dropped)


def _same(one: Record, other: Record) -> bool:
    """Return whether two attention maps are equal.

    An attention map of the task may have as many queries as keys; `watch` then also records this map as self-attention,
    and the second copy is omitted.
    """
    shapes = {(record.batch, record.heads, record.queries, record.keys) for record in (one, other)}
    return len(shapes) == 1 and torch.allclose(one.weights(), other.weights(), atol=1e-4)


def _labels(shown: Sequence[Record], count: int) -> Labels | None:
    """Return labels of `count` positions: column labels of one of the maps `shown`, else row labels, else None."""
    axes = [record.labels() for record in shown]
    known = [labels for labels in [*(one.columns for one in axes), *(one.rows for one in axes)] if labels is not None]
    return next((labels for labels in known if len(labels) == count), None)
