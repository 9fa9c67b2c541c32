"""Items marked `interpreted` run in a process with Triton's interpreter; the others in a process that compiles
kernels."""

import subprocess
import sys
from pathlib import Path

import pytest

import interpreting


@pytest.mark.interpreted
def test_a_marked_item_meets_the_interpreter(tmp_path):
    from triton.runtime.interpreter import InterpretedFunction

    from regard.kernels.triton.relu_dropout import _relu_dropout

    assert isinstance(_relu_dropout, InterpretedFunction)
    assert tmp_path.is_dir()  # pytest's fixtures are available in the second process too


def test_an_unmarked_item_does_not():
    assert not interpreting.INSIDE


CASES = """
import os
import pytest

@pytest.mark.interpreted
@pytest.mark.parametrize("number", [1, 2])
def test_number(number):
    assert number == 1

@pytest.mark.interpreted
def test_skipped():
    pytest.skip("for a reason")

@pytest.mark.interpreted
def test_process_ends():
    os._exit(3)

@pytest.mark.interpreted
def test_after_it():
    assert os.environ["TRITON_INTERPRET"] == "1"
"""


@pytest.mark.process
@pytest.mark.skipif(bool(interpreting.MISSING), reason=interpreting.MISSING or "Triton is there")
def test_each_case_is_an_item_and_a_failure_names_it(tmp_path):
    for name in ("conftest.py", "interpreting.py", "forked.py", "time_limits.py"):
        (tmp_path / name).write_text((Path(__file__).parent / name).read_text())
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    interpreted\n    installed\n    cuda\nfilterwarnings = error\n"
    )
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--color=no"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    for line in (
        "PASSED test_cases.py::test_number[1]",
        "FAILED test_cases.py::test_number[2] - assert 2 == 1",
        "FAILED test_cases.py::test_process_ends - its process ended with code 3",
        "PASSED test_cases.py::test_after_it",
        "SKIPPED [1] test_cases.py:12: for a reason",
    ):
        assert line in done.stdout.splitlines(), done.stdout
    assert "2 failed, 2 passed, 1 skipped" in done.stdout
    assert done.stderr == ""
