"""Fixtures of all tests: shapes and types of the library are checked at run time; random numbers are seeded."""

import gc
import importlib.util
import os
from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest
import torch

import forked
import interpreting

# torch.compile uses one thread, because each of its worker processes would import torch for only a few kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Tests have one thread unless the environment sets another number: so do the processes that they start, and the bits of
# torch's sums depend on the number of threads.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)

# No import above loads the library, so the checks are added to all its modules. There are three exceptions: a
# CUDA machine, where FlexAttention would have to compile the checks; Triton's interpreter, which runs kernels from
# their source; and items for which torch.compile traces the library.
if not torch.cuda.is_available() and not interpreting.INSIDE and not interpreting.INSTALLED:
    # The packages of regard with tensor shapes in their annotations.
    shaped = ("core", "decode", "kernels", "models", "nn", "parallel")
    jaxtyping.install_import_hook([f"regard.{name}" for name in shaped], "beartype.beartype")

hypothesis.settings.register_profile(
    "regard",
    derandomize=True,
    deadline=None,
    max_examples=40,
    database=None,
    print_blob=False,
    # hypothesis's check of slow tests is off: a test must not fail because the machine is slow.
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("regard")


# This script imports playwright, so pytest can collect its doctests only where playwright is installed.
collect_ignore = [] if importlib.util.find_spec("playwright") else ["studio/take_screenshots.py"]


# This hook runs before pytest selects items by their marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)
        if item.get_closest_marker("interpreted") and interpreting.MISSING:
            item.add_marker(pytest.mark.skip(reason=interpreting.MISSING))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # test items and modules exist until the end, so the garbage collector need not visit them


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # some C extensions report objects that are not collected at exit


APART = pytest.StashKey[dict[str, interpreting.Apart]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[APART] = {kind: interpreting.Apart(config, kind) for kind in interpreting.ENVIRONMENTS}
    for process in config.stash[APART].values():
        config.add_cleanup(process.close)
    config.add_cleanup(forked.close)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run items marked `interpreted` or `installed` in a second process, and report their results in this one."""
    kind = next((kind for kind in interpreting.ENVIRONMENTS if item.get_closest_marker(kind)), "")
    inside = {"interpreted": interpreting.INSIDE or interpreting.MISSING, "installed": interpreting.INSTALLED}
    if not kind or inside[kind]:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in item.config.stash[APART][kind].run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)  # this call tears down the module's fixtures after its last item
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(2018)


@pytest.fixture
def as_installed() -> Iterator[None]:
    """Disables the run-time checks of shapes and types, which an installed library does not have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many combinations of mechanisms agreed with the oracle, and the largest error, over all workers."""
    measured: dict[str, list[float]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "combination":
                dtype, error = value
                measured.setdefault(dtype, []).append(error)
    if measured:
        errors = ", ".join(f"{dtype} {max(errors):.1e}" for dtype, errors in sorted(measured.items(), reverse=True))
        count = max(map(len, measured.values()))
        terminalreporter.write_line(f"combinations: {count}, largest error {errors}")
