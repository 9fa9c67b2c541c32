"""Tests of display in a notebook: pages in an iframe of their height; records, plans and heat maps directly."""

import shutil
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import regard
from regard.core.fields import as_lines
from regard.look import heatmap
from regard.look.trace import Trace
from time_limits import BROWSER_MILLISECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def trace(rows: int = 3) -> Trace:
    words = [f"word {n}" for n in range(rows)]
    return Trace.from_weights({"layer": torch.eye(rows)[None]}, rows=words, columns=words)


class Warns:
    """A replacement for `IPython.display.HTML`, which warns about iframes."""

    def __init__(self, data: str) -> None:
        if "<iframe" in data:
            warnings.warn("Consider using IPython.display.IFrame instead", stacklevel=2)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make this process look like the kernel of a notebook, and return the list of what is displayed in it."""
    displayed: list[Any] = []
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    vars(ipython)["get_ipython"] = lambda: types.SimpleNamespace(kernel=object())
    vars(display).update(display=displayed.append, HTML=Warns)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("a browser was opened"))
    return displayed


def test_show_displays_a_frame_without_a_warning(notebook: list[Any]) -> None:
    trace().show(language="zh")
    [shown] = notebook
    assert shown._repr_html_().startswith("<iframe srcdoc=")
    assert "lang=&quot;zh-CN&quot;" in shown._repr_html_()


def test_a_shell_in_a_terminal_opens_the_browser(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    opened: list[str] = []
    ipython = types.ModuleType("IPython")
    vars(ipython)["get_ipython"] = lambda: types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trace().show()
    assert len(opened) == 1


def test_a_record_shows_its_own_page() -> None:
    two = Trace.from_weights({"first": torch.eye(2)[None], "second": torch.eye(3)[None]})
    shown = two["second"]._repr_html_()
    assert shown.startswith("<iframe")
    assert shown.count("data-record=&quot;0-") == 1


def test_a_heat_map_is_text_and_shows_the_drawing() -> None:
    drawing = heatmap.svg([[0.9, 0.1]], rows=["a"], columns=["b", "c"])
    assert drawing._repr_html_() == drawing
    page = heatmap.html([[0.9, 0.1]], rows=["a"], columns=["b", "c"])
    assert page.startswith("<!doctype html>")
    assert page._repr_html_() == drawing.strip()


def test_a_plan_is_a_line_for_each_field_and_each_reason() -> None:
    x = torch.zeros(4, 8)
    plan = regard.explain(x, x, x, score=lambda q, k: q @ k.mT)
    lines = str(plan).splitlines()
    assert lines[0] == "Plan"
    assert lines[1].split() == ["backend", plan.backend]
    for name, reason in plan.refused.items():
        assert any(line.strip().removeprefix("refused").strip() == f"{name}: {reason}" for line in lines)
    assert repr(plan) == str(plan)
    table = plan._repr_html_()
    assert table.startswith("<table>")
    assert table.count("<tr>") == len(plan.__dataclass_fields__)


def test_any_field_is_printed() -> None:
    @dataclass
    class Cost:
        backend: str
        kernel: str | None
        refused: dict[str, str]
        flops: int

    assert as_lines(Cost("sdpa", None, {}, 1234567)).splitlines() == [
        "Cost",
        "  backend  sdpa",
        "  kernel   None",
        "  refused  none",
        "  flops    1,234,567",
    ]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="NO CHROMIUM: the height of a frame was not tested in a browser")
@pytest.mark.parametrize("rows", [3, 24])
def test_the_frame_becomes_as_high_as_the_page(rows: int, tmp_path: Any) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><p>above</p>{trace(rows)._repr_html_()}<p>below</p>", encoding="utf-8")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 900, "height": 700})
        tab.set_default_timeout(BROWSER_MILLISECONDS)
        tab.goto(file.as_uri())
        inside = next(frame for frame in tab.frames if frame != tab.main_frame)
        inside.wait_for_selector("canvas")
        tab.wait_for_function(
            """() => new Promise((done) => {
                const frame = document.querySelector("iframe"), height = frame.style.height;
                setTimeout(() => done(height === frame.style.height), 200);
            })"""
        )
        given = tab.evaluate("document.querySelector('iframe').clientHeight")
        needed = inside.evaluate("document.documentElement.offsetHeight")
        scrolls = inside.evaluate("document.documentElement.scrollHeight > innerHeight")
        browser.close()
    assert needed <= given <= needed + 4
    assert not scrolls
