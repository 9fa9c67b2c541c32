"""The model that drives from camera images: its inputs, missing frames, and its outputs before training."""

import pytest
import torch

from regard.core.requests import full, top
from regard.models.vision.camera_driver import CameraDriver, FrameEncoder

HIGH, WIDE = 24, 40


def driver(*, motion: bool = False, frames: int = 3, attention: bool = True, angles: bool = False) -> CameraDriver:
    torch.manual_seed(1)
    channels = 6 if motion else 3
    encoder = FrameEncoder((HIGH, WIDE), channels=channels, size=7, widths=(5, 6, 8), cell_size=2, attention=attention)
    score = "additive" if attention else None
    made = CameraDriver(encoder, frames=frames, motion=motion, angles=angles, score=score).eval()
    torch.nn.init.normal_(made.controls.weight)
    return made


def pictures(count: int, seen: int) -> torch.Tensor:
    return torch.rand(count, seen, 3, HIGH, WIDE) * 2 - 1


@pytest.mark.parametrize("motion", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_weights_are_a_distribution_over_frames_and_gates_lie_between_0_and_1(motion, attention):
    made = driver(motion=motion, attention=attention)
    driven = made(pictures(2, made.seen), weights=full())
    assert driven.controls.shape == (2, 3)
    assert driven.gates.shape == (2, 3, 3, 5)
    torch.testing.assert_close(driven.weights.sum(1), torch.ones(2))
    assert ((driven.gates >= 0) & (driven.gates <= 1)).all()
    if not attention:
        assert (driven.gates == 1).all()
        torch.testing.assert_close(driven.weights, torch.full((2, 3), 1 / 3))
    assert made(pictures(2, made.seen)).weights is None


@pytest.mark.parametrize("motion", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_unknown_frames_change_nothing(motion, attention):
    made = driver(motion=motion, attention=attention)
    known = torch.tensor([[False] * (made.seen - 2) + [True, True]])
    given = pictures(1, made.seen)
    other = given.clone()
    other[:, : made.seen - 2] = float("nan")
    first, second = (made(one, known, weights=full()) for one in (given, other))
    torch.testing.assert_close(first.controls, second.controls)
    assert first.weights[0, : made.frames - 2].eq(0).all()


def test_motion_is_the_difference_from_the_frame_before():
    """The encoder's input is a frame and its difference from the previous one, 0 if the previous one is missing."""
    made = driver(motion=True, frames=2)
    given = pictures(1, 3)
    seen = []
    made.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    made(given, torch.tensor([[False, True, True]]))
    torch.testing.assert_close(seen[0][0, :3], given[0, 1])
    torch.testing.assert_close(seen[0][0, 3:], torch.zeros_like(given[0, 1]))
    torch.testing.assert_close(seen[0][1, 3:], given[0, 2] - given[0, 1])


def test_a_driver_that_knows_angles_starts_with_the_last_of_them():
    encoder = FrameEncoder((HIGH, WIDE), size=7, widths=(5, 6, 8))
    made = CameraDriver(encoder, frames=3, angles=True).eval()
    angles = torch.tensor([[0.1, 0.2, -0.3], [0.0, 0.5, 0.25]])
    controls = made(pictures(2, 3), angles=angles).controls
    torch.testing.assert_close(controls, torch.tensor([[-0.3, 0.0, 0.0], [0.25, 0.0, 0.0]]))


def test_every_parameter_learns():
    made = driver(motion=True, angles=True).train()
    loss = made(pictures(4, 4), angles=torch.rand(4, 4)).controls.square().sum()
    loss.backward()
    learned = [(name, one) for name, one in made.named_parameters() if one.requires_grad]
    assert not [name for name, one in learned if one.grad is None or not one.grad.abs().sum() > 0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: driver()(pictures(1, 2)), "expected 3 frames, oldest first, got 2"),
        (lambda: driver()(pictures(1, 3), angles=torch.zeros(1, 3)), "built without angles"),
        (lambda: driver(angles=True)(pictures(1, 3)), "built with angles"),
        (lambda: driver(frames=0), "frames must be at least 1"),
        (lambda: FrameEncoder((4, 40)), "smaller than a cell of 8"),
        (lambda: driver()(pictures(1, 3), weights=top(2)), "full"),
    ],
)
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises((ValueError, NotImplementedError, TypeError), match=message):
        build()
