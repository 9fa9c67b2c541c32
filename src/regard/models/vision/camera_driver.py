"""A model that drives by camera frames: spatial attention in each frame, then temporal attention over the frames."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.requests import Request, full
from regard.models.vision.convolutional import ConvolutionalNetwork
from regard.nn.argument_checks import only_full
from regard.nn.spatial import SpatialAttention
from regard.nn.temporal import TemporalAttention

_FULL = full()


@dataclass(frozen=True, eq=False)
class Driven:
    """The controls at the last frame, and if requested the gates of each frame's cells and the weights of the frames.

    Each gate is a number from 0 to 1, independent of the other gates. The weights of the frames sum to 1.
    """

    controls: Float[Tensor, "b controls"]
    gates: Float[Tensor, "b t rows columns"] | None = None
    weights: Float[Tensor, "b t"] | None = None


class FrameEncoder(nn.Module):
    """Encodes a frame as a vector v = relu(W flat(relu(P(gate ⊙ CNN(x))))).

    `gate` has one number for each cell of the feature map (the spatial attention of CBAM); without `attention` there
    are no gates. P is a 1 × 1 convolution to `cell_size` numbers per cell. The cells are not averaged, because steering
    depends on the position of the road in the image.

    >>> vectors, gates = FrameEncoder((40, 80), size=16, widths=(4, 8, 8))(torch.randn(2, 3, 40, 80))
    >>> vectors.shape, gates.shape
    (torch.Size([2, 16]), torch.Size([2, 5, 10]))
    """

    def __init__(
        self,
        input_size: tuple[int, int],
        *,
        channels: int = 3,
        size: int = 64,
        widths: Sequence[int] = (16, 32, 48),
        cell_size: int = 8,
        kernel_size: int = 5,
        attention: bool = True,
    ) -> None:
        super().__init__()
        self.backbone = ConvolutionalNetwork(channels, widths=widths)
        rows, columns = (length // self.backbone.stride for length in input_size)
        if not rows or not columns:
            high, wide = input_size
            raise ValueError(f"a frame of {high}×{wide} pixels is smaller than a cell of {self.backbone.stride}")
        self.spatial = SpatialAttention(kernel_size) if attention else None
        self.cells = nn.Conv2d(self.backbone.channels, cell_size, 1)
        self.output = nn.Linear(cell_size * rows * columns, size)
        self.size, self.grid = size, (rows, columns)

    def forward(
        self, frames: Float[Tensor, "n c height width"]
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n rows columns"]]:
        """Return the vectors of the frames, and the gates of their cells, which are ones without attention."""
        maps = self.backbone(frames)
        gates = maps.new_ones(len(maps), *maps.shape[-2:])
        if self.spatial is not None:
            gates = self.spatial.gates(maps)
            maps = maps * gates.unsqueeze(1)
        return F.relu(self.output(F.relu(self.cells(maps)).flatten(1))), gates


class CameraDriver(nn.Module):
    """Computes steering, throttle and brake from the last frames of a camera.

    Each frame is encoded as a vector v_t by spatial attention (`FrameEncoder`), plus a learned vector of its time step.
    The last frame is the query: α = softmax_t score(v_T, v_t), and the controls are W₂ relu(W₁ Σ_t α_t v_t). `score` is
    any score of `TemporalAttention`; with None the frames are averaged.

    With `motion`, each frame is concatenated with its difference from the previous frame, so the input has one frame
    more than the attention. With `angles`, the steering angle before each frame is an input too, and the first control
    is the predicted change plus the last angle, so that an untrained driver repeats the last angle.

    >>> driver = CameraDriver(FrameEncoder((40, 80), channels=6, size=16, widths=(4, 8, 8)), frames=3, motion=True)
    >>> driven = driver(torch.randn(2, 4, 3, 40, 80), weights=full())
    >>> driven.controls.shape, driven.weights.shape, driven.gates.shape
    (torch.Size([2, 3]), torch.Size([2, 3]), torch.Size([2, 3, 5, 10]))
    """

    def __init__(
        self,
        encoder: FrameEncoder,
        *,
        frames: int = 4,
        controls: int = 3,
        motion: bool = False,
        angles: bool = False,
        score: str | None = "additive",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if frames < 1:
            raise ValueError(f"frames must be at least 1, got {frames}")
        size = encoder.size
        self.encoder, self.frames, self.motion = encoder, frames, motion
        self.places = nn.Parameter(0.02 * torch.randn(frames, size))
        self.angle = nn.Linear(1, size, bias=False) if angles else None
        self.temporal: TemporalAttention | None = None
        if score is not None:
            self.temporal = TemporalAttention(size, score=score, hidden_size=None if score == "bilinear" else size)
            # The last frame is the query, so the learned query of the layer is not used and must not be trained.
            self.temporal.query.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.hidden, self.controls = nn.Linear(size, size), nn.Linear(size, controls)
        # At the start of training the controls are 0, except that with `angles` the first control is the last angle, so
        # that squared errors are small.
        nn.init.zeros_(self.controls.weight)
        nn.init.zeros_(self.controls.bias)

    @property
    def seen(self) -> int:
        """Return the number of frames that `forward` expects: with `motion` one more than it attends to."""
        return self.frames + self.motion

    def forward(
        self,
        frames: Float[Tensor, "b seen 3 height width"],
        known: Bool[Tensor, "b seen"] | None = None,
        angles: Float[Tensor, "b seen"] | None = None,
        *,
        weights: Request | None = None,
    ) -> Driven:
        """Return the controls at the last frame.

        Frames where `known` is False are set to zero and masked in the attention over the frames. `angles` are the
        steering angles before each frame.
        """
        only_full(weights, "CameraDriver")
        if frames.shape[1] != self.seen:
            raise ValueError(f"expected {self.seen} frames, oldest first, got {frames.shape[1]}")
        if (self.angle is None) != (angles is None):
            raise ValueError(f"the driver was built with{'out' if self.angle is None else ''} angles")
        last = None if angles is None else angles[:, -1]
        if known is not None:
            frames = torch.where(known[:, :, None, None, None], frames, 0)
        if self.motion:
            change = frames[:, 1:] - frames[:, :-1]
            if known is not None:
                change = torch.where(known[:, :-1, None, None, None], change, 0)
                known = known[:, 1:]
            frames = torch.cat([frames[:, 1:], change], 2)
            angles = None if angles is None else angles[:, 1:]
        vectors, gates = self.encoder(frames.flatten(0, 1))
        states = vectors.unflatten(0, frames.shape[:2]) + self.places
        if self.angle is not None and angles is not None:
            states = states + self.angle(angles.unsqueeze(-1))
        context, shares = self._over_time(states, known)
        controls = self.controls(F.relu(self.hidden(self.dropout(context))))
        if last is not None:
            controls = torch.cat([controls[:, :1] + last.unsqueeze(-1), controls[:, 1:]], 1)
        requested = weights is not None
        return Driven(
            controls, gates.unflatten(0, frames.shape[:2]) if requested else None, shares if requested else None
        )

    def _over_time(self, states: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.temporal is not None:
            read = self.temporal(states, states[:, -1], mask=known, weights=_FULL)
            assert isinstance(read.weights, Tensor)
            return read.output, read.weights
        there = states.new_ones(states.shape[:2]) if known is None else known.to(states.dtype)
        shares = there / there.sum(1, keepdim=True).clamp_min(1)
        return (shares.unsqueeze(-1) * states).sum(1), shares
