"""Local attention: each query chooses a position of the memory, then attends to the keys around it."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core.attended import Attended
from regard.core.attention import AnyScore, attention
from regard.core.local import local_attention
from regard.core.masks import padding
from regard.core.normalizers import Hard
from regard.core.requests import Request
from regard.nn.alignment_steps import check_query, clean_memory
from regard.nn.attention import Attention
from regard.nn.projection import settled
from regard.nn.protocol import Projected


class LocalAttention(nn.Module):
    """softmax over the keys within `reach` of a position p_i, with or without exp(−(j − p_i)² / 2σ²), σ = reach / 2.

    kind "predictive" (local-p, Luong et al. 2015, section 3.2): p_i = S · sigmoid(v · tanh(W q_i)) with S the length of
    the memory, and with the Gaussian, through which p gets its gradient. As in the paper the weights are not
    renormalised. kind "monotonic" (local-m): p_i = i, without the Gaussian. Time and memory of these two kinds grow
    with q · reach, whatever the length of the memory. kind "hard": p_i is the key that hard attention over the whole
    memory samples by the same score (in inference, the key of the largest score), with the Gaussian. `lock` is the
    estimator of this hard attention, and `Attended.log_prob` the log-probability of the position, for REINFORCE.

    `score` and `hidden_size` are as for `Attention`. Positions are counted without padding, which may be anywhere. For
    the kind "monotonic" the `state` that `attend` takes and returns is a tuple of one tensor, the position of the next
    query, (b,); for the other kinds the `state` is None.

    >>> from regard.core.requests import full
    >>> layer = LocalAttention(8, reach=2, kind="predictive")
    >>> out = layer(torch.randn(2, 4, 8), torch.randn(2, 11, 8), weights=full())
    >>> out.output.shape, out.weights.shape, int((out.weights > 0).sum(-1).max()) <= 5
    (torch.Size([2, 4, 8]), torch.Size([2, 4, 11]), True)
    """

    def __init__(
        self,
        query_size: int,
        memory_size: int | None = None,
        *,
        reach: int,
        kind: Literal["monotonic", "predictive", "hard"] = "monotonic",
        score: str | AnyScore = "scaled_dot",
        hidden_size: int | None = None,
        lock: Hard = Hard("straight_through"),
    ) -> None:
        super().__init__()
        if reach < 1:
            raise ValueError(f"reach must be at least 1, got {reach}")
        if kind not in ("monotonic", "predictive", "hard"):
            raise ValueError(f"kind must be monotonic, predictive or hard, got {kind!r}")
        self.scoring = Attention(query_size, memory_size, score=score, hidden_size=hidden_size)
        self.query_size, self.memory_size = query_size, self.scoring.memory_size
        self.output_size = self.scoring.output_size
        self.reach, self.kind, self.stateful = reach, kind, kind == "monotonic"
        self.lock = lock
        self.predict: nn.Sequential | None = None
        if kind == "predictive":
            hidden = query_size if hidden_size is None else hidden_size
            self.predict = nn.Sequential(
                nn.Linear(query_size, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, 1, bias=False)
            )

    def project(self, memory: Float[Tensor, "b k m"], *, mask: Bool[Tensor, "b k"] | None = None) -> Projected:
        """Return keys and values, reordered so that padding is after all real positions, and the unchanged mask."""
        memory = clean_memory(memory, self.memory_size, mask)
        if mask is not None:
            memory = memory.gather(1, _real_first(mask).unsqueeze(-1).expand_as(memory))
        return self.scoring.project(memory)._replace(mask=mask)

    def attend(
        self,
        query: Float[Tensor, "b q d"],
        projected: Projected,
        *,
        state: tuple[Tensor] | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Attended, tuple[Tensor] | None]:
        """Return the outputs of the queries, each near its position, and for the kind "monotonic" the position of the
        next query."""
        check_query(query, self.query_size, projected)
        key, value, mask = projected
        lengths = None if mask is None else mask.sum(-1)
        if key.shape[1] == 0:
            nothing = value.new_zeros(*query.shape[:2], self.output_size)
            requested = None if weights is None else weights.of(value.new_zeros(*query.shape[:2], 0))
            chosen = value.new_zeros(query.shape[:2]) if self.kind == "hard" else None
            return Attended(nothing, requested, chosen), self._next(state, query)
        log_prob = None
        if self.kind == "hard":
            centre, log_prob = self._locked(query, projected, lengths, generator)
        else:
            centre = self._centre(query, projected, state, lengths)
        near = local_attention(
            self._mapped(query),
            key.unsqueeze(1),
            value.unsqueeze(1),
            centre.unsqueeze(1),
            reach=self.reach,
            score=self.scoring.score(),
            lengths=lengths,
            gaussian=self.kind != "monotonic",
        )
        requested = None
        if weights is not None:
            weights.check(query.shape[1])
            assert isinstance(near.weights, Tensor)
            requested = weights.of(self._everywhere(near.weights.squeeze(1), centre, key.shape[1], mask))
        return Attended(near.output.squeeze(1), requested, log_prob), self._next(state, query)

    def forward(
        self,
        query: Float[Tensor, "b q d"],
        memory: Float[Tensor, "b k m"],
        *,
        mask: Bool[Tensor, "b k"] | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Attended:
        """Return the output of each query, (b, q, m), and the requested weights, (b, q, k) with `weights=full()`."""
        return self.attend(query, self.project(memory, mask=mask), weights=weights, generator=generator)[0]

    def _centre(
        self, query: Tensor, projected: Projected, state: tuple[Tensor] | None, lengths: Int[Tensor, "b"] | None
    ) -> Float[Tensor, "b q"]:
        """Return each query's position in at least float32, because half precision cannot represent large positions."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        if self.predict is not None:
            share = torch.sigmoid(self.predict(query).squeeze(-1).to(dtype))
            return share * (projected.key.shape[1] if lengths is None else lengths.unsqueeze(-1))
        place = self._first(state, query).unsqueeze(-1) + torch.arange(query.shape[1], device=query.device)
        return place.to(dtype)

    def _first(self, state: tuple[Tensor] | None, query: Tensor) -> Int[Tensor, "b"]:
        """Return the position of the first of these queries in the memory, for the kind "monotonic"."""
        return state[0] if state is not None else torch.zeros(len(query), dtype=torch.long, device=query.device)

    def _next(self, state: tuple[Tensor] | None, query: Tensor) -> tuple[Tensor] | None:
        """Return the position of the next query as a tuple of one tensor for the kind "monotonic"; None for the other
        kinds."""
        return (self._first(state, query) + query.shape[1],) if self.stateful else None

    def _mapped(self, query: Float[Tensor, "b q d"]) -> Float[Tensor, "b 1 q h"]:
        return (query if self.scoring.query is None else self.scoring.query(query)).unsqueeze(1)

    def _locked(
        self,
        query: Float[Tensor, "b q d"],
        projected: Projected,
        lengths: Int[Tensor, "b"] | None,
        generator: torch.Generator | None,
    ) -> tuple[Float[Tensor, "b q"], Float[Tensor, "b q"]]:
        """Return the position that hard attention chooses for each query, and the log-probability of that choice."""
        key = projected.key
        dtype = torch.promote_types(query.dtype, torch.float32)
        places = torch.arange(key.shape[1], dtype=dtype, device=key.device)
        attended = attention(
            self._mapped(query).to(dtype),
            key.unsqueeze(1).to(dtype),
            places[:, None].expand(len(key), 1, -1, 1),
            score=self.scoring.score(),
            normalize=settled(self.lock, self.training or generator is not None),
            mask=None if lengths is None else padding(lengths),
            generator=generator,
        )
        centre = attended.output.squeeze(1).squeeze(-1)
        assert attended.log_prob is not None
        # The one-hot weights that `Hard` returns with a gradient estimator are 0 and 1 only up to rounding, so the
        # position is rounded to an integer.
        return centre.detach().round() + (centre - centre.detach()), attended.log_prob.squeeze(1)

    def _everywhere(
        self,
        near: Float[Tensor, "b q w"],
        centre: Float[Tensor, "b q"],
        keys: int,
        mask: Bool[Tensor, "b k"] | None,
    ) -> Float[Tensor, "b q k"]:
        """Scatter the weights of the windows to their positions in the whole memory."""
        first = torch.ceil(centre.detach() - self.reach).long()
        place = first.unsqueeze(-1) + torch.arange(near.shape[-1], device=near.device)
        whole = near.new_zeros(*near.shape[:-1], keys)
        whole = whole.scatter_add(-1, place.clamp(0, keys - 1), near)  # weights at positions outside the memory are 0
        if mask is None:
            return whole
        return torch.zeros_like(whole).scatter(-1, _real_first(mask).unsqueeze(1).expand_as(whole), whole)


def _real_first(mask: Bool[Tensor, "b k"]) -> Int[Tensor, "b k"]:
    """Return the indices that reorder positions: first the real positions, then the padding, each in their original
    order."""
    return mask.logical_not().to(torch.uint8).sort(dim=-1, stable=True).indices
