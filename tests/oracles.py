"""Attention in explicit float64 loops over Python lists, with which every backend is compared.

Nothing here uses the library, and nothing is fast. A score is a function of one query vector, one key vector and the
head; a mask is a predicate and a bias a function of (batch, head, query index, key index).
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

Vector = Sequence[float]
Score = Callable[[Vector, Vector, int], float]
Allowed = Callable[[int, int, int, int], bool]
Bias = Callable[[int, int, int, int], float]


# Stage 1 of attention: scores of one query and one key.


def dot(query: Vector, key: Vector) -> float:
    assert len(query) == len(key)
    return math.fsum(a * b for a, b in zip(query, key, strict=True))


def scaled_dot(query: Vector, key: Vector, scale: float | None = None, softcap: float | None = None) -> float:
    score = dot(query, key) * (1 / math.sqrt(len(query)) if scale is None else scale)
    return score if softcap is None else softcap * math.tanh(score / softcap)


def cosine(query: Vector, key: Vector, scale: float = 1.0) -> float:
    length = math.sqrt(dot(query, query)) * math.sqrt(dot(key, key))
    return scale * dot(query, key) / length if length > 0 else 0.0


def bilinear(query: Vector, key: Vector, weight: Sequence[Vector]) -> float:
    return math.fsum(a * w * b for a, row in zip(query, weight, strict=True) for w, b in zip(row, key, strict=True))


def additive(query: Vector, key: Vector, weight: Vector) -> float:
    return math.fsum(w * math.tanh(a + b) for w, a, b in zip(weight, query, key, strict=True))


def mlp(query: Vector, key: Vector, layer: Sequence[Vector], shift: Vector, readout: Vector) -> float:
    """Return readout · tanh(layer [query; key] + shift)."""
    pair = [*query, *key]
    return math.fsum(r * math.tanh(dot(row, pair) + s) for r, row, s in zip(readout, layer, shift, strict=True))


# Stage 2: normalisers. Each takes the scores of the keys that one query may attend, never an empty list.


def log_sum_exp(scores: Vector) -> float:
    top = max(scores)
    return top + math.log(math.fsum(math.exp(s - top) for s in scores))


def softmax(scores: Vector) -> list[float]:
    total = log_sum_exp(scores)
    return [math.exp(s - total) for s in scores]


def sparsemax(scores: Vector) -> list[float]:
    """Return sparsemax: every set of keys is tried as its support, whose scores alone must exceed the threshold."""
    everything = range(len(scores))
    for size in range(1, len(scores) + 1):
        for support in combinations(everything, size):
            threshold = (math.fsum(scores[j] for j in support) - 1) / size
            inside = all(scores[j] > threshold for j in support)
            outside = all(scores[j] <= threshold for j in everything if j not in support)
            if inside and outside:
                return [scores[j] - threshold if j in support else 0.0 for j in everything]
    raise AssertionError("one support always fits")


def entmax(scores: Vector, alpha: float) -> list[float]:
    """Return [(α−1) s − τ]₊^(1/(α−1)), with the threshold τ by bisection until two adjacent floats remain."""
    if alpha == 1:
        return softmax(scores)
    scaled = [(alpha - 1) * s for s in scores]

    def weights(threshold: float) -> list[float]:
        return [max(s - threshold, 0.0) ** (1 / (alpha - 1)) for s in scaled]

    low, high = max(scaled) - 1, max(scaled)
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if math.fsum(weights(middle)) >= 1 else (low, middle)
    return weights(low)


def sigmoid(scores: Vector, bias: float = 0.0) -> list[float]:
    return [1 / (1 + math.exp(-(s + bias))) for s in scores]


def hard(scores: Vector) -> list[float]:
    best = scores.index(max(scores))
    return [1.0 if j == best else 0.0 for j in range(len(scores))]


# Masks: each is a predicate that returns whether query i may attend to key j.


def causal(offset: int = 0) -> Allowed:
    return lambda b, h, i, j: j <= i + offset


def window(before: int, after: int, offset: int = 0) -> Allowed:
    return lambda b, h, i, j: i + offset - before <= j <= i + offset + after


def padding(lengths: Sequence[int]) -> Allowed:
    return lambda b, h, i, j: j < lengths[b]


def segments(query_ids: Sequence[Sequence[int]], key_ids: Sequence[Sequence[int]]) -> Allowed:
    return lambda b, h, i, j: query_ids[b][i] == key_ids[b][j]


def everywhere(b: int, h: int, i: int, j: int) -> bool:
    return True


# Biases: each is a function whose values are added to the scores.


def alibi(slopes: Vector) -> Bias:
    return lambda b, h, i, j: -slopes[h] * abs(i - j)


def relative(table: Sequence[Vector]) -> Bias:
    reach = len(table[0]) // 2
    return lambda b, h, i, j: table[h][max(-reach, min(reach, j - i)) + reach]


# Stage 3: the weighted sum of the values, and everything that a call can return about its weights.


class Answer(NamedTuple):
    output: list  # the output, nested lists (b, h, q, e)
    weights: list  # the attention weights (b, h, q, k)
    log_sum_exp: list  # log-sum-exp (b, h, q), −inf for an empty row
    entropy: list  # the entropy of each query's weights (b, h, q)
    received: list  # the sum of the weights that each key receives (b, h, k)


def attend(
    query: list,
    key: list,
    value: list,
    score: Score,
    normalize: Callable[[Vector], list[float]],
    allowed: Allowed = everywhere,
    bias: Bias | None = None,
) -> Answer:
    """Return attention of query[b][h][i] to key[b][g][j] and value[b][g][j]; g is the key head of query head h."""
    rows = [
        [
            [
                _attend_row(
                    vector,
                    key[b][h // (len(query[b]) // len(key[b]))],
                    value[b][h // (len(query[b]) // len(key[b]))],
                    lambda q, k, h=h: score(q, k, h),
                    normalize,
                    lambda j, b=b, h=h, i=i: allowed(b, h, i, j),
                    lambda j, b=b, h=h, i=i: 0.0 if bias is None else bias(b, h, i, j),
                )
                for i, vector in enumerate(query[b][h])
            ]
            for h in range(len(query[b]))
        ]
        for b in range(len(query))
    ]
    columns = [list(zip(*head, strict=True)) for batch in rows for head in batch]
    heads = len(query[0])

    def nest(field: int) -> list:
        return [[list(columns[b * heads + h][field]) for h in range(heads)] for b in range(len(query))]

    weights = nest(1)
    received = [[[math.fsum(column) for column in zip(*head, strict=True)] for head in batch] for batch in weights]
    return Answer(nest(0), weights, nest(2), nest(3), received)


def _attend_row(
    query: Vector,
    keys: Sequence[Vector],
    values: Sequence[Vector],
    score: Callable[[Vector, Vector], float],
    normalize: Callable[[Vector], list[float]],
    allowed: Callable[[int], bool],
    bias: Callable[[int], float],
) -> tuple[list[float], list[float], float, float]:
    open_keys = [j for j in range(len(keys)) if allowed(j) and bias(j) != -math.inf]
    weights = [0.0] * len(keys)
    total = -math.inf
    if open_keys:
        scores = [score(query, keys[j]) + bias(j) for j in open_keys]
        total = log_sum_exp(scores)
        for j, weight in zip(open_keys, normalize(scores), strict=True):
            weights[j] = weight
    output = [math.fsum(weights[j] * values[j][c] for j in open_keys) for c in range(len(values[0]))]
    return output, weights, total, entropy(weights)


def entropy(weights: Vector) -> float:
    return -math.fsum(w * math.log(w) for w in weights if w > 0)


def top(weights: Vector, count: int) -> tuple[list[float], list[int]]:
    """Return the largest weights and their keys, largest first, the earlier key first on a tie; −1 if there is none."""
    order = sorted(range(len(weights)), key=lambda j: (-weights[j], j))[:count]
    return [weights[j] for j in order], [j if weights[j] > 0 else -1 for j in order]
