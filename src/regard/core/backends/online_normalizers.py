"""Normalisers that process a row of scores block by block, for attention that never stores all scores.

A `Stream` has four functions. `begin` returns the initial accumulators of some rows of scores, `add` adds a block of
keys to them, `finish` returns the output and the tensors stored for the backward pass, and `gradient` returns the
gradient of a block.

Let w = f(s) be the weights of a row of scores s, v the values, o = Σ w v the output of the row, do the gradient of o,
and dw = do · v that of a weight. For softmax, sparsemax and entmax the gradient of the scores is ds = slope ∘ (dw −
mean), with mean = Σ slope · dw / Σ slope = do · (Σ slope v / Σ slope); slope is w^(2 − α), and 0 where w = 0. So the
forward pass stores the vector Σ slope v / Σ slope for each row, and the backward pass reads the keys only once. For
softmax (α = 1), slope = w and this vector is the output itself.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.normalizers import (
    Entmax,
    Hard,
    Normalizer,
    Sigmoid,
    Softmax,
    Sparsemax,
    entmax_slope,
    entmax_threshold,
    entmax_weights,
    of_the_caller,
)
from regard.kernels import entmax_rows


class Block(NamedTuple):
    """A block of scores (−inf where masked), with the values of its keys."""

    scores: Tensor
    values: Tensor
    first: int  # the position of the block's first key
    dropout_mask: Tensor | None = None  # the dropout mask: 0 for dropped weights, 1 / (1 − p) for the others
    noise: Tensor | None = None  # Gumbel noise added to the scores, if hard attention samples a key

    def drop(self, weights: Tensor) -> Tensor:
        return weights if self.dropout_mask is None else weights * self.dropout_mask


class Finished(NamedTuple):
    """The output of some rows, the tensors stored for their backward pass, and for hard attention the chosen keys.

    `log_prob` is the log-probability of the chosen keys; for softmax it is the log-sum-exp, if that is requested.
    """

    output: Tensor
    stored: tuple[Tensor, ...]
    log_prob: Tensor | None = None
    chosen: Tensor | None = None


class Upstream(NamedTuple):
    """The incoming gradients of output and log-probabilities, for some of the queries."""

    output: Tensor
    log_prob: Tensor | None

    def weights(self, block: Block, dtype: torch.dtype | None = None) -> Tensor:
        """Return the gradient of the weights before dropout, dw = do · v, computed in `dtype` if that is given."""
        output, values = self.output, block.values
        if dtype is not None:
            output, values = output.to(dtype), values.to(dtype)
        return block.drop(output @ values.mT)


class Gradient(NamedTuple):
    """The gradient of a block's scores, and its weights after dropout, which give the gradient of the values."""

    scores: Tensor
    weights: Tensor


class Stream:
    """The interface of a normaliser whose keys arrive block by block."""

    def begin(self, rows: Tensor, size: int) -> Any:
        """Return the initial accumulators of rows (…, q), before any block of keys is added."""
        raise NotImplementedError

    def add(self, state: Any, block: Block) -> Any:
        raise NotImplementedError

    def finish(self, state: Any) -> Finished:
        raise NotImplementedError

    def gradient(self, block: Block, upstream: Upstream, stored: tuple[Tensor, ...]) -> Gradient:
        raise NotImplementedError


class Running(NamedTuple):
    """The accumulators of an online softmax: the largest score s so far, Σ exp(s − largest), and Σ exp(s − largest) v
    with the values v."""

    best: Tensor
    total: Tensor
    output: Tensor


@dataclass(frozen=True)
class SoftmaxStream(Stream):
    """Online softmax (Milakov & Gimelshein 2018); with `logsumexp`, the log-sum-exp of each row is an output too."""

    logsumexp: bool = False

    def begin(self, rows: Tensor, size: int) -> Running:
        best = torch.full_like(rows, -math.inf).unsqueeze(-1)
        return Running(best, torch.zeros_like(best), rows.new_zeros((*rows.shape, size)))

    def add(self, state: Running, block: Block) -> Running:
        best = torch.maximum(state.best, block.scores.amax(-1, keepdim=True))
        base = torch.where(best == -math.inf, 0, best)
        weights, fade = torch.exp(block.scores - base), torch.exp(state.best - base)
        total = state.total * fade + weights.sum(-1, keepdim=True)
        return Running(best, total, state.output * fade + block.drop(weights) @ block.values)

    def finish(self, state: Running) -> Finished:
        output = state.output / torch.where(state.total == 0, 1, state.total)
        # The largest score and the sum are stored separately: combined into a log-sum-exp, large scores would leave too
        # few digits for the sum.
        total = (state.best + state.total.log()).squeeze(-1) if self.logsumexp else None
        return Finished(output, (state.best, state.total, output), total)

    def gradient(self, block: Block, upstream: Upstream, stored: tuple[Tensor, ...]) -> Gradient:
        best, total, output = stored
        weights = softmax_from(block.scores, best, total)
        mean = (upstream.output * output).sum(-1, keepdim=True)
        if upstream.log_prob is not None:  # the derivative of the log-sum-exp by a score is the weight
            mean = mean - torch.where(best == -math.inf, 0, upstream.log_prob.unsqueeze(-1))
        return Gradient(weights * (upstream.weights(block) - mean), block.drop(weights))


def softmax_from(scores: Tensor, best: Tensor, total: Tensor) -> Tensor:
    """Return exp(s − best) / total, with `best` the largest score of a row and `total` the row's sum of exp(s − best);
    a fully masked row (best = −inf, total = 0) gives zeros."""
    weights = torch.exp(scores - torch.where(best == -math.inf, 0, best))
    return weights.div_(torch.where(total == 0, 1, total))


@dataclass(frozen=True)
class SigmoidStream(Stream):
    """The sigmoid normaliser, blockwise: each weight depends on its own score, so the output is a sum over blocks."""

    bias: float

    def begin(self, rows: Tensor, size: int) -> Tensor:
        return rows.new_zeros((*rows.shape, size))

    def add(self, state: Tensor, block: Block) -> Tensor:
        return state + block.drop(torch.sigmoid(block.scores + self.bias)) @ block.values

    def finish(self, state: Tensor) -> Finished:
        return Finished(state, ())

    def gradient(self, block: Block, upstream: Upstream, stored: tuple[Tensor, ...]) -> Gradient:
        weights = torch.sigmoid(block.scores + self.bias)
        return Gradient(weights * (1 - weights) * upstream.weights(block), block.drop(weights))


class Collected(NamedTuple):
    """The blocks of some rows, collected until the last one is added, and zeros in the shape of the output."""

    blocks: tuple[Block, ...]
    output: Tensor


@dataclass(frozen=True)
class EntmaxStream(Stream):
    """Sparsemax and entmax: all scores of a row are collected to compute the exact threshold before any weight.

    Memory is O(rows of a block · keys).
    """

    alpha: float

    def begin(self, rows: Tensor, size: int) -> Collected:
        return Collected((), rows.new_zeros((*rows.shape, size)))

    def add(self, state: Collected, block: Block) -> Collected:
        return Collected((*state.blocks, block), state.output)

    def finish(self, state: Collected) -> Finished:
        output = centre = state.output
        if not state.blocks:
            return Finished(output, (output.new_tensor([0.0, math.inf]).expand(*output.shape[:-1], 2), centre))
        pieces = [block.scores for block in state.blocks]
        threshold = self._threshold(pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1))
        total = torch.zeros_like(output[..., :1])
        for block in state.blocks:
            weights = entmax_weights(block.scores, threshold, self.alpha)
            slope = entmax_slope(weights, self.alpha)
            output = output + block.drop(weights) @ block.values
            centre = centre + block.drop(slope) @ block.values.to(slope.dtype)
            total = total + slope.sum(-1, keepdim=True)
        return Finished(output, (threshold, centre / torch.where(total == 0, 1, total)))

    def gradient(self, block: Block, upstream: Upstream, stored: tuple[Tensor, ...]) -> Gradient:
        threshold, centre = stored
        weights = entmax_weights(block.scores, threshold, self.alpha)
        mean = (upstream.output * centre).sum(-1, keepdim=True)
        slope = entmax_slope(weights, self.alpha)
        dscores = slope * (upstream.weights(block, slope.dtype) - mean)
        return Gradient(dscores.to(weights.dtype), block.drop(weights))

    def _threshold(self, scores: Tensor) -> Tensor:
        if self._by_kernel(scores):
            from regard.kernels.triton import entmax  # imported here: the module imports Triton

            return entmax.entmax_threshold(scores, self.alpha)
        return entmax_threshold(scores, self.alpha)

    def _by_kernel(self, scores: Tensor) -> bool:
        """Return whether the Triton kernel computes the thresholds of entmax: one launch instead of a dozen, without
        sorting."""
        return scores.is_cuda and scores.dtype == torch.float32 and entmax_rows.climbs(self.alpha, scores.shape[-1])


class Candidate(NamedTuple):
    """The accumulators of hard attention: the key of the largest score so far, and two online softmaxes.

    If a key is sampled, Gumbel noise is added to the scores that are compared.
    """

    noisy: Tensor
    score: Tensor
    index: Tensor
    scale: Tensor
    value: Tensor
    plain: Running  # the softmax from which a key is sampled, for log_prob
    relaxed: Running  # the softmax whose gradient replaces that of the one-hot weights


@dataclass(frozen=True)
class HardStream(Stream):
    """Hard attention in one pass: Gumbel-max only needs the running maximum, so sampling takes no second pass."""

    hard: Hard
    sample: bool

    def begin(self, rows: Tensor, size: int) -> Candidate:
        running = SoftmaxStream().begin(rows, size)
        index = torch.zeros_like(running.best, dtype=torch.long)
        return Candidate(running.best, running.best, index, running.total, running.output, running, running)

    def add(self, state: Candidate, block: Block) -> Candidate:
        scores = block.scores * self.hard.sharpness
        noisy = scores if block.noise is None else scores + block.noise
        best, index = noisy.max(-1, keepdim=True)
        better = best > state.noisy  # strictly greater, so that the first of equal scores is chosen
        scale = torch.ones_like(best) if block.dropout_mask is None else block.dropout_mask.gather(-1, index)
        values = block.values.expand(*scores.shape[:-2], *block.values.shape[-2:])
        value = values.gather(-2, index.expand(*index.shape[:-1], values.shape[-1]))
        return Candidate(
            torch.where(better, best, state.noisy),
            torch.where(better, scores.gather(-1, index), state.score),
            torch.where(better, index + block.first, state.index),
            torch.where(better, scale, state.scale),
            torch.where(better, value, state.value),
            SoftmaxStream().add(state.plain, block._replace(scores=scores)),
            SoftmaxStream().add(state.relaxed, block._replace(scores=self._logits(scores, block.noise))),
        )

    def _logits(self, scores: Tensor, noise: Tensor | None) -> Tensor:
        """Return the scores of the softmax whose gradient replaces that of the one-hot weights; `scores` are already
        divided by the temperature."""
        if self.hard.estimator != "gumbel":
            return scores
        return (scores if noise is None else scores + noise) / self.hard.temperature

    def finish(self, state: Candidate) -> Finished:
        best, total, _ = SoftmaxStream().finish(state.plain).stored
        log_prob = torch.where(total == 0, 0, state.score - best - total.log())
        stored = (best, total, *SoftmaxStream().finish(state.relaxed).stored, state.index)
        return Finished(state.value * state.scale, stored, log_prob.squeeze(-1), state.index.squeeze(-1))

    def gradient(self, block: Block, upstream: Upstream, stored: tuple[Tensor, ...]) -> Gradient:
        best, total, relaxed_best, relaxed_total, soft, index = stored
        scores = block.scores * self.hard.sharpness
        here = torch.arange(block.first, block.first + scores.shape[-1], device=scores.device)
        chosen = ((here == index) & (total > 0)).to(scores.dtype)
        dscores = torch.zeros_like(scores)
        if self.sample and self.hard.estimator != "reinforce":
            relaxed = softmax_from(self._logits(scores, block.noise), relaxed_best, relaxed_total)
            mean = (upstream.output * soft).sum(-1, keepdim=True)
            dscores = relaxed * (upstream.weights(block) - mean) / self.hard.temperature
        if upstream.log_prob is not None:
            toward = chosen - softmax_from(scores, best, total)
            dscores = dscores + upstream.log_prob.unsqueeze(-1) * toward * self.hard.sharpness
        return Gradient(dscores, block.drop(chosen))


def stream(normalize: Normalizer, sample: bool) -> Stream | None:
    """Return the `Stream` that computes a normaliser block by block; None if there is none, as for a caller's own
    subclass."""
    if of_the_caller(normalize):
        return None
    match normalize:
        case Softmax() | Entmax(alpha=1.0):
            return SoftmaxStream()
        case Sigmoid(bias):
            return SigmoidStream(bias)
        case Entmax() | Sparsemax():
            return EntmaxStream(normalize.alpha)
        case Hard() if not (sample and normalize.mixes):  # the expected value Σ p v needs all weights
            return HardStream(normalize, sample)
    return None
