"""Attention in a few torch operations: the eager peers, and in float64 the reference.

Each function that computes attention takes the tensors of a case in any dtype, and all queries or some rows of the
queries. It returns the output and the requested weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench.sweep import tensors
from regard.bench.sweep.cases import Case
from regard.bench.sweep.tensors import Tensors

Outcome = tuple[Tensor, Tensor | None]  # the output and the requested weights
MASKED = -1e4  # masked score for sparse normalisers, which subtract scores: −inf would give NaN


def attend(
    case: Case,
    inputs: Tensors,
    blocked: Tensor | None,
    bias: Tensor | None,
    rows: Tensor | None = None,
    *,
    fusible: bool = False,
) -> Outcome:
    """Compute normalize(score(Q, K) + bias, masked) V."""
    query = inputs["query"] if rows is None else inputs["query"][..., rows, :]
    group = case.heads // case.kv_heads
    key, value = (x if group == 1 else x.repeat_interleave(group, 1) for x in (inputs["key"], inputs["value"]))
    scores = score(case, query, key, inputs.get("weight"), fusible=fusible)
    if bias is not None:
        scores = scores + bias
    if blocked is not None:
        scores = scores.masked_fill(blocked, MASKED if case.normalizer in ("sparsemax", "entmax") else -math.inf)
    weights = normalize(case.normalizer, scores)
    # The entropy of hard attention is that of the distribution from which it samples, the softmax.
    distribution = scores.softmax(-1) if case.normalizer == "hard" and case.request == "entropy" else weights
    return weights @ value, requested(case.request, distribution, scores)


def reference(case: Case, inputs: Tensors, rows: Tensor) -> Outcome:
    """Compute the output and the weights of the queries `rows`, for a case of any kind except layers."""
    if case.kind == "linear":
        return linear_rows(case, inputs, rows), None
    if case.kind == "local":
        return local_dense(case, inputs, rows), None
    dtype = inputs["query"].dtype
    return attend(case, inputs, tensors.blocked(case, inputs, rows), tensors.bias(case, inputs, dtype, rows), rows)


def score(case: Case, query: Tensor, key: Tensor, weight: Tensor | None, *, fusible: bool = False) -> Tensor:
    """Return the scores (batch, heads, queries, keys). With `fusible`, additive scores are a sum over features in place
    of a matrix product, because torch.compile fuses the sum with the tanh."""
    if case.score == "additive":
        assert weight is not None
        features = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3))
        return (features * weight).sum(-1) if fusible else features @ weight
    query, key, scale = prepared(case, query, key, weight)
    scores = query @ key.mT * scale
    return 30.0 * torch.tanh(scores / 30.0) if case.score == "softcap" else scores


def prepared(case: Case, query: Tensor, key: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, float]:
    """Return queries, keys and a factor whose product is the score, or with a softcap the score before the cap."""
    if case.score == "cosine":
        return F.normalize(query, dim=-1), F.normalize(key, dim=-1), 10.0
    if case.score == "bilinear":
        assert weight is not None
        return query @ weight, key, 1.0
    return query, key, 1.0 if case.score == "dot" else 1 / math.sqrt(case.size)


def normalize(name: str, scores: Tensor) -> Tensor:
    """Apply the normaliser `name` by its textbook formula; sparse normalisers sort the scores."""
    if name == "softmax":
        return scores.softmax(-1)
    if name == "sigmoid":
        return scores.sigmoid()
    if name == "hard":
        return F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    exact = scores.to(torch.promote_types(scores.dtype, torch.float32))
    exact = exact - exact.amax(-1, keepdim=True)
    weights = _sparsemax(exact) if name == "sparsemax" else _entmax(exact)
    return weights.to(scores.dtype)


def _sparsemax(scores: Tensor) -> Tensor:
    """Compute sparsemax by algorithm 1 of Martins and Astudillo 2016."""
    ordered = scores.sort(-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    sums = ordered.cumsum(-1) - 1
    support = (count * ordered > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, support - 1) / support).clamp(min=0)


def _entmax(scores: Tensor) -> Tensor:
    """Compute entmax with α = 1.5 by algorithm 2 of Peters, Niculae and Martins 2019."""
    scores = scores / 2
    ordered = scores.sort(-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    mean, square = ordered.cumsum(-1) / count, ordered.square().cumsum(-1) / count
    spread = (1 - count * (square - mean.square())) / count
    threshold = mean - spread.clamp(min=torch.finfo(scores.dtype).tiny).sqrt()
    support = (threshold <= ordered).sum(-1, keepdim=True)
    return (scores - threshold.gather(-1, support - 1)).clamp(min=0).square()


def requested(request: str, weights: Tensor, scores: Tensor) -> Tensor | None:
    """Return what `request` selects or computes from the weights, such as the entropy; None for "none"."""
    if request == "full":
        return weights
    if request == "rows":
        return weights[..., [0, -1], :]
    if request == "top":
        return weights.topk(min(8, weights.shape[-1]), -1).values
    if request == "received":
        return weights.sum(-2)
    if request == "entropy":
        return torch.special.entr(weights).sum(-1)
    return scores.logsumexp(-1) if request == "logsumexp" else None


def features(case: Case, x: Tensor, projection: Tensor | None) -> Tensor:
    """Return φ(x): elu(x) + 1 (Katharopoulos et al. 2020), or Performer features divided by their maximum."""
    if case.features == "elu":
        return F.elu(x) + 1
    assert projection is not None
    x = x * case.size**-0.25
    logarithm = x @ projection.mT - x.square().sum(-1, keepdim=True) / 2
    return (logarithm - logarithm.amax((-2, -1), keepdim=True)).exp()


def linear(case: Case, inputs: Tensors) -> Tensor:
    """Compute linear attention of all queries to all keys, φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1)."""
    query, key = (features(case, inputs[name], inputs.get("projection")) for name in ("query", "key"))
    summary, total = key.mT @ inputs["value"], key.sum(-2)
    return (query @ summary) / (query @ total.unsqueeze(-1))


def linear_rows(case: Case, inputs: Tensors, rows: Tensor | None = None) -> Tensor:
    """Compute linear attention through the matrix φ(Q) φ(K)ᵀ of all pairs, with a causal mask if the case has one."""
    query, key = (features(case, inputs[name], inputs.get("projection")) for name in ("query", "key"))
    if rows is not None:
        query = query[..., rows, :]
    pairs = query @ key.mT
    if case.mask == "causal":
        later = tensors.blocked(case, inputs, rows)
        assert later is not None
        pairs = pairs.masked_fill(later, 0)
    return (pairs @ inputs["value"]) / pairs.sum(-1, keepdim=True)


def linear_chunks(case: Case, inputs: Tensors, chunk: int = 128) -> Tensor:
    """Compute causal linear attention in chunks: all pairs inside a chunk, and for the keys of earlier chunks their
    summary φ(K)ᵀ V."""
    length = case.queries
    count = math.ceil(length / chunk)
    query, key = (features(case, inputs[name], inputs.get("projection")) for name in ("query", "key"))
    value = torch.cat([inputs["value"], torch.ones_like(inputs["value"][..., :1])], -1)
    query, key, value = (
        F.pad(x, (0, 0, 0, count * chunk - length)).unflatten(-2, (count, chunk)) for x in (query, key, value)
    )
    summaries = (key.mT @ value).cumsum(-3)
    before = F.pad(summaries[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    both = (query @ key.mT).tril() @ value + query @ before
    both = both.flatten(-3, -2)[..., :length, :]
    return both[..., :-1] / both[..., -1:]


def local_dense(case: Case, inputs: Tensors, rows: Tensor | None = None) -> Tensor:
    """Compute local attention (Luong et al. 2015, section 3.2) over all keys, with those out of range masked."""
    query, centre = inputs["query"], inputs["centre"]
    if rows is not None:
        query, centre = query[..., rows, :], centre[..., rows]
    distance = torch.arange(case.keys, device=query.device) - centre.unsqueeze(-1)
    scores = query @ inputs["key"].mT / math.sqrt(case.size)
    weights = scores.masked_fill(distance.abs() > case.before, -math.inf).softmax(-1)
    weights = weights * torch.exp(distance.square() * (-2.0 / case.before**2)).to(weights.dtype)
    return weights @ inputs["value"]


def local_gathered(case: Case, inputs: Tensors) -> Tensor:
    """Compute local attention as `local_dense` does, over the keys within range, gathered for each query."""
    query, key, value, centre = (inputs[name] for name in ("query", "key", "value", "centre"))
    first = torch.ceil(centre.detach() - case.before).long().unsqueeze(-1)
    place = first + torch.arange(2 * case.before + 1, device=query.device)
    distance = place - centre.unsqueeze(-1)
    outside = (place < 0) | (place >= case.keys) | (distance.abs() > case.before)
    index = place.clamp(0, case.keys - 1).flatten(-2).unsqueeze(-1)
    near_key, near_value = (
        x.gather(-2, index.expand(*index.shape[:-1], x.shape[-1])).unflatten(-2, place.shape[-2:]) for x in (key, value)
    )
    scores = (near_key @ query.unsqueeze(-1)).squeeze(-1) / math.sqrt(case.size)
    weights = scores.masked_fill(outside, -math.inf).softmax(-1)
    weights = weights * torch.exp(distance.square() * (-2.0 / case.before**2)).to(weights.dtype)
    return (weights.unsqueeze(-2) @ near_value).squeeze(-2)
