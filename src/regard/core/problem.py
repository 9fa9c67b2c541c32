"""The checked arguments of an attention call, in the form that every backend receives.

`build` checks the arguments. Its errors name the argument, what was expected and what was given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core import sharding
from regard.core.biases import Bias, as_bias
from regard.core.clauses import Clauses, clauses
from regard.core.custom import Custom
from regard.core.mask_cache import aligned, stored
from regard.core.masks import Mask, as_mask
from regard.core.normalizers import Hard, Normalizer, normalized
from regard.core.requests import LogSumExp, Request
from regard.core.scores import Score, finite, float_tensor
from regard.core.spans import Contiguous, Span, broadcast
from regard.core.transforms import resolved
from regard.kernels.dtypes import HALF as HALF


@dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of one attention call.

    Query, key and value are expanded, without a copy, to have equal leading axes and a head axis.
    """

    query: Float[Tensor, "*lead h q d"]
    key: Float[Tensor, "*lead g k d2"]
    value: Float[Tensor, "*lead g k e"]
    score: Score
    normalize: Normalizer
    mask: Mask | None = None
    bias: Bias | None = None
    dropout: float = 0.0
    request: Request | None = None
    generator: torch.Generator | None = None
    sample: bool = False  # whether hard attention samples a key, instead of choosing the key of the highest score
    headless: bool = False  # the caller's tensors had no head axis, so it is removed from the output
    named: bool = False  # the caller named a backend, which computes the call or raises, without a fallback
    gathered: bool = False  # whether each query has its own keys, copied from around its centre (local attention)
    bad_keys: Bool[Tensor, "*lead g k"] | None = None  # keys with NaN or Inf that were replaced (see `nonfinite`)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the scores, (*leading, h, q, k)."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    @property
    def empty(self) -> bool:
        """Return whether there are no pairs of a query and a key, or the vectors have size 0."""
        return 0 in self.shape or 0 in (self.query.shape[-1], self.key.shape[-1])

    @property
    def masked(self) -> bool:
        """Return whether some pairs may be masked, by the mask or by a bias of −inf."""
        return self.mask is not None or self.bias is not None

    @property
    def mask_rules(self) -> Clauses | None:
        """Return the rules of the mask that exclude any pair of the call; None if kernels cannot evaluate the mask."""
        return clauses(self.mask, *self.shape[-2:])

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the computation: float32 for inputs in half precision, else the dtype of the inputs."""
        return torch.float32 if self.query.dtype in HALF else self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def group(self) -> int:
        """Return the number of query heads that share a key head."""
        return self.query.shape[-3] // max(1, self.key.shape[-3])

    @property
    def matrices(self) -> int:
        """Return the number of distinct q × k matrices that mask and bias form, before they broadcast to the scores."""
        parts = [part.lead() for part in (self.mask, self.bias) if part is not None]
        return math.prod(broadcast(*parts))

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """Return the tensors of score and bias that require a gradient."""
        bias = self.bias.tensors() if self.bias is not None else ()
        return tuple(t for t in (*self.score.tensors(), *bias) if t.requires_grad)

    @property
    def bias_learned(self) -> bool:
        """Return whether the bias requires a gradient and grad mode is on."""
        wanted = self.bias is not None and any(t.requires_grad for t in self.bias.tensors())
        return wanted and torch.is_grad_enabled()

    @property
    def differentiated(self) -> bool:
        """Return whether any input requires a gradient and grad mode is on."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and (any(t.requires_grad for t in tensors) or len(self.learned) > 0)

    def repeat(self, tensor: Tensor) -> Tensor:
        """Return keys or values with each head repeated for the query heads that share it (repeat_interleave)."""
        return tensor if self.group == 1 else tensor.repeat_interleave(self.group, -3)

    def scores(self, query: Tensor, key: Tensor, rows: Span, columns: Contiguous) -> Float[Tensor, "..."]:
        """Return scores plus bias, before the mask, of these queries (rows) and keys (columns).

        The key heads must already be repeated to the number of query heads.
        """
        scores = self.score(query, key)
        if self.bias is not None:
            scores = scores + self.bias.values(rows, columns, scores.dtype)
        if self.bad_keys is not None:
            bad = self.repeat(self.bad_keys.unsqueeze(-1)).mT
            scores = torch.where(bad[..., columns.start : columns.stop], math.nan, scores)
        return scores

    def open(self, scores: Tensor, rows: Span, columns: Contiguous) -> Bool[Tensor, "..."] | None:
        """Return the mask of `scores`, or None if no pair is masked.

        A score of −inf, from a bias or the caller's score function, is masked too.
        """
        allowed = self.allowed(rows, columns)
        if self.bias is None and not isinstance(self.score, Custom):
            return allowed
        finite = scores.detach() != -math.inf
        return finite if allowed is None else allowed & finite

    def weights(self, scores: Tensor, allowed: Tensor | None) -> Float[Tensor, "..."]:
        """Return the weights: the scores after the normaliser, 0 where masked."""
        infinite = self.bias is not None or isinstance(self.score, Custom)
        return normalized(self.normalize, scores, allowed, may_be_infinite=infinite)

    def allowed(self, rows: Span, columns: Contiguous) -> Bool[Tensor, "..."] | None:
        """Return the mask of these queries (rows) and keys (columns), or None if no pair is masked.

        A bias of −inf masks its pair.
        """
        allowed = self.mask.allowed(rows, columns, self.device) if self.mask is not None else None
        if self.bias is not None and self.bias.may_mask:
            open_ = self.bias.values(rows, columns, self.dtype) != -math.inf
            allowed = open_ if allowed is None else allowed & open_
        return allowed


def build(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score | Callable[[Tensor, Tensor], Tensor],
    normalize: Normalizer,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    dropout: float,
    weights: Request | None,
    generator: torch.Generator | None,
) -> Problem:
    """Check the arguments of a call and return them as a `Problem`."""
    if sharding.current is not None:
        sharding.refuse("this call")
    _check_tensors(query, key, value)
    check_normalizer(normalize)
    check_dropout(dropout)
    if weights is not None and not isinstance(weights, Request):
        raise TypeError(f"weights must be a request such as regard.full(), or None, got {said(weights)}")
    if isinstance(weights, LogSumExp) and not normalize.is_softmax:
        raise ValueError(f"logsumexp() is what softmax divides by; {normalize.name} has none: use normalize=Softmax()")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator is not None and generator.device.type != query.device.type:
        raise ValueError(f"generator is on {generator.device}, query is on {query.device}: they must be the same")

    headless = max(query.ndim, key.ndim, value.ndim) == 2
    query, key, value = _common_axes(resolved(query), resolved(key), resolved(value))
    score = _as_score(score, query, key)
    if weights is not None:
        weights.check(query.shape[-2])
    return _assembled(query, key, value, score, normalize, mask, bias, dropout, weights, generator, headless)


def rebuild(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    normalize: Normalizer,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    dropout: float,
    weights: Request | None,
) -> Problem:
    """Return the `Problem` of arguments that differ only in tensor values from those of an earlier, checked call: only
    the values are checked."""
    headless = max(query.ndim, key.ndim, value.ndim) == 2
    query, key, value = _common_axes(query, key, value)
    return _assembled(query, key, value, score, normalize, mask, bias, dropout, weights, None, headless)


def _assembled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    normalize: Normalizer,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    dropout: float,
    weights: Request | None,
    generator: torch.Generator | None,
    headless: bool,
) -> Problem:
    """Return the `Problem`, with the tensors of mask and bias reshaped to broadcast to the scores."""
    shape = (*query.shape[:-1], key.shape[-2])
    if mask is not None:
        # Results computed from a mask are cached by `Mask` object, which a mask given as a tensor does not have.
        mask = aligned(mask, shape, query.device) if isinstance(mask, Mask) else as_mask(mask).aligned(shape)
        _check_devices("mask", mask.tensors(), query)
        mask = mask if torch.compiler.is_compiling() else mask.restricting(*shape[-2:])
    if bias is not None:
        bias = _placed(as_bias(bias), query.device)
        _check_devices("bias", bias.tensors(), query)
        bias = bias.aligned(shape)
    problem = Problem(query, key, value, score, normalize, mask, bias, dropout, weights, generator, headless=headless)
    return replace(problem, sample=samples(problem)) if isinstance(normalize, Hard) else problem


def _placed(bias: Bias, device: torch.device) -> Bias:
    """Return the bias with its Python numbers as a tensor on the device; the copy is cached."""
    return stored(bias, device, "placed", lambda: bias.on(device)) if bias.plain else bias


def check_normalizer(normalize: object) -> Normalizer:
    """Return the argument if it is a `Normalizer`, or raise an error that names what was given instead."""
    if not isinstance(normalize, Normalizer):
        expected = "a regard normaliser such as Softmax(), or an instance of your subclass of regard.Normalizer"
        raise TypeError(f"normalize must be {expected}, got {said(normalize)}")
    return normalize


def check_dropout(dropout: float) -> float:
    """Return the dropout probability if it is from 0 to 1, or raise."""
    if not 0.0 <= finite(dropout, "dropout") <= 1.0:
        raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
    return dropout


def samples(problem: Problem) -> bool:
    """Return whether hard attention samples a key, instead of choosing the key of the highest score.

    If `Hard.sample` is None, a call samples if it is differentiated or has a generator.
    """
    hard = problem.normalize
    if not isinstance(hard, Hard):
        return False
    return hard.sample if hard.sample is not None else problem.generator is not None or problem.differentiated


def _as_score(score: object, query: Tensor, key: Tensor) -> Score:
    if isinstance(score, Score):
        score.check(query, key)
        _check_devices("score", score.tensors(), query)
        return score
    if isinstance(score, type) or not callable(score):
        raise TypeError(f"score must be a regard score or a function (query, key) -> scores, got {said(score)}")
    custom = Custom(score, query.dtype)
    return custom if torch.compiler.is_compiling() else probed(custom, query, key)


def probed(score: Custom, query: Tensor, key: Tensor) -> Custom:
    """Return the caller's score function after a check of its result for a few queries and keys."""
    if not query.numel() or not key.numel():
        return score
    return score.probe(query, key, query.shape[-3] // key.shape[-3])


def said(thing: object) -> str:
    """Return text for an error: what the caller passed instead of an object such as `Softmax()`, and a correction."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}, not a record: write {thing.__name__}(…)"
    if callable(thing) and hasattr(thing, "__name__"):
        hint = f": write {thing.__name__}(…)" if str(getattr(thing, "__module__", "")).startswith("regard.") else ""
        return f"the function {thing.__name__}{hint}"
    return f"the str {thing!r}" if isinstance(thing, str) else type(thing).__name__


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        float_tensor(tensor, name)
        if tensor.is_nested:
            hint = "pad it (torch.nested.to_padded_tensor) and write mask=regard.padding(lengths)"
            raise TypeError(f"{name} must be a plain tensor, got a nested one: {hint}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {tensor.layout}: write {name}.to_dense()")
        if tensor.ndim < 2:
            raise ValueError(f"{name} must be (…, length, size), got shape {tuple(tensor.shape)}")
        if tensor.dtype != query.dtype:
            raise TypeError(f"query is {query.dtype}, {name} is {tensor.dtype}: they must have one dtype")
        if tensor.device != query.device:
            raise ValueError(f"query is on {query.device}, {name} is on {tensor.device}: they must be on one device")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key has {key.shape[-2]} positions, value has {value.shape[-2]}: each key needs its value")


def _check_devices(name: str, tensors: tuple[Tensor, ...], query: Tensor) -> None:
    for tensor in tensors:
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query is on {query.device}: they must be on one device")


def _common_axes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors with equal leading axes and a head axis; query heads must be a multiple of key heads."""
    query, key, value = (t if t.ndim > 2 else t.unsqueeze(0) for t in (query, key, value))
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if key_heads != value_heads and 1 not in (key_heads, value_heads):
        raise ValueError(f"key has {key_heads} heads, value has {value_heads}: they must be equal")
    shared = key_heads if value_heads == 1 else value_heads
    if heads != 1 and (shared == 0 or heads % shared) and heads != shared:
        raise ValueError(f"query has {heads} heads, key has {shared}: query heads must be a multiple of key heads")
    heads = shared if heads == 1 else heads
    if query.shape[:-3] == key.shape[:-3] == value.shape[:-3] and query.shape[-3] == heads and key_heads == value_heads:
        return query, key, value
    try:
        leading = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        shapes = ", ".join(
            f"{name} {tuple(t.shape[:-3])}" for name, t in (("query", query), ("key", key), ("value", value))
        )
        raise ValueError(f"leading axes do not broadcast together: {shapes}") from None
    return (
        query.expand(*leading, heads, *query.shape[-2:]),
        key.expand(*leading, shared, *key.shape[-2:]),
        value.expand(*leading, shared, *value.shape[-2:]),
    )
