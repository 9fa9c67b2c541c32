"""The additive score on the CPU by tanh x = 2 σ(2x) − 1, for calls so small that compiling code would take longer.

On the CPU torch.sigmoid takes a sixth of the time of torch.tanh, and it can be differentiated any number of times.
"""

import torch
from torch import Tensor

# The rounding error of σ(2x) does not shrink with x, so σ is used only if the mean of min(|x|, 1) exceeds _LITTLE;
# otherwise tanh is used. A weight vector with a norm above _LIGHT amplifies the error: then the limit is _MUCH.
_LITTLE = 0.15
_MUCH = 0.65
_LIGHT = 2.0


def scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Return w · tanh(q + k) (…, q, k) by the logistic function; the weight w is (f,) or (h, f).

    Reference implementation: `regard.core.scores.Additive`.
    """
    weight = weight if weight.ndim == 1 else weight[:, None]  # (h, 1, f): one vector for all queries of a head
    hidden = torch.add((2 * query).unsqueeze(-2), key.unsqueeze(-3), alpha=2).sigmoid_()
    return (hidden @ (2 * weight).unsqueeze(-1)).squeeze(-1) - weight.sum(-1, keepdim=weight.ndim > 1)


def exact_enough(query: Tensor, key: Tensor, weight: Tensor) -> bool:
    """Return whether the error of `scores` is about that of tanh, estimated from a few queries and the first two keys.

    The first keys are rarely masked. The error is estimated from a mean over pairs, because a maximum would depend on
    one outlier.
    """
    group = query.shape[-3] // key.shape[-3]
    rows = query.detach()[..., ::group, :: max(1, query.shape[-2] // 4), :][..., :4, :].float()
    x = rows.unsqueeze(-2) + key.detach()[..., :2, :].float().unsqueeze(-3)
    means = x.abs().clamp_max(1).flatten(0, -2).mean(0)  # the mean of min(|q + k|, 1) for each feature, (f,)
    share = weight.detach().float().abs().reshape(-1, weight.shape[-1]).mean(0)
    try:
        norm = float(weight.detach().norm(dim=-1).max())
        return float(means @ share) > (_MUCH if norm > _LIGHT else _LITTLE) * float(share.sum())
    except RuntimeError:  # under vmap, and for fake tensors, values cannot be read
        return False
