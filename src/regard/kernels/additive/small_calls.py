"""Which additive calls on CUDA store their scores, chosen by estimated run times. Imports no Triton.

Calls that do not store their scores take the general route: kernels that compute the scores tile by tile, by a series
or by exponentials, and never store them.
"""

from collections.abc import Sequence

import torch

_MOST_PAIRS = 2**26  # largest number of scores stored, 256 MiB; a backward pass stores as many gradients
_MOST_QUERIES = 2**16  # keeps the second axis of the grids, several queries to a program, below CUDA's limit of 65,535
COLUMNS = 256  # value columns in one program of kernels that store no scores: with more, registers spill
_FILL = 132  # the number of programs, of 128 queries each, that occupy a whole H200


def stores_scores(
    query: Sequence[int],
    key: Sequence[int],
    columns: int,
    dtype: torch.dtype,
    activation: str,
    form: str,
    learning: bool,
) -> bool:
    """Return whether a call with query (b, h, q, f), key (b, g, k, f) and values of size `columns` stores its scores.

    `learning` is whether a backward pass follows. With `form="stored"` the scores of tanh are stored at every size.

    >>> rest = torch.bfloat16, "tanh", "auto", True
    >>> [stores_scores((2, 8, n, 64), (2, 8, n, 64), 64, *rest) for n in (128, 512, 2048)]
    [True, True, False]
    >>> stores_scores((5, 1, 189, 1000), (5, 1, 1471, 1000), 1000, *rest)  # the general route would take four parts
    True
    """
    if activation != "tanh" or form not in ("auto", "stored"):
        return False
    if form == "stored":
        return True
    if not can_store(query, key):
        return False
    return _stored_time(query, key, columns, dtype, learning) <= _general_time(query, key, columns, dtype, learning)


def can_store(query: Sequence[int], key: Sequence[int]) -> bool:
    """Return whether a call has few enough scores to store them."""
    return 0 < query[0] * query[1] * query[2] * key[2] <= _MOST_PAIRS and query[2] <= _MOST_QUERIES


# Estimated microseconds on an H200 for 10⁹ hidden units (pairs times features), fitted to calls with 0.3 to 8.6 · 10⁹.
# The dictionary keys are whether the dtype is float32 and whether a backward pass follows. _STORED is for kernels that
# store the scores. The general route consists of the kernels that do not: _GENERAL is their backward pass, and
# _PREPARED is the time to prepare 10⁶ features of queries and keys for them.
_STORED = {(False, False): 300.0, (False, True): 940.0, (True, False): 470.0, (True, True): 1450.0}
_GENERAL = {(False, False): 0.0, (False, True): 300.0, (True, False): 0.0, (True, True): 1900.0}
_PREPARED = {(False, False): 17.0, (False, True): 45.0, (True, False): 20.0, (True, True): 40.0}


def _stored_time(query: Sequence[int], key: Sequence[int], columns: int, dtype: torch.dtype, learning: bool) -> float:
    """Return the estimated microseconds of a call, on host and device together, with stored scores."""
    (b, h, q, f), k = query, key[2]
    work = _STORED[dtype == torch.float32, learning] * _up(f, 32) + (200.0 if learning else 67.0) * columns
    return (430.0 if learning else 80.0) + b * h * q * k * 1e-9 * work


def _general_time(query: Sequence[int], key: Sequence[int], columns: int, dtype: torch.dtype, learning: bool) -> float:
    """Return the estimated microseconds of a call, on host and device together, without stored scores."""
    (b, h, q, f), g, k = query, key[1], key[2]
    full, rows, chunks = dtype == torch.float32, _up(q, 128), -(-columns // COLUMNS)
    forward = 240.0 if full else 50.0 if columns <= 64 else 75.0
    forward *= max(1.0, _FILL / (b * h * (rows // 128)))  # the forward pass starts one program for every 128 queries
    device = b * h * rows * _up(k, 128) * _up(f, 32) * 1e-9 * (forward + _GENERAL[full, learning])
    device += b * (h * q + g * k) * f * 1e-6 * _PREPARED[full, learning]
    return chunks * ((1000.0 if learning else 400.0) + device)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
