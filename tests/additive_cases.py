"""Test cases of the additive attention kernels, their reference in float64, and the comparison with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.core.scores import ACTIVATIONS

# Sizes are all different and mostly prime; the keys fill more than one block of 32 keys, to a multiple of which the
# kernels pad.
BATCH, HEADS, GROUPS, QUERIES, KEYS, FEATURES, SIZE = 2, 2, 1, 31, 41, 11, 5


def explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    activation: str,
    allowed: Tensor,
    bias: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp from the features of all pairs; a fully masked row gives 0 and -inf."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    hidden = ACTIVATIONS[activation](query[:, :, :, None] + key[:, :, None])
    scores = (hidden * weight[:, None, None, :]).sum(-1) + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, -1)
    return torch.where(allowed.any(-1, keepdim=True), weights, 0.0) @ value, scores.logsumexp(-1)


def allowed_pairs(settings: dict[str, Any], shape: tuple[int, int, int, int], device: str) -> Tensor:
    i = torch.arange(shape[2], device=device)[:, None]
    j = torch.arange(shape[3], device=device)[None, :]
    allowed = torch.ones(shape, dtype=torch.bool, device=device)
    low, high = settings.get("band", (None, None))
    if low is not None:
        allowed &= j - i >= low
    if high is not None:
        allowed &= j - i <= high
    if "lengths" in settings:
        allowed &= j < settings["lengths"][:, None, None, None]
    if "query_ids" in settings:
        allowed &= settings["query_ids"][:, None, :, None] == settings["key_ids"][:, None, None, :]
    if "mask" in settings:
        allowed &= settings["mask"]
    return allowed


def added(extra: dict[str, Tensor], queries: int, keys: int, device: str) -> Tensor | float:
    total: Tensor | float = extra.get("bias", 0.0)
    if "relative" in extra:
        radius = extra["relative"].shape[1] // 2
        step = torch.arange(keys, device=device)[None] - torch.arange(queries, device=device)[:, None]
        total = total + extra["relative"][:, step.clamp(-radius, radius) + radius]
    return total


def compare(
    dtype: torch.dtype,
    device: str,
    *,
    settings: Callable[..., dict[str, Any]] | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
    activation: str = "tanh",
    groups: int = GROUPS,
    keys: int = KEYS,
    form: str | None = None,
    heavy: float = 1.0,
    batch: int = BATCH,
) -> None:
    """Compare output, log-sum-exp and every gradient of a kernel with the reference, within a few rounding errors.

    `form` selects how the kernel computes tanh; by default it is the way that large calls of this dtype use.
    """
    from regard.kernels.additive.fused import additive_attention

    form = form or ("exact" if dtype == torch.float32 else "series")
    torch.manual_seed(7)
    shape = (batch, HEADS, QUERIES, keys)
    query = torch.randn(batch, HEADS, QUERIES, FEATURES) * scale + shift
    key = torch.randn(batch, groups, keys, FEATURES) * scale - shift
    value = torch.randn(batch, groups, keys, SIZE)
    weight = heavy * torch.randn(HEADS, FEATURES) / FEATURES**0.5
    out_grad, lse_grad = torch.randn(*shape[:3], SIZE, device=device), torch.randn(shape[:3], device=device)
    chosen = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in (settings() if settings else {}).items()}
    leaves = [x.to(device, dtype) for x in (query, key, value, weight)]
    learned = {name: chosen.pop(name) for name in ("bias", "relative") if name in chosen}
    allowed = allowed_pairs(chosen, shape, device)

    def run(cast: torch.dtype | None, attend: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        mine = [x.to(cast or x.dtype, copy=True).requires_grad_() for x in (*leaves, *learned.values())]
        extra = dict(zip(learned, mine[4:], strict=True))
        out, lse = attend(*mine[:4], extra)
        real = torch.where(lse == float("-inf"), 0.0, lse)
        loss = (out.double() * out_grad).sum() + (real.double() * lse_grad).sum()
        return [out.detach(), real.detach(), *torch.autograd.grad(loss, mine)]

    true = run(torch.float64, lambda *x: explicit(*x[:4], activation, allowed, added(x[4], QUERIES, keys, device)))
    found = run(None, lambda *x: additive_attention(*x[:4], activation=activation, form=form, **chosen, **x[4]))
    most = {torch.float32: 3e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    names = ["out", "lse", "query", "key", "value", "weight", *learned]
    for name, a, t in zip(names, found, true, strict=True):
        error = ((a.double() - t).norm() / t.norm()).item()
        assert error < most, f"{name}: relative error {error:.1e}"


def _lengths() -> dict[str, Any]:
    return {"lengths": torch.tensor([0, KEYS - 20])}


def _segments() -> dict[str, Any]:
    """Return segment ids that are equal in their lower 32 bits, so that a conversion to int32 would merge them."""
    ids = {"query_ids": torch.arange(QUERIES) // 17 * 2**32, "key_ids": torch.arange(KEYS) // 13 * 2**32}
    return {name: t.expand(BATCH, -1) for name, t in ids.items()}


def _everything() -> dict[str, Any]:
    return {
        **_segments(),
        "band": (-23, 19),
        # A length of 2**40, which is more than the number of keys, means all keys.
        "lengths": torch.tensor([KEYS - 29, 2**40]),
        "mask": torch.rand(BATCH, 1, QUERIES, KEYS) > 0.2,
        "bias": torch.randn(1, HEADS, QUERIES, KEYS),
        "relative": torch.randn(HEADS, 31),
    }


FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FULL, {}),
    "bfloat16, several tiles": (BRAIN, {"keys": 149}),
    "float16": (HALF, {}),
    "float16, heavy weights": (HALF, {"heavy": 8.0}),  # attention weights of large scores must not underflow
    "float16, heavy weights, exact": (HALF, {"heavy": 8.0, "form": "exact"}),
    "every head its keys": (FULL, {"groups": HEADS}),
    "causal": (FULL, {"settings": lambda: {"band": (None, 0)}}),
    "window": (BRAIN, {"settings": lambda: {"band": (-11, 7)}}),
    "lengths": (FULL, {"settings": _lengths}),
    "segments": (BRAIN, {"settings": _segments}),
    "everything float32": (FULL, {"settings": _everything}),
    "everything bfloat16": (BRAIN, {"settings": _everything}),
    "key bias": (FULL, {"settings": lambda: {"bias": torch.randn(BATCH, 1, 1, KEYS)}}),
    "sigmoid": (FULL, {"activation": "sigmoid"}),
    "gelu": (FULL, {"activation": "gelu"}),
    "leaky_relu": (FULL, {"activation": "leaky_relu"}),
    "gelu bfloat16": (BRAIN, {"activation": "gelu"}),
    "times 10": (FULL, {"scale": 10.0}),
    "times 100": (FULL, {"scale": 100.0}),
    "times 10 bfloat16": (BRAIN, {"scale": 10.0}),
    "a 60, b -59": (FULL, {"shift": 59.5}),
}
