"""Shapes and types of the library are checked in every test; hypothesis repeats itself; random numbers are seeded."""

from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest
import torch

# Nothing above imports the library: from here on, its modules are checked as they load. On a CUDA machine they are
# not: FlexAttention compiles the library's own rules for a pair, and would have to compile the checks inside them.
if not torch.cuda.is_available():
    jaxtyping.install_import_hook("regard", "beartype.beartype")

hypothesis.settings.register_profile(
    "regard", derandomize=True, deadline=None, max_examples=60, database=None, print_blob=False
)
hypothesis.settings.load_profile("regard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
