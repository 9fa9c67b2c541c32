"""Builds the network that drives from camera frames from its settings, and computes its loss."""

from typing import Any

from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn

from regard.core.requests import Request, full
from regard.models.vision.camera_driver import CameraDriver, Driven, FrameEncoder
from regard.tasks.driving.camera_material import CameraCodec
from regard.tasks.driving.config import DrivingConfig, ModelSettings
from regard.tasks.image_inputs import Grid, scaled
from regard.tasks.task import Outcome


def visible(settings: ModelSettings, height: int) -> slice:
    """Return the rows of a frame between the sky and the bonnet.

    >>> visible(ModelSettings(crop=(0.3, 0.1)), 80)
    slice(24, 72, None)
    """
    above, below = settings.crop
    return slice(round(above * height), height - round(below * height))


class Camera(nn.Module):
    """A `CameraDriver` on frames of bytes (uint8), cropped to the rows between the sky and the car's bonnet."""

    def __init__(self, driver: CameraDriver, rows: slice) -> None:
        super().__init__()
        self.driver, self.rows = driver, rows

    @property
    def grid(self) -> Grid:
        """Return the numbers of rows and columns of cells in the cropped frame."""
        return self.driver.encoder.grid

    def forward(
        self,
        frames: UInt8[Tensor, "b seen 3 height width"],
        known: Bool[Tensor, "b seen"],
        angles: Float[Tensor, "b seen"],
        *,
        weights: Request | None = None,
    ) -> Driven:
        """Return the controls (steering, throttle, brake) at the last of the input frames."""
        shown = scaled(frames[..., self.rows, :].flatten(0, 1)).unflatten(0, frames.shape[:2])
        driver_angles = None if self.driver.angle is None else angles
        return self.driver(shown, known, driver_angles, weights=weights)


def build_camera(config: DrivingConfig, codec: CameraCodec) -> Camera:
    """Return an untrained network for frames of the size of the codec."""
    settings = config.model
    rows = visible(settings, codec.height)
    attends = settings.attention != "none"
    encoder = FrameEncoder(
        (rows.stop - rows.start, codec.width),
        channels=6 if settings.motion else 3,
        size=settings.size,
        widths=settings.widths,
        cell_size=settings.cell,
        attention=attends,
    )
    driver = CameraDriver(
        encoder,
        frames=settings.frames,
        motion=settings.motion,
        angles=settings.angles,
        score=settings.attention if attends else None,
        dropout=settings.dropout,
    )
    return Camera(driver, rows)


def camera_outcome(network: Camera, batch: Any, config: DrivingConfig, attention: bool) -> Outcome:
    """Return the squared error of the steering plus `pedal_weight` times the errors of throttle and brake.

    The attention weights in the returned `Outcome` are those of the input frames.
    """
    known = batch.known | ~batch.real[:, None]
    driven = network(batch.frames, known, batch.angles, weights=full() if attention else None)
    wrong = (driven.controls.float() - batch.controls).square()
    pedals = config.learning.pedal_weight * wrong[:, 1:].sum(1)
    total, count = ((wrong[:, 0] + pedals) * batch.real).sum(), batch.real.sum()
    if driven.weights is None or config.model.attention == "none":
        return Outcome(total, count)
    mask = batch.known[:, -network.driver.frames :] & batch.real[:, None]
    return Outcome(total, count, [driven.weights[:, None]], mask[:, None])
