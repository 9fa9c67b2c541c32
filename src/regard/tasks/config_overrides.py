"""`--set key=value`: changes of a configuration; a key is the full dotted name of a setting, or the last part of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from regard.tasks.config import Need, Needs, TaskConfig
from regard.tasks.task import SettingError, Task

Config = TypeVar("Config", bound=BaseModel)

_WHOLE = {"int_parsing", "int_type", "int_from_float", "int_parsing_size"}
_NUMBER = {"float_parsing", "float_type", "finite_number"}
_SWITCH = {"bool_parsing", "bool_type"}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
}


class Setting(NamedTuple):
    """One setting of a configuration: its full dotted name, its value, its description, and the values it accepts."""

    name: str
    value: Any
    about: str
    may_be_none: bool  # whether the setting may be None, which the user writes as "none"
    number: str  # description of a numeric setting's type in error messages: "a whole number" or "a number"
    choices: tuple[str, ...]  # the allowed values of a setting of type `Literal`; empty for other types


def changed(
    config: Config, settings: Mapping[str, str], *, aliases: Mapping[str, str] | None = None, needs: Needs | None = None
) -> Config:
    """Return the configuration with the given settings changed and all values checked.

    It is an error to change a setting that has no effect in the new configuration.

    >>> from regard.train.train_settings import TrainSettings
    >>> changed(TrainSettings(), {"steps": "12", "schedule": "cosine"}).steps
    12
    >>> changed(TrainSettings(), {"step": "12"})
    Traceback (most recent call last):
    regard.tasks.task.SettingError: no setting is called 'step': did you mean steps? (--set help lists them all)
    >>> changed(TrainSettings(), {"steps": "many"})
    Traceback (most recent call last):
    regard.tasks.task.SettingError: steps: expected a whole number, got 'many'
    """
    tree = config.model_dump(mode="json")
    known = {one.name: one for one in listed(config)}
    places = []
    for key, text in settings.items():
        place = _place((aliases or {}).get(key, key), known)
        places.append(place)
        _put(tree, place.split("."), None if text == "none" and known[place].may_be_none else _value(text))
    try:
        result = config.__class__.model_validate(tree)
    except ValidationError as error:
        raise SettingError(_complaint(error.errors(include_url=False)[0], known)) from error
    for name in places:
        if (need := _unmet(result, name, needs or {})) is not None and _at(result, name) not in ("none", None):
            now = _at(result, need.place)
            why = "" if isinstance(now, BaseModel) else f", and {need.place} is {_shown(now)}"
            raise SettingError(f"{name} has no effect: it is a setting of {need.words}{why}")
    return result


def configure(task: Task, preset: str, data: Sequence[Path], settings: Mapping[str, str]) -> TaskConfig:
    """Return the configuration of a preset, with the given data files and settings.

    `task.choosing` maps values of some settings to presets: setting such a value selects that preset, unless `preset`
    is already a preset in this map.
    """
    for name, presets in task.choosing.items():
        chosen = presets.get(settings.get(name, ""), preset)
        preset = chosen if preset not in presets.values() else preset
    if preset not in task.presets:
        raise SettingError(f"no preset is called {preset!r}: {task.name} has {', '.join(task.presets)}")
    config = task.presets[preset].make()
    if data:
        # The common prefix of several files is accepted too: sst/stsa.binary for its train, dev and test files.
        missing = [str(path) for path in data if not path.exists() and not any(path.parent.glob(f"{path.name}*"))]
        if missing:
            raise SettingError(f"no such file: {', '.join(missing)}")
        config = config.model_copy(update={"data": config.data.model_copy(update={"files": tuple(data)})})
    return changed(config, settings, aliases=task.aliases, needs=task.needs)


def recorded(task: Task, config: TaskConfig) -> dict[str, Any]:
    """Return the configuration as JSON, with absolute paths of data files and without settings that have no effect."""
    files = tuple(path.absolute() for path in config.data.files)
    config = config.model_copy(update={"data": config.data.model_copy(update={"files": files})})
    tree = config.model_dump(mode="json")
    for name in task.needs:
        if name not in task.recorded and _unmet(config, name, task.needs) is not None:
            part, _, last = name.rpartition(".")
            inner = tree
            for step in part.split("."):
                inner = inner[step]
            del inner[last]
    return tree


def _unmet(config: BaseModel, name: str, needs: Needs) -> Need | None:
    return next((need for need in needs.get(name, ()) if not need.holds(_at(config, need.place))), None)


def _at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "empty"
    return "none" if value is None else str(value)


def listed(config: BaseModel) -> list[Setting]:
    """Return every setting of a configuration that has a description, in the order of the fields.

    >>> from regard.train.train_settings import TrainSettings
    >>> [one.name for one in listed(TrainSettings())][:3]
    ['steps', 'epochs', 'accumulate']
    """
    return list(_settings(config, ""))


def parsed(items: list[str]) -> dict[str, str]:
    """Return `key=value` texts as a dictionary.

    >>> parsed(["attention=none", "size=64"])
    {'attention': 'none', 'size': '64'}
    """
    settings = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise SettingError(f"expected key=value, got {item!r}")
        settings[key.strip()] = value.strip()
    return settings


def _settings(config: BaseModel, prefix: str) -> Iterator[Setting]:
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{prefix}{name}.")
        elif field.description:
            kinds = get_args(field.annotation)
            whole = "int" in repr(field.annotation)
            number = "a whole number" if whole else "a number"
            choices = tuple(map(str, kinds)) if get_origin(field.annotation) is Literal else ()
            yield Setting(f"{prefix}{name}", value, field.description, NoneType in kinds, number, choices)


def _place(key: str, known: Mapping[str, Setting]) -> str:
    if key in known:
        return key
    ends = [name for name in known if name.endswith(f".{key}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise SettingError(f"{key!r} could be {' or '.join(sorted(ends))}: say which")
    near = _nearest(key, known)
    if near:
        raise SettingError(
            f"no setting is called {key!r}: did you mean {' or '.join(near)}? (--set help lists them all)"
        )
    raise SettingError(f"no setting is called {key!r}; the settings are (--set help explains them)\n{_grouped(known)}")


def _nearest(key: str, known: Mapping[str, Setting]) -> list[str]:
    names = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
    return list(dict.fromkeys(names[name] for name in get_close_matches(key, names, n=3, cutoff=0.6)))


def _grouped(known: Mapping[str, Setting]) -> str:
    """Return the names of all settings as lines of text, one group for each part of the configuration."""
    groups: dict[str, list[str]] = {}
    for name in known:
        part, _, last = name.rpartition(".")
        groups.setdefault(part, []).append(last)
    margin = max(8, *(len(part) + 2 for part in groups))
    return "\n".join(line for part, names in groups.items() for line in _wrapped(part or "others", names, margin))


def _wrapped(part: str, names: list[str], margin: int, wide: int = 76) -> Iterator[str]:
    line = f"  {part:{margin}}"
    for place, name in enumerate(names):
        more = name if place == len(names) - 1 else f"{name}, "
        if len(line) + len(more.rstrip()) > wide:
            yield line.rstrip()
            line = " " * (margin + 2)
        line += more
    yield line.rstrip()


def _complaint(error: Mapping[str, Any], known: Mapping[str, Setting]) -> str:
    """Return the message for a pydantic error: it names the setting, its expected value, and the given value."""
    path = [str(part) for part in error["loc"]]
    if error["type"] == "value_error":  # raised by a validator in `regard`, whose message already names the settings
        return _expected(error, None)
    # pydantic appends list indices to the name of a setting; they are removed
    while len(path) > 1 and ".".join(path) not in known:
        path.pop()
    setting = known.get(".".join(path))
    return f"{'.'.join(path)}: expected {_expected(error, setting)}, got {error['input']!r}"


def _expected(error: Mapping[str, Any], setting: Setting | None) -> str:
    kind, context = error["type"], error.get("ctx", {})
    number = "a number" if setting is None else setting.number
    none = " or none" if setting is not None and setting.may_be_none else ""
    if kind in _WHOLE or kind in _NUMBER:
        return number + none
    if kind in _SWITCH:
        return "true or false"
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{number} {words} {context[name]:g}{none}"
    if kind == "literal_error":
        return f"one of {context['expected'].replace(chr(39), '').replace(' or ', ', ')}"
    if kind in ("tuple_type", "list_type", "missing", "too_long", "too_short"):
        like = list(setting.value) if setting is not None and setting.value else ["…"]
        return f"a list such as {json.dumps(like, ensure_ascii=False, default=str)}"
    if kind in ("string_type", "path_type"):
        return "text"
    return error["msg"].removeprefix("Value error, ")


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree[name]
    tree[path[-1]] = value


def _value(text: str) -> Any:
    """Return the value of a text that is JSON (a number, true, null, a list), else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError also comes from integers with more than 4,300 digits
        return text
