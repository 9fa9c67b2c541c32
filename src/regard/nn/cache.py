"""The key-value cache: keys and values of earlier decoding steps."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core.biases import Alibi, Bias, DenseBias, Relative, as_bias
from regard.core.masks import Dense, Mask, as_mask
from regard.core.spans import all_of
from regard.core.tensor_arguments import second_offset

_FIRST = 32  # initial capacity of a growing cache, in positions


class KeyValueCache:
    """Keys and values of earlier positions: each decoding step appends its keys and values, and attends to all of them.

    There are three kinds of caches. By default, storage is doubled when it is full, up to `capacity`. With
    `static=True` the whole capacity is allocated at the first step, shapes never change and the length is a tensor on
    the device (`position`), as CUDA graphs and compiled steps require. `fixed` fills the cache once, with an encoder's
    memory; after that it is read-only. An error leaves the cache unchanged.

    >>> cache = KeyValueCache(capacity=8)
    >>> keys, values = cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5))
    >>> keys, values = cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 5))
    >>> cache.length, tuple(values.shape)
    (4, (1, 2, 4, 5))
    """

    def __init__(self, capacity: int | None = None, static: bool = False) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if static and capacity is None:
            raise ValueError("a static cache holds its whole capacity from the start: give capacity")
        self.capacity = capacity
        self.static = static
        self.position: Int[Tensor, ""] | None = None  # the length as a tensor on the device, for a static cache
        self.is_fixed = False
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._length = 0

    @property
    def length(self) -> int:
        """Return the number of stored positions. For a static cache this waits for the device."""
        if self.position is None or self.is_fixed:
            return self._length
        return int(self.position)

    @property
    def offset(self) -> int | Int[Tensor, ""]:
        """Return the position of the next query: the length, as a number, or for a static cache as a tensor."""
        return self._length if self.position is None else self.position.clone()

    @property
    def room(self) -> int | None:
        """Return the fixed number of keys that a static cache returns; None for a growing or read-only cache."""
        return self.capacity if self.static and not self.is_fixed else None

    def update(
        self, key: Float[Tensor, "b g n d"], value: Float[Tensor, "b g n e"]
    ) -> tuple[Float[Tensor, "b g k d"], Float[Tensor, "b g k e"]]:
        """Append keys and values, and return all stored keys and values (a static cache returns its whole storage)."""
        self._check(key, value)
        if self.static:
            return self._write(key, value)
        length = self._length + key.shape[-2]
        if self._key is None or self._value is None:
            self._key, self._value = key.new_empty(0), value.new_empty(0)
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad or self._key.requires_grad):
            # Autograd cannot differentiate through a tensor that later steps change in place, so with gradients new
            # positions are appended by copying.
            self._key, self._value = (
                new if self._length == 0 else torch.cat((old.narrow(-2, 0, self._length), new), -2)
                for old, new in ((self._key, key), (self._value, value))
            )
        else:
            self._key, self._value = self._appended(self._key, key), self._appended(self._value, value)
        self._length = length
        return self._key.narrow(-2, 0, length), self._value.narrow(-2, 0, length)

    def fixed(
        self, key: Float[Tensor, "b g k d"], value: Float[Tensor, "b g k e"]
    ) -> tuple[Float[Tensor, "b g k d"], Float[Tensor, "b g k e"]]:
        """Fill an empty cache with the keys and values of a whole memory; after that the cache is read-only."""
        if self._key is not None:
            raise ValueError(f"fixed() fills an empty cache, this one holds {self.length} positions")
        self._check(key, value)
        self._key, self._value, self._length, self.is_fixed = key, value, key.shape[-2], True
        return key, value

    def read(self) -> tuple[Float[Tensor, "b g k d"], Float[Tensor, "b g k e"]]:
        """Return the stored keys and values (of a static cache its whole storage)."""
        if self._key is None or self._value is None:
            raise ValueError("the cache is empty: there is nothing to read")
        if self.static:
            return self._key, self._value
        return self._key.narrow(-2, 0, self._length), self._value.narrow(-2, 0, self._length)

    def reorder(self, index: Int[Tensor, " rows"]) -> None:
        """Select the batch rows `index`, in this order: the hypotheses of beam search that continue, or copies for new
        hypotheses."""
        if self._key is None or self._value is None:
            return
        self._key, self._value = self._rows(self._key, index), self._rows(self._value, index)

    def reset(self) -> None:
        """Remove all positions; a static cache keeps its storage, so that captured graphs stay valid."""
        self._length, self.is_fixed = 0, False
        if self.position is not None:
            self.position.zero_()
        else:
            self._key = self._value = None

    def _check(self, key: Tensor, value: Tensor) -> None:
        """Raise, without changing the cache, if the shapes of the new keys and values do not match the stored keys and
        values."""
        if self.is_fixed:
            raise ValueError(f"the cache holds a fixed memory of {self._length} positions: it is read, not added to")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"key is {tuple(key.shape)}, value is {tuple(value.shape)}: they must agree up to the size"
            )
        count = key.shape[-2]
        if self.capacity is not None and self._length + count > self.capacity:
            raise ValueError(
                f"the cache has a capacity of {self.capacity} and holds {self._length}: {count} more do not fit"
            )
        if self._key is None or self._value is None:
            return
        for name, new, old in (("key", key, self._key), ("value", value, self._value)):
            if new.shape[0] != old.shape[0]:
                raise ValueError(f"{name} has a batch of {new.shape[0]}, the cache holds a batch of {old.shape[0]}")
            if new.shape[1] != old.shape[1] or new.shape[-1] != old.shape[-1]:
                raise ValueError(
                    f"{name} has {new.shape[1]} heads of size {new.shape[-1]}, "
                    f"the cache holds {old.shape[1]} heads of size {old.shape[-1]}"
                )
            if new.dtype != old.dtype or new.device != old.device:
                raise ValueError(f"{name} is {new.dtype} on {new.device}, the cache holds {old.dtype} on {old.device}")

    def _appended(self, storage: Tensor, new: Tensor) -> Tensor:
        """Return the storage with the new positions appended, reallocated at twice the size if it was full."""
        length = self._length + new.shape[-2]
        if self._length == 0 or length > storage.shape[-2]:
            room = max(length, 2 * self._length, _FIRST)
            room = room if self.capacity is None else min(room, self.capacity)
            larger = new.new_empty((*new.shape[:-2], room, new.shape[-1]))
            if self._length:
                larger.narrow(-2, 0, self._length).copy_(storage.narrow(-2, 0, self._length))
            storage = larger
        storage.narrow(-2, self._length, new.shape[-2]).copy_(new)
        return storage

    def _write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values in place at `position`, the length on the device, and advance it."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("a static cache is written in place, for inference: use torch.no_grad()")
        if self._key is None or self._value is None or self.position is None:
            assert self.capacity is not None
            self._key = key.new_zeros((*key.shape[:-2], self.capacity, key.shape[-1]))
            self._value = value.new_zeros((*value.shape[:-2], self.capacity, value.shape[-1]))
            self.position = torch.zeros((), dtype=torch.long, device=key.device)
        count = key.shape[-2]
        index = self.position + torch.arange(count, device=key.device)
        self._key.index_copy_(-2, index, key)
        self._value.index_copy_(-2, index, value)
        self.position.add_(count)
        if not torch.compiler.is_compiling():  # a Python number that changes would cause recompilations
            self._length += count
        return self._key, self._value

    def _rows(self, storage: Tensor, index: Tensor) -> Tensor:
        if self.is_fixed or not self.static:
            used = storage.narrow(-2, 0, self._length).index_select(0, index)
            if used.requires_grad or self.is_fixed:
                return used
            larger = used.new_empty((*used.shape[:-2], storage.shape[-2], used.shape[-1]))
            larger.narrow(-2, 0, self._length).copy_(used)
            return larger
        rows = storage.index_select(0, index)
        return storage.copy_(rows) if rows.shape == storage.shape else rows


def later_mask(
    mask: Mask | Tensor | None, offset: int | Tensor, queries: int, keys: int, device: torch.device
) -> Mask | None:
    """Return the mask for queries that start at key position `offset`: bands are shifted, other masks unchanged.

    A band mask whose offset the caller already set is an error: the mask would be shifted twice. For an offset on the
    device, bands become tensors. Keys after the last query are masked, because the storage after the last query is
    still unused.
    """
    moved = None if mask is None else as_mask(mask).later(offset, queries, keys, device)
    if isinstance(offset, int) and offset + queries == keys:
        return moved
    written = Dense(torch.arange(keys, device=device) < offset + queries)
    return written if moved is None else moved & written


def later_bias(bias: Bias | Tensor | None, offset: int | Tensor, query: Tensor, keys: int) -> Bias | None:
    """Return the bias for queries that start at key position `offset`: a bias that depends on distance is shifted."""
    if bias is None:
        return None
    bias = as_bias(bias)
    if not isinstance(bias, (Alibi, Relative)):
        return bias
    if bias.offset != 0 and not (isinstance(offset, int) and offset == 0):
        raise ValueError(second_offset("bias", bias.offset, offset, "alibi(slopes) or relative(table)"))
    if isinstance(offset, int):
        return replace(bias, offset=bias.offset + offset)
    rows = torch.arange(query.shape[-2], device=offset.device) + offset
    return DenseBias(bias.values(rows, all_of(keys), torch.promote_types(query.dtype, torch.float32)))
