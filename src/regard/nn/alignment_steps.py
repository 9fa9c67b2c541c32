"""Functions shared by attention layers that process one query at a time: padding, initial weights, one step, all
steps."""

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.attended import Attended
from regard.core.attention import attention
from regard.core.normalizers import Hard, Normalizer
from regard.core.requests import Request, full
from regard.core.scores import Additive, float_tensor
from regard.nn.protocol import Projected

_FULL = full()


def score_vector(size: int) -> nn.Parameter:
    """Return the weight vector w of the additive score w · tanh(…), initialised uniformly within ±1/√size."""
    bound = 1 / math.sqrt(size)
    return nn.Parameter(torch.empty(size).uniform_(-bound, bound))


def clean_memory(memory: Float[Tensor, "b k m"], size: int, mask: Bool[Tensor, "b k"] | None) -> Float[Tensor, "b k m"]:
    """Return the memory (keys and values of attention) with padding set to zero, so that NaN in padding is never
    multiplied."""
    float_tensor(memory, "memory")
    if memory.ndim != 3 or memory.shape[-1] != size:
        raise ValueError(f"memory must be (b, k, {size}), got {tuple(memory.shape)}")
    if mask is None:
        return memory
    if mask.dtype != torch.bool or mask.shape != memory.shape[:2]:
        raise ValueError(
            f"mask must be a bool tensor {tuple(memory.shape[:2])}, True for real positions, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    return torch.where(mask.unsqueeze(-1), memory, 0)


def check_query(query: Float[Tensor, "b q d"], size: int, projected: Projected) -> None:
    """Raise unless the queries have this size, and as many batch rows as the memory."""
    float_tensor(query, "query")
    batch = projected.key.shape[0]
    if query.ndim != 3 or query.shape[-1] != size or query.shape[0] != batch:
        raise ValueError(f"query must be ({batch}, q, {size}), got {tuple(query.shape)}")


def blank(projected: Projected) -> Float[Tensor, "b k"]:
    """Return zeros, which the first query uses as the attention weights of the query before it."""
    return projected.value.new_zeros(projected.value.shape[:2])


def sampling(normalize: Normalizer, training: bool, generator: torch.Generator | None) -> Normalizer:
    """Return the normaliser; `Hard` with `sample=None` gets sample=True in training or if a generator is given, else
    sample=False."""
    if isinstance(normalize, Hard) and normalize.sample is None:
        return replace(normalize, sample=training or generator is not None)
    return normalize


def read(
    query: Float[Tensor, "b 1 d"],
    projected: Projected,
    weight: Float[Tensor, "d"],
    normalize: Normalizer,
    generator: torch.Generator | None,
) -> Attended:
    """Return the output and the weights of additive attention of one query over the memory."""
    mask = None if projected.mask is None else projected.mask.unsqueeze(1)
    return attention(
        query,
        projected.key,
        projected.value,
        score=Additive(weight),
        normalize=normalize,
        mask=mask,
        weights=_FULL,
        generator=generator,
    )


def alignment(attended: Attended) -> Float[Tensor, "b k"]:
    """Return the weights (b, k) of a result of attention that has a single query."""
    assert isinstance(attended.weights, Tensor)
    return attended.weights.squeeze(1)


def gathered(steps: list[Attended], projected: Projected, query: Tensor, weights: Request | None) -> Attended:
    """Concatenate the outputs of all queries into one result, with the requested weights."""
    if not steps:
        output = projected.value.new_zeros(query.shape[0], 0, projected.value.shape[-1])
        empty = projected.value.new_zeros(query.shape[0], 0, projected.value.shape[1])
        return Attended(output, None if weights is None else weights.of(empty))
    log_probs = [step.log_prob for step in steps if step.log_prob is not None]
    requested = None
    if weights is not None:
        weights.check(len(steps))
        requested = weights.of(torch.stack([alignment(step) for step in steps], 1))
    return Attended(
        torch.cat([step.output for step in steps], 1), requested, torch.cat(log_probs, 1) if log_probs else None
    )
