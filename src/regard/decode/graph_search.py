"""Beam search with fixed shapes: on CUDA one graph replays a whole step of the model and of the search.

A state supports this search if the state that its `grouped()` returns has `static(width, steps)`. This returns a static
state (or None), which has its own storage. Its `load(state)` copies another state into that storage; a step with it
never makes the host wait for the device; and its `fits(state, width, steps)` returns whether its storage can be reused
for another search. The step function must have an attribute `pure` that is true, as those of this library's models
have: a pure step depends on its state, its tokens and the model's parameters only.
"""

import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from regard.decode.backpointers import walk
from regard.decode.beam_state import Front, advance
from regard.decode.penalties import best_divisors
from regard.decode.ranking import ranked
from regard.decode.records import Bounds, Hypothesis, StepFunction, check_step, refuse_broken
from regard.kernels import cuda_graphs
from regard.kernels.availability import TRITON

_SHORTEST = 4  # a search of fewer steps is not captured as a CUDA graph: the capture would take longer than it saves
# number of decoding steps between two checks whether the search has ended for all rows; each check waits for the device
_LOOK = 8


class Captures:
    """A cache that lets searches of similar size share their storage, and on CUDA the captured graph of a step.

    A capture takes as long as two or three steps without a graph. To search many batches, pass the same `Captures` to
    every call of `beam` and `greedy`; the storage and graphs of the `keep` most recently used sizes stay in memory. The
    model's parameters may change in place between searches. `devices` lists the types of devices on which the cache is
    used; on others, dynamic shapes are faster. On CUDA, if Triton is installed, Triton kernels compute the attention,
    the ranking and the update of a step.

    >>> Captures(keep=2)
    Captures(keep=2, held=0)
    """

    def __init__(self, keep: int = 4, *, devices: Sequence[str] = ("cuda",)) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more; got {keep}")
        self.keep, self.devices = keep, tuple(devices)
        self.lock = threading.RLock()  # the lock lets only one search at a time use the cached storage
        self.held: list[_Session] = []

    def __repr__(self) -> str:
        return f"Captures(keep={self.keep}, held={len(self.held)})"

    def session(self, step: StepFunction, state: Any, limits: Bounds, width: int, n_best: int) -> "_Session | None":
        """Return a cached or new `_Session` with storage for this search; None if `state` supports no fixed shapes."""
        steps = limits.longest + 1
        session = next((cached for cached in self.held if cached.fits(step, state, limits, width, n_best)), None)
        if session is None:
            static = state.static(width, steps)
            if static is None:
                return None
            session = _Session(step, static, limits, width, n_best)
        self.held = (
            [cached for cached in self.held if cached is not session][-(self.keep - 1) :] if self.keep > 1 else []
        )
        self.held.append(session)
        return session

    def pool(self, device: torch.device) -> Any:
        """Return the memory pool for a new CUDA graph, which is that of the cached graphs if there are any.

        Graphs can share a pool because they never run at the same time. A pool is freed with the last of its graphs,
        and its handle must not be used again, so the handle comes from a graph that still exists.
        """
        living = (session.graph for session in self.held if session.graph is not None and session.device == device)
        first = next(living, None)
        return torch.cuda.graph_pool_handle() if first is None else first.pool()


def captured_search(
    step: StepFunction,
    state: Any,
    limits: Bounds,
    table: Tensor,
    *,
    width: int,
    n_best: int,
    captures: Captures | None,
) -> list[list[Hypothesis]] | None:
    """Return the hypotheses of a search with fixed shapes; None if fixed shapes are unsupported or would be slower."""
    worthwhile = captures is not None or limits.longest >= _SHORTEST
    captures = Captures(keep=1) if captures is None else captures
    wanted = worthwhile and limits.start.device.type in captures.devices and getattr(step, "pure", False)
    if not wanted or not hasattr(state, "static") or limits.start.shape[0] == 0:
        return None
    with captures.lock:
        session = captures.session(step, state, limits, width, n_best)
        return None if session is None else session.search(state, limits, table, captures)


class _Session:
    """The storage for beam searches of one size, and on CUDA the graph that replays one step of a search."""

    def __init__(self, step: StepFunction, static: Any, limits: Bounds, width: int, n_best: int) -> None:
        self.step, self.static, self.width, self.n_best = step, static, width, n_best
        self.kernels = TRITON and limits.start.is_cuda
        rows, device, steps = static.rows, limits.start.device, static.steps
        self.device = device
        self.limits = replace(
            limits, start=limits.start.new_zeros(rows), limit=limits.limit.new_zeros(rows), longest=steps
        )
        fresh = Front.fresh(self.limits, width, n_best, slots=width)
        self.front = Front(
            **{field.name: getattr(fresh, field.name) for field in fields(Front) if field.name == "width"},
            **{
                field.name: getattr(fresh, field.name).clone(memory_format=torch.contiguous_format)
                for field in fields(Front)
                if field.name != "width"
            },
        )
        self.broken = torch.zeros_like(self.front.closed)
        self.table = torch.ones(steps + 2, dtype=torch.float64, device=device)
        self.hope = torch.ones(rows, steps + 2, dtype=torch.float64, device=device)
        self.time = torch.zeros(1, dtype=torch.long, device=device)
        self.trail: list[Tensor] | None = None  # tokens, parents, log-probabilities, and any weights, of every step
        self.graph: torch.cuda.CUDAGraph | None = None

    def fits(self, step: StepFunction, state: Any, limits: Bounds, width: int, n_best: int) -> bool:
        """Return whether the storage and the graph of this session can run a search with these arguments.

        The step function, the limits of tokens and the number of results must be those for which this session was
        created, and the storage must be large enough for `state`.
        """
        mine, theirs = self.limits.never, limits.never
        never = mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))
        return (
            never
            and self.step == step
            and (self.n_best, self.limits.stop, self.limits.minimum) == (n_best, limits.stop, limits.minimum)
            and self.static.fits(state, width, limits.longest + 1)
        )

    def search(self, state: Any, limits: Bounds, table: Tensor, captures: Captures) -> list[list[Hypothesis]]:
        self._load(state, limits, table)
        if self.trail is None:
            self._first(state, limits)
            self._load(state, limits, table)
        if self.graph is None and self.device.type == "cuda":
            self.graph, _ = cuda_graphs.capture(self._once, self.device, pool=captures.pool(self.device))
        done = 0
        while done <= limits.longest:
            count = min(_LOOK, limits.longest + 1 - done)
            for _ in range(count):
                self._once() if self.graph is None else self.graph.replay()
            done += count
            if bool((self.front.closed | self.broken).all()):
                break
        rows = limits.start.shape[0]
        refuse_broken(self.broken[:rows], done)
        assert self.trail is not None
        front = self.front
        trail = [part[:done, :rows] for part in self.trail]
        return walk(
            tokens=trail[0],
            parents=trail[1],
            values=trail[2],
            weights=trail[3] if len(trail) > 3 else None,
            scores=front.done_score[:rows],
            sums=front.done_sum[:rows],
            times=front.done_time[:rows],
            slots=front.done_slot[:rows],
        )

    def _load(self, state: Any, limits: Bounds, table: Tensor) -> None:
        """Copy the inputs of a new search into the storage; the storage's rows beyond the batch are marked as ended."""
        rows = limits.start.shape[0]
        self.static.load(state)
        for mine, theirs in ((self.limits.start, limits.start), (self.limits.limit, limits.limit)):
            mine.zero_()
            mine[:rows] = theirs
        fresh = Front.fresh(self.limits, self.width, self.n_best, slots=self.width)
        copy_front(fresh, self.front)
        self.front.closed[rows:] = True
        self.broken.zero_()
        self.time.zero_()
        self.table[: table.shape[0]] = table
        self.hope.copy_(best_divisors(self.table, self.limits.limit)[:, : self.hope.shape[1]])

    def _first(self, state: Any, limits: Bounds) -> None:
        """Run a first step without a graph, and allocate the storage of all steps by the shapes of its results.

        On CUDA, the first step also makes libraries load their kernels, which must not happen during a capture.
        """
        with cuda_graphs.aside(self.device):
            produced = self.step(self.static, self.front.tokens.flatten())
            check_step(produced, self.static.rows * self.width, limits.stop)
            values = self.front.values.to(torch.promote_types(produced.logits.dtype, torch.float32))
            parts = [self.front.tokens, self.front.parents, values]
            if produced.weights is not None:
                parts.append(produced.weights.unflatten(0, (-1, self.width)))
            self.trail = [part.new_zeros((self.static.steps, *part.shape)) for part in parts]
            self.static.load(state)
            self._once()

    def _once(self) -> None:
        """Run a whole step of the model and of the search, without waiting for the device."""
        assert self.trail is not None
        produced = self.step(self.static, self.front.tokens.flatten())
        candidates = ranked(produced.logits, self.limits, self.time, 2 * self.width, kernels=self.kernels)
        if produced.weights is not None:
            looked = produced.weights.unflatten(0, (-1, self.width))
            self.trail[3].index_copy_(0, self.time, looked.unsqueeze(0))
        if self.kernels:
            self._fused(candidates)
        else:
            self._plain(candidates)
        self.static.regroup(self.front.parents)
        self.time.add_(1)

    def _plain(self, candidates: tuple[Tensor, Tensor, Tensor]) -> None:
        """Advance the search by one token with PyTorch operations, and write the step to the trail."""
        assert self.trail is not None
        values, tokens, at_stop = (part.unflatten(0, (-1, self.width)) for part in candidates)
        divisor, hope = self.table.index_select(0, self.time + 1), self.hope.index_select(1, self.time)[:, 0]
        self.broken |= at_stop.isnan().any(1) & ~self.front.closed
        front = advance(self.front, values, tokens, at_stop, self.limits, self.time, divisor, hope)
        for storage, part in zip(self.trail, (front.tokens, front.parents, front.values), strict=False):
            storage.index_copy_(0, self.time, part.to(storage.dtype).unsqueeze(0))
        copy_front(front, self.front)

    def _fused(self, candidates: tuple[Tensor, Tensor, Tensor]) -> None:
        """Advance the search by one token with one Triton kernel, which also writes the step to the trail."""
        from regard.kernels.triton import beam_update  # imported only here, because the module needs Triton

        assert self.trail is not None
        beam_update.advance(
            *(self.front.tensors(), candidates),
            stop=self.limits.stop,
            limit=self.limits.limit,
            table=self.table,
            hope=self.hope,
            time=self.time,
            broken=self.broken,
            trail=self.trail,
        )


def copy_front(new: Front, held: Front) -> None:
    """Copy the values of the search state `new` into the storage of the state `held`."""
    for field in fields(Front):
        if field.name != "width":
            getattr(held, field.name).copy_(getattr(new, field.name))
