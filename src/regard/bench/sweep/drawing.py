"""Random cases. A case depends only on the seed, its index and the kind of device.

Ordinary calls are frequent: causal self-attention, padding, documents, windows, additive attention. Any other
combination of score, normaliser, mask, bias and request is sampled too, but rarely. Sizes are log-uniform, and halved
until the eager form of the call takes at most about a second.
"""

import math
from dataclasses import replace
from random import Random
from typing import Any

from regard.bench.sweep.cases import BIASES, ITEM, MASKS, NORMALIZERS, REQUESTS, SCORES, Case

LONGEST = {"cpu": 4096, "cuda": 32768}
# Limits on the work of the eager form (the case in plain torch operations) by kind of device. MATRIX and PLAIN_MATRIX:
# entries of the score matrix, with and without a fused peer; SORTED: entries of a score matrix that is sorted;
# PAIR_FEATURES: entries times features, for additive scores; ELEMENTS: elements of the inputs; LAYER: multiplications
# of a layer's projections.
MATRIX = {"cpu": 2**25, "cuda": 2**33}
PLAIN_MATRIX = {"cpu": 2**25, "cuda": 2**30}
SORTED = {"cpu": 2**22, "cuda": 2**28}
PAIR_FEATURES = {"cpu": 2**27, "cuda": 2**32}
ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
LAYER = {"cpu": 2**33, "cuda": 2**40}
GRADIENTS = 3  # time of a forward and a backward pass, divided by that of a forward pass
LEARNED_TENSOR = 2**24  # largest number of entries of a dense bias

KINDS = {
    "itself": 40,
    "other": 8,
    "additive": 15,
    "step": 10,
    "any": 8,
    "weights": 5,
    "linear": 6,
    "local": 2,
    "multihead": 3,
    "block": 3,
}
HEADS = {1: 15, 2: 5, 4: 10, 6: 3, 8: 30, 12: 12, 16: 20, 32: 5}
SIZES = {64: 40, 128: 20, 32: 10, 16: 5, 80: 4, 96: 4, 256: 4, 24: 2, 40: 3, 72: 2, 100: 2, 33: 2, 50: 2}
DTYPES = {"cpu": {"float32": 85, "bfloat16": 15}, "cuda": {"bfloat16": 50, "float32": 35, "float16": 15}}


def draw(seed: int, index: int, device: str) -> Case:
    """Return the random case of this seed, index and kind of device.

    >>> draw(5, 17, "cpu") == draw(5, 17, "cpu"), draw(5, 17, "cpu") == draw(5, 18, "cpu")
    (True, False)
    """
    rng = Random(f"{seed} {index} {device}")
    kind = _one(rng, KINDS)
    common = Case(
        seed,
        index,
        device,
        dtype=_one(rng, DTYPES[device]),
        gradients=rng.random() < 0.45,
        cold=rng.random() < 0.2,
        compiled=rng.random() < 1 / 3,
        tokens_first=rng.random() < 0.5,
    )
    shapes = {"additive": _additive, "step": _step, "other": _other, "linear": _itself, "local": _itself}
    case = shapes.get(kind, _itself)(rng, common)
    case = replace(case, **_mechanism(rng, kind, case))
    anew = rng.random() < 0.5
    if case.kind != "linear" and case.mask not in ("none", "cache"):
        case = replace(case, new_mask=anew)
    return _bounded(rng, case)


def _one(rng: Random, weights: dict[Any, int]) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]


def _length(rng: Random, least: int, most: int) -> int:
    """Return a log-uniform size; half of the time it is a power of two."""
    length = math.exp(rng.uniform(math.log(least), math.log(most)))
    return 2 ** round(math.log2(length)) if rng.random() < 0.5 else round(length)


def _itself(rng: Random, case: Case) -> Case:
    """Return the case with random sizes of self-attention."""
    length = _length(rng, 1 if rng.random() < 0.1 else 16, LONGEST[case.device])
    heads, size = _one(rng, HEADS), _one(rng, SIZES)
    groups = [g for g in (1, 2, 4, 8) if heads % g == 0 and g < heads]
    kv_heads = rng.choice(groups) if groups and rng.random() < 0.15 else heads
    batch = _length(rng, 1, 512)
    value_size = rng.choice((16, 40, 96, 128, 200)) if rng.random() < 0.08 else size
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "size": size, "value_size": value_size}
    return replace(case, queries=length, keys=length, **sizes)


def _other(rng: Random, case: Case) -> Case:
    """Return the case with random sizes of cross-attention."""
    return replace(_itself(rng, case), keys=_length(rng, 4, LONGEST[case.device]))


def _additive(rng: Random, case: Case) -> Case:
    """Return the case with random sizes of additive attention: one head with a wide value, or several small heads."""
    queries, keys = _length(rng, 1, 1024), _length(rng, 4, 2048)
    if rng.random() < 0.4:
        size = rng.choice((128, 256, 512, 1000))
        sized = replace(case, size=size, value_size=rng.choice((size, 2 * size)), tokens_first=False)
    else:
        heads, size = rng.choice((1, 2, 4, 8)), rng.choice((32, 64, 64, 96, 128, 50))
        sized = replace(case, heads=heads, kv_heads=heads, size=size, value_size=rng.choice((size, size, 80)))
        if rng.random() < 0.5:
            keys = queries
    return replace(sized, batch=_length(rng, 1, 256), queries=queries, keys=keys)


def _step(rng: Random, case: Case) -> Case:
    """Return the case with random sizes of a decoding step: few queries over a cache, without gradients.

    A quarter of the cases have an additive score and a single head.
    """
    step = replace(_itself(rng, case), gradients=False, queries=rng.choice((1, 1, 1, 2, 4, 8)))
    keys = max(step.queries, _length(rng, 16, LONGEST[case.device]))
    if rng.random() < 0.25:
        size = rng.choice((128, 256, 512))
        step = replace(step, heads=1, kv_heads=1, size=size, value_size=rng.choice((size, 2 * size)), score="additive")
        return replace(step, tokens_first=False, keys=min(keys, 1024))
    return replace(step, keys=keys)


def _mechanism(rng: Random, kind: str, case: Case) -> dict[str, Any]:
    """Return the sampled score, normaliser, mask, bias and requested weights, as fields of `Case`."""
    masks = {"causal": 35, "none": 20, "padding": 15, "documents": 12, "window": 12, "causal_padding": 4, "segments": 2}
    fields: dict[str, Any] = {"before": min(_length(rng, 4, 1024), case.keys)}
    if kind == "itself":
        biases = {"none": 85, "alibi": 7, "relative": 4, "tensor": 4}
        scores = {"scaled_dot": 86, "softcap": 4, "cosine": 4, "bilinear": 3, "dot": 3}
        return fields | {"mask": _one(rng, masks), "bias": _one(rng, biases), "score": _one(rng, scores)}
    if kind == "other":
        return fields | {"mask": _one(rng, {"none": 50, "padding": 50})}
    if kind == "additive":
        allowed = (
            {"none": 45, "padding": 55} if case.queries != case.keys else {"none": 50, "causal": 30, "padding": 20}
        )
        return fields | {
            "score": "additive",
            "mask": _one(rng, allowed),
            "request": _one(rng, {"none": 85, "full": 15}),
        }
    if kind == "step":
        return fields | {"mask": _one(rng, {"none": 35, "padding": 40, "cache": 25})}
    if kind == "weights":
        requests = {"full": 20, "rows": 20, "top": 20, "received": 20, "entropy": 20}
        return fields | {"mask": _one(rng, masks), "request": _one(rng, requests)}
    if kind == "any":
        return fields | _any(rng, case)
    if kind == "linear":
        causal = "causal" if rng.random() < 0.5 else "none"
        features = _one(rng, {"elu": 60, "performer": 40})
        return fields | {"kind": "linear", "mask": causal, "features": features, "kv_heads": case.heads}
    if kind == "local":
        before = min(rng.choice((4, 10, 32)), max(1, case.keys // 2))
        return {"kind": "local", "before": before, "kv_heads": case.heads, "value_size": case.size}
    allowed = {"causal": 40, "none": 30, "padding": 30}
    sizes = {"size": rng.choice((32, 64, 64, 128)), "pre_norm": rng.random() < 0.6}
    sizes["value_size"] = sizes["size"]
    shared = {"kv_heads": case.heads} if kind == "block" else {}
    return fields | {"kind": kind, "mask": _one(rng, allowed), "tokens_first": False} | sizes | shared


def _any(rng: Random, case: Case) -> dict[str, Any]:
    """Return a random valid combination of score, normaliser, mask, bias and request."""
    fields = {
        "score": rng.choice(list(SCORES)),
        "normalizer": rng.choice(list(NORMALIZERS)),
        "mask": rng.choice([name for name in MASKS if name != "cache"]),
        "bias": rng.choice(list(BIASES)),
        "request": rng.choice(list(REQUESTS)),
    }
    if fields["normalizer"] != "softmax" and fields["request"] == "logsumexp":
        fields["request"] = "none"
    if fields["normalizer"] == "hard":  # in half precision, rounding would decide which key has the largest score
        fields |= {"gradients": False, "dtype": "float32"}
    if fields["bias"] == "tensor" and case.heads * case.queries * case.keys > LEARNED_TENSOR:
        fields["bias"] = "alibi"
    return fields


def _bounded(rng: Random, case: Case) -> Case:
    """Return the case with its batch or a length halved until its work is within the limits. A dense bias that is still
    too large is replaced by ALiBi."""
    while _work(case) > 1:
        if case.batch > 1 and (rng.random() < 0.6 or max(case.queries, case.keys) < 64):
            case = replace(case, batch=case.batch // 2)
        elif case.queries == case.keys and case.queries > 1:
            case = replace(case, queries=case.queries // 2, keys=case.keys // 2)
        elif case.queries > case.keys:
            case = replace(case, queries=case.queries // 2)
        elif case.keys > 8:
            case = replace(case, keys=max(case.queries, case.keys // 2))
        elif case.batch > 1:
            case = replace(case, batch=case.batch // 2)
        else:
            break
    if case.bias == "tensor" and case.heads * case.queries * case.keys > LEARNED_TENSOR:
        case = replace(case, bias="alibi")
    return replace(case, before=max(1, min(case.before, case.keys)))


def _work(case: Case) -> float:
    """Return the work of the eager form of a case, relative to the limits: at most 1 is within them."""
    device = case.device
    times = GRADIENTS if case.gradients else 1
    fused = case.normalizer == "softmax" and case.request in ("none", "rows") and case.score != "softcap"
    widest = max(case.size, case.value_size)
    tokens = case.batch * max(case.queries, case.keys)
    shares = [tokens * case.heads * widest * times / ELEMENTS[device]]
    precision = ITEM[case.dtype] / 2 if device == "cuda" else 1.0
    if case.kind in ("attention", "multihead", "block"):
        matrix = MATRIX if fused else PLAIN_MATRIX
        shares.append(case.pairs * times * precision * max(1.0, widest / 128) / matrix[device])
    if case.mask not in ("none", "causal", "cache") or case.bias != "none":  # SDPA needs a dense mask
        heads = 1 if case.bias == "none" else case.heads
        shares.append(case.batch * heads * case.queries * case.keys * times * precision / PLAIN_MATRIX[device])
    if case.kind == "linear":
        features = case.size if case.features == "elu" else case.size * math.log(case.size)
        shares.append(tokens * case.heads * features * times / ELEMENTS[device])
    if case.kind == "local":
        near = case.batch * case.heads * case.queries * (2 * case.before + 1) * case.size
        shares.append(near * times / PAIR_FEATURES[device] * 2)
    if case.normalizer in ("sparsemax", "entmax") or case.request == "top":
        shares.append(case.pairs * times / SORTED[device])
    if case.score == "additive":
        shares.append(case.pairs * case.size * times * precision / PAIR_FEATURES[device])
    if case.kind in ("multihead", "block"):
        maps = 4 if case.kind == "multihead" else 12
        shares.append(tokens * maps * case.width**2 * times / LAYER[device])
    return max(shares)
