"""Fused attention of torch: SDPA in each backend, FlexAttention, varlen_attn.

Constant masks and biases are reused from call to call, as in efficient code; a mask that is new in every call is built
in the call.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench import attention_peers
from regard.bench.sweep import plain_forms, tensors
from regard.bench.sweep.cases import Case
from regard.bench.sweep.contests import Call, room
from regard.bench.sweep.plain_forms import Outcome
from regard.bench.sweep.tensors import REACH, Tensors

BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def every(case: Case, inputs: Tensors) -> dict[str, Callable[[], Call]]:
    """Return the fused peers that support the score, the normaliser and the requested weights of a case."""
    if case.normalizer != "softmax" or case.request not in ("none", "rows") or case.score == "additive":
        return {}
    peers: dict[str, Callable[[], Call]] = {}
    if case.score != "softcap":
        peers["SDPA"] = lambda: sdpa(case, inputs)
        if case.heads != case.kv_heads:
            peers["SDPA, keys repeated"] = lambda: sdpa(case, inputs, repeat=True)
        if case.device == "cuda":
            for name in BACKENDS:
                label = f"SDPA {name.removesuffix('_ATTENTION').lower()}"
                peers[label] = lambda name=name: _forced(case, inputs, name)
    if case.device == "cuda" and case.request == "none":
        if case.compiled:
            peers["FlexAttention"] = lambda: flex(case, inputs)
        plain = case.score in ("scaled_dot", "dot") and case.bias == "none" and case.size == case.value_size
        if plain and case.mask in ("padding", "documents", "segments") and case.dtype != "float32":
            peers["varlen_attn"] = lambda: varlen(case, inputs)
    return peers


def dense_parts(case: Case, inputs: Tensors) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask and the bias that all calls reuse; None for one that every call builds or that the case lacks."""
    blocked = None if case.new_mask else tensors.blocked(case, inputs)
    learned = case.gradients and case.bias == "relative"
    return blocked, None if learned else tensors.bias(case, inputs, case.torch_dtype)


def sdpa(case: Case, inputs: Tensors, *, repeat: bool = False) -> Call:
    """Return a call of torch's scaled_dot_product_attention, which also computes requested rows of weights."""
    causal = case.mask == "causal" and case.bias == "none"
    if not causal and (case.mask != "none" or case.bias != "none"):
        lead = case.heads if case.bias != "none" else 1
        room(case, case.batch * lead * case.queries * case.keys)
    cached_mask, cached_bias = (None, None) if causal else dense_parts(case, inputs)
    # A learned bias is joined with the mask in every call, because an autograd graph can run backward only once.
    learned = case.gradients and case.bias in ("relative", "tensor")
    cached = None if case.new_mask or learned else _joined(cached_mask, cached_bias)
    rows = torch.tensor([0, case.queries - 1], device=case.device)
    grouped = case.heads != case.kv_heads

    def run() -> Outcome:
        query, key, scale = plain_forms.prepared(case, inputs["query"], inputs["key"], inputs.get("weight"))
        value, joined = inputs["value"], cached
        if joined is None and not causal:
            blocked = tensors.blocked(case, inputs) if case.new_mask else cached_mask
            learned = tensors.bias(case, inputs, case.torch_dtype) if cached_bias is None else cached_bias
            joined = _joined(blocked, learned)
        if repeat:
            key, value = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (key, value))
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=joined, is_causal=causal, scale=scale, enable_gqa=grouped and not repeat
        )
        weights = None if case.request == "none" else plain_forms.reference(case, _few(inputs), rows)[1]
        return output, weights

    return run


def _few(inputs: Tensors) -> Tensors:
    """Return the tensors of a call with one feature of the value, to compute weights, which do not depend on the
    value."""
    return {**inputs, "value": inputs["value"][..., :1]}


def _joined(blocked: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return `attn_mask` for SDPA: a bool tensor, True at visible keys, or a float tensor that is added to the
    scores."""
    if bias is None:
        return None if blocked is None else ~blocked
    return bias if blocked is None else bias.masked_fill(blocked, -torch.inf)


def _forced(case: Case, inputs: Tensors, name: str) -> Call:
    if name == "MATH":
        room(case, case.pairs)
    call = sdpa(case, inputs)
    return attention_peers.sdpa_backend(name, call)


def flex(case: Case, inputs: Tensors) -> Call:
    """Return a call of compiled FlexAttention, whose block mask is reused, or built in the call if the mask is new."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    rule, change = _mask_rule(case, inputs), _score_rule(case, inputs)
    batch = case.batch if "lengths" in inputs or "ids" in inputs else None

    def block_mask() -> Any:
        if rule is None:
            return None
        return create_block_mask(rule, batch, None, case.queries, case.keys, device=case.device)

    cached_mask = block_mask()

    def run() -> Outcome:
        query, key, scale = plain_forms.prepared(case, inputs["query"], inputs["key"], inputs.get("weight"))
        mask = block_mask() if case.new_mask and case.mask not in ("causal", "window") else cached_mask
        options = {"scale": scale, "block_mask": mask, "enable_gqa": case.heads != case.kv_heads}
        return compiled(query, key, inputs["value"], score_mod=change, **options), None

    return run


def _mask_rule(case: Case, inputs: Tensors) -> Any:
    """Return the mask as a `mask_mod` of FlexAttention, a function of indices; None if the case has no mask."""
    lengths, ids, allowed, before = inputs.get("lengths"), inputs.get("ids"), inputs.get("allowed"), case.before
    shift = case.keys - case.queries if case.mask == "cache" else 0

    def early(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + shift

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k <= before)

    def real(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert lengths is not None
        return k < lengths[b]

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert ids is not None
        return ids[b, q] == ids[b, k]

    def allowed_pairs(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert allowed is not None
        return allowed[q, k]

    def early_and_real(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return early(b, h, q, k) & real(b, h, q, k)

    def early_and_same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return early(b, h, q, k) & same(b, h, q, k)

    rules = {"causal": early, "cache": early, "window": near, "padding": real, "segments": same, "dense": allowed_pairs}
    return (rules | {"documents": early_and_same, "causal_padding": early_and_real}).get(case.mask)


def _score_rule(case: Case, inputs: Tensors) -> Any:
    """Return softcap and bias as a `score_mod` of FlexAttention; None if the case has neither."""
    slopes, table, bias, capped = inputs.get("slopes"), inputs.get("table"), inputs.get("bias"), case.score == "softcap"
    if slopes is None and table is None and bias is None and not capped:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if capped:
            score = 30.0 * torch.tanh(score / 30.0)
        if slopes is not None:
            return score - slopes[h] * (k - q).abs()
        if table is not None:
            return score + table[h, (k - q).clamp(-REACH, REACH) + REACH]
        return score if bias is None else score + bias[h, q, k]

    return change


def varlen(case: Case, inputs: Tensors) -> Call:
    """Return a call of torch's varlen_attn over packed sequences. Padding tokens are removed before the attention, and
    their outputs are filled with zeros after it.
    """
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn  # in torch 2.10 and later

    def bounds() -> tuple[Tensor | None, Tensor, int]:
        if case.mask == "padding":
            lengths = inputs["lengths"]
            index = (torch.arange(case.keys, device=case.device) < lengths[:, None]).flatten().nonzero().squeeze(-1)
        else:
            ids = inputs["ids"]
            first = torch.ones_like(ids[:, :1], dtype=torch.bool)
            starts = torch.cat([first, ids.diff(dim=-1) != 0], -1).flatten().nonzero().squeeze(-1)
            ends = torch.cat([starts[1:], starts.new_tensor([ids.numel()])])
            index, lengths = None, ends - starts
        return index, F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())

    if case.mask == "padding" and case.queries != case.keys:
        raise ValueError("queries are not padded as keys are")
    cached_bounds = None if case.new_mask else bounds()
    options: dict[str, Any] = {}
    if case.mask == "documents":  # the keyword for causal attention differs between versions of torch
        named = inspect.signature(varlen_attn).parameters
        options = {"is_causal": True} if "is_causal" in named else {"window_size": (-1, 0)}
    if case.heads != case.kv_heads:
        options["enable_gqa"] = True
    if case.score == "dot":
        options["scale"] = 1.0

    def run() -> Outcome:
        index, edges, longest = bounds() if cached_bounds is None else cached_bounds
        flat = [inputs[name].transpose(1, 2).flatten(0, 1) for name in ("query", "key", "value")]
        if index is not None:
            flat = [x[index] for x in flat]
        output = varlen_attn(*flat, edges, edges, longest, longest, **options)
        if index is not None:
            padded = output.new_zeros(case.batch * case.queries, case.heads, case.value_size)
            output = padded.index_copy(0, index, output)
        return output.unflatten(0, (case.batch, case.queries)).transpose(1, 2), None

    return run
