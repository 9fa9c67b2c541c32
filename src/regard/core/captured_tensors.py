"""Listening to a function of the caller's: what it reads and writes, whether it draws; and giving it other tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.core.scores import Swap
from regard.kernels.availability import capturing


class Drawing:
    """Inside, random numbers may be drawn: afterwards it is as if they had not been."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [device.index] if device.type == "cuda" and not capturing(device) else []

    def __enter__(self) -> "Drawing":
        self._before = self._states()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.drawn():  # what nobody drew is left alone: another thread may be drawing
            first, *others = self._before
            torch.set_rng_state(first)
            for index, state in zip(self._devices, others, strict=True):
                torch.cuda.set_rng_state(state, index)

    def drawn(self) -> bool:
        """Have any been drawn so far?"""
        if torch._guards.detect_fake_mode() is not None:  # a state that nobody can read
            return False
        return not all(map(torch.equal, self._before, self._states()))

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in self._devices)]


class Listener(torch.overrides.TorchFunctionMode):
    """Hears every torch call: which outside tensors come in, with and without grad, how many numbers go out."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.captured: list[Tensor] = []
        self.frozen: list[Tensor] = []
        self._versions: list[int] = []  # of the frozen ones, when they were met
        self._copies: dict[int, Tensor] = {}  # of those that may be written to, by their place among the frozen
        self.numbers = 0
        self._inside = list(inputs)  # kept alive, so that no id is used twice

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        known = {id(tensor) for tensor in (*self._inside, *self.captured, *self.frozen)}
        for tensor in _tensors_in((args, kwargs)):
            if id(tensor) not in known:
                known.add(id(tensor))
                if tensor.requires_grad:
                    self.captured.append(tensor)
                else:
                    self.frozen.append(tensor)
                    self._versions.append(version(tensor))
        if _may_write(function, kwargs):
            self._copy(_tensors_in((args, kwargs)))
        result = function(*args, **kwargs)
        for tensor in _tensors_in(result):
            if id(tensor) not in known:
                self._inside.append(tensor)
                self.numbers += tensor.numel()
        return result

    def _copy(self, tensors: list[Tensor]) -> None:
        """Keep what these hold, or what they are views of."""
        given = {_place(tensor) for tensor in tensors}
        for place, tensor in enumerate(self.frozen):
            if place not in self._copies and version(tensor) == self._versions[place] and _place(tensor) in given:
                self._copies[place] = tensor.clone()

    def changed(self) -> tuple[Tensor, ...]:
        """Outside tensors without grad that the function itself changed, such as running statistics."""
        return tuple(tensor for place, tensor in enumerate(self.frozen) if self._is_changed(place))

    def _is_changed(self, place: int) -> bool:
        tensor, before = self.frozen[place], self._copies.get(place)
        if version(tensor) != self._versions[place]:
            return True
        # Norms write to their statistics without a word.
        return before is not None and not tensor.is_meta and not capturing(tensor.device) and not tensor.equal(before)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Afterwards, those that were changed hold what they held."""
        try:
            yield
        finally:
            with torch.no_grad():
                for place, before in self._copies.items():
                    if self._is_changed(place):
                        self.frozen[place].copy_(before)


def _place(tensor: Tensor) -> int:
    """Where its numbers lie."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without numbers
        return id(tensor)


def _may_write(function: Any, kwargs: dict[str, Any]) -> bool:
    """Can a torch function change its arguments: in place, as out=, or as the statistics of a norm?"""
    name = getattr(function, "__name__", "")
    written = name.endswith("_") and (not name.endswith("__") or name.startswith("__i") or name == "__setitem__")
    return written or name in ("batch_norm", "instance_norm") or kwargs.get("out") is not None


def version(tensor: Tensor) -> int:
    """How often it was changed in place; a tensor of an inference pass does not say."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


class Swapped(torch.overrides.TorchFunctionMode):
    """While it is on, tensors are exchanged wherever torch meets them: in closures and modules, too."""

    def __init__(self, swap: Swap) -> None:
        super().__init__()
        self._swap = swap

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        tree = torch.utils._pytree.tree_map_only(Tensor, self._swap, (args, kwargs or {}))
        return function(*tree[0], **tree[1])


def leaves(scores: Tensor, known: tuple[Tensor, ...] = ()) -> list[Tensor]:
    """Leaf tensors whose gradient flows through the scores' graph, not counting what is behind the known ones."""
    stop = {id(tensor) for tensor in known}
    closed = {tensor.grad_fn for tensor in known if tensor.grad_fn is not None}
    found: list[Tensor] = []
    seen, waiting = set(closed), [scores.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in stop:
            found.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def _tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
