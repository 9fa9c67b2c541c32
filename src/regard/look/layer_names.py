"""Readable names of layers: `encoder.block.0.layer.0.SelfAttention` is "encoder 0".

A name is derived from the module path: the side (encoder, decoder), the number of the layer, and the kind of attention
(self, cross) if the layer has both. Numbers count from 0, as in the path. If two paths would get one name, the numbers
of inner blocks are added to all of them, then the parts in which the paths differ.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Words = tuple[str, ...]

_PART = re.compile(r"[A-Za-z_]\w*|\d+")
_CROSS = re.compile(r"cross|enc_?dec|encoder_?att|attn2|memory_att", re.IGNORECASE)
_BESIDE = "multihead_attn"  # cross-attention of nn.TransformerDecoderLayer, beside its self-attention
_SELF = re.compile(r"self|attn1", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a dotted path that is a number
_SIDES = ("encoder", "decoder")


class _Path(NamedTuple):
    """The parts of a module path that describe its layer."""

    sides: Words
    numbers: Words
    role: str | None
    others: Words  # the other parts of the path


def layer_names(names: Sequence[str]) -> list[Words | None]:
    """Return the words of each name; None for a name that is not the path of a numbered layer.

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
        found = {name: way(path) for name, path in paths.items()}
        if len(set(found.values())) == len(found):
            return [found.get(name) for name in names]
    return [None] * len(names)


def stacks(names: Iterable[str]) -> dict[str, str]:
    """Return the stack of each name, as a pattern: the paths of its layers differ in one number, which is `*`.

    If the paths differ in several numbers, `*` is the first of them. A side without numbered layers is a stack of
    its own. Other names have no stack.

    >>> set(stacks(f"encoder.layer.{number}.attention.self" for number in range(12)).values())
    {'encoder.layer.*.attention.self'}
    """
    alike: dict[str, list[str]] = defaultdict(list)
    found: dict[str, str] = {}
    for name in names:
        if _path(name) is not None:
            alike[_NUMBER.sub("*", name)].append(name)
        elif _is_path(name):
            parts = name.split(".")
            if places := [place for place, part in enumerate(parts) if part in _SIDES]:
                found[name] = ".".join(parts[: places[-1] + 1]) + ".*"
    for group in alike.values():
        numbers = [_NUMBER.findall(name) for name in group]
        varying = [place for place, each in enumerate(zip(*numbers, strict=True)) if len(set(each)) > 1]
        place = varying[0] if varying else 0
        for name in group:
            start, end = [match.span() for match in _NUMBER.finditer(name)][place]
            found[name] = f"{name[:start]}*{name[end:]}"
    return found


def cross_attention(names: Iterable[str]) -> set[str]:
    """Return the names that are paths of cross-attention.

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
    """Return the parts that some of the paths have and others do not."""
    each = [set(path.others) for path in paths]
    return set.union(*each) - set.intersection(*each)


def _plain(path: _Path, varying: set[str]) -> Words:
    return tuple(dict.fromkeys(part.replace("_", " ") for part in path.others if part in varying))
