"""`regard.attention` compared with the same attention by eager and compiled torch operations and by fused kernels."""

from torch import Tensor

import regard
from regard.bench.sweep import fused_peers, plain_forms, tensors
from regard.bench.sweep.cases import Case
from regard.bench.sweep.contests import Call, Contender, Contest, Make, compiled, leaves, maker, room
from regard.bench.sweep.plain_forms import Outcome
from regard.bench.sweep.tensors import Tensors
from regard.core.masks import Mask


def contest(case: Case) -> Contest:
    """Return the contenders of a case of kind "attention"."""
    inputs = tensors.make(case)
    peers: dict[str, Make] = {"eager": maker(inputs, lambda: _eager(case, inputs))}
    if case.compiled:
        peers["torch.compile"] = maker(inputs, lambda: _compiled(case, inputs))
    for name, prepare in fused_peers.every(case, inputs).items():
        peers[name] = maker(inputs, prepare)
    return Contest(
        inputs,
        Contender(ours(case, inputs), leaves(inputs)),
        peers,
        lambda some, rows: plain_forms.reference(case, some, rows),
    )


def ours(case: Case, inputs: Tensors) -> Call:
    """Return regard's call. Score, normaliser, bias and mask are built once; with `case.new_mask`, the mask is built in
    every call."""
    score: dict[str, regard.Score] = {
        "scaled_dot": regard.ScaledDot(),
        "softcap": regard.ScaledDot(softcap=30.0),
        "dot": regard.Dot(),
        "cosine": regard.Cosine(scale=10.0),
    }
    chosen = score.get(case.score)
    if chosen is None:
        chosen = (regard.Additive if case.score == "additive" else regard.Bilinear)(inputs["weight"])
    normalizers: dict[str, regard.Normalizer] = {
        "softmax": regard.Softmax(),
        "sparsemax": regard.Sparsemax(),
        "entmax": regard.Entmax(1.5),
        "sigmoid": regard.Sigmoid(),
        "hard": regard.Hard(),
    }
    normalizer = normalizers[case.normalizer]
    request = _request(case)
    bias = inputs.get("bias")
    if "slopes" in inputs:
        bias = regard.alibi(inputs["slopes"])
    if "table" in inputs:
        bias = regard.relative(inputs["table"])
    cached_mask = mask(case, inputs)

    def run() -> Outcome:
        attended = regard.attention(
            inputs["query"],
            inputs["key"],
            inputs["value"],
            score=chosen,
            normalize=normalizer,
            mask=mask(case, inputs) if case.new_mask else cached_mask,
            bias=bias,
            weights=request,
        )
        weights = attended.weights
        return attended.output, weights.values if isinstance(weights, regard.Top) else weights

    return run


def mask(case: Case, inputs: Tensors) -> Mask | Tensor | None:
    """Return the mask of a case as an argument of `regard.attention`."""
    name = case.mask
    if name == "cache":
        return regard.causal(offset=case.keys - case.queries)
    if name == "window":
        return regard.window(case.before, 0)
    parts: list[Mask] = []
    if name in ("segments", "documents"):
        parts.append(regard.segments(inputs["ids"], inputs["ids"]))
    if name in ("causal", "documents", "causal_padding"):
        parts.append(regard.causal())
    if name in ("padding", "causal_padding"):
        parts.append(regard.padding(inputs["lengths"]))
    if name == "dense":
        return inputs["allowed"]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _request(case: Case) -> regard.Request | None:
    requests = {
        "full": regard.full,
        "rows": lambda: regard.rows([0, -1]),
        "top": lambda: regard.top(8),
        "received": regard.received,
        "entropy": regard.entropy,
        "logsumexp": regard.logsumexp,
    }
    return None if case.request == "none" else requests[case.request]()


def _eager(case: Case, inputs: Tensors) -> Call:
    room(case, case.pairs * (case.size if case.score == "additive" else 1))
    cached_mask, cached_bias = fused_peers.dense_parts(case, inputs)

    def run() -> Outcome:
        blocked = tensors.blocked(case, inputs) if case.new_mask else cached_mask
        learned = tensors.bias(case, inputs, case.torch_dtype) if cached_bias is None else cached_bias
        return plain_forms.attend(case, inputs, blocked, learned)

    return run


def _compiled(case: Case, inputs: Tensors) -> Call:
    room(case, case.pairs)
    cached_mask, cached_bias = fused_peers.dense_parts(case, inputs)

    def form(inputs: Tensors, blocked: Tensor | None, learned: Tensor | None) -> Outcome:
        if case.new_mask:
            blocked = tensors.blocked(case, inputs)
        if learned is None:
            learned = tensors.bias(case, inputs, case.torch_dtype)
        return plain_forms.attend(case, inputs, blocked, learned, fusible=True)

    call = compiled(form)
    return lambda: call(inputs, cached_mask, cached_bias)
