"""Recurrent visual attention: equations, gradients of each loss, and glimpse locations trained by reward."""

import math
import sys

import pytest
import torch

import forked
from regard.models.vision.visual_attention import Looked, RecurrentVisualAttention, looked_loss, stepwise_loss
from regard.nn.glimpse import Glimpse


def small(**changes):
    options = {"glimpse": Glimpse(3, scales=2), "channels": 2, "steps": 3, "size": 11, "hidden_size": 7}
    return RecurrentVisualAttention(5, **(options | changes))


def test_it_is_the_recurrence_of_the_paper():
    model = small().double().eval()
    images = torch.rand(2, 2, 13, 17, dtype=torch.float64)
    looked = model(images)

    def linear(layer, x):
        return layer.weight @ x + layer.bias

    for row in range(2):
        hidden, place = torch.zeros(11, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for step in range(3):
            torch.testing.assert_close(looked.locations[row, step], place)
            patches = model.glimpse(images[row : row + 1], place[None]).output.flatten()
            what, where = linear(model.what, patches).clamp(min=0), linear(model.where, place).clamp(min=0)
            seen = (linear(model.from_what, what) + linear(model.from_where, where)).clamp(min=0)
            hidden = (linear(model.recurrent, hidden) + linear(model.input, seen)).clamp(min=0)
            if step < 2:
                torch.testing.assert_close(looked.baseline[row, step].double(), linear(model.baseline, hidden)[0])
            place = torch.tanh(linear(model.location, hidden))
        torch.testing.assert_close(looked.logits[row], linear(model.action, hidden))


def test_evaluation_is_deterministic_and_training_draws():
    model, images = small(), torch.rand(3, 2, 13, 17)
    first, second = model(images), model(images)
    assert torch.equal(first.locations[:, 0], torch.zeros(3, 2))
    assert not torch.equal(first.locations, second.locations)
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    first, second = (model(images, generator=generator) for generator in generators)
    assert torch.equal(first.locations, second.locations)
    model.eval()
    first, second = model(images), model(images)
    assert torch.equal(first.locations, second.locations)
    assert torch.equal(first.logits, second.logits)


def test_the_log_probability_is_that_of_a_gaussian():
    model = small(steps=2, deviation=0.1)
    with torch.no_grad():
        model.location.weight.zero_()
        model.location.bias.copy_(torch.tensor([0.2, -0.3]).atanh())
    looked = model(torch.rand(5, 2, 13, 17))
    drawn = looked.locations[:, 1].tolist()
    for (x, y), found in zip(drawn, looked.log_prob[:, 0].tolist(), strict=True):
        density = math.exp(-((x - 0.2) ** 2 + (y + 0.3) ** 2) / (2 * 0.1**2)) / (2 * math.pi * 0.1**2)
        assert found == pytest.approx(math.log(density), abs=1e-4)


def test_the_gaze_stays_inside_the_image():
    model = small(deviation=3.0)
    looked = model(torch.rand(31, 2, 13, 17))
    assert looked.locations.abs().max() == 1
    assert looked.log_prob.isfinite().all()


def test_the_loss_is_its_three_parts_worked_by_hand():
    # Class 0 is predicted for both images; the target is 0 for the first and 1 for the second.
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    log_prob, baseline = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[0.5, 0.25], [0.5, 0.75]])
    loss = looked_loss(
        Looked(logits, torch.zeros(2, 3, 2), log_prob, baseline),
        torch.tensor([0, 1]),
        reinforce_weight=0.5,
        baseline_weight=2.0,
    )
    classification = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2
    reinforce = -((0.5 * -1 + 0.75 * -2) + (-0.5 * -3 + -0.75 * -4)) / 2
    mistake = (0.5**2 + 0.75**2 + 0.5**2 + 0.75**2) / 4
    assert loss.classification.item() == pytest.approx(classification)
    assert loss.reinforce.item() == pytest.approx(reinforce)
    assert loss.baseline.item() == pytest.approx(mistake)
    assert loss.total.item() == pytest.approx(classification + 0.5 * reinforce + 2 * mistake)


def test_what_learns_from_what():
    """The reward trains only the location network, the baseline's error only the baseline, and cross-entropy all other
    modules."""
    model = small()
    loss = looked_loss(model(torch.rand(4, 2, 13, 17)), torch.tensor([0, 1, 2, 3]))

    def learns(part):
        found = torch.autograd.grad(part, list(model.parameters()), retain_graph=True, allow_unused=True)
        names = [name for name, _ in model.named_parameters()]
        return {name.split(".")[0] for name, grad in zip(names, found, strict=True) if grad is not None and grad.any()}

    assert learns(loss.reinforce) == {"location"}
    assert learns(loss.baseline) == {"baseline"}
    assert learns(loss.classification) == {"what", "where", "from_what", "from_where", "recurrent", "input", "action"}
    loss.total.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_the_gradient_of_the_reward_is_the_one_of_reinforce():
    """If the location network has only a bias μ, the REINFORCE gradient of a location l with reward R and baseline b is
    −(R − b) (l − μ) / σ²."""
    model = small(steps=2, deviation=0.1).double()
    with torch.no_grad():
        model.location.weight.zero_()
        model.location.bias.zero_()
    looked = model(torch.rand(3, 2, 13, 17, dtype=torch.float64))
    target = looked.logits.argmax(-1)
    loss = looked_loss(looked, target)
    [grad] = torch.autograd.grad(loss.reinforce, [model.location.bias])
    advantage = 1 - looked.baseline[:, 0].detach().double()
    expected = -(advantage[:, None] * looked.locations[:, 1] / 0.1**2).mean(0)
    torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-4)


def test_one_step_has_no_moves():
    model = small(steps=1)
    looked = model(torch.rand(2, 2, 13, 17))
    assert looked.locations.shape == (2, 1, 2)
    assert looked.log_prob.shape == looked.baseline.shape == (2, 0)
    assert looked_loss(looked, torch.tensor([0, 1])).total.isfinite()


def cued(count):
    """Return images with a dot in the centre, left or right; the class is the shade of the square on that side.

    The first glimpse contains only the dot. A model that always looks to one side is right in three of four cases.
    """
    side, shades = torch.randint(2, (count,)), torch.randint(2, (count, 2))
    images, row = torch.zeros(count, 1, 16, 16), torch.arange(count)
    images[:, :, 6:10, :4] = (2.0 * shades[:, 0] - 1)[:, None, None, None]
    images[:, :, 6:10, 12:] = (2.0 * shades[:, 1] - 1)[:, None, None, None]
    images[row, 0, 7, 7 + side] = 1
    return images, shades[row, side], side


@pytest.mark.usefixtures("as_installed")
@pytest.mark.slow
@pytest.mark.parametrize(("reinforce_weight", "steps"), [(1.0, 450), (0.0, 150)])
def test_the_gaze_learns_to_follow_a_cue(reinforce_weight, steps):
    model = RecurrentVisualAttention(2, glimpse=Glimpse(8), steps=2, size=64, hidden_size=32, deviation=0.6)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        images, target, _ = cued(128)
        loss = looked_loss(model(images), target, reinforce_weight=reinforce_weight)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    images, target, side = cued(512)
    with torch.no_grad():
        looked = model.eval()(images)
    accuracy = (looked.logits.argmax(-1) == target).float().mean()
    followed = ((looked.locations[:, 1, 0] > 0) == side.bool()).float().mean()
    if reinforce_weight:
        assert accuracy > 0.95
        assert followed > 0.95
    else:  # without the reward's loss nothing trains the glimpse locations
        assert accuracy < 0.85


@pytest.mark.usefixtures("as_installed")
def test_eight_images_are_learnt():
    model = small(size=64, hidden_size=32)
    images, target = torch.rand(8, 2, 13, 17), torch.arange(8) % 5
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(120):
        loss = looked_loss(model(images), target, reinforce_weight=0.1)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert torch.equal(model.eval()(images).logits.argmax(-1), target)


def test_state_dict_round_trip_and_autocast():
    first, second = small().eval(), small().eval()
    images = torch.rand(3, 2, 13, 17)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(images).logits, second(images).logits)
    first.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = looked_loss(first(images), torch.tensor([0, 1, 2]))
    loss.total.backward()
    assert loss.total.isfinite()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        low = first.eval()(images)
    torch.testing.assert_close(low.logits.float(), second(images).logits, atol=0.05, rtol=0.05)


# This code runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests.
COMPILED = """
import torch
from regard.models.vision.visual_attention import RecurrentVisualAttention
from regard.nn.glimpse import Glimpse

model = RecurrentVisualAttention(5, glimpse=Glimpse(3, scales=2), steps=3, size=11, hidden_size=7).eval()
images = torch.rand(3, 1, 13, 17)
compiled = torch.compile(model, fullgraph=True, backend="eager")
torch.testing.assert_close(compiled(images).logits, model(images).logits)
"""


@pytest.mark.process
@pytest.mark.slow
def test_it_compiles_without_a_break():
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        small(steps=0)
    with pytest.raises(ValueError, match="deviation must be a finite number above 0, got 0"):
        small(deviation=0.0)
    with pytest.raises(ValueError, match="places must be 3 for each image, got 2"):
        small()(torch.rand(1, 2, 13, 17), places=torch.zeros(1, 2, 2))
    looked = small()(torch.rand(3, 2, 13, 17))
    with pytest.raises(ValueError, match="samples must divide the number of rows: got 2 and 3 rows"):
        stepwise_loss(looked, torch.tensor([0, 1, 2]), samples=2)
    bare = Looked(looked.logits, looked.locations, looked.log_prob, looked.baseline)
    with pytest.raises(ValueError, match="step_logits is None"):
        stepwise_loss(bare, torch.tensor([0, 1, 2]))


def test_a_saccade_moves_from_the_place_by_what_the_patches_show():
    model = small(cell="gru", saccade=5).double().eval()
    with torch.no_grad():
        model.location.bias.copy_(torch.tensor([0.5, -0.7]))
        model.location.weight.zero_()
    looked = model(torch.rand(3, 2, 13, 17, dtype=torch.float64))
    step = torch.tensor([0.5, -0.7], dtype=torch.float64).tanh()
    torch.testing.assert_close(looked.locations[:, 1], step.expand(3, 2))
    # Locations are clamped to the image, from −1 to 1.
    torch.testing.assert_close(looked.locations[:, 2], (2 * step).clamp(-1, 1).expand(3, 2))


def test_the_gaze_can_come_back_from_an_edge():
    """A location's mean is clamped to the image; the location network still gets a gradient from the reward."""
    model = small(saccade=5, deviation=0.1)
    with torch.no_grad():
        model.location.weight.zero_()
        model.location.bias.fill_(1.5)  # the second move would end at 1.8, outside of the image
    looked = model(torch.rand(4, 2, 13, 17))
    [grad] = torch.autograd.grad(looked.log_prob[:, 1].sum(), [model.location.bias])
    assert looked.locations[:, 2].min() > 0.5
    assert grad.abs().min() > 0.01


def test_given_places_are_looked_at_without_a_choice():
    model, images = small(cell="gru"), torch.rand(3, 2, 13, 17)
    places = torch.rand(3, 3, 2) * 2 - 1
    looked = model(images, places=places)
    assert torch.equal(looked.locations, places)
    assert looked.log_prob.shape == looked.baseline.shape == (3, 0)
    hidden = torch.zeros(3, 11)
    for place in places.unbind(1):
        hidden = model.look(images, place, hidden)
    torch.testing.assert_close(looked.logits, model.action(hidden))
    loss = stepwise_loss(looked, torch.tensor([0, 1, 2]), samples=3)
    assert loss.reinforce == loss.baseline == 0


@pytest.mark.parametrize("reward", ["log_probability", "right"])
def test_the_stepwise_loss_is_worked_by_hand(reward):
    """The example has two sampled sequences of three glimpses of one image, whose class is 0."""
    logits = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]], [[0.0, 1.0], [0.0, 2.0], [1.0, 0.0]]])
    log_prob, baseline = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[0.5, 0.25], [0.0, 0.75]])
    looked = Looked(logits[:, -1], torch.zeros(2, 3, 2), log_prob, baseline, logits)
    loss = stepwise_loss(looked, torch.tensor([0, 0]), samples=2, reward=reward, reinforce_weight=0.5)
    entropies = [[math.log(1 + math.exp(b - a)) for a, b in row] for row in logits.tolist()]
    rewards = [[-one for one in row] for row in entropies] if reward == "log_probability" else [[1, 1, 1], [0, 0, 1]]
    returns = [[(row[1] + row[2]) / 2, row[2]] for row in rewards]
    advantages = [
        [gain - base for gain, base in zip(*pair, strict=True)] for pair in zip(returns, baseline.tolist(), strict=True)
    ]
    # From the advantage of each of the two samples, the other sample's advantage is subtracted.
    differences = [a - b for a, b in zip(*advantages, strict=True)]
    reinforce = -sum(d * (p - q) for d, p, q in zip(differences, *log_prob.tolist(), strict=True)) / 2
    mistake = (
        sum(
            (g - b) ** 2
            for gain, base in zip(returns, baseline.tolist(), strict=True)
            for g, b in zip(gain, base, strict=True)
        )
        / 4
    )
    assert loss.classification.item() == pytest.approx(sum(map(sum, entropies)) / 6)
    assert loss.reinforce.item() == pytest.approx(reinforce, abs=1e-6)
    assert loss.baseline.item() == pytest.approx(mistake, abs=1e-6)
    assert loss.total.item() == pytest.approx(sum(map(sum, entropies)) / 6 + 0.5 * reinforce + mistake, abs=1e-6)


def test_rows_that_are_not_counted_have_no_part_in_the_loss():
    model = small()
    looked = model.eval()(torch.rand(3, 2, 13, 17))
    target = torch.tensor([0, 1, 2])
    counted = stepwise_loss(looked, target, counted=torch.tensor([True, True, False]))
    assert looked.step_logits is not None
    few = Looked(
        looked.logits[:2], looked.locations[:2], looked.log_prob[:2], looked.baseline[:2], looked.step_logits[:2]
    )
    torch.testing.assert_close(counted.total, stepwise_loss(few, target[:2]).total)
