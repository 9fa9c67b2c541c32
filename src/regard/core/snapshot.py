"""A function as it is now: whatever its variables are bound to later does not reach it."""

import functools
import types
from collections.abc import Callable
from typing import Any


def snapshot(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """The same function over the variables of this moment, closed over or global.

    A loop that writes `lambda q, k: layer(q) @ k.mT` makes functions that all read its last layer once it is over.
    Functions with variables of their own that it closes over are taken along; what is no plain function, or has a
    variable that is not bound yet, is given back as it is. Also: were any taken along? A function may ask for another
    by its identity.
    """
    taken = _Taken()
    copy = taken.function(function)
    return copy, len(taken.functions) > 1


class _Taken:
    """What has been copied so far: a function that calls itself, or a variable of two functions, is copied once."""

    def __init__(self) -> None:
        self.functions: dict[int, Callable[..., Any]] = {}
        self._cells: dict[int, types.CellType] = {}

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if id(function) in self.functions:
            return self.functions[id(function)]
        if isinstance(function, functools.partial):
            keywords = {name: self._part(thing) for name, thing in function.keywords.items()}
            return functools.partial(self.function(function.func), *map(self._part, function.args), **keywords)
        if not isinstance(function, types.FunctionType) or not all(map(_is_bound, function.__closure__ or ())):
            return function
        known = function.__globals__
        names = {"__builtins__", "__name__", *_names(function.__code__)}
        fresh = [cell for cell in function.__closure__ or () if id(cell) not in self._cells]
        self._cells |= {id(cell): types.CellType() for cell in fresh}
        copy = types.FunctionType(
            function.__code__,
            {name: known[name] for name in names if name in known},
            function.__name__,
            function.__defaults__,
            tuple(self._cells[id(cell)] for cell in function.__closure__ or ()),
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__dict__.update(function.__dict__)
        self.functions[id(function)] = copy
        for cell in fresh:
            self._cells[id(cell)].cell_contents = self._part(cell.cell_contents)
        return copy

    def _part(self, thing: Any) -> Any:
        """What a function holds: functions with variables as they are now, and all else itself."""
        holds = isinstance(thing, functools.partial) or (isinstance(thing, types.FunctionType) and thing.__closure__)
        return self.function(thing) if holds else thing


def _is_bound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _names(code: types.CodeType) -> set[str]:
    """What a function and those written inside it may look up among globals."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
