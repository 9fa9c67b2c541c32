"""Score functions given by the caller: any function of queries and keys, computed block by block.

The backward pass computes each block again, as `torch.utils.checkpoint` does with a function: it calls the function a
second time, with the closure's values at that time. So the second call must give the same scores: the score of a pair
may depend only on that query and key, not on positions or other pairs, and the tensors and variables that the function
uses must not change before the backward pass. This is not checked. With `backend="reference"` the function is called
once, on all pairs, and need not meet these conditions.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.scores import Score, Swap
from regard.kernels.availability import capturing


class Custom(Score):
    """A user's pairwise function (query, key) -> scores, as a score with known cost and parameters.

    `probe` calls the function once on a few vectors (the trial call), to determine which tensors the function captured
    (parameters of a module, variables of a closure, leaves or not), so that recomputation in the backward pass can give
    them gradients. The trial call also determines how many numbers the function stores for each pair, so that the size
    of blocks can be chosen to fit memory.
    """

    name = "custom"

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        self.function = function
        self.dtype = dtype  # the dtype of the caller's tensors, to which query and key are cast
        self.unfit: str | None = None  # why the backward pass cannot recompute blocks of scores; else None
        self._captured: tuple[Tensor, ...] = ()
        self._floats = 1.0

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        scores = self.function(query.to(self.dtype), key.to(self.dtype))
        expected = _expected(query, key)
        if not isinstance(scores, Tensor):
            raise TypeError(f"score must return a float tensor (…, queries, keys), got {type(scores).__name__}")
        if scores.is_complex() or scores.dtype == torch.bool:  # integer scores are valid, because they are real numbers
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
        """Call the function on a few pairs, and record its captured tensors and how many numbers it stores per pair."""
        rows, columns = _few(query, key)
        few = query[..., :rows, :].detach().clone(), key[..., :columns, :].detach().repeat_interleave(group, -3)
        try:
            return self._probe(*few)
        except _ShapeError as error:
            if message := self._said_of_all(query, key, group):
                raise ValueError(message) from None
            raise _tried_on(ValueError(str(error)), *few) from None

    def _said_of_all(self, query: Tensor, key: Tensor, group: int) -> str | None:
        """Return the error message if the scores of this query and key have a wrong shape, None if not or unknown."""
        from torch._subclasses.fake_tensor import FakeTensorMode  # imported only for an error message

        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as fake:  # fake tensors have shapes but no memory
                query, key = (fake.from_tensor(t.detach()) for t in (query, key))
                key = key.repeat_interleave(group, -3)
                scores = self.function(query, key)
                return None if tuple(scores.shape) == _expected(query, key) else _said_of_shapes(query, key, scores)
        except Exception:  # the score function reads values, which fake tensors lack, or fails for these shapes
            return None

    def _probe(self, query: Tensor, key: Tensor) -> "Custom":
        seen = _Captured(query, key)
        with _RestoredRandomState(query.device) as random, torch.enable_grad():
            try:
                with seen:
                    scores = self(query, key)
            except torch._dynamo.exc.InternalTorchDynamoError:
                self.unfit = "the score is compiled: the tensors it learns cannot be seen"
                return self
            except _ShapeError:
                raise
            except Exception as error:
                _tried_on(error, query, key)
                raise
            if random.used():
                self.unfit = "the score draws random numbers, and would draw others when it is computed again"
        if leaves(scores, tuple(seen.tensors)):
            self.unfit = "the score uses tensors that torch functions do not show, as a scripted module does"
        known = dict.fromkeys(seen.tensors)  # the captured tensors without duplicates, in order of first use
        if isinstance(self.function, torch.nn.Module):
            known |= {tensor: None for tensor in self.function.parameters() if tensor.requires_grad}
        self._captured = tuple(known)
        self._floats = max(1.0, seen.numbers / max(1, scores.numel()))
        return self

    def tensors(self) -> tuple[Tensor, ...]:
        return self._captured

    def flops(self, size: int) -> int:
        return 2 * int(self._floats)

    def floats(self, size: int) -> float:
        return self._floats


class Swapped(torch.overrides.TorchFunctionMode):
    """A torch function mode that replaces the tensors in every torch call, also those captured by closures."""

    def __init__(self, swap: Swap) -> None:
        super().__init__()
        self._swap = swap

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        tree = torch.utils._pytree.tree_map_only(Tensor, self._swap, (args, kwargs or {}))
        return function(*tree[0], **tree[1])


def leaves(scores: Tensor, known: tuple[Tensor, ...] = ()) -> list[Tensor]:
    """Return the leaf tensors of the scores' autograd graph; the search ends at the tensors in `known`."""
    stop = {id(tensor) for tensor in known}
    seen, waiting = {tensor.grad_fn for tensor in known if tensor.grad_fn is not None}, [scores.grad_fn]
    unknown: list[Tensor] = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in stop:
            unknown.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return unknown


class _Captured(torch.overrides.TorchFunctionMode):
    """A torch function mode that observes every torch call while the caller's score function is tried on a few vectors.

    It records the tensors with requires_grad that the score function captured, and counts the numbers that the function
    stores for each pair of query and key.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.numbers = 0
        self._lengths = query.shape[-2], key.shape[-2]
        self._inside = [query, key]  # other tensors, kept alive so that no new tensor gets the id() of one

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        known = {id(tensor) for tensor in (*self._inside, *self.tensors)}
        for tensor in _tensors_in((args, kwargs)):
            if id(tensor) not in known:
                known.add(id(tensor))
                (self.tensors if tensor.requires_grad else self._inside).append(tensor)
        result = function(*args, **kwargs)
        for tensor in _tensors_in(result):
            if id(tensor) not in known:
                self._inside.append(tensor)
                if not tensor._is_view() and self._may_be_of_pairs(tensor.shape):
                    self.numbers += tensor.numel()
        return result

    def _may_be_of_pairs(self, shape: torch.Size) -> bool:
        """Return whether a tensor of this shape may hold numbers for each pair of query and key.

        A tensor with numbers for each pair has one axis whose size is a multiple of the number of queries and another
        whose size is a multiple of the number of keys, or one axis whose size is a multiple of the product of these
        numbers.
        """
        queries, keys = self._lengths
        return any(size % (queries * keys) == 0 for size in shape) or any(
            one % queries == 0 and other % keys == 0 for one, other in itertools.permutations(shape, 2)
        )


class _RestoredRandomState:
    """A context manager that restores the states of torch's random generators if random numbers were sampled inside."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [device.index] if device.type == "cuda" and not capturing(device) else []

    def __enter__(self) -> "_RestoredRandomState":
        self._before = self._states()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.used():  # an unused state is not restored, because another thread may be sampling
            first, *others = self._before
            torch.set_rng_state(first)
            for index, state in zip(self._devices, others, strict=True):
                torch.cuda.set_rng_state(state, index)

    def used(self) -> bool:
        """Return whether random numbers were sampled since the context was entered."""
        if torch._guards.detect_fake_mode() is not None:  # fake tensors have no generator state
            return False
        return not all(map(torch.equal, self._before, self._states()))

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in self._devices)]


def _few(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Return the numbers of queries and keys with which the caller's score function is tried.

    Where possible the two numbers are different, so that scores with swapped axes are detected, and are primes that
    divide the size of no other axis, so that `_may_be_of_pairs` can recognise them in the shape of a tensor.
    """
    others = {*query.shape[:-2], *key.shape[:-2], query.shape[-1], key.shape[-1]}
    primes = [prime for prime in (3, 5, 7, 11, 13) if not any(size % prime == 0 for size in others)]
    if len(primes) >= 2 and primes[0] <= query.shape[-2] and primes[1] <= key.shape[-2]:
        return primes[0], primes[1]
    return min(2, query.shape[-2]), min(3, key.shape[-2])


def _tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _tried_on(error: Exception, query: Tensor, key: Tensor) -> Exception:
    """Return the error with a note that the score was tried on a few pairs, which explains the sizes in the error."""
    error.add_note(
        f"the score was tried on a few pairs first, query {tuple(query.shape)} and key {tuple(key.shape)}: it gets (…, "
        "heads, queries, size), any number of queries and keys; what depends on positions goes to bias="
    )
    return error


class _ShapeError(ValueError):
    """The error for a score function that does not return one score for each query and key."""


def _expected(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Return the shape that the scores of this query and key must have."""
    return (*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2])


def _said_of_shapes(query: Tensor, key: Tensor, scores: Tensor) -> str:
    return (
        f"score must return (…, queries, keys) = {_expected(query, key)} for a query {tuple(query.shape)} and a key "
        f"{tuple(key.shape)}, got {tuple(scores.shape)}"
    )
