"""C files of this package as shared libraries or extension modules: compiled once for each machine, then loaded from
the user's cache.

The C files include no header of torch, so compiling takes a second; a later process loads the library in milliseconds.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from importlib import resources
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_log = logging.getLogger("regard")
# -ffast-math is not used: linking with it would flush subnormal numbers to 0 in the whole process. If torch has loaded
# libgomp, the library uses that copy for OpenMP, and shares its thread pool with torch.
_OPENMP = "-fopenmp"
_HEADERS = ("vectors.h", "bfloat16.h", "regions.h")  # their text precedes the files of a `library`
_FLAGS = ("-O3", "-march=native", "-std=c11", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math")
_EXTENSION_FLAGS = ("-O2", "-std=c11", "-fPIC", "-shared", "-pthread")


@functools.cache
def compiler() -> str | None:
    """Return the path of a C compiler, or None if none is installed."""
    names = (os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """Return the cache folder: `REGARD_CACHE`, else `regard` in the user's cache folder."""
    if chosen := os.environ.get("REGARD_CACHE"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "regard"


@functools.cache
def library(package: str, *names: str) -> ctypes.CDLL | None:
    """Return the C files `names` of a package, joined in this order, as one loaded library.

    Return None if there is no C compiler or the system is not Linux; if compiling fails, return None and log a warning.
    """
    path = compiler()
    if path is None or platform.system() != "Linux":
        return None
    flags = (_OPENMP, *_FLAGS)
    headers = [resources.files("regard.kernels").joinpath(header) for header in _HEADERS]
    files = (*headers, *(resources.files(package).joinpath(name) for name in names))
    source = b"".join(file.read_bytes() for file in files)
    try:
        return ctypes.CDLL(str(_compiled(path, source, Path(names[-1]).stem, flags)))
    # RuntimeError: the compiler reports errors, or the user has no home directory.
    except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
        _log.warning("%s cannot be compiled, slower code runs in its place: %s", names[-1], problem)
        return None


def extension(package: str, name: str, *, compiles: bool) -> ModuleType | None:
    """Return the C file `name` of a package as a loaded extension module of Python.

    Return None if it cannot be compiled, as without Python's headers, if Python runs without its global lock, or if the
    cache does not have the module and `compiles` is False.
    """
    path, headers = compiler(), sysconfig.get_paths()["include"]
    if path is None or platform.system() != "Linux" or not Path(headers, "Python.h").exists():
        return None
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # importing the module would enable the lock
        return None
    source, stem = resources.files(package).joinpath(name).read_bytes(), Path(name).stem
    try:
        built = _compiled(path, source, stem, (*_EXTENSION_FLAGS, f"-I{headers}"), compiles=compiles)
        # Python derives the name of the initialisation function from the part of the name after the last dot.
        loader = ExtensionFileLoader(f"{package}._compiled.{stem}", str(built))
        spec = spec_from_file_location(loader.name, built, loader=loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
        return module
    except _NotCompiledError:
        return None
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as problem:
        level = logging.WARNING if compiles else logging.DEBUG
        _log.log(level, "%s cannot be compiled, slower code runs in its place: %s", name, problem)
        return None


class _NotCompiledError(Exception):
    """Raised if the cache has no library compiled from a C file, and it is not to be compiled now."""


def _compiled(compiler_path: str, source: bytes, stem: str, flags: tuple[str, ...], *, compiles: bool = True) -> Path:
    """Return the path of the shared library, compiled if the cache has none for this compiler, source and processor."""
    version = subprocess.run([compiler_path, "--version"], capture_output=True, check=True, timeout=600).stdout
    parts = (source, version, " ".join(flags).encode(), _processor())
    folder = cache_folder() / "native"
    target = folder / f"{stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:32]}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_foreign(folder)
    if target.exists():
        _refuse_foreign(target)
        return target
    if not compiles:
        raise _NotCompiledError
    with tempfile.TemporaryDirectory(dir=folder) as room:
        written, built = Path(room) / f"{stem}.c", Path(room) / f"{stem}.so"
        written.write_bytes(source)
        command = [compiler_path, *(flag for flag in flags if flag != _OPENMP), str(written), "-o", str(built)]
        openmp = [_OPENMP] if _OPENMP in flags else []
        done = subprocess.run([*command, *openmp], capture_output=True, text=True, timeout=600)
        if done.returncode and openmp:  # the compiler may lack OpenMP; without OpenMP the library runs on one thread
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"{compiler_path} ended with code {done.returncode}")
        os.replace(built, target)  # renaming is atomic, so no other process loads a partial file
    return target


def _refuse_foreign(path: Path) -> None:
    """Raise OSError if the path belongs to another user or others can write to it, because code is loaded from it."""
    facts = path.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{path} belongs to another user, or others may write it")


def _processor() -> bytes:
    """Return the line of processor features in /proc/cpuinfo, on which -march=native depends; without this file, return
    the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
