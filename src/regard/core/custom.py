"""Scores of the caller's own: any function of queries and keys, with what it learns found out by listening to it."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.captured_tensors import Drawing, Listener, leaves
from regard.core.scores import Score, Swap
from regard.core.snapshot import snapshot
from regard.core.transforms import transformed
from regard.kernels.availability import capturing

_ASKED = 2**18  # numbers that a question may make


class Custom(Score):
    """Any pairwise function (query, key) -> scores, as a score that can say what it costs and what it learns.

    The function is called once on a few vectors to find out: which tensors it captured (parameters of a
    module, variables of a closure, leaves or not), so that recomputation in the backward pass can give them
    gradients; and how many numbers it makes for each pair, so that blocks can be cut to fit memory.
    """

    name = "custom"

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        self.function = function
        self._again = function  # the same, whatever its variables are bound to by then
        self.dtype = dtype  # the caller's own: a module in half precision wants half precision
        self._unfit: str | None = None
        self._tried: tuple[Tensor, Tensor, Tensor] | None = None  # a few queries and keys, and what it made of them
        self._asked = False  # is it known whether it looks at pairs alone?
        self._captured: tuple[Tensor, ...] = ()
        self._frozen: tuple[Tensor, ...] = ()
        self._changing: tuple[Tensor, ...] = ()  # what it writes to itself, such as statistics
        self._floats = 1.0

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        scores = self.function(query.to(self.dtype), key.to(self.dtype))
        expected = _expected(query, key)
        if not isinstance(scores, Tensor):
            raise TypeError(f"score must return a float tensor (…, queries, keys), got {type(scores).__name__}")
        if scores.is_complex() or scores.dtype == torch.bool:  # integers are numbers, and have one real value
            hint = ": take .real or .abs() of it" if scores.is_complex() else ": who may attend whom goes to mask="
            raise TypeError(f"score must return a float tensor (…, queries, keys), got {scores.dtype}{hint}")
        try:
            if scores.shape[-2:] == expected[-2:]:
                return scores.to(query.dtype).expand(expected)
        except RuntimeError:
            pass
        raise _ShapeError(_said_of_shapes(query, key, scores))

    def probe(
        self, query: Float[Tensor, "*lead h q d"], key: Float[Tensor, "*lead g k d2"], group: int = 1
    ) -> "Custom":
        """Call the function on a few pairs, without a trace, and note what it captured and made."""
        # Not as many queries as keys: (…, keys, queries) instead of (…, queries, keys) shows. Clones: the caller may
        # change what was given before the backward pass.
        few = query[..., :2, :].detach().clone(), key[..., :3, :].detach().repeat_interleave(group, -3).clone()
        try:
            return self._probe(*few)
        except _ShapeError as error:
            if message := self._said_of_all(query, key, group):
                raise ValueError(message) from None
            raise _tried_on(ValueError(str(error)), *few) from None

    def _said_of_all(self, query: Tensor, key: Tensor, group: int) -> str | None:
        """What is wrong with the shape of all scores, in the sizes of the call; None where it does not show."""
        from torch._subclasses.fake_tensor import FakeTensorMode  # for an error alone

        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as fake:  # shapes, without the numbers or their memory
                query, key = (fake.from_tensor(t.detach()) for t in (query, key))
                key = key.repeat_interleave(group, -3)
                scores = self.function(query, key)
                return None if tuple(scores.shape) == _expected(query, key) else _said_of_shapes(query, key, scores)
        except Exception:  # it reads its numbers, or does not take all of them
            return None

    def _probe(self, query: Tensor, key: Tensor) -> "Custom":
        self._again, deep = snapshot(self.function)
        listener = Listener((query, key))
        with Drawing(query.device) as drawing, torch.enable_grad(), listener.undone():
            try:
                with listener:
                    scores = self(query, key)
            except torch._dynamo.exc.InternalTorchDynamoError:
                self._unfit = "the score is compiled: nobody can hear which tensors it learns"
                return self
            except _ShapeError:
                raise
            except Exception as error:
                _tried_on(error, query, key)
                raise
            self._changing = listener.changed()
            if drawing.drawn() and self._draws(query, key):
                self._unfit = "the score draws random numbers, and would draw others when it is computed again"
            elif transformed() or query.is_meta or capturing(query.device):
                pass  # nobody can look at the numbers
            elif self._changing and not torch.equal(scores, self(query, key)):
                self._unfit = "the score changes what it reads, and would be another when it is computed again"
            else:
                self._tried = query, key, scores.detach()
        if deep and self._tried is not None and not self._is_still(self._again):
            self._again = self.function
        known: dict[Tensor, None] = dict.fromkeys(listener.captured)  # in the order they were met, each once
        if leaves(scores, tuple(known)):
            self._unfit = "the score uses tensors that cannot be heard, as a scripted module does"
        if isinstance(self.function, torch.nn.Module):
            known |= {tensor: None for tensor in self.function.parameters() if tensor.requires_grad}
        changing = set(map(id, self._changing))
        self._captured, self._frozen = tuple(known), tuple(t for t in listener.frozen if id(t) not in changing)
        self._floats = max(1.0, listener.numbers / max(1, scores.numel()))
        return self

    @property
    def unfit(self) -> str | None:
        """Why its blocks cannot be computed one by one, and again, if they cannot.

        Asked where blocks are wanted, and of each call anew: it takes a few calls of the function, on CUDA waiting for
        them, and what the function reads may have changed since the last.
        """
        if self._unfit is None and self._tried is not None and not self._asked:
            self._asked = True
            if not self._alone_as_among(*self._tried):
                self._unfit = "the score of a pair depends on the other pairs: it cannot be computed in parts"
        return self._unfit

    def _alone_as_among(self, query: Tensor, key: Tensor, _: Tensor) -> bool:
        """Have pairs the same scores among fewer others? Asked on numbers of its own, or else on those it was given."""
        room = _ASKED / (math.prod(query.shape[:-2]) * self._floats)
        drawn = tuple(_waves(t, max(6, min(256, int(room**0.5))), start) for start, t in ((0, query), (1, key)))
        with self._unseen():
            for tried in (drawn, (query, key)):
                try:
                    whole = self(*tried)
                    if tried is not drawn or not bool(whole.isnan().any()):
                        return self._same(whole, *tried)
                except Exception:  # it does not take these numbers, or so few: that says nothing of others
                    continue
        return True

    def _same(self, whole: Tensor, query: Tensor, key: Tensor) -> bool:
        """Are the scores of some queries and keys the same without the rest?

        The first of these with the last of those: what depends on the distance of positions would not show elsewhere.
        """
        near = _near(self.dtype, whole.device)
        for rows, columns in zip(_halves(query.shape[-2]), reversed(_halves(key.shape[-2])), strict=True):
            found, wanted = self(query[..., rows, :], key[..., columns, :]), whole[..., rows, columns]
            largest = float(wanted.nan_to_num(0, 0, 0).abs().amax())
            if not torch.allclose(found, wanted, rtol=near, atol=near * largest, equal_nan=True):
                return False
        return True

    def check_unchanged(self) -> None:
        """Raise if it is not the score that it was at the call: what it reads may be bound to something else by now."""
        if self._tried is None or capturing(self._tried[0].device) or self._is_still(self._again):
            return
        raise RuntimeError(
            "score is another function by now than at the call of attention, whose backward pass computes it again: "
            "something that it reads was bound anew or set meanwhile; write a function or a module for each call, or "
            "use backend='reference'"
        )

    def _is_still(self, function: Callable[[Tensor, Tensor], Tensor]) -> bool:
        """Does a function make the same of the few pairs as the score did?"""
        assert self._tried is not None
        query, key, before = self._tried
        other = copy.copy(self)
        other.function = function
        try:
            with self._unseen():
                now = other(query, key)
        except Exception:
            if function is self.function:
                raise
            return False
        near = 8 * torch.finfo(self.dtype).eps
        largest = float(before.nan_to_num(0, 0, 0).abs().amax())
        return torch.allclose(now, before, rtol=near, atol=near * largest, equal_nan=True)

    def _draws(self, query: Tensor, key: Tensor) -> bool:
        """Does it draw random numbers at each of a few more calls? Another thread may have, at the first."""
        for _ in range(3):
            with Drawing(query.device) as drawing:
                self(query, key)
                if not drawing.drawn():
                    return False
        return True

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Inside, calls leave no trace: no draw, no graph, and nothing in the statistics that it may keep."""
        assert self._tried is not None
        kept = [tensor.clone() for tensor in self._changing]
        with Drawing(self._tried[0].device), torch.no_grad():
            try:
                yield
            finally:
                for tensor, before in zip(self._changing, kept, strict=True):
                    tensor.copy_(before)

    def again(self) -> "Custom":
        """The score as it was at the call, for the way back."""
        other = copy.copy(self)
        other.function = self._again
        return other

    def holding(self, swap: Swap) -> Score:
        return self.again()

    def tensors(self) -> tuple[Tensor, ...]:
        return self._captured

    def reads(self) -> tuple[Tensor, ...]:
        return (*self._captured, *self._frozen)

    def flops(self, size: int) -> int:
        return 2 * int(self._floats)

    def floats(self, size: int) -> float:
        return self._floats


def _tried_on(error: Exception, query: Tensor, key: Tensor) -> Exception:
    """The error, with a note that explains the sizes in it."""
    error.add_note(
        f"the score was tried on a few pairs first, query {tuple(query.shape)} and key {tuple(key.shape)}: it gets (…, "
        "heads, queries, size), any number of queries and keys; what depends on positions goes to bias="
    )
    return error


class _ShapeError(ValueError):
    """Scores of another shape than one for each query and key."""


def _expected(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """The shape of the scores."""
    return (*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2])


def _said_of_shapes(query: Tensor, key: Tensor, scores: Tensor) -> str:
    return (
        f"score must return (…, queries, keys) = {_expected(query, key)} for a query {tuple(query.shape)} and a key "
        f"{tuple(key.shape)}, got {tuple(scores.shape)}"
    )


def _waves(like: Tensor, count: int, start: int) -> Tensor:
    """Some rows of numbers between -1 and 1, no two alike."""
    size = like.shape[-1]
    rows = torch.arange(start, start + count * size, device=like.device).mul(0.7).sin().to(like.dtype)
    return rows.unflatten(0, (count, size)).expand(*like.shape[:-2], count, size)


def _halves(count: int) -> tuple[slice, slice]:
    """The first of so many and the last, at least two of each: statistics are not of one."""
    first = (count + 1) // 2 if count > 2 else count
    return slice(0, first), slice(count - first, count)


def _near(dtype: torch.dtype, device: torch.device) -> float:
    """How far two ways to the same scores may be apart, as a share of the largest."""
    if dtype in (torch.float16, torch.bfloat16):
        return 8 * torch.finfo(dtype).eps
    return 5e-3 if device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32 else 1e-4
