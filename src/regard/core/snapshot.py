"""A function as it is now: whatever its variables are bound to later does not reach it."""

import functools
import types
from collections.abc import Callable
from typing import Any


def snapshot(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function over the variables of this moment, closed over or global.

    A loop that writes `lambda q, k: layer(q) @ k.mT` makes functions that all read its last layer once it is over.
    Functions that it closes over are taken along; what is no plain function, or has a variable that is not bound yet,
    is given back as it is.
    """
    return _taken(function, {})


def _taken(function: Callable[..., Any], taken: dict[int, Callable[..., Any]]) -> Callable[..., Any]:
    if id(function) in taken:  # one that calls itself, or two that share a third
        return taken[id(function)]
    if isinstance(function, functools.partial):
        keywords = {name: _part(thing, taken) for name, thing in function.keywords.items()}
        return functools.partial(_taken(function.func, taken), *(_part(t, taken) for t in function.args), **keywords)
    if not isinstance(function, types.FunctionType):
        return function
    try:
        contents = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return function
    known = function.__globals__
    names = {"__builtins__", "__name__", *_names(function.__code__)}
    cells = tuple(types.CellType() for _ in contents)
    copy = types.FunctionType(
        function.__code__,
        {name: known[name] for name in names if name in known},
        function.__name__,
        function.__defaults__,
        cells,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    taken[id(function)] = copy
    for cell, thing in zip(cells, contents, strict=True):
        cell.cell_contents = _part(thing, taken)
    return copy


def _part(thing: Any, taken: dict[int, Callable[..., Any]]) -> Any:
    """What a function holds: functions of this moment, and all else as it is."""
    return _taken(thing, taken) if isinstance(thing, (types.FunctionType, functools.partial)) else thing


def _names(code: types.CodeType) -> set[str]:
    """What a function and those written inside it may look up among globals."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
