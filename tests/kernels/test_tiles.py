"""Tile sizes of kernels: measured on request, or read from a cache file; a broken cache causes no error."""

import json
import logging
from pathlib import Path

import pytest

from regard.kernels.additive import autotuning


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "caches"))
    monkeypatch.delenv("REGARD_AUTOTUNE", raising=False)


def refuse(number: int) -> float:
    raise AssertionError(f"choice {number} was measured, and nobody asked")


def test_default_unless_asked() -> None:
    chosen = autotuning.Tiles()
    assert chosen.choose("n 64", "a device", ["a", "b"], refuse) == 0
    assert chosen.known("n 64") == 0
    assert chosen.known("n 128") is None
    assert not autotuning.path().exists()


def test_measured_once_then_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_AUTOTUNE", "1")
    times = {0: 3.0, 1: 1.0, 2: 2.0}
    assert autotuning.Tiles().choose("n 64", "a device", ["a", "b", "c"], times.__getitem__) == 1
    monkeypatch.delenv("REGARD_AUTOTUNE")
    later = autotuning.Tiles()
    assert later.choose("n 64", "a device", ["c", "b", "a"], refuse) == 1
    assert later.choose("n 64", "another device", ["a", "b"], refuse) == 0
    assert later.choose("n 65", "a device", ["a", "b"], refuse) == 0


def test_a_choice_that_does_not_run_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_AUTOTUNE", "1")

    def measure(number: int) -> float:
        if number == 1:
            raise RuntimeError("out of shared memory")
        return 2.0 - number

    assert autotuning.Tiles().choose("n 64", "a device", ["a", "b", "c"], measure) == 2


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": '])
def test_a_broken_file_is_passed_over(text: str, caplog: pytest.LogCaptureFixture) -> None:
    autotuning.path().parent.mkdir(parents=True)
    autotuning.path().write_text(text)
    with caplog.at_level(logging.WARNING, logger="regard"):
        assert autotuning.Tiles().choose("n 64", "a device", ["a"], refuse) == 0
    assert "cannot be read" in caplog.text
    autotuning.store("x", "a")
    assert autotuning.stored() == {"x": "a"}


def test_the_file_stays_small() -> None:
    autotuning.path().parent.mkdir(parents=True)
    autotuning.path().write_text(json.dumps({str(n): "a" for n in range(2000)}))
    autotuning.store("new", "b")
    assert len(autotuning.stored()) == 512
    assert autotuning.stored()["new"] == "b"
    assert [p.name for p in autotuning.path().parent.iterdir()] == ["additive.json"]


def test_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setenv("REGARD_AUTOTUNE", "1")
    with caplog.at_level(logging.WARNING, logger="regard"):
        assert autotuning.Tiles().choose("n 64", "a device", ["a", "b"], lambda number: 1.0 - number) == 1
    assert "could not write" in caplog.text
