"""Driving controllers: the attention of the ego vehicle to all objects compared with loops; actions and weights."""

import math
import sys

import pytest
import torch
from torch.nn import functional as F

import forked
import oracles
from regard.core.normalizers import Hard
from regard.core.requests import full, top
from regard.models.memory import Memory
from regard.models.scene.controller import Controller
from regard.models.scene.object_encoder import SceneEncoder

BATCH, KEYS, SIZE, ACTIONS = 2, 7, 5, 3
MASK = torch.tensor([[True] * 7, [True, True, False, True, False, False, True]])


def a_memory(mask=MASK, dtype=torch.float64):
    keys = torch.randn(BATCH, KEYS, SIZE, dtype=dtype)
    return Memory(keys, torch.randn(BATCH, KEYS, SIZE, dtype=dtype), mask, torch.randn(BATCH, SIZE, dtype=dtype))


def identity_heads(attention, size, heads):
    """Return torch's attention with identity projections, so that its heads are slices of its inputs."""
    eye = torch.eye(size, dtype=torch.float64)
    made = torch.nn.MultiheadAttention(size, heads, batch_first=True).double()
    with torch.no_grad():
        made.in_proj_weight.copy_(torch.cat([eye, eye, eye]))
        made.in_proj_bias.zero_()
        made.out_proj.weight.copy_(eye)
        made.out_proj.bias.zero_()
    return type(attention).from_torch(made)


@torch.no_grad()
def test_it_is_ego_attention_as_in_the_paper():
    heads, size = 2, 6
    controller = Controller(size, actions=ACTIONS, controls=2, summary_size=SIZE, size=size, heads=heads).double()
    controller.attention = identity_heads(controller.attention, size, heads)
    keys, values = torch.randn(2, BATCH, KEYS, size, dtype=torch.float64)
    summary = torch.randn(BATCH, SIZE, dtype=torch.float64)
    found = controller(Memory(keys, values, MASK, summary), weights=full())
    assert found.weights.shape == (BATCH, 1, KEYS)
    for row in range(BATCH):
        query = (controller.ego.weight @ summary[row] + controller.ego.bias).clamp(min=0)
        read, mean = [], torch.zeros(KEYS, dtype=torch.float64)
        for head in (slice(0, 3), slice(3, 6)):
            real = [j for j in range(KEYS) if MASK[row, j]]
            asked = query[head].tolist()
            weights = oracles.softmax([oracles.scaled_dot(asked, keys[row, j, head].tolist()) for j in real])
            mean[real] += torch.tensor(weights, dtype=torch.float64) / heads
            read.append(sum(w * values[row, j, head] for w, j in zip(weights, real, strict=True)))
        torch.testing.assert_close(found.weights[row, 0], mean)
        mixed = query + torch.cat(read)
        centred = mixed - mixed.mean()
        # As by a layer norm with scale 1 and shift 0.
        normed = centred / math.sqrt(float(centred.square().mean()) + 1e-5)
        hidden = (controller.hidden.weight @ normed + controller.hidden.bias).clamp(min=0)
        torch.testing.assert_close(found.logits[row], controller.actions.weight @ hidden + controller.actions.bias)
        steering = torch.tanh(controller.controls.weight @ hidden + controller.controls.bias)
        torch.testing.assert_close(found.controls[row], steering)


def test_what_was_not_built_is_none():
    memory = a_memory()
    discrete, continuous = Controller(SIZE, actions=ACTIONS).double(), Controller(SIZE, controls=1).double()
    assert discrete(memory).controls is None
    assert discrete(memory).logits.shape == (BATCH, ACTIONS)
    assert discrete(memory).weights is None
    assert continuous(memory).logits is None
    assert continuous(memory).controls.shape == (BATCH, 1)
    assert continuous(memory).controls.abs().max() < 1


def test_order_and_padding_change_nothing():
    controller = Controller(SIZE, actions=ACTIONS).double()
    memory = a_memory()
    found = controller(memory, weights=full())
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(BATCH, 1, dtype=torch.float64))
    assert not found.weights[:, 0][~MASK].any()
    keys, values = memory.keys.clone(), memory.values.clone()
    keys[~MASK] = values[~MASK] = math.nan
    torch.testing.assert_close(controller(Memory(keys, values, MASK, memory.summary)).logits, found.logits)
    order = torch.randperm(KEYS)
    moved = Memory(memory.keys[:, order], memory.values[:, order], MASK[:, order], memory.summary)
    shuffled = controller(moved, weights=full())
    torch.testing.assert_close(shuffled.logits, found.logits)
    torch.testing.assert_close(shuffled.weights, found.weights[..., order])


def test_a_top_stays_by_head_and_nothing_to_see_is_finite():
    controller = Controller(SIZE, actions=ACTIONS, heads=4).double()
    assert controller(a_memory(), weights=top(2)).weights.indices.shape == (BATCH, 4, 1, 2)
    empty = controller(a_memory(torch.zeros(BATCH, KEYS, dtype=torch.bool)), weights=full())
    assert empty.logits.isfinite().all()
    assert not empty.weights.any()
    empty.logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in controller.parameters())


def scenes(count):
    """Return scenes, actions (1, brake, if the object in the ego vehicle's lane is near), and ego vehicles' lanes."""
    lanes = torch.arange(3.0).repeat(count, 1)
    ego = torch.randint(3, (count, 1)).float()
    near = torch.rand(count, 3)
    objects = torch.stack([torch.cat([ego, lanes], 1), torch.cat([torch.zeros(count, 1), near], 1)], -1)
    role = torch.tensor([1.0, 0, 0, 0]).expand(count, 4)
    return torch.cat([objects, role.unsqueeze(-1)], -1), (near.gather(1, ego.long())[:, 0] > 0.5).long(), ego.long()


@pytest.mark.usefixtures("as_installed")
@pytest.mark.slow
def test_it_learns_to_watch_the_object_ahead():
    encoder, controller = SceneEncoder(3, 32), Controller(32, actions=2, size=32, heads=1)
    optimizer = torch.optim.Adam([*encoder.parameters(), *controller.parameters()], 5e-3)
    for _ in range(400):
        objects, target, _ = scenes(128)
        loss = F.cross_entropy(controller(encoder(objects)).logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    objects, target, ahead = scenes(512)
    found = controller(encoder(objects), weights=full())
    assert (found.logits.argmax(-1) == target).float().mean() > 0.9
    others = found.weights[:, 0, 1:]
    assert (others.argmax(-1) == ahead[:, 0]).float().mean() > 0.8


@pytest.mark.usefixtures("as_installed")
def test_every_parameter_learns_and_eight_scenes_are_learnt():
    controller = Controller(SIZE, actions=ACTIONS, controls=1)
    memory = Memory(torch.randn(8, KEYS, SIZE), torch.randn(8, KEYS, SIZE), None, torch.randn(8, SIZE))
    target, steering = torch.arange(8) % ACTIONS, torch.linspace(-0.7, 0.7, 8)
    optimizer = torch.optim.Adam(controller.parameters(), 1e-2)
    for step in range(120):
        found = controller(memory)
        loss = F.cross_entropy(found.logits, target) + F.mse_loss(found.controls[:, 0], steering)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert {name for name, p in controller.named_parameters() if p.grad is None or not p.grad.any()} == set()
        optimizer.step()
    assert loss.item() < 0.02


def test_state_dict_round_trip_and_autocast():
    first, second = (Controller(SIZE, actions=ACTIONS, controls=1, dropout=0.1).eval() for _ in range(2))
    memory = a_memory(dtype=torch.float32)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(memory).logits, second(memory).logits)
    with torch.autocast("cpu", torch.bfloat16):
        low = first(memory)
    torch.testing.assert_close(low.logits.float(), first(memory).logits, atol=0.05, rtol=0.05)


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="give actions, controls or both"):
        Controller(SIZE)


# This code runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests.
COMPILED = """
import torch
from regard.models.classifier import Classifier
from regard.models.scene.controller import Controller
from regard.models.vision.image_encoder import ImageEncoder, ResidualNetwork
from regard.models.scene.object_encoder import SceneEncoder

drive, present = (SceneEncoder(5, 8, layers=1), Controller(8, actions=3)), torch.rand(2, 7) < 0.8
see = (ImageEncoder(8, backbone=ResidualNetwork(widths=(4, 6))), Classifier(3, memory_size=8))
for (encoder, decoder), inputs in ((drive, (torch.randn(2, 7, 5), present)), (see, (torch.rand(2, 3, 16, 24),))):
    def model(*inputs):
        return decoder(encoder(*inputs)).logits

    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
"""


@pytest.mark.process
@pytest.mark.slow
def test_driving_and_seeing_compile_without_a_break():
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("score", ["dot", "cosine", "bilinear", "additive"])
def test_any_score_weighs_the_objects(score):
    controller = Controller(SIZE, actions=ACTIONS, attention=score, heads=2).double()
    found = controller(a_memory(), weights=full())
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(BATCH, 1, dtype=torch.float64))
    found.logits.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in controller.attention.parameters())


def test_hard_attention_reads_one_object_for_each_head_and_reports_its_log_probability():
    controller = Controller(SIZE, actions=ACTIONS, normalize=Hard(), heads=1).double()
    found = controller(a_memory(), weights=full(), generator=torch.Generator().manual_seed(3))
    assert sorted(found.weights[0, 0].tolist())[-2:] == [0.0, 1.0]
    assert found.log_prob.shape == (BATCH,)
    assert (found.log_prob < 0).all()


def test_without_attention_the_mean_is_read_with_as_many_parameters():
    size = 24
    plain, twin = (Controller(SIZE, actions=ACTIONS, size=size, attention=one) for one in ("scaled_dot", None))
    counts = [sum(parameter.numel() for parameter in one.parameters()) for one in (plain, twin)]
    assert counts[1] == pytest.approx(counts[0], rel=0.02)
    twin = twin.double()
    memory = a_memory()
    found = twin(memory, weights=full())
    assert found.weights is None
    for row in range(BATCH):
        mean = memory.values[row][MASK[row]].mean(0)
        read = twin.norm(F.relu(twin.ego(memory.summary[row])) + twin.mean(mean))
        torch.testing.assert_close(found.logits[row], twin.actions(F.relu(twin.hidden(read))))
    masked = Memory(memory.keys, memory.values, torch.zeros(BATCH, KEYS, dtype=torch.bool), memory.summary)
    assert twin(masked).logits.isfinite().all()
