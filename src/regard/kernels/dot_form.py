"""What the compiled loops of dot-product attention (`regard.kernels.dot_attention`) must know of a call.

`Form` is what all calls with one signature share. `Limits` and `Rows` are the tensors of a call beside query, key and
value.
"""

import ctypes
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Numbers of multiplications, of entries of key and value, and of heads in all sequences, for which one more thread of
# the forward pass is worthwhile. A call with few queries (FEW in C) takes about twice as long for each multiplication.
_OF_THREAD, _KEYS_OF_THREAD, _HEADS_OF_THREAD, _FEW = 2**17, 2**16, 2**8, 8
# Constants of the normalisers in C. `hard` gives the key with the largest score the weight 1; it has no gradients.
# `entmax` is entmax with α = 1.5, and `power` is entmax with any 1 < α ≤ 2.
_NORMALIZERS = {"softmax": 0, "sigmoid": 1, "sparsemax": 2, "entmax": 3, "hard": 4, "power": 5}
_REQUESTS = {"nothing": 0, "weights": 1, "received": 2, "entropy": 3, "rows": 4, "logsumexp": 5}
# Indices in `Form.numbers`: of the strides of `query`, `bias` and `query_ids`, and of the request.
_QUERY, _BIAS, _IDS, _REQUEST = 13, 25, 33, 36


class Limits(NamedTuple):
    """The tensors that mask or change the scores; each of them may be None.

    Query i attends to key j if j < lengths (b,), int64; if query_ids (b, q) and key_ids (b, k), int64, are equal; and
    if `allowed` (b, h, q, k) is true. `bias` (b, h, q, k) and −slopes (h,) · |i + offset − j|, in float32, are added to
    the scores. `bias`, `allowed` and the ids may broadcast.
    """

    lengths: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    allowed: Tensor | None = None


NO_LIMITS = Limits()


class Rows(NamedTuple):
    """The queries whose weights are requested.

    `positions` holds the indices of these queries; `places` has, for each query of the call, its index in `positions`,
    or −1 if its weights are not requested.
    """

    positions: Tensor
    places: Tensor


class Form(NamedTuple):
    """What all calls with one signature share: sizes, strides and options, and the layout of the output.

    `numbers` is the struct `shape` of the C code.
    """

    numbers: Any
    factors: tuple[float, float, float, float, float]  # scale, softcap, shift, alpha and dropout of `form()`
    shape: tuple[int, ...]  # of the output
    strides: tuple[int, ...]  # of the output
    given: tuple[tuple[int, ...], ...]  # the strides of query, key and value
    keys: int
    # The largest number of threads that is worthwhile in the forward pass; in the backward pass twice as many are.
    threads: int
    normalizer: str
    band: tuple[int | None, int | None]
    offset: int
    request: str
    complete: bool = False  # whether `numbers` includes the strides of the tensors in `Limits`

    def completed(self, limits: Limits) -> "Form":
        """Return the form with the strides of the ids in `limits`; unchanged if `limits` has a bias or a mask
        tensor."""
        if limits.bias is not None or limits.allowed is not None:
            return self
        return self._replace(numbers=self.numbers_with(limits, None), complete=True)

    def requesting(self, request: str) -> "Form":
        """Return the form of the same calls with another request."""
        numbers = type(self.numbers).from_buffer_copy(self.numbers)
        numbers[_REQUEST] = _REQUESTS[request]
        return self._replace(numbers=numbers, request=request)

    def of_strides(self, query: Tensor, key: Tensor, value: Tensor) -> "Form":
        """Return the form of calls whose query, key and value have the strides of these tensors."""
        numbers = type(self.numbers).from_buffer_copy(self.numbers)
        numbers[_QUERY : _QUERY + 9] = [*_steps(query), *_steps(key), *_steps(value)]
        return self._replace(numbers=numbers)

    def numbers_with(self, limits: Limits, rows: Rows | None) -> Any:
        """Return `numbers` with the strides of bias, mask and ids, and the number of requested rows."""
        bias, allowed, ids = limits.bias, limits.allowed, limits.query_ids
        if rows is None and (self.complete or (bias is None and allowed is None and ids is None)):
            return self.numbers
        numbers = type(self.numbers).from_buffer_copy(self.numbers)
        if rows is not None:
            numbers[_REQUEST + 1] = len(rows.positions)
        for place, tensor in ((_BIAS, bias), (_BIAS + 4, allowed)):
            if tensor is not None:
                for axis, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
                    numbers[place + axis] = 0 if length == 1 else step
        if ids is not None and limits.key_ids is not None:
            numbers[_IDS] = 0 if len(ids) == 1 else ids.shape[1]
            numbers[_IDS + 1] = 0 if len(limits.key_ids) == 1 else limits.key_ids.shape[1]
        return numbers


def form(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    shift: float = 0.0,
    normalizer: str = "softmax",
    band: tuple[int | None, int | None] = (None, None),
    offset: int = 0,
    request: str = "nothing",
    alpha: float = 2.0,
    dropout: float = 0.0,
    checked: bool = False,
) -> Form:
    """Return the `Form` of calls with query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e), with g key heads.

    The tensors may lack the batch axis. Scores are x + shift with x = scale · (query · key), or softcap · tanh(x /
    softcap) + shift if `softcap` is above 0. With the band (low, high), query i attends only to keys j with low ≤ j − i
    ≤ high. `offset` is that of the distances in `Limits`. The request is one of nothing, weights, received, entropy,
    rows and logsumexp (with softmax only). Only the normaliser "power" uses `alpha`. `dropout` must be less than 1;
    requested weights are those before dropout. With `checked`, the forward pass also checks that the numbers that only
    the backward pass reads are finite.
    """
    batch = query.shape[0] if query.ndim == 4 else 1
    heads, queries, size = query.shape[-3:]
    kv_heads, keys, value_size = *key.shape[-3:-1], value.shape[-1]
    # The output has the layout of the outputs of torch's kernels: in memory, the token axis precedes the head axis.
    strides = (queries * heads * value_size, value_size, heads * value_size, 1)
    low, high = band
    factors = (scale, softcap, shift, alpha, dropout)
    numbers = [batch, heads, kv_heads, queries, keys, size, value_size]
    numbers += [int(query.dtype == torch.bfloat16), _NORMALIZERS[normalizer]]
    numbers += [int(low is not None), low or 0, int(high is not None), high or 0]
    numbers += [*_steps(query), *_steps(key), *_steps(value), *strides[:3]]
    numbers += [0] * 8 + [queries, keys, offset, _REQUESTS[request], 0]
    numbers += struct.unpack("5q", struct.pack("5d", *factors))  # five integers with the bits of the factors
    numbers += [int(checked)]
    numbers_read = batch * kv_heads * keys * (size + value_size)
    # A row with fewer than eight keys takes as long as a row with eight.
    work = batch * heads * queries * max(keys, 8) * (size + value_size) * (2 if queries <= _FEW else 1)
    threads = max(work // _OF_THREAD, numbers_read // _KEYS_OF_THREAD, batch * heads // _HEADS_OF_THREAD)
    axes = query.ndim
    return Form(
        (ctypes.c_int64 * len(numbers))(*numbers),
        factors,
        (batch, heads, queries, value_size)[-axes:],
        strides[-axes:],
        (query.stride(), key.stride(), value.stride()),
        keys,
        max(1, threads),
        normalizer,
        band,
        offset,
        request,
    )


def _steps(tensor: Tensor) -> tuple[int, int, int]:
    """Return the strides of the axes batch, head and token; the batch axis may be missing."""
    batch, head, token = (0, *tensor.stride()[:-1])[-3:]
    return batch, head, token


def rows(positions: Tensor, queries: int) -> Rows:
    """Return the `Rows` of the queries at `positions`; a position that is given several times has one index."""
    places = torch.full((queries,), -1, dtype=torch.long, device="cpu")
    places[positions] = torch.arange(len(positions), device="cpu")
    return Rows(positions, places)
