"""The cost model of `regard bench scaling`, compared with costs by hand and with measurements of two processes."""

import json
import math
import multiprocessing
from dataclasses import replace

import pytest
import torch
import typer
import worker_process  # noqa: F401  imported by the forkserver

from regard.bench import scaling_bench, scaling_measurement
from regard.bench.scaling_costs import Link, Machine, Model, Work, cost
from time_limits import HANG_SECONDS

WAYS = ("ddp", "fsdp2", "context")
MODEL = Model(64, 2, 101)
TOKENS, LENGTH = 64, 32
# A machine of 10 FLOP/s that sends a byte per second within a node and half a byte between nodes, without other costs.
FREE = {"per_layer": 0.0, "per_parameter": 0.0, "per_logit": 0.0, "activation": 0.0, "output": 0.0}
SIMPLE = Machine("simple", flops=10.0, near=Link(1.0, 0.0), far=Link(0.5, 0.0), node=2, width=4, **FREE)


@pytest.mark.parametrize("model", [MODEL, Model(128, 1, 7)], ids=str)
def test_the_formula_counts_the_parameters_of_the_model(model):
    with torch.device("meta"):
        built = scaling_measurement.LanguageModel(model)
    assert sum(one.numel() for one in built.parameters()) == model.parameters
    assert sum(one.numel() for one in built.layers.parameters()) == model.layer_parameters


def test_costs_worked_by_hand():
    """For size d = 2 and vocabulary v = 3, a layer has 12·4 + 26 = 74 parameters (296 bytes), and the model
    74 + 12 + 4 = 90 (360 bytes)."""
    work = Work(Model(2, 1, 3), tokens=8, length=4)
    flops = 6 * (48 + 6) + 6 * 4 * 2  # operations per token: weights, and causal attention over 4 positions
    alone = cost("plain", work, SIMPLE, 1)
    assert (alone.seconds, alone.sent, alone.states) == (8 * flops / 10, 0, 4 * 360)
    # Two devices of one node: in an all-reduce each device sends 2 · 1/2 of the bytes of the gradients.
    two = cost("ddp", work, replace(SIMPLE, overlaps=False), 2)
    assert (two.sent, two.seconds, two.states) == (360, 4 * flops / 10 + 360, 4 * 360)
    # With FSDP2 on two devices, each device sends half of all parameters in the forward pass, half of the layer's
    # parameters in the backward pass, and half of the gradients.
    sharded = cost("fsdp2", work, replace(SIMPLE, overlaps=False), 2)
    assert (sharded.sent, sharded.states) == (180 + 148 + 180, 2 * 360)
    # Four devices in two nodes: in each of the two passes of an all-reduce, a device sends half of the bytes within its
    # node (180 s), and a quarter of the bytes to the other node at half the speed (180 s).
    four = cost("ddp", work, replace(SIMPLE, overlaps=False), 4)
    assert (four.sent, four.seconds) == (540, 2 * flops / 10 + 2 * (180 + 180))
    # In a context-parallel ring of two devices with 4 positions each, a device sends keys and values of 9/4 · 4
    # positions (2·2·4 = 16 bytes per position), forward and backward together, and the gradients.
    assert cost("context", work, SIMPLE, 2).sent == 2.25 * 4 * 16 + 360


def test_communication_hides_behind_the_backward_pass():
    work = Work(Model(2, 1, 3), tokens=8000, length=4)
    assert cost("ddp", work, SIMPLE, 2).seconds == cost("plain", replace(work, tokens=4000), SIMPLE, 1).seconds


def test_constants_are_found_again():
    truth = replace(SIMPLE, flops=1e9, per_layer=0.25, per_parameter=1e-3, activation=50.0, output=8.0, per_logit=1e-4)
    cases = []
    for way in ("plain", *WAYS):
        for model in (Model(64, 2, 101), Model(128, 2, 101)):
            for tokens in (128, 512):
                known = cost("plain", Work(model, tokens, 32), truth, 1)
                seconds = known.seconds + (0.0 if way == "plain" else 0.5)
                size = {"size": model.size, "layers": 2, "vocabulary": 101, "name": ""}
                cases.append({"way": way, "model": size, "tokens": tokens, "length": 32, "seconds": seconds})
                cases[-1]["peak"] = known.memory
    probes = {str(amount): amount / 1e9 + 2 * 1e-4 for amount in (2**16, 2**20, 2**23)}
    found = scaling_bench.fitted({1: [{"cases": cases, "probes": {}}], 2: [{"cases": [], "probes": probes}]}, "cpu")
    for name in ("flops", "per_layer", "per_parameter", "per_logit", "activation", "output"):
        assert math.isclose(getattr(found[1], name), getattr(truth, name), rel_tol=1e-6)
    assert all(math.isclose(found[1].added[way], 0.25) for way in WAYS)
    assert math.isclose(found[2].near.bandwidth, 1e9, rel_tol=1e-6)
    assert math.isclose(found[2].near.latency, 1e-4, rel_tol=1e-6)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Return the measurements of two processes for each kind of parallelism."""
    folder = tmp_path_factory.mktemp("scaling")
    model = {"size": MODEL.size, "layers": MODEL.layers, "vocabulary": MODEL.vocabulary}
    cases = [{"way": way, "model": model, "tokens": TOKENS, "length": LENGTH} for way in WAYS]
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"cases": cases, "steps": 1, "device": "cpu", "threads": 1}))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_training", "torch._dynamo", "worker_process"])
    started = [context.Process(target=scaling_measurement.main, args=(plan, rank, 2)) for rank in range(2)]
    for one in started:
        one.start()
    for one in started:
        one.join(HANG_SECONDS)
    assert [one.exitcode for one in started] == [0, 0]
    found = [json.loads((folder / f"{rank}-of-2.json").read_text())["cases"] for rank in range(2)]
    return {way: [one[place] for one in found] for place, way in enumerate(WAYS)}


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_send_the_bytes_of_the_formula(measured, way):
    sent = [one["sent"] for one in measured[way]]
    if None in sent:
        pytest.skip("this system does not count the bytes of a socket")
    expected = cost(way, Work(MODEL, TOKENS, LENGTH), replace(SIMPLE, scatters=False), 2).sent
    # The tolerance of 5 % is for headers, sums of losses and signals.
    assert math.isclose(sum(sent) / 2, expected, rel_tol=0.05)


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_hold_the_states_of_the_formula(measured, way):
    states = [sum(one["states"].values()) for one in measured[way]]
    expected = cost(way, Work(MODEL, TOKENS, LENGTH), SIMPLE, 2).states
    # The tolerance is for AdamW's counters, and for rows that do not divide evenly.
    assert math.isclose(max(states), expected, rel_tol=0.02)
    assert math.isclose(sum(states), 2 * expected, rel_tol=0.02)


def test_forecasts_say_what_does_not_fit():
    rows = {(row["model"], row["way"], row["devices"]): row for row in scaling_bench.forecasts(scaling_bench.H200)}
    large = scaling_bench.LARGE[-1].name
    assert not rows[large, "ddp", 1024]["fits"]
    assert rows[large, "fsdp2", 1024]["fits"]
    # Only FSDP2, which also divides the optimiser's work, may have an efficiency above 1.
    assert all(0 < row["efficiency"] <= 1 + 1e-9 for (_, way, _), row in rows.items() if way != "fsdp2")


@pytest.mark.parametrize("text", ["0", "two", "1,,2", "65"])
def test_wrong_numbers_of_workers_are_refused(text):
    with pytest.raises(typer.BadParameter, match="must be numbers from 1 to 64 with commas between them"):
        scaling_bench.scaling(workers=text, steps=1, device="cpu", as_json=True, out=None)
