"""Posterior attention: the weights of a decoding step, corrected by Bayes' rule once the next word is known."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.models.memory import Decoded, Memory

LOGITS = 2**25  # the largest number of logits that are in memory at a time


def log_likelihood(
    decoder: Any, memory: Memory, prefix: Int[Tensor, "b t"], target: Int[Tensor, "b t"]
) -> Float[Tensor, "b t k"]:
    """Return log p(y_i | y_<i, h_j), the log-probability of target token i if the memory had only position j.

    `target` is the prefix shifted by one token. The result is 0 for negative targets, which mark padding, and at padded
    positions of the memory. A decoder that starts from the memory's summary uses the summary of the whole memory.

    >>> from regard.models.transformer.encoder_decoder import TransformerDecoder
    >>> decoder, states = TransformerDecoder(7, 8, layers=1, heads=2).eval(), torch.randn(1, 3, 8)
    >>> memory = Memory(states, states, None, states.mean(1))
    >>> log_likelihood(decoder, memory, torch.tensor([[1, 4]]), torch.tensor([[4, 2]])).shape
    torch.Size([1, 2, 3])
    """
    if target.shape != prefix.shape:
        raise ValueError(f"target must have the shape of prefix, {tuple(prefix.shape)}, got {tuple(target.shape)}")
    batch, count = memory.keys.shape[:2]
    keys = memory.keys.flatten(0, 1).unsqueeze(1)
    values = keys if memory.values is memory.keys else memory.values.flatten(0, 1).unsqueeze(1)
    single = Memory(keys, values, None, memory.summary.repeat_interleave(count, 0))
    decoded: Decoded = decoder(single, prefix.repeat_interleave(count, 0))
    index = target.clamp(min=0).repeat_interleave(count, 0).flatten()
    states = decoded.states.flatten(0, 1)
    rows = max(1, LOGITS // len(decoder.output_weight))
    parts = zip(states.split(rows), index.split(rows), strict=True)
    log_probs = [_chosen(decoder.logits(some), tokens) for some, tokens in parts]
    likely = torch.cat(log_probs).view(batch, count, prefix.shape[1]).transpose(1, 2)
    known = target.unsqueeze(-1) >= 0
    return torch.where(known if memory.mask is None else known & memory.mask.unsqueeze(1), likely, 0.0)


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities (n,) of `tokens` (n,) under the logits (n, v)."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def posterior(weights: Float[Tensor, "b t k"], likelihood: Float[Tensor, "b t k"]) -> Float[Tensor, "b t k"]:
    """Return the posterior weights a_ij p(y_i | j) / Σ_j' a_ij' p(y_i | j') of each step, given its word y_i.

    The attention weights a_ij are the prior of the position that the next word comes from (Shankar &
    Sarawagi 2019, section 2.1). `likelihood` is the result of `log_likelihood`. A row of zeros stays zeros,
    and a row whose word has probability 0 at every position stays unchanged.

    >>> posterior(torch.tensor([[[0.75, 0.25, 0.0]]]), torch.tensor([[[0.1, 0.9, 1.0]]]).log())
    tensor([[[0.2500, 0.7500, 0.0000]]])
    """
    open_ = weights > 0
    joint = torch.where(open_, torch.where(open_, weights, 1.0).log() + likelihood, -torch.inf)
    some = (joint > -torch.inf).any(-1, keepdim=True)
    return torch.where(some, torch.where(some, joint, 0.0).softmax(-1), weights)
