"""The public functions of attention over sequences that are sharded over a process group.

`attention` computes one call over sharded sequences. Inside `context`, every call of `regard.attention` does so.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import attention as core
from regard.core import sharding
from regard.core.attended import Attended
from regard.core.attention import AnyScore
from regard.core.backends import blocked
from regard.core.biases import Bias, Rule, as_bias
from regard.core.custom import Custom
from regard.core.masks import Mask, as_mask
from regard.core.problem import Problem, build
from regard.core.requests import LogSumExp, Request
from regard.core.scores import ScaledDot
from regard.core.transforms import transformed
from regard.parallel import block_masks, ring
from regard.parallel.agreement import agree
from regard.parallel.schedule import schedule
from regard.parallel.sequences import Group, Layout, layout, positions


@contextmanager
def context(group: Group = None, *, balanced: bool = True) -> Iterator[None]:
    """Inside this context, `regard.attention` and layers that call it receive and return this process's part of each
    sequence.

    Masks and positions are those of the whole sequences. Of the ids of `segments`, each process passes the part that
    belongs to its part of the sequences.
    `balanced` means the same as in `shard`. The backward pass may run outside of the context.
    """
    ring_ = Ring(group, layout(group, balanced))
    before = sharding.current
    sharding.current = ring_
    try:
        yield
    finally:
        sharding.current = before


def attention(
    query: Float[Tensor, "... q d"],
    key: Float[Tensor, "... k d2"],
    value: Float[Tensor, "... k e"],
    *,
    group: Group = None,
    balanced: bool = True,
    score: AnyScore = ScaledDot(),
    mask: Mask | None = None,
    bias: Bias | None = None,
    weights: Request | None = None,
) -> Attended:
    """Compute softmax attention of this process's queries over the keys of all processes of the group.

    query (…, h, q, d), key (…, g, k, d), value (…, g, k, e) are this process's parts, as from `shard`; the output (…,
    h, q, e) is this process's part of the output. The mask (causal, window, padding, segments, and their combinations)
    uses positions of the whole sequences; ids of `segments` are sharded like the sequences. `weights` may be
    `regard.logsumexp()`.

    The gradients of query, key and value are complete. The gradients of the tensors of score and bias are only this
    process's part, as for any parameter: `reduce_gradients` sums the parts.
    """
    with context(group, balanced=balanced):
        return core.attention(query, key, value, score=score, mask=mask, bias=bias, weights=weights)


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """The implementation of the protocol `regard.core.sharding.Sharding` for the sequences of a process group."""

    group: Group
    layout: Layout

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions, in the whole sequence, of this process's part of `length` positions."""
        return positions(length, self.group, balanced=self.layout.balanced, device=device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Attended:
        """Compute `regard.attention` of this process's queries over the keys of all processes."""
        device = query.device if isinstance(query, Tensor) else torch.device("cpu")
        sharding.current = None  # nested calls of `regard.attention` run on this process alone
        try:
            error: Exception | None = None
            problem, mask = None, None
            call: dict[str, str] = {}
            try:
                problem, mask = _checked(self.layout, query, key, value, **arguments)
                call = _description(self.layout, problem, mask)
            except (TypeError, ValueError, NotImplementedError) as caught:
                error = caught
            agree(self.group, self.layout, device, call, error)
            assert problem is not None  # not None: `agree` raises if the arguments are invalid
            return self._attend(problem, mask)
        finally:
            sharding.current = self

    def _attend(self, problem: Problem, mask: Mask | None) -> Attended:
        where = self.layout
        mask = None if mask is None else block_masks.with_all_ids(mask, self.group, where)
        queries, keys = (length * where.size for length in problem.shape[-2:])
        plan = schedule(where, queries, keys, mask, problem.device)
        with_logsumexp = isinstance(problem.request, LogSumExp)
        output, total = ring.attend(ring.Job(problem, mask, plan, self.group, with_logsumexp))
        if problem.headless:
            output, total = output.squeeze(0), total.squeeze(0)
        return Attended(output, total if with_logsumexp else None)


def _checked(
    where: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: AnyScore,
    normalize: Any,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    dropout: float,
    weights: Request | None,
    backend: str,
) -> tuple[Problem, Mask | None]:
    """Return the checked arguments for this process's parts, and the mask of the whole sequences; or raise.

    The segment ids of the mask are still those of this process's part.
    """
    if torch.compiler.is_compiling() or transformed():
        raise NotImplementedError("attention over a process group runs outside of torch.compile and torch.func")
    problem = build(query, key, value, score, normalize, None, None, dropout, weights, None)
    if not problem.normalize.is_softmax:
        raise ValueError(f"attention over a process group needs softmax, got {problem.normalize.name}")
    if dropout > 0.0:
        raise ValueError(f"attention over a process group has no dropout on the weights, got {dropout}")
    if weights is not None and not isinstance(weights, LogSumExp):
        raise ValueError(f"attention over a process group returns no weights but logsumexp(), got {weights}")
    if backend != "auto":
        raise ValueError(f"attention over a process group has no backend but auto, got {backend!r}")
    if isinstance(problem.score, Custom) and (reason := blocked.refuses(problem)):
        raise ValueError(f"this score cannot be computed over a process group: {reason}")
    for name, length in (("query", problem.shape[-2]), ("key", problem.shape[-1])):
        where.check_part(length, name)
    whole = (*problem.shape[:-2], *(length * where.size for length in problem.shape[-2:]))
    if bias is not None:
        problem = dataclasses.replace(problem, bias=_checked_bias(bias, problem, whole))
    if mask is None:
        return problem, None
    return problem, block_masks.checked(as_mask(mask).on(query.device), problem.shape, whole, problem.device)


def _checked_bias(bias: Bias | Tensor, problem: Problem, whole: tuple[int, ...]) -> Bias:
    rule = as_bias(bias)
    if not isinstance(rule, Rule):
        raise ValueError("a bias over a process group is alibi or relative, not a tensor of all pairs")
    rule = rule.on(problem.device).aligned(whole)
    for tensor in rule.tensors():
        if tensor.device != problem.device:
            raise ValueError(f"bias is on {tensor.device}, query is on {problem.device}: they must be on one device")
    return rule


def _description(where: Layout, problem: Problem, mask: Mask | None) -> dict[str, str]:
    """Return what must be equal on all processes, as text by name, to be compared and to name a difference."""
    return {
        "the number of processes": str(where.size),
        "balanced": str(where.balanced),
        "the shape of query": str(tuple(problem.query.shape)),
        "the shape of key": str(tuple(problem.key.shape)),
        "the shape of value": str(tuple(problem.value.shape)),
        "dtype": str(problem.query.dtype),
        "score": _described(problem.score),
        "bias": "none" if problem.bias is None else _described(problem.bias),
        "mask": "none" if mask is None else block_masks.described(mask),
        "weights": str(problem.request),
        "whether gradients are computed": "yes" if problem.differentiated else "no",
    }


def _described(record: Any) -> str:
    """Return a score, mask or similar object as text, with the shapes of its tensors instead of their values."""
    if isinstance(record, Custom):
        return "a function"
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    values = {name: tuple(value.shape) if isinstance(value, Tensor) else value for name, value in fields.items()}
    return f"{type(record).__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"
