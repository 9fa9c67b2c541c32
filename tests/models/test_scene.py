"""The scene encoder: objects may be in any order, and absent objects have no effect."""

import math

import pytest
import torch
from torch.nn import functional as F

from regard.models.scene.object_encoder import SceneEncoder

BATCH, OBJECTS, FEATURES, SIZE = 2, 7, 5, 6
PRESENT = torch.tensor([[True] * 7, [True, True, False, True, False, False, True]])


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("summary", ["ego", "mean"])
def test_objects_in_another_order_give_the_same_memory_in_that_order(layers, summary):
    encoder = SceneEncoder(FEATURES, SIZE, layers=layers, summary=summary).double()
    objects = torch.randn(BATCH, OBJECTS, FEATURES, dtype=torch.float64)
    # Object 0 of a scene is the ego vehicle.
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(OBJECTS - 1)])
    assert not torch.equal(order, torch.arange(OBJECTS))
    memory, moved = encoder(objects, PRESENT), encoder(objects[:, order], PRESENT[:, order])
    torch.testing.assert_close(moved.values, memory.values[:, order])
    torch.testing.assert_close(moved.summary, memory.summary)
    assert torch.equal(moved.mask, PRESENT[:, order])


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("summary", ["ego", "mean"])
def test_absent_objects_leave_no_trace(layers, summary):
    encoder = SceneEncoder(FEATURES, SIZE, layers=layers, summary=summary).double()
    objects = torch.randn(BATCH, OBJECTS, FEATURES, dtype=torch.float64)
    objects[~PRESENT] = math.nan
    memory = encoder(objects, PRESENT)
    for row in range(BATCH):
        alone = encoder(objects[row : row + 1, PRESENT[row]])
        torch.testing.assert_close(memory.values[row, PRESENT[row]], alone.values[0])
        torch.testing.assert_close(memory.summary[row], alone.summary[0])
    assert not memory.values[~PRESENT].any()


def test_objects_see_one_another_only_through_self_attention():
    objects = torch.randn(1, OBJECTS, FEATURES)
    changed = objects.clone()
    changed[:, 3] += 1
    for layers, same in ((0, True), (1, False)):
        encoder = SceneEncoder(FEATURES, SIZE, layers=layers)
        before, after = encoder(objects).values, encoder(changed).values
        others = [j for j in range(OBJECTS) if j != 3]
        assert torch.equal(before[:, others], after[:, others]) is same
        assert not torch.equal(before[:, 3], after[:, 3])


def test_the_embedding_is_its_formula():
    encoder = SceneEncoder(FEATURES, SIZE, hidden_size=11).double()
    x = torch.randn(1, 1, FEATURES, dtype=torch.float64)
    hidden = (encoder.inner.weight @ x[0, 0] + encoder.inner.bias).clamp(min=0)
    torch.testing.assert_close(encoder(x).values[0, 0], encoder.outer.weight @ hidden + encoder.outer.bias)


def test_an_empty_scene_gives_zeros():
    encoder = SceneEncoder(FEATURES, SIZE, layers=1, summary="mean")
    objects = torch.randn(BATCH, OBJECTS, FEATURES, requires_grad=True)
    memory = encoder(objects, torch.zeros(BATCH, OBJECTS, dtype=torch.bool))
    assert not memory.values.any()
    assert not memory.summary.any()
    memory.summary.sum().backward()
    assert not objects.grad.any()


@pytest.mark.usefixtures("as_installed")
def test_every_parameter_learns_and_eight_scenes_are_learnt():
    encoder = SceneEncoder(FEATURES, 16, layers=1, summary="mean")
    readout = torch.nn.Linear(16, 8)
    objects, present = torch.randn(8, OBJECTS, FEATURES), torch.rand(8, OBJECTS) < 0.7
    optimizer = torch.optim.Adam([*encoder.parameters(), *readout.parameters()], 1e-2)
    for step in range(100):
        loss = F.cross_entropy(readout(encoder(objects, present).summary), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            unseen = {name for name, p in encoder.named_parameters() if p.grad is None or not p.grad.any()}
            assert unseen == set()
        optimizer.step()
    assert loss.item() < 0.1


def test_state_dict_round_trip_and_autocast():
    first, second = (SceneEncoder(FEATURES, SIZE, layers=1) for _ in range(2))
    objects = torch.randn(BATCH, OBJECTS, FEATURES)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(objects, PRESENT).values, second(objects, PRESENT).values)
    with torch.autocast("cpu", torch.bfloat16):
        low = first(objects, PRESENT)
    torch.testing.assert_close(low.values.float(), first(objects, PRESENT).values, atol=0.05, rtol=0.05)


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="summary must be 'ego' or 'mean', got 'max'"):
        SceneEncoder(FEATURES, SIZE, summary="max")
