"""`regard bench attention`: the report is complete, and the same as JSON, text and page. No test depends on times."""

import json
import math
import os
import statistics
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from regard.bench import attention_bench as bench
from regard.bench import attention_cases as cases
from regard.bench import bar_chart as chart
from regard.bench import measurement as measure
from time_limits import HANG_SECONDS

SVG = "{http://www.w3.org/2000/svg}"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "regard", "bench", "attention", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONUTF8": "1", "COLUMNS": "100"},
        capture_output=True,
        encoding="utf-8",
        timeout=HANG_SECONDS,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path, str]:
    """Run the benchmark on one small case; return the JSON that it prints, the report's folder, and standard error."""
    folder = tmp_path_factory.mktemp("bench")
    done = run("--quick", "--json", "--only", "overhead", "--out", "docs", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder / "docs", done.stderr


def record(*found: measure.Measurement) -> dict:
    """Return a benchmark record with one case and the given results, as `--json` prints it."""
    contenders = [vars(one) for one in found]
    case = {"name": "a-case", "what": "some <attention>", "device": "cpu", "work": 2.0, "unit": "pairs"}
    return {
        "bench": "attention",
        "quick": False,
        "date": "2018-04-01 00:00 UTC",
        "device": "cpu",
        "machine": {"cpu": "A & B", "cores": 2, "threads": 2, "gpu": None},
        "versions": {"torch": "1.0"},
        "cases": [{**case, "contenders": contenders}],
    }


def contest(**contenders: cases.Make) -> list[measure.Measurement]:
    case = cases.Case("c", "what", "cpu", lambda: cases.Field(contenders), work=6.0, memory=False)
    return measure.measure(case, quick=True, say=lambda _: None)


@pytest.mark.process
def test_the_record_has_the_machine_and_every_contender(measured):
    found, _, _ = measured
    assert found["bench"] == "attention"
    assert found["quick"] is True
    assert found["device"] in ("cpu", "cuda")
    assert set(found["machine"]) == {"cpu", "cores", "threads", "gpu"}
    assert {"regard", "torch", "python"} <= set(found["versions"])
    assert found["versions"]["torch"] == torch.__version__
    [case] = found["cases"]
    assert case["name"] == "overhead"
    assert [one["name"] for one in case["contenders"]] == ["regard", "SDPA"]
    ours, peer = case["contenders"]
    assert ours["ratio"] == 1.0
    assert peer["ratio"] == pytest.approx(peer["seconds"] / ours["seconds"])
    assert all(0 <= one["error"] < 1e-5 for one in (ours, peer))
    assert all(0 <= one["error_by_norm"] < 1e-5 for one in (ours, peer))


@pytest.mark.process
def test_what_is_being_measured_is_told(measured):
    _, _, said = measured
    assert "1/1 overhead: SDPA" in said
    assert "Traceback" not in said
    assert "Warning" not in said


@pytest.mark.process
def test_the_table_has_the_numbers_of_the_record(measured):
    found, folder, _ = measured
    page = (folder / "benchmarks.md").read_text(encoding="utf-8")
    assert found["date"] in page
    assert found["versions"]["torch"] in page
    for one in found["cases"][0]["contenders"]:
        [line] = [line for line in page.splitlines() if line.startswith(f"| {one['name']} |")]
        taken, ratio, rate, memory, error, by_norm = (cell.strip() for cell in line.strip("|").split("|")[1:])
        scale = {"s": 1.0, "ms": 1e3, "µs": 1e6}[taken.split()[1]]
        assert float(taken.split()[0]) == float(f"{one['seconds'] * scale:.3g}")
        assert float(ratio) == float(f"{one['ratio']:.3g}")
        assert float(error) == float(f"{one['error']:.2e}")
        assert float(by_norm) == float(f"{one['error_by_norm']:.2e}")
        # A case that measures the overhead of a call reports no FLOP rate and no memory.
        assert (rate, memory) == ("–", "–")


@pytest.mark.process
def test_the_chart_is_there_and_linked(measured):
    found, folder, _ = measured
    image = f"images/bench-{found['device']}.svg"
    assert f"({image})" in (folder / "benchmarks.md").read_text(encoding="utf-8")
    words = {text.text for text in ElementTree.parse(folder / image).iter(f"{SVG}text")}
    assert {"regard", "SDPA"} <= words


@pytest.mark.slow
def test_a_contender_that_fails_keeps_its_place_with_the_reason():
    def broken() -> cases.Run:
        raise RuntimeError("no such kernel\nand a long story")

    def absent() -> cases.Run:
        import a_package_that_nobody_has

        return a_package_that_nobody_has.attend

    def refused() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried …")

    found = contest(
        regard=lambda: lambda: torch.ones(3), broken=broken, absent=absent, late=lambda: refused, last=lambda: torch.eye
    )
    assert [one.name for one in found] == ["regard", "broken", "absent", "late", "last"]
    assert found[0].reason is None
    assert found[0].rate == 6.0 / found[0].seconds
    assert found[1].reason == "RuntimeError: no such kernel"
    assert found[2].reason == "a_package_that_nobody_has is not installed"
    assert found[3].reason == "out of memory"
    assert found[4].reason.startswith("TypeError: ")
    assert all(one.seconds is None for one in found[1:])


@pytest.mark.slow
def test_peers_are_measured_where_regard_fails():
    def broken() -> cases.Run:
        raise ValueError

    ours, peer = contest(regard=broken, peer=lambda: lambda: torch.ones(3))
    assert ours.reason == "ValueError"
    assert peer.seconds is not None
    assert peer.ratio is None
    page = bench.markdown(record(ours, peer))
    assert "- regard (a-case): ValueError" in page
    ElementTree.fromstring(bench.drawing(record(ours, peer)))


def test_reasons_stand_below_the_table_and_in_the_chart():
    found = record(
        measure.Measurement("regard", 0.25, 1.0, 8.0, 3 * 2**20, 1e-6),
        measure.Measurement("R&D <1>", reason="a & b failed"),
        measure.Measurement("Nobody's", reason="x is not installed"),
    )
    assert "- R&D <1> (a-case): a & b failed" in bench.markdown(found)
    assert "R&amp;D &lt;1&gt;" in bench.drawing(found)
    words = {text.text for text in ElementTree.fromstring(bench.drawing(found)).iter(f"{SVG}text")}
    assert {"regard", "R&D <1>", "a & b failed", "not installed here: Nobody's"} <= words


@pytest.mark.parametrize("count", range(1, 9))
def test_each_comes_after_each_equally_often(count):
    """Each contender runs equally often right after each other contender, whose run affects clock rate and caches."""
    found = measure.orders(count)
    assert all(sorted(order) == list(range(count)) for order in found)
    neighbours = [pair for order in found for pair in pairwise(order)]
    every = [(a, b) for a in range(count) for b in range(count) if a != b]
    assert sorted(neighbours) == sorted(every * (1 + count % 2))


@pytest.mark.process
def test_turns_end_when_there_are_enough_or_they_took_long_enough(monkeypatch):
    """Slow contenders are measured fewer times; fast ones are measured in complete rounds, in every order."""
    ran = []

    def seconds(run, number, device):
        ran.append((run(), number))
        return times[run()]

    monkeypatch.setattr(measure, "seconds_per_call", seconds)
    times = {"fast": 0.001, "slow": 0.3, "far too slow": 11.0}
    readings = {name: [time] for name, time in times.items()}
    measure.take_turns({name: lambda name=name: name for name in times}, readings, "cuda", False)
    assert [len(found) for found in readings.values()] == [1 + 20, 1 + 2, 1]

    times = {"one": 0.001, "two": 0.0012, "three": 0.0013}
    readings, ran = {name: [time] for name, time in times.items()}, []
    measure.take_turns({name: lambda name=name: name for name in times}, readings, "cuda", False)
    assert [len(found) for found in readings.values()] == [1 + 24] * 3, "four rounds of six orders"
    before = Counter(pair for pair in pairwise(name for name, _ in ran))
    others = [before[a, b] for a in times for b in times if a != b]
    assert max(others) - min(others) <= 2 * 4, "but for where orders meet, each after each alike"
    assert min(before[name, name] for name in times) == 8, "the first of an order comes after itself"

    times = {"one": 0.015}
    readings = {"one": [0.015]}
    measure.take_turns({"one": lambda: "one"}, readings, "cuda", False)
    assert len(readings["one"]) == 1 + 21, "enough, long before the time is spent"


@pytest.mark.process
def test_those_near_the_fastest_are_read_again_among_themselves(monkeypatch):
    ran = []

    def seconds(run, number, device):
        ran.append((run(), number))
        # Each contender takes 5 % longer in rounds of measurements that include the contender "slow".
        return times[run()] if number == 5 else 1.05 * times[run()]

    monkeypatch.setattr(measure, "seconds_per_call", seconds)
    times = {"first": 0.001, "slow": 0.002, "second": 0.00104}
    readings = {name: [time] for name, time in times.items()}
    measure.take_turns({name: lambda name=name: name for name in times}, readings, "cuda", False)
    assert [len(found) for found in readings.values()] == [1 + 84, 1 + 24, 1 + 84]
    assert {number for _, number in ran[-100:]} == {5}, "in shorter turns"
    assert "slow" not in {name for name, _ in ran[-2 * 84 :]}
    settled = {name: statistics.median(found) for name, found in readings.items()}
    assert settled["second"] / settled["first"] == pytest.approx(1.04)
    assert max(readings["first"][1:]) == times["first"], "what was read beside the slow one is let go"


def test_a_longer_bar_is_slower_and_ten_times_is_one_step():
    bars = [chart.Bar(name, ratio, "") for name, ratio in (("a", 1.0), ("b", 10.0), ("c", 100.0))]
    drawing = ElementTree.fromstring(chart.svg([chart.Group("times", bars)], title="t"))
    a, b, c = [float(bar.get("width")) for bar in drawing.iter(f"{SVG}rect") if bar.get("height") == "16.0"]
    assert c - b == pytest.approx(b - a, abs=0.2)  # the chart gives the widths of its bars with one decimal
    assert b > a


def test_the_rest_of_a_page_is_kept(tmp_path):
    """Writing a CPU record changes neither the page's section for GPUs nor the text around the sections."""
    here = record(measure.Measurement("regard", 0.25, 1.0))
    there = {**here, "device": "cuda", "machine": {**here["machine"], "gpu": "A GPU"}}
    path = tmp_path / "benchmarks.md"
    path.write_text("# Benchmarks\n\nWritten by hand.\n", encoding="utf-8")
    for one in (here, there, {**here, "date": "later"}):
        bench.write(one, tmp_path)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("# Benchmarks\n\nWritten by hand.\n")
    assert page.count("## GPU") == page.count("## CPU") == page.count("A GPU") == 1
    assert "later" in page
    assert {path.name for path in (tmp_path / "images").iterdir()} == {"bench-cpu.svg", "bench-cuda.svg"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_cases_can_be_told_apart_and_chosen(device, quick):
    known = cases.cases(device, quick)
    names = [case.name for case in known]
    assert len(set(names)) == len(names)
    assert bench.select(known, []) == known
    assert [case.name for case in bench.select(known, ["window-training", "overhead"])] == [
        "overhead",
        "window-training",
    ]
    with pytest.raises(ValueError, match=r"no case has 'x-ray' in its name; the cases are overhead, "):
        bench.select(known, ["x-ray"])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the peers of a GPU compile for minutes")
@pytest.mark.parametrize("case", cases.cases("cpu", quick=True), ids=lambda case: case.name)
def test_every_contender_of_every_case_computes_the_same(case):
    """All contenders of a case compute the same function: their results are close to those in float64."""
    field = case.build()
    truth = field.truth()
    for name, make in field.contenders.items():
        if name == "torch.compile":
            # Compiled contenders are skipped: compiling takes minutes, and the benchmark itself reports their errors.
            continue
        try:
            attend = make()
        except ModuleNotFoundError:
            continue
        output = attend()[..., cases.ROWS, :].double()
        torch.testing.assert_close(output, truth, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_is_measured_in_a_process_of_its_own(tmp_path):
    done = run("--quick", "--json", "--only", "sparsemax", cwd=tmp_path)
    [case] = json.loads(done.stdout)["cases"]
    assert all(isinstance(one["memory"], int) for one in case["contenders"] if one["seconds"] is not None)


@pytest.mark.process
def test_a_wrong_name_is_refused_without_a_traceback(tmp_path):
    done = run("--only", "x-ray", cwd=tmp_path)
    assert done.returncode == 2
    assert "no case has 'x-ray' in its name" in done.stderr
    assert "Traceback" not in done.stderr


def test_units():
    assert bench.duration(1.5) == "1.5 s"
    assert bench.duration(999e-6) == "999 µs"
    assert bench.size(None) == "–"
    assert math.isclose(float(bench.size(2**30).split()[0]), 1.0)


def test_errors_are_the_largest_and_that_of_all():
    """Largest and total errors of two outputs with errors of 3 and 4; five further queries are not compared."""
    truth = torch.zeros(64, 2, dtype=torch.float64)
    truth[:2, 0] = torch.tensor([10.0, 20.0])
    output = torch.cat([torch.full((5, 2), 9.0), truth.float()])
    output[5:7, 1] = torch.tensor([3.0, -4.0])
    assert measure.relative_errors(output, truth) == (pytest.approx(4 / 20), pytest.approx(5 / 500**0.5))
    assert measure.relative_errors(output, None) == (None, None)
