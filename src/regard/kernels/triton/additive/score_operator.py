"""Additive scores as a differentiable function, for requests of all weights and for normalisers without a kernel."""

import math
from typing import Any

import torch
from torch import Tensor

from regard.kernels.derivatives import REFERENCE, once_only
from regard.kernels.triton.additive import stored
from regard.kernels.triton.additive.pairs import EVERY
from regard.kernels.triton.additive.plan import Inputs

_LN2 = math.log(2.0)  # the stored scores are in base 2


def scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Return w · tanh(q + k) (…, h, q, k) from query (…, h, q, f), key (…, h, k, f) and weight (f,) or (h, f).

    Reference implementation: `regard.core.scores.Additive`.
    """
    return _Scores.apply(query, key, weight)


def _inputs(query: Tensor, key: Tensor, weight: Tensor) -> Inputs:
    query, key = (t.reshape(-1, *t.shape[-3:]) if t.dim() > 2 else t[None, None] for t in (query, key))
    return Inputs(query, key, key, weight if weight.stride(-1) == 1 else weight.contiguous(), None, "tanh")


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, weight)
        inputs = _inputs(query, key, weight)
        found = stored.recipe(inputs, EVERY).pair_scores(inputs.query, inputs.key, inputs.weight, EVERY)
        shape = *query.shape[:-1], key.shape[-2]
        return (found[:, : shape[-2], : shape[-1]] * _LN2).to(query.dtype).reshape(shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        once_only("the additive score kernel", REFERENCE)
        query, key, weight = ctx.saved_tensors
        inputs = _inputs(query, key, weight)
        plan = stored.recipe(inputs, EVERY)
        work = torch.zeros(plan.numel, device=query.device, dtype=torch.float32)
        slab = work[: plan.weight_at].view(plan.room)
        slab[:, : query.shape[-2], : key.shape[-2]] = upstream[0].reshape(-1, *upstream[0].shape[-2:])
        grad_query, grad_key = plan.feature_gradients(inputs.query, inputs.key, inputs.weight, EVERY, work)
        if plan.parts > 1:
            grad_query = plan.query_sum(work, inputs.query)
        found = (grad_query, grad_key, plan.weight_sum(work))
        return tuple(t.reshape(x.shape).to(x.dtype) for t, x in zip(found, (query, key, weight), strict=True))
