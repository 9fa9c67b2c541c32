"""`regard.watch`: records the attention calls of any PyTorch model while it runs, without changes to the model."""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from types import FrameType

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.core import attention as core
from regard.core.attended import Attended
from regard.core.problem import Problem
from regard.look.attention_records import Given, Record, nbytes
from regard.look.capture import flex_calls, multihead_modules, regard_calls, sdpa_calls, softmax_calls
from regard.look.capture.captured_call import Backward, Call, Function, Handler, checked, shortened
from regard.look.capture.missed_modules import Expected, named, times
from regard.look.capture.transformers_calls import interface
from regard.look.recomputed_weights import Modified, Pairs
from regard.look.trace import Trace

Keep = str | Sequence[str] | Callable[[str], bool]

_open: list["_Watcher"] = []  # the watchers of all `regard.watch` contexts that are active in any thread
# The attributes in which modules usually store their number of heads.
_HEADS = ("num_heads", "heads", "n_heads", "nhead", "num_attention_heads", "n_head")


@contextmanager
def watch(
    model: nn.Module,
    *,
    keep: Keep | None = None,
    limit: int = 2**30,
    exact: int = 100 * 2**20,
    gradients: bool = False,
    title: str | None = None,
) -> Iterator[Trace]:
    """Record a model's attention calls in a `Trace` while the model runs.

    A trace stores queries and keys instead of matrices of weights; weights are recomputed when they are requested.
    `keep` selects layers by a pattern such as "decoder.*", several patterns, or a function of the module's name.
    `limit` is the largest number of stored bytes. `trace.dropped` lists calls that did not fit or could not be
    captured. A call whose queries and keys take more than `exact` bytes, or that would exceed the limit, is stored in
    24 bits per number instead of 32, and its note states the largest error of a score. `gradients` also stores the
    tensors that `Record.gradient` needs.

    `watch` captures torch's attention functions and layers, FlexAttention, Hugging Face models on any backend, compiled
    models (which run uncompiled in this context), attention written with a softmax, and regard's own layers. It does
    not capture kernels that bypass torch, TorchScript, and calls in other threads.

    >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(1, 5, 8)
    >>> with watch(layer) as trace:
    ...     _ = layer(x, x, x, need_weights=False)
    >>> trace.records
    [Record('', call 0, multihead: 1 × 2 heads, 5 queries, 5 keys)]
    >>> trace[""].weights(head=1).shape, trace[""].check() < 1e-6
    (torch.Size([5, 5]), True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if limit <= 0:
        raise ValueError(f"limit is a number of bytes above 0, got {limit}")
    if exact < 0:
        raise ValueError(f"exact is a number of bytes, 0 or more, got {exact}")
    trace = Trace(title or type(model).__name__)
    watcher = _Watcher(model, trace, _chooser(keep), limit, exact, gradients)
    with ExitStack() as stack:
        stack.callback(watcher.finish)
        _open.append(watcher)
        stack.callback(_open.remove, watcher)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        # FlexAttention runs uncompiled in this context on purpose, so that its calls can be captured.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        stack.enter_context(interface(watcher))
        stack.enter_context(_observing(watcher))
        stack.enter_context(watcher.expected.counting())
        stack.enter_context(multihead_modules.unpacked(model))
        stack.enter_context(watcher)
        yield trace


class _Watcher(TorchFunctionMode):
    """Intercepts the torch functions that attention is made of while a model runs, and adds records to the trace."""

    def __init__(
        self, model: nn.Module, trace: Trace, keeps: Callable[[str], bool], limit: int, exact: int, gradients: bool
    ) -> None:
        super().__init__()
        self.trace = trace
        # Number of heads of the nn.MultiheadAttention that is running; None if none is running.
        self._inner: int | None = None
        self.sinks: Tensor | None = None
        self.thread = threading.get_ident()
        self._names = {id(module): named(name) for name, module in model.named_modules()}
        self.expected = Expected(model)  # `expected` reports attention modules in which no attention call was captured
        self._keeps, self._limit, self._exact, self._gradients = keeps, limit, exact, gradients
        self._calls: Counter[str] = Counter()
        # the number of attention calls of each module (by name) that were not stored because of the memory limit
        self._full: Counter[str] = Counter()
        self._blind: Counter[tuple[str, str]] = Counter()
        self._bytes = 0
        self._held: set[int] = set()
        self._paused = 0
        self._handlers: dict[Function, Handler] = {
            **softmax_calls.handlers(softmax_calls.Tags()),
            **sdpa_calls.HANDLERS,
            **multihead_modules.HANDLERS,
            **flex_calls.HANDLERS,
        }

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        handler = self._handlers.get(function)
        if handler is None or self._paused:
            return function(*args, **(kwargs or {}))
        return handler(self, function, args, kwargs or {})

    @property
    def count(self) -> int:
        return sum(self._calls.values()) + sum(self._blind.values())

    def heads(self, count: int) -> int | None:
        if self._inner is not None:
            return self._inner
        owner = self._module()
        counts = (getattr(owner, name, None) for name in _HEADS)
        return next((n for n in counts if type(n) is int and n > 0 and count % n == 0), None)

    @contextmanager
    def inside(self, heads: int) -> Iterator[None]:
        before, self._inner = self._inner, heads
        try:
            with self:
                yield
        finally:
            self._inner = before

    @contextmanager
    def with_sinks(self, sinks: Tensor | None) -> Iterator[None]:
        before, self.sinks = self.sinks, sinks
        try:
            yield
        finally:
            self.sinks = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def safely(self) -> Iterator[None]:
        others = [watcher for watcher in _open if watcher.thread == self.thread]
        # the capture code itself may call attention functions; no watcher of this thread may record these calls
        for watcher in others:
            watcher._paused += 1
        try:
            yield
        except Exception as error:
            self.cannot_see(f"a call ({type(error).__name__}: {str(error)[:200]})")
        finally:
            for watcher in others:
                watcher._paused -= 1

    def cannot_see(self, what: str) -> None:
        name = self._where()
        if name is not None:
            self._blind[name, what] += 1

    def record(self, call: Call) -> None:
        """Add a record of the call to the trace, under the name of its module, if it fits the memory limit."""
        name = self._where()
        if name is None:
            return
        number = self._calls[name]
        self._calls[name] += 1
        if not self._keeps(name):
            return
        kind, (_, heads, queries, _) = "multihead" if self._inner is not None else call.kind, call.source.shape
        if queries == 1:
            kind = "rows"
            if not isinstance(call.source, Given):
                # For one query, the row of weights is smaller than the keys, and the keys may be a cache that the next
                # step overwrites: the weights are stored instead of queries and keys.
                rows = torch.zeros(1, dtype=torch.long, device=call.source.holds()[0].device)
                call = replace(call, source=Given(call.source.block(slice(None), range(heads), rows)))
        elif isinstance(call.source, Pairs | Modified) and nbytes(call.source.numbers()) > self._exact:
            call = shortened(call) or call
        record, fits = self._build_record(name, kind, number, call)
        if not fits:
            smaller = shortened(call)
            if smaller is not None:
                call = smaller
                record, fits = self._build_record(name, kind, number, call)
        if not fits:
            self._full[name] += 1
            return
        held = _sizes(record)
        self._bytes += sum(size for place, size in held.items() if place not in self._held)
        self._held |= set(held)
        if self._gradients and call.output is not None and call.value is not None and call.output.requires_grad:
            record.backward = Backward(call, name)
            call.output.register_hook(record.backward.store)
        self.trace.records.append(record)

    def _build_record(self, name: str, kind: str, number: int, call: Call) -> tuple[Record, bool]:
        """Return the record of a call, and whether its tensors fit the memory limit."""
        record = Record(name, kind, call.source, call=number, scale=call.scale, note=call.note, checked=checked(call))
        new = sum(size for place, size in _sizes(record).items() if place not in self._held)
        return record, self._bytes + new <= self._limit

    def finish(self) -> None:
        """Add to `trace.dropped` the calls that were not stored or could not be captured."""
        say = self.trace.dropped.append
        for name, count in self._full.items():
            say(f"{name!r} did not fit the limit of {self._limit / 2**20:.3g} MiB, {times(count)}")
        for (name, what), count in self._blind.items():
            say(f"{name!r}: {what} cannot be seen, {times(count)}")
        for text in self.expected.missing(set(self._calls) | {name for name, _ in self._blind}, self._keeps):
            say(text)
        if not self.trace.records and not self.trace.dropped:
            say("no attention was seen: the model did not run while it was watched, has none, or `keep` left it out")

    def _where(self) -> str | None:
        """Return the name of the model's innermost running module; None if only another model's modules are running."""
        owner = self._module()
        return "" if owner is None else self._names.get(id(owner))

    def _module(self) -> nn.Module | None:
        """Return the model's innermost running module; if no module of it runs, that of another model, or None.

        The running modules are determined from the frames of the Python stack.
        """
        frame: FrameType | None = sys._getframe(2)
        foreign = None
        while frame is not None:
            code = frame.f_code
            if code.co_argcount and code.co_varnames[0] in ("self", "module"):
                owner = frame.f_locals.get(code.co_varnames[0])
                if isinstance(owner, nn.Module):
                    if id(owner) in self._names:
                        return owner
                    foreign = foreign or owner
            frame = frame.f_back
        return foreign


def _sizes(record: Record) -> dict[int, int]:
    """Return the size in bytes of each tensor storage that a record holds, by the storage's address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in record.holds()}


def _chooser(keep: Keep | None) -> Callable[[str], bool]:
    if keep is None:
        return lambda name: True
    if callable(keep):
        return keep
    patterns = [keep] if isinstance(keep, str) else list(keep)
    return lambda name: any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def _observing(watcher: _Watcher) -> Iterator[None]:
    """In this context, the calls of `regard.attention` in the watcher's thread are recorded."""

    def observer(problem: Problem, run: Callable[[], Attended]) -> Attended:
        if threading.get_ident() != watcher.thread:
            return run()
        return regard_calls.captured(watcher, problem, run)

    core.observers = (*core.observers, observer)
    try:
        yield
    finally:
        core.observers = tuple(other for other in core.observers if other is not observer)
