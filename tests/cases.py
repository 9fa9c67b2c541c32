"""The mechanisms under test: each score, normaliser and mask as the library's record and as a function of `oracles`."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import oracles
import regard

BACKENDS = ("reference", "sdpa", "additive", "blocked")

# All sizes differ, so that a swapped axis fails. They are prime, except the heads, a multiple of the key heads.
BATCH, HEADS, GROUPS, QUERIES, KEYS, SIZE, VALUE_SIZE = 2, 6, 3, 5, 7, 13, 11


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in float64 that float32 represents exactly, so both precisions have the same input."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


class Score(NamedTuple):
    build: Callable[..., Any]
    """The library's score from its parameters."""
    oracle: Callable[..., oracles.Score]
    """The oracle's score from the same parameters, as lists."""
    shapes: Callable[[int, int, int], Sequence[tuple[int, ...]]] = lambda heads, size, key_size: ()
    """Shapes of the parameters."""
    wider_keys: int = 0
    """The number of features that a key has beyond those of a query."""
    sdpa: bool = False
    """Whether the score is a dot product of transformed queries and keys, which the backend `sdpa` supports."""

    def inputs(
        self, *, batch: int = BATCH, heads: int = HEADS, groups: int = GROUPS, queries: int = QUERIES,
        keys: int = KEYS, size: int = SIZE, value_size: int = VALUE_SIZE, seed: int = 0,
    ) -> list[Tensor]:  # fmt: skip
        """Return query, key, value and the score's parameters, in float64."""
        shapes = [
            (batch, heads, queries, size),
            (batch, groups, keys, size + self.wider_keys),
            (batch, groups, keys, value_size),
            *self.shapes(heads, size, size + self.wider_keys),
        ]
        return [randn(*shape, seed=100 * seed + number) for number, shape in enumerate(shapes)]


def mlp(layer: Tensor, shift: Tensor, readout: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the score readout · tanh(layer [query; key] + shift) as a Python function, as a user would write it."""

    def score(query: Tensor, key: Tensor) -> Tensor:
        left, right = layer.split((query.shape[-1], key.shape[-1]), dim=-1)
        hidden = (query @ left.mT).unsqueeze(-2) + (key @ right.mT).unsqueeze(-3) + shift
        return hidden.tanh() @ readout

    return score


SCORES = {
    "dot": Score(lambda: regard.Dot(), lambda: lambda q, k, h: oracles.dot(q, k), sdpa=True),
    "scaled": Score(lambda: regard.ScaledDot(), lambda: lambda q, k, h: oracles.scaled_dot(q, k), sdpa=True),
    "softcap": Score(
        lambda: regard.ScaledDot(scale=0.5, softcap=2.0), lambda: lambda q, k, h: oracles.scaled_dot(q, k, 0.5, 2.0)
    ),
    "cosine": Score(
        lambda: regard.Cosine(scale=3.0), lambda: lambda q, k, h: oracles.cosine(q, k, scale=3.0), sdpa=True
    ),
    "bilinear": Score(
        lambda weight: regard.Bilinear(weight),
        lambda weight: lambda q, k, h: oracles.bilinear(q, k, weight),
        lambda heads, size, key_size: [(size, key_size)],
        wider_keys=4,
        sdpa=True,
    ),
    "bilinear-heads": Score(
        lambda weight: regard.Bilinear(weight),
        lambda weight: lambda q, k, h: oracles.bilinear(q, k, weight[h]),
        lambda heads, size, key_size: [(heads, size, key_size)],
        wider_keys=4,
        sdpa=True,
    ),
    "additive": Score(
        lambda weight: regard.Additive(weight),
        lambda weight: lambda q, k, h: oracles.additive(q, k, weight),
        lambda heads, size, key_size: [(size,)],
    ),
    "additive-heads": Score(
        lambda weight: regard.Additive(weight),
        lambda weight: lambda q, k, h: oracles.additive(q, k, weight[h]),
        lambda heads, size, key_size: [(heads, size)],
    ),
    "mlp": Score(
        mlp,
        lambda *parameters: lambda q, k, h: oracles.mlp(q, k, *parameters),
        lambda heads, size, key_size: [(4, size + key_size), (4,), (4,)],
    ),
}


class Normalizer(NamedTuple):
    record: Any
    oracle: Callable[[oracles.Vector], list[float]]


NORMALIZERS = {
    "softmax": Normalizer(regard.Softmax(), oracles.softmax),
    "sparsemax": Normalizer(regard.Sparsemax(), oracles.sparsemax),
    "entmax1.5": Normalizer(regard.Entmax(), lambda scores: oracles.entmax(scores, 1.5)),
    "entmax1.2": Normalizer(regard.Entmax(alpha=1.2), lambda scores: oracles.entmax(scores, 1.2)),
    "sigmoid": Normalizer(regard.Sigmoid(bias=-0.5), lambda scores: oracles.sigmoid(scores, -0.5)),
    "hard": Normalizer(regard.Hard(sample=False), oracles.hard),
}


class Place(NamedTuple):
    """A mask and a bias for the sizes of this module (BATCH, HEADS, …), and the equivalent functions for `oracles`."""

    mask: Any = None
    allowed: oracles.Allowed = oracles.everywhere
    bias: Callable[[torch.dtype], Any] = lambda dtype: None
    added: oracles.Bias | None = None


def _places() -> dict[str, Place]:
    lengths = [4, 0]
    query_ids, key_ids = [[0, 0, 1, 2, 2], [5, 5, 3, 5, 5]], [[0, 0, 1, 1, 1, 2, 3], [5, 5, 5, 5, 4, 4, 4]]
    per_head = randn(BATCH, HEADS, QUERIES, KEYS, seed=1) > 0.3
    per_head[1, 2, 3] = False
    shared = randn(QUERIES, KEYS, seed=2) > 0
    slopes, table, added = randn(HEADS, seed=3), randn(HEADS, 5, seed=4), randn(HEADS, QUERIES, KEYS, seed=5)
    closed = randn(BATCH, 1, QUERIES, KEYS, seed=6)
    closed[closed > 0.5] = -math.inf
    closed[0, 0, 1] = -math.inf
    heads, pairs, added_list, closed_list = per_head.tolist(), shared.tolist(), added.tolist(), closed.tolist()

    padding, padded = regard.padding(torch.tensor(lengths)), oracles.padding(lengths)
    segments = regard.segments(torch.tensor(query_ids), torch.tensor(key_ids))
    same, near = oracles.segments(query_ids, key_ids), oracles.window(2, 1)
    past, dense_heads = oracles.causal(), lambda b, h, i, j: heads[b][h][i][j]
    return {
        "open": Place(),
        "causal": Place(regard.causal(), past),
        "causal+2": Place(regard.causal(offset=2), oracles.causal(2)),
        "causal-2": Place(regard.causal(offset=-2), oracles.causal(-2)),
        "window": Place(regard.window(2, 1), near),
        "window-3": Place(regard.window(before=1, after=0, offset=-3), oracles.window(1, 0, -3)),
        "padding": Place(padding, padded),
        "segments": Place(segments, same),
        "dense": Place(regard.dense(per_head), dense_heads),
        "tensor": Place(shared, lambda b, h, i, j: pairs[i][j]),
        "causal&padding": Place(regard.causal() & padding, lambda *at: past(*at) and padded(*at)),
        "window|segments": Place(regard.window(2, 1) | segments, lambda *at: near(*at) or same(*at)),
        "dense&~causal": Place(
            regard.dense(per_head) & ~regard.causal(), lambda *at: dense_heads(*at) and not past(*at)
        ),
        "bias": Place(bias=lambda dtype: added.to(dtype), added=lambda b, h, i, j: added_list[h][i][j]),
        "alibi": Place(
            regard.causal(), past, lambda dtype: regard.alibi(slopes.to(dtype)), oracles.alibi(slopes.tolist())
        ),
        "relative": Place(
            bias=lambda dtype: regard.relative(table.to(dtype)), added=oracles.relative(table.tolist())
        ),
        "closed": Place(
            shared, lambda b, h, i, j: pairs[i][j],
            lambda dtype: closed.to(dtype), lambda b, h, i, j: closed_list[b][0][i][j],
        ),
    }  # fmt: skip


PLACES = _places()


@cache
def answer(score: str, normalize: str, place: str) -> oracles.Answer:
    """Return the oracle's result for the sizes of this module (BATCH, HEADS, …), as float64 tensors."""
    case, where = SCORES[score], PLACES[place]
    query, key, value, *parameters = (tensor.tolist() for tensor in case.inputs())
    found = oracles.attend(
        query, key, value, case.oracle(*parameters), NORMALIZERS[normalize].oracle, where.allowed, where.added
    )
    return oracles.Answer(*(torch.tensor(field, dtype=torch.float64) for field in found))


def serves(backend: str, score: str, normalize: str) -> bool:
    """Return whether a backend must support a score with a normaliser; `reference` and `blocked` support all."""
    if backend == "additive":
        return score.startswith("additive")
    return backend != "sdpa" or (SCORES[score].sdpa and normalize == "softmax")


def paths(scores: Sequence[str] = tuple(SCORES), normalizers: Sequence[str] = tuple(NORMALIZERS)) -> list[str]:
    """Return every "backend/score/normaliser" for which the backend must support the score and the normaliser."""
    return [
        f"{backend}/{score}/{normalize}"
        for backend in BACKENDS
        for score in scores
        for normalize in normalizers
        if serves(backend, score, normalize)
    ]


# Each entry is "backend/score/normaliser": every normaliser with the scaled dot product, and every score with softmax,
# on each backend.
TYPICAL_PATHS = sorted({*paths(scores=["scaled"]), *paths(normalizers=["softmax"])})
# The combinations "backend/score/normaliser" that are tested with keys in several blocks. Entmax with α = 1.2 is left
# out: it is slower than α = 1.5, and its threshold is computed by the same code.
FUSED_PATHS = [path for path in TYPICAL_PATHS if not path.startswith("reference") and "1.2" not in path]


def attend(path: str, inputs: Sequence[Tensor], **arguments: Any) -> regard.Attended:
    """Compute attention as "backend/score/normaliser" states; inputs are query, key, value and score parameters."""
    backend, score, normalize = path.split("/")
    query, key, value, *parameters = inputs
    arguments = {"normalize": NORMALIZERS[normalize].record} | arguments
    return regard.attention(query, key, value, score=SCORES[score].build(*parameters), backend=backend, **arguments)


class Learned(NamedTuple):
    """The result of a call, and the gradient of each of its inputs."""

    output: Tensor
    weights: Tensor
    log_prob: Tensor | None
    gradients: list[Tensor]

    @property
    def everything(self) -> list[Tensor]:
        return [self.output, self.weights, *self.gradients]


def learn(path: str, inputs: Sequence[Tensor], rows: Any = slice(None), **arguments: Any) -> Learned:
    """Compute attention with all weights, and gradients of a loss that uses only `rows` of output and weights."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    attended = attend(path, leaves, weights=regard.full(), **arguments)
    loss = sum((result * slopes_like(result))[..., rows, :].sum() for result in (attended.output, attended.weights))
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return Learned(attended.output, attended.weights, attended.log_prob, list(gradients))


def slopes_like(result: Tensor) -> Tensor:
    """Return a tensor of different factors, by which outputs are multiplied so that errors do not cancel in a sum."""
    slopes = torch.linspace(-1, 1, result.numel(), dtype=torch.float64) + 0.3
    return slopes.reshape(result.shape).to(result)
