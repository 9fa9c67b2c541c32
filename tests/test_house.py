"""The structure of the code: which folder may import which, what an import loads, and the list of public names."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "regard"
MODULES = sorted(PACKAGE.rglob("*.py"))

# The folders of regard as layers, from top to bottom. A layer may import the layers below it, and its own modules.
FLOORS = ["cli", "studio", "bench", "tasks", "train decode data", "models", "look", "nn", "parallel", "core", "kernels"]
# The folders train, decode and data take callables and records instead of models; look imports core, but not nn.
NARROWER = {"train": {"kernels"}, "decode": {"kernels"}, "data": {"kernels"}, "look": {"core", "kernels"}}

# A module of Triton kernels imports Triton at its top, so it must be imported inside of functions.
KERNELS = [path for path in MODULES if "triton" in path.relative_to(PACKAGE).parts and path.name != "__init__.py"]

PUBLIC = [
    *("attention", "explain", "Attended", "Plan", "linear_attention", "PerformerFeatures", "EluFeatures"),
    *("Score", "Dot", "ScaledDot", "Cosine", "Bilinear", "Additive"),
    *("Normalizer", "Softmax", "Sparsemax", "Entmax", "Sigmoid", "Hard", "reinforce", "Reinforced"),
    *("Mask", "causal", "window", "padding", "segments", "dense"),
    *("Bias", "alibi", "relative"),
    *("Request", "Top", "full", "rows", "top", "received", "entropy", "logsumexp", "merge"),
    *("watch", "Trace", "Record", "Labels", "load"),
]
FOLDERS = ["nn", "models", "parallel"]


def may_import(floor: str) -> set[str]:
    level = next(level for level, rooms in enumerate(FLOORS) if floor in rooms.split())
    below = {room for rooms in FLOORS[level + 1 :] for room in rooms.split()}
    return NARROWER.get(floor, below) | {floor}


def name_of(path: Path) -> list[str]:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield the full names of every module that the statements of a tree may import; `from a import b` may mean
    a.b."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def at_import(tree: ast.Module) -> ast.Module:
    """Return the statements that run when a module is imported: no function bodies, no `if TYPE_CHECKING` blocks."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

        def visit_If(self, node):
            if ast.unparse(node.test) == "TYPE_CHECKING":
                return node.orelse
            return self.generic_visit(node)

    return Strip().visit(tree)


def floor_of(name: str) -> str | None:
    """Return the layer (top folder) of a dotted name; None for `regard` itself, whose names all come from core."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else None


def top_packages(path: Path, tree: ast.AST) -> set[str]:
    """Return the packages outside the standard library that the statements of a tree import."""
    return {name.split(".")[0] for name in imports(path, tree)} - sys.stdlib_module_names - {"regard"}


def named(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: ".".join(name_of(path)))


# The package itself and `python -m regard` may import every layer.
@named([path for path in MODULES if path.parent != PACKAGE])
def test_imports_go_downwards(path):
    home = name_of(path)[1]
    names = [name for name in imports(path, ast.parse(path.read_text())) if name.split(".")[0] == "regard"]
    wanted = {floor_of(name) or "core" for name in names}
    assert wanted <= may_import(home), f"{home} may import {sorted(may_import(home))}"


@named(sorted((PACKAGE / "core").rglob("*.py")))
def test_core_stands_on_torch_alone(path):
    names = list(imports(path, ast.parse(path.read_text())))
    # The package `regard` imports core, so core must not import it.
    assert all(floor_of(name) in ("core", "kernels") for name in names if name.split(".")[0] == "regard")
    # numpy comes with torch, and jaxtyping is the notation of shapes.
    assert top_packages(path, ast.parse(path.read_text())) <= {"torch", "numpy", "jaxtyping"}


@named(sorted((PACKAGE / "kernels").rglob("*.py")))
def test_kernels_know_tensors_alone(path):
    tree = ast.parse(path.read_text())
    assert all(floor_of(name) == "kernels" for name in imports(path, tree) if name.split(".")[0] == "regard")
    triton = {"triton"} if path in KERNELS else set()
    assert top_packages(path, tree) <= {"torch", "numpy", "jaxtyping"} | triton


def test_every_folder_is_a_known_floor():
    floors = {room for rooms in FLOORS for room in rooms.split()}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= floors


# Folders of regard that may have modules of the same name for one mechanism, such as `core/linear.py` and
# `nn/linear.py`.
LAYERED = {"core", "nn", "parallel", "kernels"}
TASK_FOLDERS = sorted(path.parent for path in (PACKAGE / "tasks").glob("*/__init__.py"))
DESCRIBED = sorted(
    path.parent
    for path in PACKAGE.rglob("__init__.py")
    if path.parent not in (PACKAGE, *TASK_FOLDERS) and name_of(path)[1] not in {*LAYERED, "decode"}
)


@pytest.mark.parametrize("folder", DESCRIBED, ids=lambda folder: ".".join(folder.relative_to(PACKAGE).parts))
def test_a_folder_lists_its_files(folder):
    about = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {path for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"} - {*TASK_FOLDERS}
    assert set(re.findall(r"^- `([\w/]+)`:", about, re.M)) == files | {f"{path.name}/" for path in folders}


@pytest.mark.parametrize("folder", TASK_FOLDERS, ids=lambda folder: folder.name)
def test_a_task_lists_the_files_that_others_do_not_have(folder):
    about = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    shared = {"task", "config", "presets", "material", "codec", "network", "predictor", "scoring"}
    assert files == shared | set(re.findall(r"^- `(\w+)`:", about, re.M))


def test_a_file_name_occurs_once():
    homes: dict[str, set[str]] = {}
    for path in MODULES:
        if path.parent not in (PACKAGE, *TASK_FOLDERS) and path.stem != "__init__":
            homes.setdefault(path.stem, set()).add(str(path.parent.relative_to(PACKAGE)))
    assert not {
        name: folders
        for name, folders in homes.items()
        if len(folders) > 1 and not {folder.split("/")[0] for folder in folders} <= LAYERED
    }


@named([path for path in MODULES if path not in KERNELS])
def test_optional_packages_are_imported_where_used(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    tree = at_import(ast.parse(path.read_text()))
    assert top_packages(path, tree) <= required
    kernels = {".".join(name_of(kernel)) for kernel in KERNELS}
    assert not [name for name in imports(path, tree) if name in kernels or name.rpartition(".")[0] in kernels]


@pytest.mark.process
def test_importing_the_package_imports_no_torch():
    code = "import sys, regard; dir(regard); {}; print('torch' in sys.modules)"
    for use, expected in {"regard.__version__": "False", "regard.Dot": "True"}.items():
        done = subprocess.run([sys.executable, "-c", code.format(use)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_the_public_names_are_these():
    assert sorted(regard.__all__) == sorted([*PUBLIC, *FOLDERS, "__version__"]) == dir(regard)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_what_its_module_defines(name):
    found = getattr(regard, name)
    assert found.__name__ == name
    assert found.__module__.startswith(("regard.core.", "regard.look.", "regard.tasks."))
    assert found.__doc__, f"regard.{name} has no docstring"


@pytest.mark.parametrize("folder", FOLDERS)
def test_layers_and_models_are_listed(folder):
    home = getattr(regard, folder)
    assert dir(home) == sorted(home.__all__) == sorted(home._HOME)
    for name in home.__all__:
        found = getattr(home, name)
        assert found.__module__.startswith(f"regard.{folder}."), name
        assert found.__doc__, f"regard.{folder}.{name} has no docstring"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        home.nothing  # noqa: B018


@pytest.mark.parametrize(
    "package", [regard, regard.nn, regard.models, regard.parallel], ids=lambda package: package.__name__
)
def test_checkers_see_the_same_names(package):
    """Compares the imports under `if TYPE_CHECKING`, which are written by hand, with the list of public names."""
    [block] = [
        node
        for node in ast.parse(Path(package.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    declared = {alias.asname: statement.module for statement in block.body for alias in statement.names}
    whole = (*getattr(package, "_FOLDERS", ()), *getattr(package, "_MODULES", ()))
    assert declared == {**package._HOME, **dict.fromkeys(whole, package.__name__)}


@pytest.mark.process
def test_every_folder_is_found_by_its_name():
    """This runs in a separate process, because the test process has already imported the folders."""
    names = ["bench", "cli", "core", "data", "decode", "look", "nn.losses", "studio", "tasks", "train"]
    code = f"import regard; print(*({', '.join(f'regard.{name}.__name__' for name in names)},))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [f"regard.{name}" for name in names], done.stderr


@pytest.mark.process
def test_an_unknown_name_is_refused_with_a_suggestion():
    code = "import regard; regard.atention"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "module 'regard' has no attribute 'atention'. Did you mean: 'attention'?" in done.stderr
