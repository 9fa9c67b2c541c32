"""Shapes and types of the library are checked in every test; hypothesis repeats itself; random numbers are seeded."""

from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest
import torch

import interpreting

# Nothing above imports the library: from here on, its modules are checked as they load. On a CUDA machine they are
# not: FlexAttention compiles the library's own rules for a pair, and would have to compile the checks inside them.
# Nor under Triton's interpreter, which runs kernels from their source.
if not torch.cuda.is_available() and not interpreting.INSIDE:
    jaxtyping.install_import_hook("regard", "beartype.beartype")

hypothesis.settings.register_profile(
    "regard",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # as slow as the machine is
)
hypothesis.settings.load_profile("regard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("interpreted") and interpreting.MISSING:
            item.add_marker(pytest.mark.skip(reason=interpreting.MISSING))


INTERPRETER = pytest.StashKey[interpreting.Interpreter]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[INTERPRETER] = interpreting.Interpreter(config)
    config.add_cleanup(config.stash[INTERPRETER].close)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Items marked `interpreted` run in the process of Triton's interpreter; here they are only reported."""
    if interpreting.INSIDE or interpreting.MISSING or not item.get_closest_marker("interpreted"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in item.config.stash[INTERPRETER].run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(2018)


@pytest.fixture
def as_installed() -> Iterator[None]:
    """The library as its users have it, without the checks of shapes and types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many combinations agreed with the oracle, and how closely; reports bring it from any worker."""
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
