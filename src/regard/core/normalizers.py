"""Stage 2 of attention: scores become weights.

A normaliser is a frozen record that is also a function, `normalize(scores, allowed=None) -> weights`, over the
last axis. Keys that are not allowed get weight 0; a row without allowed keys is all zeros.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.scores import finite
from regard.core.spans import constant
from regard.core.transforms import forwards, transformed, twice
from regard.kernels import entmax_rows

_LIKELY = 128  # the support of nearly every row of sparsemax and entmax lies within this many of its largest scores

Estimator = Literal["straight_through", "reinforce", "gumbel"]


class Normalizer:
    """A function from scores to weights over the last axis.

    A subclass implements `__call__` (or `forward`, if its first base is `nn.Module`). It returns weights of the shape
    of the scores. `allowed` broadcasts to the scores; None means that every key is allowed. A key that is not allowed
    gets weight 0, and so does every key of a row without allowed keys: `attention` sets these weights to 0 if
    the subclass did not.
    """

    name = "normalizer"

    @property
    def is_softmax(self) -> bool:
        """Return whether this normaliser is softmax (or entmax with α = 1), the only one that fused kernels support."""
        return False

    def __call__(
        self, scores: Float[Tensor, "*rows k"], allowed: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "*rows k"]:
        raise NotImplementedError(
            f"{type(self).__name__} must define __call__(self, scores, allowed=None); a module that defines forward "
            "needs nn.Module as its first base, before regard.Normalizer"
        )


def _checked(allowed: object) -> None:
    """Raise a TypeError unless `allowed` is a bool tensor or None."""
    if allowed is not None and (not isinstance(allowed, Tensor) or allowed.dtype != torch.bool):
        came = str(allowed.dtype) if isinstance(allowed, Tensor) else type(allowed).__name__
        raise TypeError(f"allowed must be a bool tensor (True = may attend), got {came}; masks go to attention(mask=…)")


def normalized(
    normalize: Normalizer,
    scores: Float[Tensor, "*rows k"],
    allowed: Bool[Tensor, "..."] | None,
    *,
    may_be_infinite: bool = True,
) -> Float[Tensor, "*rows k"]:
    """Return the weights of a normaliser; weights of a user-defined normaliser are checked, and set to 0 at masked
    keys.

    For a row without allowed keys, a user-defined normaliser is called with all keys allowed, and with scores of 0 if
    scores may be −inf. Its weights in that row are then replaced by zeros, and the row's gradient has no NaN.
    """
    if not of_the_caller(normalize):
        return normalize(scores, allowed)
    if allowed is None:
        return _as_weights(normalize(scores, None), scores, normalize)
    filled = allowed.any(-1, keepdim=True)
    safe = torch.where(filled, scores, 0) if may_be_infinite else scores
    weights = _as_weights(normalize(safe, allowed | ~filled), scores, normalize)
    return torch.where(allowed, weights, 0)


def of_the_caller(normalize: Normalizer) -> bool:
    """Return whether the normaliser's class is defined outside of regard, as a user's subclass of `Softmax` is."""
    return not type(normalize).__module__.startswith("regard.")


def _as_weights(weights: object, scores: Tensor, normalize: Normalizer) -> Tensor:
    """Return the weights in the dtype of the scores; raise unless they are real numbers in the shape of the scores."""
    expected = f"{type(normalize).__name__} must return weights in the shape of the scores, {tuple(scores.shape)}"
    if not isinstance(weights, Tensor):
        raise TypeError(f"{expected}, got {type(weights).__name__}")
    if weights.is_complex() or weights.dtype == torch.bool:
        raise TypeError(f"{expected}, as real numbers, got {weights.dtype}")
    if weights.shape != scores.shape:
        raise ValueError(f"{expected}, got {tuple(weights.shape)}")
    return weights.to(scores.dtype)


def masked(scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores with −inf at masked keys, and a bool tensor (…, 1) of the rows that have an allowed key.

    In a row without allowed keys the scores are 0 instead of −inf, so that its gradient is not NaN.
    """
    filled = allowed.any(-1, keepdim=True)
    return torch.where(allowed, scores, torch.where(filled, -math.inf, 0.0).to(scores.dtype)), filled


def filled_with(numbers: Tensor, allowed: Tensor, other: float) -> Tensor:
    """Return `numbers` where `allowed` is True, and `other` elsewhere."""
    if numbers.device.type == "cpu":
        return torch.where(allowed, numbers, other)
    # torch.where would copy a Python number to the GPU in a kernel launch of its own; a cached tensor needs none.
    number = constant(
        ("number", other, numbers.dtype),
        numbers.device,
        lambda: torch.full((), other, dtype=numbers.dtype, device=numbers.device),
    )
    return torch.where(allowed, numbers, number)


def masked_softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Return the softmax over allowed keys; rows without allowed keys are 0, and so is their gradient."""
    if allowed is None:
        return torch.softmax(scores, -1)
    if _no_row_empty(scores, allowed):  # faster: no pass over the weights sets rows to 0
        return torch.softmax(torch.where(allowed, scores, -math.inf), -1)
    scores, filled = masked(scores, allowed)
    return torch.where(filled, torch.softmax(scores, -1), 0)


def _no_row_empty(scores: Tensor, allowed: Tensor) -> bool:
    """Return whether each row has an allowed key; False where the values of the mask are not inspected, as on a GPU."""
    if not type(scores) is type(allowed) is Tensor or allowed.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or transformed():
        return False
    return bool(allowed.any(-1).all())


def log_sum_exp(scores: Float[Tensor, "*rows k"], allowed: Bool[Tensor, "..."] | None) -> Float[Tensor, "*rows"]:
    """Return ln Σ exp(s) over allowed keys; −inf, with a gradient of 0, for rows without allowed keys."""
    if scores.shape[-1] == 0:
        return scores.sum(-1) - math.inf
    if allowed is None:
        return scores.logsumexp(-1)
    scores, filled = masked(scores, allowed)
    return torch.where(filled.squeeze(-1), scores.logsumexp(-1), -math.inf)


@dataclass(frozen=True)
class Softmax(Normalizer):
    """exp(s_j) / Σ exp(s): weights in [0, 1] that sum to 1.

    >>> Softmax()(torch.tensor([0.0, 0.0, math.log(2.0)]))
    tensor([0.2500, 0.2500, 0.5000])
    """

    name = "softmax"

    @property
    def is_softmax(self) -> bool:
        return not of_the_caller(self)

    def __call__(
        self, scores: Float[Tensor, "*rows k"], allowed: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "*rows k"]:
        _checked(allowed)
        return masked_softmax(scores, allowed)


@dataclass(frozen=True)
class Entmax(Normalizer):
    """[(α−1) s − τ]₊^{1/(α−1)} with τ such that the row sums to 1: α = 1 is softmax, α = 2 sparsemax (Peters 2019).

    Weights of scores far below the largest are exactly 0.
    """

    alpha: float = 1.5
    name = "entmax"

    @property
    def is_softmax(self) -> bool:
        return self.alpha == 1 and not of_the_caller(self)

    def __post_init__(self) -> None:
        if not finite(self.alpha, "alpha of Entmax") >= 1:
            raise ValueError(f"alpha of Entmax must be a finite number of at least 1 (1 is softmax), got {self.alpha}")

    def __call__(
        self, scores: Float[Tensor, "*rows k"], allowed: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "*rows k"]:
        _checked(allowed)
        if self.alpha == 1:
            return masked_softmax(scores, allowed)
        if allowed is not None:
            scores = torch.where(allowed, scores, -math.inf)
        if forwards():
            raise NotImplementedError(
                f"{type(self).__name__} has derivatives backwards, of any order, and none forwards: "
                "take jacrev for jacfwd, grad of grad for hessian"
            )
        if torch.compiler.is_compiling() and twice():
            raise NotImplementedError(f"second derivatives of {type(self).__name__} do not compile: torch loses parts")
        if not scores.requires_grad and not torch.compiler.is_compiling() and not transformed():
            return _Entmax.forward(scores, self.alpha)  # `apply` would inspect the signature of `forward` at each call
        return _Entmax.apply(scores, self.alpha)


@dataclass(frozen=True)
class Sparsemax(Normalizer):
    """The sparse weights [s − τ]₊ with τ such that the row sums to 1, for scores s (Martins & Astudillo 2016).

    They are the Euclidean projection of the scores onto the simplex.

    >>> Sparsemax()(torch.tensor([1.0, 0.5, -1.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """

    name = "sparsemax"
    alpha = 2.0

    def __call__(
        self, scores: Float[Tensor, "*rows k"], allowed: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "*rows k"]:
        return Entmax(2.0)(scores, allowed)


@dataclass(frozen=True)
class Sigmoid(Normalizer):
    """σ(s + bias) for each key independently, so that the weights of a row need not sum to 1.

    With a bias near −ln k, for k keys, the weights of an untrained model sum to about 1.
    """

    bias: float = 0.0
    name = "sigmoid"

    def __post_init__(self) -> None:
        finite(self.bias, "bias of Sigmoid")

    def __call__(
        self, scores: Float[Tensor, "*rows k"], allowed: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "*rows k"]:
        _checked(allowed)
        weights = torch.sigmoid(scores + self.bias)
        return weights if allowed is None else torch.where(allowed, weights, 0)


@dataclass(frozen=True)
class Hard(Normalizer):
    """One-hot weights: on a sampled key in training, on the key of the largest score (first on a tie) in inference.

    The estimators of the gradient, for scores s and temperature T:
    - `straight_through`: a sample of p = softmax(s / T) forward, the gradient of p backward (Bengio et al. 2013);
    - `reinforce`: the same sample; scores learn only through `Attended.log_prob` (Xu et al. 2015; see `reinforce`);
    - `gumbel`: the argmax of s + noise forward, the gradient of softmax((s + noise) / T) backward (Jang et al. 2017).

    `sample=None` samples when the call is differentiated (one of its tensors requires grad, and grad mode is on) or a
    generator is given, and otherwise chooses the key of the largest score; True and False override this.

    `expected` is the probability that a query uses the expected value Σ p_j v_j instead of a sample, with the gradient
    of p (Xu et al. 2015, section 4.1); the log-probability of such a query is 0. A number, or a float tensor without
    axes (which may change between calls), is the probability for each query independently. A bool tensor that
    broadcasts to (…, h, q) says which queries use the expected value.
    """

    estimator: Estimator = "straight_through"
    temperature: float = 1.0
    sample: bool | None = None
    expected: float | Tensor = 0.0
    name = "hard"

    def __post_init__(self) -> None:
        if self.estimator not in ("straight_through", "reinforce", "gumbel"):
            raise ValueError(f"estimator must be straight_through, reinforce or gumbel, got {self.estimator!r}")
        if self.sample is not None and not isinstance(self.sample, bool):
            raise TypeError(f"sample of Hard must be True, False or None, got {self.sample!r}")
        if not finite(self.temperature, "temperature of Hard") > 0:
            raise ValueError(f"temperature of Hard must be a finite number above 0, got {self.temperature}")
        if isinstance(self.expected, Tensor):
            probability = self.expected.is_floating_point() and self.expected.ndim == 0
            if self.expected.dtype != torch.bool and not probability:
                raise TypeError(
                    "expected of Hard must be a bool tensor, a number or a float tensor without axes, "
                    f"got {self.expected.dtype} {tuple(self.expected.shape)}"
                )
        elif not 0.0 <= finite(self.expected, "expected of Hard") <= 1.0:
            raise ValueError(f"expected of Hard must be between 0 and 1, got {self.expected}")

    @property
    def mixes(self) -> bool:
        """Return whether some queries may use the expected value Σ p_j v_j while other queries sample a key."""
        return isinstance(self.expected, Tensor) or self.expected > 0

    @property
    def sharpness(self) -> float:
        """Return the factor of the scores in the softmax from which a key is sampled: 1 / temperature.

        The factor is 1 for `gumbel`, where the temperature only affects the gradient.
        """
        return 1.0 if self.estimator == "gumbel" else 1.0 / self.temperature

    def distribution(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """Return softmax(scores · sharpness) over the allowed keys, the distribution from which a key is sampled."""
        return masked_softmax(scores * self.sharpness, allowed)

    def __call__(
        self, scores: Float[Tensor, "*rows k"], allowed: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "*rows k"]:
        """Return the weights of hard attention without sampling: one-hot at the key of the largest score."""
        _checked(allowed)
        if allowed is not None:
            scores = torch.where(allowed, scores, -math.inf)
        if scores.shape[-1] == 0:
            return torch.zeros_like(scores)
        return one_hot(scores.argmax(-1), scores, allowed)


def one_hot(index: Tensor, like: Tensor, allowed: Tensor | None) -> Tensor:
    """Return weights of 1 at the key `index` of each row, 0 elsewhere; rows without allowed keys are all 0."""
    if like.shape[-1] == 0:
        return torch.zeros_like(like)
    hot = torch.zeros_like(like).scatter(-1, index.unsqueeze(-1), 1.0)
    return hot if allowed is None else torch.where(allowed.any(-1, keepdim=True), hot, 0)


def gumbel_like(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard Gumbel noise: argmax(s + noise) samples from softmax(s) (Gumbel 1954; Maddison et al. 2014)."""
    noise = torch.empty_like(scores).exponential_(generator=generator)
    return -noise.clamp_min(torch.finfo(scores.dtype).tiny).log()


class _Entmax(torch.autograd.Function):
    """The autograd function of entmax, for scores that are finite or −inf.

    The backward pass uses differentiable operations on the weights, so second derivatives exist.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, alpha: float) -> Tensor:
        if _by_kernel(scores, alpha):
            from regard.kernels.triton.entmax import entmax  # imported here: the module imports Triton

            return entmax(scores, alpha)
        return entmax_weights(scores, entmax_threshold(scores, alpha), alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.alpha = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        (weights,) = ctx.saved_tensors
        slope = entmax_slope(weights, ctx.alpha)
        if ctx.alpha == 2:
            inside = slope * grad
            mean = inside.sum(-1, keepdim=True) / slope.sum(-1, keepdim=True).clamp_min(1)
            return inside - slope * mean, None
        total = slope.sum(-1, keepdim=True)
        mean = (slope * grad).sum(-1, keepdim=True) / torch.where(total > 0, total, 1)
        return (slope * (grad - mean)).to(grad.dtype), None


def _by_kernel(scores: Tensor, alpha: float) -> bool:
    """Return whether the Triton kernel computes entmax of these scores: one launch instead of a dozen by torch."""
    if not scores.is_cuda or scores.dtype != torch.float32 or not entmax_rows.climbs(alpha, scores.shape[-1]):
        return False
    return scores.numel() > 0 and not torch.compiler.is_compiling() and not transformed()


def entmax_weights(scores: Tensor, threshold: Tensor, alpha: float) -> Tensor:
    """Return [(α−1) (s − best) − τ]₊^{1/(α−1)}; `threshold` (…, 2) holds best, the largest score of the row, and τ.

    A row without allowed keys has τ = +inf and weights 0. The largest score and τ are stored as two numbers, because
    in their sum a large score would round τ away.
    """
    best, tau = threshold[..., :1], threshold[..., 1:]
    margin = torch.where(scores == -math.inf, -math.inf, (alpha - 1) * (scores - best))
    margin = (margin - tau).clamp_min(0)
    if alpha in (1.5, 2):
        return margin if alpha == 2 else margin.square()
    return margin.pow(1 / (alpha - 1)).to(scores.dtype)


def _steep(alpha: float) -> bool:
    """Return whether the power 1 / (α − 1) or its derivative needs more precision than float32 has."""
    return alpha < 1.05 or alpha > 3


def entmax_slope(weights: Tensor, alpha: float) -> Tensor:
    """Return the derivative of each weight by its own score at fixed τ: weight^{2−α} on the support, 0 elsewhere.

    For α > 3 the derivative is computed in float64, because the smallest weights have derivatives many powers of ten
    larger than the others.
    """
    inside = weights > 0
    if alpha == 2:
        return inside.to(weights.dtype)
    weights = weights.double() if alpha > 2 and _steep(alpha) else weights
    return torch.where(inside, torch.where(inside, weights, 1).pow(2 - alpha), 0)


def entmax_threshold(scores: Tensor, alpha: float) -> Tensor:
    """Return the largest score of each row and the threshold τ relative to that score, as one tensor (…, 2).

    τ has a closed form for α = 2 and α = 1.5; for other α it is computed by bisection.
    """
    if scores.shape[-1] == 0:
        return scores.new_tensor([0.0, math.inf]).expand(*scores.shape[:-1], 2)
    best = scores.amax(-1, keepdim=True)
    empty = best == -math.inf
    best = torch.where(empty, 0, best)
    if _steep(alpha):
        best, scores = best.double(), scores.double()
    tau = _threshold((alpha - 1) * (scores - best), alpha)
    return torch.cat([best, torch.where(empty, math.inf, tau)], -1)


def _threshold(margins: Tensor, alpha: float) -> Tensor:
    """Return the threshold τ, computed from the 128 largest scores of each row if they contain the support (the keys
    with weight > 0), else from all scores.

    The 128 largest scores nearly always contain the support. In compiled code and CUDA graphs, which cannot read
    values, all scores are always used.
    """
    solve = {2.0: _sparsemax_threshold, 1.5: _entmax15_threshold}.get(alpha) or partial(_bisect_threshold, alpha=alpha)
    blind = torch.compiler.is_compiling() or (margins.is_cuda and torch.cuda.is_current_stream_capturing())
    if margins.shape[-1] > 2 * _LIKELY and not blind and not transformed():
        largest = margins.topk(_LIKELY, -1).values
        threshold = solve(largest)
        if bool((largest[..., -1:] <= threshold).all()):
            return threshold
    return solve(margins.sort(-1, descending=True).values)


def _candidates(ordered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which sorted scores can be in the support (within 1 of the largest), these scores, and 1, 2, … n.

    Scores that cannot be in the support are replaced by 0.
    """
    inside = ordered > -1
    count = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device, dtype=ordered.dtype)
    return inside, torch.where(inside, ordered, 0), count


def _sparsemax_threshold(ordered: Tensor) -> Tensor:
    inside, values, count = _candidates(ordered)
    candidates = (values.cumsum(-1) - 1) / count
    size = (inside & (ordered > candidates)).sum(-1, keepdim=True).clamp_min(1)
    return candidates.gather(-1, size - 1)


def _entmax15_threshold(ordered: Tensor) -> Tensor:
    inside, values, count = _candidates(ordered)
    mean, square = values.cumsum(-1) / count, (values * values).cumsum(-1) / count
    candidates = mean - ((1 - count * (square - mean * mean)) / count).clamp_min(0).sqrt()
    size = (inside & (ordered >= candidates)).sum(-1, keepdim=True).clamp_min(1)
    return candidates.gather(-1, size - 1)


def _bisect_threshold(margins: Tensor, *, alpha: float) -> Tensor:
    """Return the threshold τ, computed by bisection to the last bit, for n margins m = (α−1) (s − max s) ≤ 0.

    The search starts at −τ = n^{1−α}, where Σ [m − τ]₊^{1/(α−1)} is at most 1. It is a search for ln(−τ), because for
    large α the threshold of many equal scores is a very small number.
    """
    power = 1 / (alpha - 1)
    low = margins.new_full((*margins.shape[:-1], 1), -(alpha - 1) * math.log(margins.shape[-1]))
    width = (alpha - 1) * math.log(margins.shape[-1])
    for _ in range(60 if margins.dtype == torch.float64 else 32):
        width /= 2
        middle = low + width
        mass = (margins + middle.exp()).clamp_min(0).pow(power).sum(-1, keepdim=True)
        low = torch.where(mass <= 1, middle, low)
    return -low.exp()
