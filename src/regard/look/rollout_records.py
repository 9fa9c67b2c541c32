"""The attention rollout of each stack of layers as a record, which is computed when its weights are requested."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.look.attention_records import Record
from regard.look.layer_names import cross_attention, layer_names, stacks
from regard.look.rollout import rollout

KIND = "rollout"
LONGEST = 512  # largest number of positions for which a rollout is computed
_WEIGHTS = 2**27  # largest number of weights, over all heads and layers of a stack, for which a rollout is computed


class Rolled:
    """The attention rollout of several layers as the weights of a `Record` with one head; padding has weight 0."""

    def __init__(self, layers: Sequence[Record]) -> None:
        self._layers = list(layers)
        # `_last` caches the index of the sequence whose rollout was computed last, and that rollout
        self._last: tuple[int, Tensor] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        first = self._layers[0]
        return first.batch, 1, first.queries, first.keys

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        if self._last is None or self._last[0] != batch:
            self._last = batch, self._whole(batch)
        return self._last[1][rows][None]

    def _whole(self, batch: int) -> Tensor:
        rolled = rollout(self._layers, batch=batch)
        first = self._layers[0]
        if rolled.shape == (first.queries, first.keys):
            return rolled
        rows, columns = (
            torch.arange(length) if labels is None or labels.shown is None else torch.tensor(labels.shown)
            for labels, length in zip(first.labels(batch=batch), (first.queries, first.keys), strict=True)
        )
        total = torch.zeros(first.queries, first.keys)
        total[rows[:, None], columns] = rolled
        return total

    def holds(self) -> list[Tensor]:
        return []


def with_rollouts(records: Sequence[Record]) -> list[Record]:
    """Return the records, followed by the rollout of each stack of at least two layers of square self-attention.

    >>> from regard.look.attention_records import Given
    >>> swap = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
    >>> records = with_rollouts([Record(f"layers.{n}.attention", "given", Given(swap)) for n in range(2)])
    >>> records[2].name, records[2].weights(head=0)
    ('rollout', tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]]))
    """
    names = [record.name for record in records]
    stack_of, crossing = stacks(names), cross_attention(names)
    layers_of: dict[str, list[Record]] = {}
    words: dict[str, tuple[str, ...]] = {}
    for record, said in zip(records, layer_names(names), strict=True):
        if said is not None and record.name not in crossing:
            stack = stack_of[record.name]
            layers_of.setdefault(stack, []).append(record)
            words[stack] = tuple(word for word in said if not word[0].isdecimal())
    rolled = {stack: layers for stack, layers in layers_of.items() if _can(layers)}
    titles = {stack: " ".join((*words[stack], KIND)) if len(rolled) > 1 else KIND for stack in rolled}
    if len(set(titles.values())) < len(titles):
        titles = {stack: f"{stack} {KIND}" for stack in rolled}
    return [*records, *(_record(titles[stack], layers) for stack, layers in rolled.items())]


def _can(layers: Sequence[Record]) -> bool:
    shapes = {(layer.batch, layer.queries, layer.keys) for layer in layers}
    if len(layers) < 2 or len(shapes) > 1 or len({layer.name for layer in layers}) < len(layers):
        return False
    [(batch, queries, keys)] = shapes
    if (
        not batch
        or not 1 < queries == keys <= LONGEST
        or any(getattr(layer.source, "rest", None) is not None for layer in layers)
    ):
        # a `Source` with an attribute `rest` has only the largest weights of each row, from a trace file, so it has no
        # exact rollout
        return False
    if any(rows != columns for layer in layers for rows, columns in itertools.pairwise(_places(layer))):
        return False
    return sum(layer.heads for layer in layers) * queries * keys <= _WEIGHTS


def _places(layer: Record) -> list[tuple[tuple[int, ...] | None, ...]]:
    """Return, for the rows and for the columns, the positions of each sequence that are not padding (None: all)."""
    axes = [layer.labels(batch=item) for item in range(layer.batch)]
    rows = tuple(None if labels.rows is None else labels.rows.shown for labels in axes)
    columns = tuple(None if labels.columns is None else labels.columns.shown for labels in axes)
    return [rows, columns]


def _record(name: str, layers: Sequence[Record]) -> Record:
    axes = [layers[0].labels(batch=item) for item in range(layers[0].batch)]
    return Record(
        name,
        KIND,
        Rolled(layers),
        row_labels=[labels.rows for labels in axes],
        column_labels=[labels.columns for labels in axes],
    )
