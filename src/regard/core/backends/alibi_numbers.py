"""ALiBi on the CPU by torch's kernels: bias and band become one float mask, cached for the bias object."""

import math

import torch
from torch import Tensor

from regard.core.backends import torch_sdpa
from regard.core.backends.result import Direct
from regard.core.biases import Alibi
from regard.core.clauses import Clauses
from regard.core.mask_cache import stored
from regard.core.masks import Band
from regard.core.nonfinite import harmless
from regard.core.problem import Problem
from regard.core.scores import Score
from regard.core.spans import all_of

_STORED = 2**20  # the largest number of entries of a float mask that is cached


def direct(problem: Problem, rules: Clauses) -> Direct | None:
    """Return a function that runs torch's kernel for ALiBi with a band or without a mask; None for other calls."""
    if not isinstance(problem.bias, Alibi) or problem.bias_learned or problem.device.type != "cpu":
        return None
    shape, dtype, band = problem.shape, problem.dtype, Band(rules.low, rules.high)
    if math.prod(shape[-3:]) > _STORED or rules.lengths is not None or rules.segments or rules.dense:
        return None
    if problem.dropout > 0.0 or problem.key.shape[-1] != problem.value.shape[-1]:
        return None
    learning, grouped = problem.differentiated, problem.group > 1

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Score, mask: object, bias: Alibi) -> Tensor | None:
        if not harmless(query, key, value, learning):
            return None
        numbers = stored(bias, query.device, ("scores", shape, band, dtype), lambda: _numbers(bias, shape, band, dtype))
        product = score.as_product(query, key)
        assert product is not None  # `refuses` has checked that the score is a dot product of vectors
        options = {"attn_mask": numbers, "scale": product.scale, "enable_gqa": grouped}
        return torch_sdpa.attend(product.query, product.key, value, **options)

    return attended


def _numbers(bias: Alibi, shape: tuple[int, ...], band: Band, dtype: torch.dtype) -> Tensor:
    """Return bias and band mask as one float mask (1, h, q, k): the bias within the band, −inf outside of the band."""
    rows, columns, device = all_of(shape[-2]), all_of(shape[-1]), torch.device("cpu")
    numbers = bias.on(device).aligned(shape).values(rows, columns, dtype)
    if band.low is not None or band.high is not None:
        numbers = torch.where(band.allowed(rows, columns, device), numbers, -math.inf)
    return numbers.reshape((1,) * (4 - numbers.ndim) + tuple(numbers.shape))
