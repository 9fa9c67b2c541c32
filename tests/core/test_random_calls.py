"""Random calls, each made three times with other values: what the first call stores must be right for the next ones.

Outputs, requested weights and gradients are compared with the reference in float64. Between the calls the tensors of a
mask may change in place, and closed keys may hold NaN.
"""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard

TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9}


class Draw:
    """One random call: its records, and tensors with new values as often as they are needed."""

    def __init__(self, seed: int) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        choice = self.random.choice
        self.batch, self.heads = choice((1, 2, 3)), choice((1, 2, 4))
        self.groups = choice([n for n in (1, 2, 4) if self.heads % n == 0])
        self.queries = choice((1, 2, 3, 7, 16, 17, 33, 64))
        self.keys = self.queries if self.random.random() < 0.6 else choice((1, 2, 5, 16, 40, 65))
        self.size = choice((1, 4, 7, 16, 64))
        self.values = self.size if self.random.random() < 0.7 else choice((1, 3, 24))
        self.dtype = choice((torch.float32, torch.float32, torch.float64))
        self.learns = self.random.random() < 0.5
        self.lengths, self.ids, self.kept = (torch.zeros(0) for _ in range(3))
        self.change()
        self.score = choice([*[regard.ScaledDot()] * 4, regard.Dot(), regard.ScaledDot(-0.4), regard.Cosine(3.0)])
        self.normalize = choice([*[regard.Softmax()] * 6, regard.Sparsemax(), regard.Sigmoid()])
        self.mask, self.bias = choice(self.masks()), choice(self.biases())
        self.request = choice([*[None] * 6, regard.full(), regard.entropy(), regard.received(), regard.rows([0])])

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=self.dtype)

    def change(self) -> None:
        """Change the tensors of the masks in place."""
        lengths = torch.randint(self.keys + 1, (self.batch,), generator=self.generator)
        ids = torch.randint(3, (self.batch, self.keys), generator=self.generator).sort(-1).values
        kept = torch.rand(self.batch, 1, 1, self.keys, generator=self.generator) < 0.6
        if self.lengths.numel() == 0:
            self.lengths, self.ids, self.kept = lengths, ids, kept
        else:
            self.lengths.copy_(lengths), self.ids.copy_(ids), self.kept.copy_(kept)

    def masks(self) -> list[Any]:
        causal, padding, kept = regard.causal(), regard.padding(self.lengths), regard.dense(self.kept)
        pairs = torch.rand(self.queries, self.keys, generator=self.generator) < 0.5
        found = [None, None, causal, regard.causal(-2), regard.window(2, 0), regard.window(1, 1, offset=-3), padding]
        found += [padding & causal, kept, kept & causal, self.kept, pairs, ~padding, regard.window(3, 2) & padding]
        if self.queries == self.keys:
            documents = regard.segments(self.ids, self.ids)
            found += [documents, documents & causal, documents & causal & padding]
        return found

    def biases(self) -> list[Any]:
        closed = torch.rand(self.queries, self.keys, generator=self.generator) < 0.3
        numbers = self.numbers(self.queries, self.keys)
        slopes = [0.1 * (head + 1) for head in range(self.heads)]
        return [*[None] * 6, regard.alibi(slopes), numbers, numbers.masked_fill(closed, -math.inf)]

    def tensors(self) -> list[Tensor]:
        shapes = (self.heads, self.queries, self.size), (self.groups, self.keys, self.size)
        tensors = [self.numbers(self.batch, *shape) for shape in (*shapes, (self.groups, self.keys, self.values))]
        if self.random.random() < 0.2:
            tensors[self.random.choice((1, 2))][..., self.random.randrange(self.keys), :] = math.nan
        return tensors

    def call(self, tensors: list[Tensor], backend: str) -> list[Tensor]:
        """Return the output, the requested weights, and the gradients if all values are finite."""
        leaves = [tensor.clone().requires_grad_(self.learns) for tensor in tensors]
        bias = self.bias.to(leaves[0].dtype) if isinstance(self.bias, Tensor) else self.bias
        options = {"score": self.score, "normalize": self.normalize, "mask": self.mask, "bias": bias}
        found = regard.attention(*leaves, **options, weights=self.request, backend=backend)
        results = [found.output] if found.weights is None else [found.output, found.weights]
        if self.learns and all(tensor.isfinite().all() for tensor in tensors):
            change = torch.cos(torch.arange(found.output.numel(), dtype=leaves[0].dtype)).view_as(found.output)
            results += torch.autograd.grad(found.output, leaves, change, materialize_grads=True)
        return results


@pytest.mark.parametrize("seed", range(200))
def test_calls_after_the_first_agree_with_the_reference(seed: int) -> None:
    drawn = Draw(seed)
    for turn in range(3):
        tensors = drawn.tensors()
        if turn == 2:
            drawn.change()
        found = drawn.call(tensors, "auto")
        true = drawn.call([tensor.double() for tensor in tensors], "reference")
        tolerance = TOLERANCE[drawn.dtype]
        for one, other in zip(found, true, strict=True):
            assert_close(one.double(), other, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("mask", [regard.padding([0]), regard.padding([0]) & regard.causal()], ids=str)
def test_a_batch_without_a_key_has_a_gradient_of_zeros(mask: regard.Mask) -> None:
    leaves = [torch.randn(1, 2, 33, 4, requires_grad=True) for _ in range(3)]
    for _ in range(2):
        output = regard.attention(*leaves, mask=mask).output
        assert not output.any()
        assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum(), leaves))


def test_an_intersection_of_which_one_part_masks_nothing() -> None:
    """For one query after eleven keys the causal mask allows everything, so only the dense mask remains."""
    query, key, value = (torch.randn(2, 1, n, 4) for n in (1, 12, 12))
    mask = regard.dense(torch.arange(12) % 2 == 0) & regard.causal(offset=11)
    for _ in range(2):
        found = regard.attention(query, key, value, mask=mask).output
        assert_close(found, regard.attention(query, key[:, :, ::2], value[:, :, ::2]).output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [regard.window(9, 3), regard.window(60, 60), regard.causal()], ids=["narrow", "wide", ""]
)
def test_the_first_call_gives_the_bits_of_the_next_ones(mask: regard.Mask) -> None:
    """A resumed run starts without stored routes; dropout makes a difference in the number of kernel calls visible."""
    query, key, value = (torch.randn(25, 8, 181, 4).bfloat16() for _ in range(3))
    outputs = []
    for _ in range(3):
        torch.manual_seed(1)
        outputs.append(regard.attention(query, key, value, mask=mask, dropout=0.5).output)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])


class Near(regard.Mask):
    """A mask of the caller's own that depends on more than its tensors."""

    def __init__(self, reach: int) -> None:
        self.reach, self.kept = reach, torch.ones(20, dtype=torch.bool)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.kept,)

    def allowed(self, rows, columns, device):
        rows, columns = torch.arange(rows.start, rows.stop)[:, None], torch.arange(columns.start, columns.stop)
        return (columns - rows <= self.reach) & self.kept[columns]


def test_a_mask_of_the_callers_own_is_not_stored() -> None:
    x, mask = torch.randn(1, 2, 20, 8), Near(0)
    for reach in (0, 5):
        mask.reach = reach
        assert_close(
            regard.attention(x, x, x, mask=mask).output, regard.attention(x, x, x, mask=regard.causal(reach)).output
        )


def test_an_output_without_keys_can_be_changed_in_place() -> None:
    x = torch.randn(1, 2, 100, 8)
    output = regard.attention(x, x, x, mask=regard.padding([0])).output
    output += 1
    assert torch.equal(output, torch.ones_like(x))
