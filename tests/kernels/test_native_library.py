"""Extension modules compiled from C: loaded from the cache, compiled only if wanted, refused from an unsafe folder."""

import logging
import shutil
import sys
from pathlib import Path

import pytest

from regard.kernels.native_library import compiler, extension

PACKAGE, NAME = "regard.core", "recent_calls.c"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the compiled module; skip where nothing can be compiled."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_CACHE", str(folder))
        if extension(PACKAGE, NAME, compiles=True) is None:
            pytest.skip("no C compiler, or no headers of Python")
    (module,) = (folder / "native").iterdir()
    return module


@pytest.fixture
def built(compiled_once: Path, cache: Path) -> Path:
    """Return the path of the compiled module in this test's cache."""
    cache.mkdir(parents=True, mode=0o700)
    return Path(shutil.copy(compiled_once, cache / compiled_once.name))


def test_nothing_is_compiled_unless_wanted(cache: Path) -> None:
    assert extension(PACKAGE, NAME, compiles=False) is None
    assert not cache.exists() or not list(cache.iterdir())


def test_a_compiled_module_is_loaded_again_without_compiling(built: Path, cache: Path) -> None:
    before = built.stat().st_mtime_ns
    module = extension(PACKAGE, NAME, compiles=False)
    assert module is not None
    assert callable(module.call)
    assert module.__name__ not in sys.modules
    assert module.__name__.rpartition(".")[2] not in sys.modules
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]


@pytest.mark.parametrize("of", ["folder", "file"])
def test_a_path_that_others_may_write_is_refused(built: Path, of: str, caplog: pytest.LogCaptureFixture) -> None:
    (built if of == "file" else built.parent).chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="regard"):
        assert extension(PACKAGE, NAME, compiles=True) is None
    assert "others may write it" in caplog.text


def test_without_a_compiler_there_is_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.kernels.native_library.compiler", lambda: None)
    assert extension(PACKAGE, NAME, compiles=True) is None


def test_functions_refuse_wrong_arguments(built: Path) -> None:
    module = extension(PACKAGE, NAME, compiles=False)
    assert module is not None
    with pytest.raises(TypeError, match="tuple"):
        module.store([])
    with pytest.raises(TypeError, match="lacks fields"):
        module.store(((1, 2),))
    with pytest.raises(TypeError, match="9 arguments"):
        module.call(1, 2)


def test_the_compiler_is_found_where_one_is_installed() -> None:
    found = compiler()
    assert found is None or Path(found).exists()
