"""`regard bench layers`: the number of layers between two positions, against known counts; the record, its tables and
its figure. No test depends on measured times."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import typer
from torch import nn

from regard.bench import layers_bench
from regard.bench import line_chart as curves
from regard.bench.layer_kinds import KINDS, Convolution, Formed, Met, Setting, meet
from regard.nn.multihead import MultiHeadAttention
from time_limits import HANG_SECONDS

BY_NAME = {kind.name: kind for kind in KINDS}
SMALL = Setting(size=8, kernel=3, reach=2)


@pytest.mark.parametrize(
    ("name", "length", "met"),
    [
        ("self-attention", 11, Met(1, 1)),
        ("self-attention, matrix formed", 11, Met(1, 1)),
        ("linear attention", 11, Met(1, 1)),
        ("recurrent (GRU)", 11, Met(1, 11)),
        # Each query attends to its own position and two positions on each side.
        ("restricted self-attention", 3, Met(1, 1)),
        ("restricted self-attention", 4, Met(2, 2)),
        ("restricted self-attention", 11, Met(5, 5)),
        ("convolution", 3, Met(1, 1)),  # a causal convolution with a kernel of size 3 depends on two earlier positions
        ("convolution", 4, Met(2, 2)),
        ("convolution", 12, Met(6, 6)),
        # Stacked layers with dilations 1, 3 and 9 depend on 2, 2 + 6 and 2 + 6 + 18 earlier positions.
        ("dilated convolution", 3, Met(1, 1)),
        ("dilated convolution", 4, Met(2, 2)),
        ("dilated convolution", 9, Met(2, 2)),
        ("dilated convolution", 10, Met(3, 3)),
        ("dilated convolution", 27, Met(3, 3)),
    ],
)
def test_steps_worked_by_hand(name, length, met):
    assert meet(BY_NAME[name], length, SMALL) == met


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("length", [1, 2, 97])
def test_the_probe_counts_what_the_formula_says(kind, length):
    setting = Setting(size=8, kernel=5, reach=7)
    assert meet(kind, length, setting).steps == kind.expected(length, setting)


def test_a_change_that_fades_still_counts():
    """A changed input is detected after 40 layers that scale by 10⁻⁹; rounding would hide it after three layers."""

    class Faint(nn.Module):
        def forward(self, x):
            return torch.cat((x[:, :1], x[:, :-1]), 1) * 1e-9

    kind = replace(BY_NAME["convolution"], make=lambda setting, depth: Faint())
    assert meet(kind, 41, SMALL) == Met(40, 40)


def test_ends_that_never_meet_are_reported():
    kind = replace(BY_NAME["convolution"], make=lambda setting, depth: nn.Identity())
    with pytest.raises(ValueError, match=r"convolution: the ends of 5 positions do not meet in 5 layers"):
        meet(kind, 5, SMALL)


def test_the_matrix_formed_is_the_same_attention():
    formed, fused = Formed(12, 3).double(), MultiHeadAttention(12, 3).double()
    fused.load_state_dict(formed.state_dict())
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    torch.testing.assert_close(formed(x), fused(x).output)


@pytest.mark.parametrize("dilation", [1, 2, 5])
def test_a_convolution_reads_its_own_position_and_those_before(dilation):
    layer, x = Convolution(2, 3, dilation).double(), torch.randn(1, 13, 2, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    assert output.shape == x.shape
    output[0, 11].sum().backward()
    assert x.grad is not None
    assert x.grad[0].any(-1).nonzero().flatten().tolist() == [11 - 2 * dilation, 11 - dilation, 11]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """Run the benchmark on a tiny scale; return the record printed as JSON, and the path of the page that it wrote."""
    folder = tmp_path_factory.mktemp("layers")
    (folder / "docs").mkdir()
    (folder / "docs" / "layers.md").write_text("# Ours\n\n<!-- cpu -->\nold\n<!-- end -->\n\nThe end.\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "regard", "bench", "layers", "--device", "cpu", "--lengths", "16,7"),
            *("--size", "8", "--kernel", "3", "--reach", "2", "--json", "--out", "docs"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder / "docs" / "layers.md"  # standard output is the JSON alone


@pytest.mark.process
def test_the_record_has_every_kind_at_every_length(measured):
    record, _ = measured
    assert record["bench"] == "layers"
    assert record["lengths"] == [7, 16]
    assert record["setting"] == {"size": 8, "kernel": 3, "reach": 2, "heads": 1, "dtype": "float32"}
    assert [kind["name"] for kind in record["kinds"]] == [*BY_NAME]
    for kind in record["kinds"]:
        assert [point["length"] for point in kind["points"]] == [7, 16]
        for point in kind["points"]:
            assert point["steps"] == point["expected"]
            assert point["reason"] is None
            assert point["forward"] > 0
            assert point["stack"] == pytest.approx(point["training"] * point["layers"])
            assert point["memory"] >= 0 if sys.platform == "linux" else point["memory"] is None


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("self-attention", 4 * (8 * 8 + 8)),
        ("linear attention", 4 * (8 * 8 + 8)),
        ("recurrent (GRU)", 6 * (8 * 8 + 8)),
        ("convolution", 3 * 8 * 8 + 8),
    ],
)
def test_parameters_are_counted(measured, name, parameters):
    [kind] = [kind for kind in measured[0]["kinds"] if kind["name"] == name]
    assert kind["parameters"] == parameters


@pytest.mark.process
@pytest.mark.parametrize("figure", [*layers_bench.FIGURES])
def test_the_tables_are_on_the_screen_and_on_the_page(measured, figure, capsys, monkeypatch):
    record, page = measured
    monkeypatch.setenv("COLUMNS", "200")
    layers_bench.show(record)
    printed, text = capsys.readouterr().out, page.read_text(encoding="utf-8")
    # Whitespace is joined, because the terminal output breaks long titles into lines.
    assert layers_bench.FIGURES[figure][0] in " ".join(printed.split())
    for row in layers_bench.rows(record, figure):
        assert f"| {' | '.join(row)} |" in text


@pytest.mark.process
def test_the_rest_of_the_page_stays(measured):
    record, page = measured
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Ours\n")
    assert text.endswith("The end.\n")
    assert "old" not in text
    assert (
        layers_bench.write(record, page.parent)[0].read_text(encoding="utf-8") == text
    )  # writing the page a second time does not change it


@pytest.mark.process
def test_the_drawing_is_there_and_linked(measured):
    _, page = measured
    drawn = ElementTree.fromstring((page.parent / "images" / "layers-cpu.svg").read_text(encoding="utf-8"))
    words = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {*BY_NAME, "steps until both ends meet"} <= words
    assert "(images/layers-cpu.svg)" in page.read_text(encoding="utf-8")


def test_a_curve_stands_where_its_figures_are():
    """Both axes are logarithmic: the centre of an axis from 4 to 16 is 8, and that of 1 to 100 is 10."""
    drawn = curves.svg([curves.Panel("t", {"a": [(4.0, 1.0), (8.0, 10.0), (16.0, 100.0)]}, str)], title="t")
    path = ElementTree.fromstring(drawn).findall("{http://www.w3.org/2000/svg}path")[-1].attrib["d"]
    (left, low), (middle, half), (right, top) = (map(float, point.split()) for point in path[1:].split(" L"))
    assert middle == pytest.approx((left + right) / 2)
    assert half == pytest.approx((low + top) / 2)
    assert right - left == pytest.approx(curves.WIDE)
    assert low - top == pytest.approx(curves.HIGH)


@pytest.mark.slow
def test_what_fails_or_is_too_large_keeps_its_place(monkeypatch):
    attention, formed = BY_NAME["self-attention"], BY_NAME["self-attention, matrix formed"]

    def only_narrow(setting, depth):
        # Layers of size 2 work, because the benchmark counts the steps between positions with them.
        if setting.size > 2:
            raise RuntimeError("no such layer\nat all")
        return attention.make(setting, depth)

    faulty = replace(BY_NAME["linear attention"], make=only_narrow)
    monkeypatch.setattr(layers_bench, "KINDS", (attention, formed, faulty))
    monkeypatch.setattr(layers_bench, "MATRICES", {"cpu": 4 * 10**2})
    monkeypatch.setattr(layers_bench, "summary_of_kind", lambda kind, points, _: {"name": kind.name, "points": points})
    monkeypatch.setattr(layers_bench, "peaks_apart", lambda *_: {"self-attention 12": 5})
    record = layers_bench.run([9, 12], SMALL, device="cpu", say=lambda _: None)
    found = {kind["name"]: [point.reason for point in kind["points"]] for kind in record["kinds"]}
    assert found["self-attention"] == [None, None]
    assert found["self-attention, matrix formed"] == [None, "its matrix of weights would take 0.000549 MiB"]
    assert found["linear attention"] == ["RuntimeError: no such layer"] * 2
    assert [point.memory for point in record["kinds"][0]["points"]] == [None, 5]


def test_slow_kinds_stop_early():
    before = [layers_bench.Point(64, 1, 1, 1, training=12.0)]
    reason = layers_bench.reason_to_skip(BY_NAME["convolution"], 128, SMALL, "cpu", before)
    assert reason == "64 positions took 12 s"


@pytest.mark.parametrize("lengths", ["", "1,8", "8;16", "8,x", "8,,9", "4,99999999"])
def test_lengths_that_are_none_are_named(lengths):
    with pytest.raises(typer.BadParameter, match=r"must be numbers from 2 to 1,048,576 with commas between them"):
        layers_bench.layers(lengths=lengths, width=8, kernel=3, reach=2, device="cpu", as_json=True, out=None)
