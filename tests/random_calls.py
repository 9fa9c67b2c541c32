"""Random calls of `regard.attention`: a seed determines shapes and options; each use of a call samples new tensors."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import regard


@dataclass(frozen=True)
class Range:
    """The option values from which a random call is sampled; a value that is listed twice is sampled more often."""

    batches: tuple[int, ...] = (1, 2, 3)
    queries: tuple[int, ...] = (1, 2, 3, 7, 16, 17, 33, 64)
    keys: tuple[int, ...] = (1, 2, 5, 16, 40, 65)
    sizes: tuple[int, ...] = (1, 4, 7, 16, 64)
    values: tuple[int, ...] = (1, 3, 24)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float32, torch.float64)
    learned_scores: bool = False
    device: str = "cpu"
    more_requests: list[regard.Request] = field(default_factory=list)


CPU = Range()
CUDA = Range(
    batches=(1, 2, 3, 9),
    queries=(1, 2, 17, 64, 65, 130, 257),
    keys=(1, 5, 64, 129, 300),
    sizes=(4, 16, 24, 32, 40, 64, 64, 72, 96, 128, 128, 256),
    values=(3, 24, 64, 80, 128),
    dtypes=(torch.float32, torch.bfloat16, torch.bfloat16, torch.float16),
    learned_scores=True,
    device="cuda",
    more_requests=[regard.full(), regard.entropy(), regard.received(), regard.rows([0, -1])],
)


class Draw:
    """One random call. All numbers are sampled on the CPU, so a seed gives the same call on every device."""

    def __init__(self, seed: int, range: Range = CPU) -> None:
        self.range, self.random, self.generator = range, random.Random(seed), torch.Generator().manual_seed(seed)
        choice = self.random.choice
        self.batch, self.heads = choice(range.batches), choice((1, 2, 4))
        self.groups = choice([n for n in (1, 2, 4) if self.heads % n == 0])
        self.queries = choice(range.queries)
        self.keys = self.queries if self.random.random() < 0.6 else choice(range.keys)
        self.size = choice(range.sizes)
        self.values = self.size if self.random.random() < 0.7 else choice(range.values)
        self.dtype = choice(range.dtypes)
        self.learns = self.random.random() < 0.5
        self.lengths, self.ids, self.kept = (torch.zeros(0) for _ in "abc")
        self.change()
        self.score = choice(self.scores())
        self.normalize = choice([*[regard.Softmax()] * 6, regard.Sparsemax(), regard.Sigmoid()])
        self.mask, self.bias = choice(self.masks()), choice(self.biases())
        requests = [*[None] * 6, regard.full(), regard.entropy(), regard.received(), regard.rows([0])]
        self.request = choice([*requests, *range.more_requests])

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.range.device, self.dtype)

    def where(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.range.device)

    def change(self) -> None:
        """Change the tensors that the call's masks hold in place."""
        lengths = torch.randint(self.keys + 1, (self.batch,), generator=self.generator)
        ids = torch.randint(3, (self.batch, self.keys), generator=self.generator).sort(-1).values
        kept = torch.rand(self.batch, 1, 1, self.keys, generator=self.generator) < 0.6
        if self.lengths.numel() == 0:
            self.lengths, self.ids, self.kept = self.where(lengths), self.where(ids), self.where(kept)
        else:
            self.lengths.copy_(lengths), self.ids.copy_(ids), self.kept.copy_(kept)

    def scores(self) -> list[Any]:
        found = [*[regard.ScaledDot()] * 4, regard.Dot(), regard.ScaledDot(-0.4), regard.Cosine(3.0)]
        if self.range.learned_scores:
            found += [regard.Bilinear(self.numbers(self.size, self.size) / self.size)] * 2
            found += [regard.Additive(self.numbers(self.size))] * 3
            found += [regard.ScaledDot(softcap=2.0)]
        return found

    def masks(self) -> list[Any]:
        causal, padding, kept = regard.causal(), regard.padding(self.lengths), regard.dense(self.kept)
        pairs = self.where(torch.rand(self.queries, self.keys, generator=self.generator) < 0.5)
        found = [None, None, causal, regard.causal(-2), regard.window(2, 0), regard.window(1, 1, offset=-3), padding]
        found += [padding & causal, kept, kept & causal, self.kept, pairs, ~padding, regard.window(3, 2) & padding]
        if self.queries == self.keys:
            documents = regard.segments(self.ids, self.ids)
            found += [documents, documents & causal, documents & causal & padding]
        return found

    def biases(self) -> list[Any]:
        closed = self.where(torch.rand(self.queries, self.keys, generator=self.generator) < 0.3)
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
        dtype = leaves[0].dtype
        bias = self.bias.to(dtype) if isinstance(self.bias, Tensor) else self.bias
        score = self.score
        if isinstance(score, regard.Additive | regard.Bilinear):
            learned = score.weight.to(dtype).requires_grad_(self.learns)
            score, leaves = type(score)(learned), [*leaves, learned]
        options = {"score": score, "normalize": self.normalize, "mask": self.mask, "bias": bias}
        found = regard.attention(*leaves[:3], **options, weights=self.request, backend=backend)
        results = [found.output] if found.weights is None else [found.output, found.weights]
        if self.learns and all(tensor.isfinite().all() for tensor in tensors):
            change = torch.cos(torch.arange(found.output.numel(), dtype=torch.float64)).view_as(found.output)
            change = change.to(self.range.device, self.dtype).to(dtype)
            results += torch.autograd.grad(found.output, leaves, change, materialize_grads=True)
        return results

    def __str__(self) -> str:
        shape = f"B{self.batch} H{self.heads}/{self.groups} n{self.queries} m{self.keys} d{self.size} v{self.values}"
        mask = "dense" if isinstance(self.mask, Tensor) else self.mask
        records = f"{type(self.score).__name__} {self.normalize} {mask} bias {type(self.bias).__name__} {self.request}"
        return f"{shape} {self.dtype} {'gradients ' * self.learns}{records}"
