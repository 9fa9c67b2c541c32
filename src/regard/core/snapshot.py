"""A function as it is now: whatever its variables are bound to later does not reach it."""

import functools
import types
from collections.abc import Callable
from typing import Any


def snapshot(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function over the variables of this moment, closed over or global.

    A loop that writes `lambda q, k: layer(q) @ k.mT` makes functions that all read its last layer once it is over.
    What is no plain function, or has a variable that is not bound yet, is given back as it is.
    """
    if isinstance(function, functools.partial):
        args = (snapshot(thing) if callable(thing) else thing for thing in function.args)
        return functools.partial(function.func, *args, **function.keywords)
    if not isinstance(function, types.FunctionType):
        return function
    try:
        cells = tuple(types.CellType(cell.cell_contents) for cell in function.__closure__ or ())
    except ValueError:
        return function
    known = function.__globals__
    names = {"__builtins__", "__name__", *_names(function.__code__)}
    copy = types.FunctionType(
        function.__code__,
        {name: known[name] for name in names if name in known},
        function.__name__,
        function.__defaults__,
        cells,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _names(code: types.CodeType) -> set[str]:
    """What a function and those written inside it may look up among globals."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
