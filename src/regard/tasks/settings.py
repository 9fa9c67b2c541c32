"""`--set key=value`: changes to a configuration, by the full dotted name of a field or the end of it."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from regard.tasks.task import SettingError

Config = TypeVar("Config", bound=BaseModel)


def changed(config: Config, settings: Mapping[str, str], *, aliases: Mapping[str, str] | None = None) -> Config:
    """The configuration with these fields set, checked as a whole.

    >>> from regard.train.settings import TrainSettings
    >>> changed(TrainSettings(), {"steps": "12", "schedule": "cosine"}).steps
    12
    >>> changed(TrainSettings(), {"step": "12"})
    Traceback (most recent call last):
    regard.tasks.task.SettingError: no setting is called 'step': there are accumulate, average, ...
    """
    tree = config.model_dump(mode="json")
    known = dict(_leaves(tree))
    for key, text in settings.items():
        place = _place((aliases or {}).get(key, key), known)
        _put(tree, place.split("."), _value(text))
    try:
        return config.__class__.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingError(f"{where}: {first['msg']}, got {first['input']!r}") from error


def parsed(items: list[str]) -> dict[str, str]:
    """`key=value` texts as a dictionary.

    >>> parsed(["attention=none", "size=64"])
    {'attention': 'none', 'size': '64'}
    """
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise SettingError(f"expected key=value, got {item!r}")
        found[key.strip()] = value.strip()
    return found


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        found.append((f"{prefix}{name}", value))
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{name}.")
    return found


def _place(key: str, known: Mapping[str, Any]) -> str:
    if key in known:
        return key
    ends = [name for name in known if name.endswith(f".{key}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise SettingError(f"{key!r} could be {' or '.join(sorted(ends))}: say which")
    names = sorted(name for name, value in known.items() if not isinstance(value, dict))
    raise SettingError(f"no setting is called {key!r}: there are {', '.join(names)}")


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree[name]
    tree[path[-1]] = value


def _value(text: str) -> Any:
    """JSON where it is JSON (numbers, true, null, lists), else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
