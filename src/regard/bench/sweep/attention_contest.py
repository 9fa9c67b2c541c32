"""`regard.attention` compared with eager and compiled forms and fused kernels."""

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
    given = tensors.make(case)
    peers: dict[str, Make] = {"eager": maker(given, lambda: _eager(case, given))}
    if case.compiled:
        peers["torch.compile"] = maker(given, lambda: _compiled(case, given))
    for name, prepare in fused_peers.every(case, given).items():
        peers[name] = maker(given, prepare)
    return Contest(
        given,
        Contender(ours(case, given), leaves(given)),
        peers,
        lambda some, rows: plain_forms.reference(case, some, rows),
    )


def ours(case: Case, given: Tensors) -> Call:
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
        chosen = (regard.Additive if case.score == "additive" else regard.Bilinear)(given["weight"])
    normalizers: dict[str, regard.Normalizer] = {
        "softmax": regard.Softmax(),
        "sparsemax": regard.Sparsemax(),
        "entmax": regard.Entmax(1.5),
        "sigmoid": regard.Sigmoid(),
        "hard": regard.Hard(),
    }
    normalizer = normalizers[case.normalizer]
    request = _request(case)
    bias = given.get("bias")
    if "slopes" in given:
        bias = regard.alibi(given["slopes"])
    if "table" in given:
        bias = regard.relative(given["table"])
    kept = mask(case, given)

    def run() -> Outcome:
        attended = regard.attention(
            given["query"],
            given["key"],
            given["value"],
            score=chosen,
            normalize=normalizer,
            mask=mask(case, given) if case.new_mask else kept,
            bias=bias,
            weights=request,
        )
        weights = attended.weights
        return attended.output, weights.values if isinstance(weights, regard.Top) else weights

    return run


def mask(case: Case, given: Tensors) -> Mask | Tensor | None:
    """Return the mask of a case as an argument of `regard.attention`."""
    name = case.mask
    if name == "cache":
        return regard.causal(offset=case.keys - case.queries)
    if name == "window":
        return regard.window(case.before, 0)
    parts: list[Mask] = []
    if name in ("segments", "documents"):
        parts.append(regard.segments(given["ids"], given["ids"]))
    if name in ("causal", "documents", "causal_padding"):
        parts.append(regard.causal())
    if name in ("padding", "causal_padding"):
        parts.append(regard.padding(given["lengths"]))
    if name == "dense":
        return given["allowed"]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _request(case: Case) -> regard.Request | None:
    made = {
        "full": regard.full,
        "rows": lambda: regard.rows([0, -1]),
        "top": lambda: regard.top(8),
        "received": regard.received,
        "entropy": regard.entropy,
        "logsumexp": regard.logsumexp,
    }
    return None if case.request == "none" else made[case.request]()


def _eager(case: Case, given: Tensors) -> Call:
    room(case, case.pairs * (case.size if case.score == "additive" else 1))
    kept_mask, kept_bias = fused_peers.dense_parts(case, given)

    def run() -> Outcome:
        blocked = tensors.blocked(case, given) if case.new_mask else kept_mask
        learned = tensors.bias(case, given, case.torch_dtype) if kept_bias is None else kept_bias
        return plain_forms.attend(case, given, blocked, learned)

    return run


def _compiled(case: Case, given: Tensors) -> Call:
    room(case, case.pairs)
    kept_mask, kept_bias = fused_peers.dense_parts(case, given)

    def form(given: Tensors, blocked: Tensor | None, learned: Tensor | None) -> Outcome:
        if case.new_mask:
            blocked = tensors.blocked(case, given)
        if learned is None:
            learned = tensors.bias(case, given, case.torch_dtype)
        return plain_forms.attend(case, given, blocked, learned, fusible=True)

    call = compiled(form)
    return lambda: call(given, kept_mask, kept_bias)
