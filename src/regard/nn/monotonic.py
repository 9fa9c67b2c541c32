"""Monotonic attention: the attended position only moves forwards, in training as an expectation over all positions at
which it may stop."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.core.attended import Attended
from regard.core.problem import HALF
from regard.core.requests import Request
from regard.core.scores import unit
from regard.nn.alignment_steps import blank, check_query, clean_memory, score_vector
from regard.nn.argument_checks import check_sizes
from regard.nn.protocol import Projected

HIDDEN_NUMBERS = 2**24  # the largest number of entries of the tanh layer (b, q, k, hidden) in memory at a time


class MonotonicAttention(nn.Module):
    """Query i moves forwards from the previous query's key and stops at key j with probability p_ij (Raffel 2017).

    e_ij = g · (w / |w|) · tanh(W s_i + V h_j + b) + r and p = σ(e) (section 2.4 of the paper). In training the weights
    are the expected alignment, α_ij = p_ij Σ_{l≤j} α_{i−1,l} Π_{l≤m<j} (1 − p_im), with Gaussian `noise` on the
    energies so that p learns to be near 0 or 1 (section 2.5). In evaluation the query stops at the first key with e >
    0, and the output is zeros after the end. A row of weights sums to at most 1: one minus the sum is the probability
    of passing the end. `offset` is the initial r: negative, so that at the start of training queries do not stop at
    once.

    The `state` that `attend` takes and returns is a tuple of one tensor: the weights α of the last query, (b, k).

    >>> from regard.core.requests import full
    >>> layer = MonotonicAttention(8, 6)
    >>> out = layer(torch.randn(2, 4, 8), torch.randn(2, 11, 6), weights=full())
    >>> out.output.shape, out.weights.shape
    (torch.Size([2, 4, 6]), torch.Size([2, 4, 11]))
    """

    stateful = True

    def __init__(
        self,
        query_size: int,
        memory_size: int | None = None,
        *,
        hidden_size: int | None = None,
        offset: float = -1.0,
        noise: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(query_size=query_size, memory_size=memory_size, hidden_size=hidden_size)
        memory_size = query_size if memory_size is None else memory_size
        hidden_size = query_size if hidden_size is None else hidden_size
        if not 0 <= noise < math.inf:
            raise ValueError(f"noise must be a finite number of at least 0, got {noise}")
        self.query_size, self.memory_size, self.output_size = query_size, memory_size, memory_size
        self.noise = noise
        self.query = nn.Linear(query_size, hidden_size, bias=False)
        self.key = nn.Linear(memory_size, hidden_size)
        self.weight = score_vector(hidden_size)
        self.gain = nn.Parameter(torch.tensor(1 / math.sqrt(hidden_size)))
        self.offset = nn.Parameter(torch.tensor(float(offset)))

    def project(self, memory: Float[Tensor, "b k m"], *, mask: Bool[Tensor, "b k"] | None = None) -> Projected:
        """Return the keys V h_j + b and the values h_j of a memory, such as the outputs h_j of an encoder."""
        memory = clean_memory(memory, self.memory_size, mask)
        return Projected(self.key(memory), memory, mask)

    def energies(self, query: Float[Tensor, "b q d"], key: Float[Tensor, "b k hidden"]) -> Float[Tensor, "b q k"]:
        """Return the energies e_ij without noise, in at least float32."""
        hidden = torch.tanh(self.query(query).unsqueeze(2) + key.unsqueeze(1))
        scores = hidden @ unit(self.weight).to(hidden.dtype)
        return self.gain * (scores.float() if scores.dtype in HALF else scores) + self.offset

    def _energies(self, query: Float[Tensor, "b q d"], key: Float[Tensor, "b k hidden"]) -> Float[Tensor, "b q k"]:
        """Return the result of `energies`; if the hidden layer is large, it is computed for some queries at a time and
        recomputed in the backward pass."""
        rows = max(1, HIDDEN_NUMBERS // max(1, key.numel()))
        if query.shape[1] <= rows:
            return self.energies(query, key)
        return torch.cat(
            [checkpoint(self.energies, part, key, use_reentrant=False) for part in query.split(rows, 1)], 1
        )

    def attend(
        self,
        query: Float[Tensor, "b q d"],
        projected: Projected,
        *,
        state: tuple[Tensor] | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Attended, tuple[Tensor]]:
        """Return the outputs of the queries, computed one after another, and the weights of the last query."""
        check_query(query, self.query_size, projected)
        energies = self._energies(query, projected.key)
        mask = projected.mask
        last = state[0] if state is not None else _beginning(projected)
        last = last.to(energies.dtype)
        rows = []
        for energy in energies.unbind(1):
            last = self._step(energy, last, mask, generator)
            rows.append(last)
        alignments = torch.stack(rows, 1) if rows else energies
        alignments = alignments.to(projected.value.dtype)
        requested = None
        if weights is not None:
            weights.check(len(rows))
            requested = weights.of(alignments)
        return Attended(alignments @ projected.value, requested), (last,)

    def _step(
        self,
        energy: Float[Tensor, "b k"],
        last: Float[Tensor, "b k"],
        mask: Bool[Tensor, "b k"] | None,
        generator: torch.Generator | None,
    ) -> Float[Tensor, "b k"]:
        """Return the weights of the next query, given those of the previous query (`last`); padding is skipped."""
        if self.training:
            if self.noise > 0:
                noise = torch.randn(energy.shape, dtype=energy.dtype, device=energy.device, generator=generator)
                energy = energy + self.noise * noise
            stop, go = torch.sigmoid(energy), torch.sigmoid(-energy)  # 1 − stop would round a small `go` to 0
        else:
            stop = (energy > 0).to(energy.dtype)
            go = 1 - stop
        if mask is not None:
            stop, go = torch.where(mask, stop, 0), torch.where(mask, go, 1)
        return expected_alignment(stop, go, last)

    def forward(
        self,
        query: Float[Tensor, "b q d"],
        memory: Float[Tensor, "b k m"],
        *,
        mask: Bool[Tensor, "b k"] | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Attended:
        """Return the output of each query, (b, q, m); each query starts where the previous one stopped."""
        return self.attend(query, self.project(memory, mask=mask), weights=weights, generator=generator)[0]


def _beginning(projected: Projected) -> Float[Tensor, "b k"]:
    """Return the weights before the first query, with weight 1 on the first key."""
    start = blank(projected)
    if start.shape[1]:
        start[:, 0] = 1
    return start


def expected_alignment(
    stop: Float[Tensor, "*lead k"], go: Float[Tensor, "*lead k"], last: Float[Tensor, "*lead k"]
) -> Float[Tensor, "*lead k"]:
    """Return α_j = stop_j · r_j, where r_j = go_{j−1} r_{j−1} + last_j is the probability of reaching key j.

    The closed form by cumulative products divides by numbers that underflow; this recurrence only multiplies and adds
    numbers in [0, 1], as a scan in ⌈log₂ k⌉ steps.

    >>> half = torch.full((3,), 0.5)
    >>> expected_alignment(half, half, torch.tensor([1.0, 0.0, 0.0]))
    tensor([0.5000, 0.2500, 0.1250])
    """
    if stop.shape[-1] == 0:
        return stop
    carried = torch.cat([torch.zeros_like(go[..., :1]), go[..., :-1]], -1)
    return stop * _Recurrence.apply(carried, last)


class _Recurrence(torch.autograd.Function):
    """The recurrence r_j = carry_j r_{j−1} + add_j.

    The gradient of r is the same recurrence in reverse, so no intermediate step of the scan is stored.
    """

    @staticmethod
    def forward(ctx: Any, carry: Tensor, add: Tensor) -> Tensor:
        reached = _scan(carry, add)
        ctx.save_for_backward(carry, reached)
        return reached

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        carry, reached = ctx.saved_tensors
        later = torch.cat([carry[..., 1:], torch.zeros_like(carry[..., :1])], -1)
        add = _Recurrence.apply(later.flip(-1), grads[0].flip(-1)).flip(-1)
        before = torch.cat([torch.zeros_like(reached[..., :1]), reached[..., :-1]], -1)
        return add * before, add


def _scan(carry: Tensor, add: Tensor) -> Tensor:
    """Return r_j = carry_j r_{j−1} + add_j by a scan (Hillis & Steele 1986): each round doubles the summed range."""
    length, distance = add.shape[-1], 1
    while distance < length:
        add = torch.cat([add[..., :distance], add[..., distance:] + carry[..., distance:] * add[..., :-distance]], -1)
        carry = torch.cat([carry[..., :distance], carry[..., distance:] * carry[..., :-distance]], -1)
        distance *= 2
    return add
