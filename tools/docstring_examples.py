"""Additions to docstrings in the API reference: parameters and formulas from `reference.toml`, examples as code."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

_TOLD = tomllib.loads(Path(__file__).with_name("reference.toml").read_text(encoding="utf-8"))
# Parameters without a description; `unknown` collects arguments of PyTorch's function, for which an error is raised.
_HIDDEN = ("self", "cls", "unknown", "args", "kwargs")


class DocstringExamples(griffe.Extension):
    """Puts a code fence around every paragraph that starts with `>>>`, and adds formulas and parameters.

    Markdown would parse `>>>` as nested quotations.
    """

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(
                f"```pycon\n{paragraph}\n```" if paragraph.startswith(">>>") else paragraph for paragraph in paragraphs
            )

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for obj in _all(pkg):
            if obj.docstring is not None and not obj.name.startswith("_"):
                _complete(obj)


def _all(obj: griffe.Object) -> Iterator[griffe.Object]:
    for member in obj.members.values():
        if not isinstance(member, griffe.Alias):
            yield member
            if isinstance(member, (griffe.Module, griffe.Class)):
                yield from _all(member)


def _complete(obj: griffe.Object) -> None:
    """Insert the formula after the first paragraph, the parameters before the first example, and an example if the
    docstring has none.
    """
    assert obj.docstring is not None
    parent = obj.parent
    key = f"{parent.name}.{obj.name}" if isinstance(parent, griffe.Class) else obj.name
    shown = f"parallel.{obj.name}" if obj.path.startswith("regard.parallel.") else key
    first, *rest = obj.docstring.value.split("\n\n")
    formula = _TOLD["formulas"].get(shown)
    if formula is not None:
        first += f"\n\n$$\n{formula.strip()}\n$$"
    function = obj.members.get("__init__") if isinstance(obj, griffe.Class) else obj
    if isinstance(function, griffe.Function):
        if "unknown" in function.parameters:
            del function.parameters["unknown"]
        names = [parameter.name.lstrip("*") for parameter in function.parameters]
        lines = [
            f"    {name}: {described(key, name)}" for name in names if name not in _HIDDEN and described(key, name)
        ]
        if lines:
            place = next((n for n, paragraph in enumerate(rest) if paragraph.startswith("```pycon")), len(rest))
            rest.insert(place, "\n".join(["Args:", *lines]))
    for language, examples in (("pycon", _TOLD["examples"]), ("python", _TOLD["programs"])):
        if shown in examples:
            rest.append(f"```{language}\n{examples[shown].strip()}\n```")
    obj.docstring.value = "\n\n".join([first, *rest])


def described(key: str, name: str) -> str | None:
    """Return the description of a parameter: that of this class or function, else that of the name in `everywhere`."""
    own = _TOLD["parameters"].get(key, {}).get(name)
    return own if own is not None else _TOLD["everywhere"].get(name)
