"""Training steps as CUDA graphs: batches padded to few shapes give the same gradients, and replayed steps do too."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.data.token_batches import Batch, TokenBatches, collate
from regard.tasks.training import TaskLoss, train
from regard.tasks.translation.config import ModelSettings
from regard.tasks.translation.network import build
from regard.tasks.translation.presets import tiny
from regard.tasks.translation.task import TRANSLATION
from regard.train.cuda_graph_gradients import Captured
from regard.train.progress_display import Silent
from regard.train.updates import Loss, differentiated

CPU = torch.device("cpu")
PAIRS = [([3, 4, 5], [6, 7]), ([8], [9, 10, 11, 12]), ([13, 14], [3])]


def network(kind: str = "transformer", dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(7)
    settings = ModelSettings(kind=kind, size=8, heads=2, layers=2 if kind == "transformer" else 1, dropout=dropout)
    return build(settings, (17, 19), shared=False).to(dtype)


def loss_of(model: nn.Module, batch: Batch, device: torch.device = CPU) -> Loss:
    return TaskLoss(TRANSLATION, tiny().model_copy(update={"smoothing": 0.1}), model, device)(model, batch)


def gradients(model: nn.Module, batch: Batch) -> tuple[float, int, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.total.backward()
    return float(loss.total.detach()), int(loss.count), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
def test_rows_and_columns_of_padding_teach_nothing(kind):
    model = network(kind)
    plain = gradients(model, collate(PAIRS))
    filled = gradients(model, collate(PAIRS, grid=8, rows=7))
    assert filled[0] == pytest.approx(plain[0], rel=1e-12)
    assert filled[1] == plain[1] == 10
    for name, gradient in plain[2].items():
        torch.testing.assert_close(filled[2][name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_a_grid_makes_few_shapes_of_at_most_the_budget():
    torch.manual_seed(3)
    lengths = torch.randint(2, 31, (2, 3000)).numpy()
    widths = set()
    found = []
    for rows in TokenBatches(*lengths, tokens=480, seed=5, grid=8):
        source, target = (-(-int(side[rows].max()) // 8) * 8 for side in lengths)
        assert max(source, target) * len(rows) <= 480
        widths.add((source, target))
        found += rows
    assert sorted(found) == list(range(3000))
    assert len(widths) <= 16


def test_the_order_of_another_grid_is_not_taken_up():
    lengths = [3, 9, 4, 8, 3], [4, 9, 4, 9, 3]
    state = TokenBatches(*lengths, tokens=18, seed=1, grid=4).state()
    for grid in (8, 1):
        with pytest.raises(ValueError, match=f"grid was 4 when the state was taken, and is {grid} now"):
            TokenBatches(*lengths, tokens=18, seed=1, grid=grid).resume(state)
    older = {name: value for name, value in TokenBatches(*lengths, tokens=18, seed=1).state().items() if name != "grid"}
    TokenBatches(*lengths, tokens=18, seed=1).resume(older)


def steps(model: nn.Module, device: str, *, captured: bool) -> list[list[torch.Tensor]]:
    """Return the gradients of seven updates, each of one or two batches; the batches repeat a few shapes."""
    batches = [collate(PAIRS, grid=4, rows=4), collate(PAIRS[1:], grid=4, rows=4), collate(PAIRS[:1], grid=4, rows=3)]
    place = torch.device(device)

    def loss(network, batch):
        return loss_of(network, batch, place)

    gather = Captured(loss, model, torch.float32, place)
    found = []
    for update in range(7):
        if captured:
            gather.begin()
        else:
            model.zero_grad()
        for batch in (batches[update % 3], batches[0]):
            total, count = gather(batch) if captured else differentiated(loss, model, batch, torch.float32, place)
            assert float(total) > 0
            assert int(count) > 0
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_captured_gradients_are_the_plain_ones_over_several_updates(device, kind):
    model = network(kind, dtype=torch.float32).to(device)
    twin = copy.deepcopy(model)
    plain, replayed = steps(model, device, captured=False), steps(twin, device, captured=True)
    for one, other in zip(plain, replayed, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_gets_no_gradient_keeps_none():
    model = network(dtype=torch.float32)
    model.spare = nn.Linear(3, 3)
    steps(model, "cpu", captured=True)
    assert all(parameter.grad is None for parameter in model.spare.parameters())


def test_a_parameter_that_joins_later_starts_every_update_without_a_gradient():
    model = nn.Linear(2, 1)
    model.late = nn.Linear(2, 1)

    @dataclass
    class Rows:
        x: torch.Tensor

    def loss(network, batch):
        found = network(batch.x) if len(batch.x) == 2 else network(batch.x) + network.late(batch.x)
        return Loss(found.sum(), len(batch.x))

    gather = Captured(loss, model, torch.float32, torch.device("cpu"))
    for rows in (2, 3, 3):
        gather.begin()
        gather(Rows(torch.ones(rows, 2)))
    torch.testing.assert_close(model.late.weight.grad, torch.full((1, 2), 3.0))


@pytest.mark.cuda
def test_a_loss_that_waits_for_the_device_runs_as_it_is(caplog):
    model = network(dtype=torch.float32, dropout=1e-9).cuda()

    def waits(network, batch):
        found = loss_of(network, batch, torch.device("cuda"))
        float(found.total.detach())
        return found

    gather = Captured(waits, model, torch.float32, torch.device("cuda"))
    totals = []
    for _ in range(4):
        gather.begin()
        totals.append(float(gather(collate(PAIRS, grid=4, rows=4))[0]))
    assert totals == pytest.approx([totals[0]] * 4, rel=1e-4)
    assert "no CUDA graphs for this model" in caplog.text


@pytest.mark.cuda
def test_a_training_run_with_graphs_learns_as_one_without(tmp_path: Path):
    results = []
    for graphs in (False, True):
        config = tiny()
        data = config.data.model_copy(update={"train": 3000, "valid": 40, "test": 40, "longer": 4})
        settings = config.train.model_copy(update={"steps": 120, "validate_every": 60, "graphs": graphs})
        model = config.model.model_copy(update={"kind": "transformer", "size": 64, "layers": 2})
        config = config.model_copy(update={"data": data, "model": model, "train": settings})
        train(TRANSLATION, config, tmp_path / str(graphs), progress=Silent())
        lines = (tmp_path / str(graphs) / "metrics.jsonl").read_text().splitlines()
        results.append(lines)
    losses = [[d["loss"] for line in lines if (d := json.loads(line))["kind"] == "validation"] for lines in results]
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.15)
    assert losses[1][-1] < losses[1][0]
