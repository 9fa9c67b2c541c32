"""The reference has every public name, with its methods, parameters and a tested example, and nothing private."""

import ast
import doctest
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import regard
from regard import models, nn, parallel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").glob("*.md")}
TOLD = tomllib.loads((ROOT / "tools/reference.toml").read_text(encoding="utf-8"))
ENTRIES = re.findall(r"^::: (regard\.[\w.]+)((?:\n {4,}.*)*)", "\n".join(PAGES.values()), re.MULTILINE)
# Which methods of each name the reference page lists: all, none, or some.
SHOWN = {name: re.search(r"members: (.*)", options) for name, options in ENTRIES}
PUBLIC = [
    *(f"regard.{name}" for name in regard.__all__ if name not in ("__version__", "nn", "models", "parallel")),
    *(f"{folder.__name__}.{name}" for folder in (nn, models, parallel) for name in folder.__all__),
]
HIDDEN = ("self", "cls", "unknown", "args", "kwargs")


def found(path: str) -> Any:
    """Return the object of a dotted name."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(path)


def functions(path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield a function, or a class's constructor and methods, each with its key in tools/reference.toml."""
    thing = found(path)
    if inspect.isfunction(thing):
        yield path.rpartition(".")[2], thing
    if not inspect.isclass(thing):
        return
    if "__init__" in vars(thing) and not getattr(thing, "_is_protocol", False):
        yield thing.__name__, vars(thing)["__init__"]
    some = SHOWN.get(path)
    for name, member in vars(thing).items():
        inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        shown = (
            not name.startswith("_") and name != "extra_repr" if some is None else name in re.findall(r"\w+", some[1])
        )
        if shown and inspect.isfunction(inner):
            yield f"{thing.__name__}.{name}", inner


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_entry_and_is_listed(name: str) -> None:
    assert [entry for entry, _ in ENTRIES].count(name) == 1
    assert f"#{name})" in PAGES["index"]


@pytest.mark.parametrize("name", [name for name, _ in ENTRIES if not inspect.ismodule(found(name))])
def test_an_entry_has_a_text_parameters_and_an_example(name: str) -> None:
    thing = found(name)
    own = thing.__doc__ if not inspect.isclass(thing) else vars(thing).get("__doc__")
    assert own
    assert not own.startswith(f"{thing.__name__}("), "the text that dataclasses make is no text"
    key = f"parallel.{thing.__name__}" if name.startswith("regard.parallel.") else thing.__name__
    assert ">>>" in own or key in TOLD["examples"] or key in TOLD["programs"], "no example"
    for called, function in functions(name):
        assert function.__doc__ or function.__name__ == "__init__", f"{called} has no text"
        told = TOLD["everywhere"] | TOLD["parameters"].get(called, {})
        missing = [each for each in inspect.signature(function).parameters if each not in told and each not in HIDDEN]
        assert not missing, f"{called}: nothing is said of {missing} in tools/reference.toml"


@pytest.mark.parametrize("name", PUBLIC)
def test_no_default_of_a_public_signature_is_private(name: str) -> None:
    for called, function in functions(name):
        # The constructor of a dataclass is generated, with the defaults of its fields.
        if function.__name__ == "__init__" and is_dataclass(found(name)):
            continue
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        arguments = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)).args
        defaults = [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]
        names = {node.id for default in defaults for node in ast.walk(default) if isinstance(node, ast.Name)}
        assert not [each for each in names if each.startswith("_")], called


@pytest.mark.parametrize("name", TOLD["examples"])
def test_an_example_of_the_reference_runs(name: str) -> None:
    test = doctest.DocTestParser().get_doctest(TOLD["examples"][name], {}, name, "tools/reference.toml", 0)
    complaints: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(test, out=complaints.append)
    assert not complaints, "".join(complaints)


def test_what_is_described_exists() -> None:
    """Fails if tools/reference.toml describes a name that was renamed or removed."""
    called = {key for name, _ in ENTRIES for key, _ in functions(name)}
    called |= {name.rpartition(".")[2] for name, _ in ENTRIES}
    called |= {f"parallel.{name}" for name in parallel.__all__}
    described = {*TOLD["parameters"], *TOLD["formulas"], *TOLD["examples"], *TOLD["programs"]}
    assert sorted(described - called) == []
