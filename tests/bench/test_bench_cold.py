"""`regard bench cold`: for each mechanism, a new process runs a first call and reports its time in seconds."""

import pytest

from regard.bench import cold_start


@pytest.mark.parametrize("name", ["padding", "additive, training", "linear, Performer, causal"])
def test_a_first_call(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cold_start.main(name, "cpu")
    assert float(capsys.readouterr().out) > 0.0
