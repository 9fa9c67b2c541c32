"""A report of modules whose class name suggests attention, but in which no attention call was captured.

Such a module may run a kernel outside of torch, TorchScript, or a custom loop.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_ATTENDS = re.compile("attention|attn", re.IGNORECASE)


class Expected:
    """Counts the calls of modules whose class name contains "attention" or "attn", and of their parent modules."""

    def __init__(self, model: nn.Module) -> None:
        plain = [(name, module) for name, module in model.named_modules()]
        self._scripts = [named(name) for name, module in plain if isinstance(module, torch.jit.ScriptModule)]
        self._modules = {name: module for name, module in plain if not isinstance(module, torch.jit.ScriptModule)}
        self._attending = [name for name, module in self._modules.items() if _ATTENDS.search(type(module).__name__)]
        self._ran: Counter[str] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which forward pre-hooks count the calls of attention modules and of the modules that directly
        contain them."""
        names = {*self._attending, *(name.rpartition(".")[0] for name in self._attending if name)}
        handles: list[RemovableHandle] = [
            self._modules[name].register_forward_pre_hook(functools.partial(self._count, named(name)))
            for name in names
            if name in self._modules
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _count(self, name: str, module: nn.Module, args: object) -> None:
        self._ran[name] += 1

    def missing(self, seen: set[str], keeps: Callable[[str], bool]) -> Iterator[str]:
        """Yield a sentence for each attention module without a captured call; `seen` are the names with captured calls.

        A module is left out if `keeps` rejects its name, or if neither it nor its parent module ran.
        """
        for whole in self._attending:
            name = named(whole)
            if not keeps(name) or any(other == name or other.startswith(f"{name}.") for other in seen):
                continue
            owner = name.rpartition(".")[0]
            if self._ran[name]:
                yield f"{name!r} ran {times(self._ran[name])}, but no attention was seen in it"
            elif name and self._ran[owner] and owner not in seen:
                yield f"{name!r} was not called, though {owner!r} ran: if that attends by other means, it was not seen"
        for name in self._scripts:
            if keeps(name) and name.rpartition(".")[0] not in self._scripts:
                yield f"{name!r} is TorchScript: what it attends to cannot be seen"


def named(name: str) -> str:
    """Return a module's path without `_orig_mod`, the name of the module inside torch.compile's wrapper."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def times(count: int) -> str:
    """Return a number of times in words: "once" or, for example, "3 times"."""
    return "once" if count == 1 else f"{count} times"
