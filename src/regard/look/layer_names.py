"""Readable names of layers: the name of the module `encoder.block.0.layer.0.SelfAttention` is "encoder 0".

A name is derived from the path of a module: the side of the model (encoder or decoder), the number of the layer, and
the kind of attention (self or cross) if that side has cross-attention. Numbers count from 0, as in the path. If two
paths would get the same name, the numbers of inner blocks are added to all names; if that does not suffice, the parts
of the paths that differ.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Words = tuple[str, ...]

_PART = re.compile(r"[A-Za-z_]\w*|\d+")
_CROSS = re.compile(r"cross|enc_?dec|encoder_?att|attn2|memory_att", re.IGNORECASE)
_BESIDE = "multihead_attn"  # the cross-attention of nn.TransformerDecoderLayer, whose self-attention is `self_attn`
_SELF = re.compile(r"self|attn1", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a dotted path that is a number
_SIDES = ("encoder", "decoder")


class _Path(NamedTuple):
    """The parts of a module path that describe its layer."""

    sides: Words  # the side of the model: ("encoder",), ("decoder",) or ()
    numbers: Words
    role: str | None  # the kind of attention: "self", "cross" or None
    others: Words  # the parts of the module path that are neither a side nor a role


def layer_names(names: Sequence[str]) -> list[Words | None]:
    """Return the words of the readable name of each module path; None for a path without a layer number.

    >>> layer_names(["encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention",
    ...              "decoder.block.0.layer.1.EncDecAttention"])
    [('encoder', '0'), ('decoder', '0', 'self'), ('decoder', '0', 'cross')]
    >>> layer_names(["transformer.h.0.attn", "transformer.h.1.attn", "Tom chases Jerry"])
    [('layer', '0'), ('layer', '1'), None]
    """
    paths = {name: path for name in names if (path := _path(name)) is not None}
    crossing = cross_attention(paths)
    paths = {name: path._replace(role="cross") if name in crossing else path for name, path in paths.items()}
    if not paths:
        return [None] * len(names)
    crossed = {path.sides for path in paths.values() if path.role == "cross"}
    varying = _varying(list(paths.values()))
    ways: tuple[Callable[[_Path], Words], ...] = (
        lambda path: _said(path, crossed, path.numbers[:1]),
        lambda path: _said(path, crossed, path.numbers),
        lambda path: (*_plain(path, varying), *_said(path, crossed, path.numbers[:1])),
        lambda path: (*_plain(path, varying), *_said(path, crossed, path.numbers)),
    )
    for way in ways:
        words = {name: way(path) for name, path in paths.items()}
        if len(set(words.values())) == len(words):
            return [words.get(name) for name in names]
    return [None] * len(names)


def stacks(names: Iterable[str]) -> dict[str, str]:
    """Return the stack of layers of each module path, as a pattern with `*` in place of the number of the layer.

    A stack is a sequence of layers whose module paths differ only in numbers, such as `encoder.0` and `encoder.1`. If
    the paths differ in several numbers, `*` replaces the first of them. Paths without numbers that contain "encoder" or
    "decoder" form a stack for the encoder or decoder. Names of any other form have no stack and are not in the result.

    >>> set(stacks(f"encoder.layer.{number}.attention.self" for number in range(12)).values())
    {'encoder.layer.*.attention.self'}
    """
    alike: dict[str, list[str]] = defaultdict(list)
    stack_of: dict[str, str] = {}
    for name in names:
        if _path(name) is not None:
            alike[_NUMBER.sub("*", name)].append(name)
        elif _is_path(name):
            parts = name.split(".")
            if places := [place for place, part in enumerate(parts) if part in _SIDES]:
                stack_of[name] = ".".join(parts[: places[-1] + 1]) + ".*"
    for group in alike.values():
        numbers = [_NUMBER.findall(name) for name in group]
        varying = [place for place, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
        place = varying[0] if varying else 0
        for name in group:
            start, end = [match.span() for match in _NUMBER.finditer(name)][place]
            stack_of[name] = f"{name[:start]}*{name[end:]}"
    return stack_of


def cross_attention(names: Iterable[str]) -> set[str]:
    """Return those of the names that are paths of cross-attention modules.

    >>> cross_attention(["decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn", "encoder.layers.0.self_attn"])
    {'decoder.layers.0.multihead_attn'}
    """
    names = list(names)
    return {
        name
        for name in names
        if _is_path(name) and (_CROSS.search(name) is not None or _is_beside(name, [*filter(_SELF.search, names)]))
    }


def _is_path(name: str) -> bool:
    return all(_PART.fullmatch(part) for part in name.split("."))


def _path(name: str) -> _Path | None:
    parts = name.split(".")
    numbers = tuple(part for part in parts if part.isdecimal())
    if not numbers or not _is_path(name):
        return None
    words = [part for part in parts if not part.isdecimal()]
    cross = any(_CROSS.search(part) for part in words)
    role = "cross" if cross else "self" if any(_SELF.search(part) for part in words) else None
    sides = tuple(part for part in words if part in _SIDES)[-1:]
    named = [part for part in words if part not in _SIDES and not _CROSS.search(part) and not _SELF.search(part)]
    return _Path(sides, numbers, role, tuple(named))


def _is_beside(name: str, self_attention: Sequence[str]) -> bool:
    layer, _, last = name.rpartition(".")
    return last == _BESIDE and any(other.rpartition(".")[0] == layer for other in self_attention)


def _said(path: _Path, crossed: set[Words], numbers: Words) -> Words:
    role = (path.role or "self",) if path.sides in crossed else ()
    return (*(path.sides or ("layer",)), ".".join(numbers), *role)


def _varying(paths: Sequence[_Path]) -> set[str]:
    """Return the parts of module paths that occur in some of the paths, but not in all paths."""
    parts = [set(path.others) for path in paths]
    return set.union(*parts) - set.intersection(*parts)


def _plain(path: _Path, varying: set[str]) -> Words:
    return tuple(dict.fromkeys(part.replace("_", " ") for part in path.others if part in varying))
