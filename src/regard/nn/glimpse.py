"""A glimpse: a small part of an image at a location, sharp at its centre and coarse around it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.attended import Attended
from regard.core.problem import HALF
from regard.core.requests import Request
from regard.core.scores import float_tensor
from regard.nn.argument_checks import only_full


class Glimpse(nn.Module):
    """Patches of an image around a location at several scales, each size × size (Mnih et al. 2014, 3.1, the retina).

    The patch at scale s covers size · factorˢ pixels in each direction. The pixels are interpolated bilinearly and
    averaged over squares of factorˢ × factorˢ. The location is (x, y) in [−1, 1]²: (0, 0) is the middle of the image,
    (−1, −1) its upper left corner. Pixels outside the image are 0. Interpolation and averaging are separable in rows
    and columns, so each patch is A_y image A_xᵀ: two matrix products for the whole batch, with gradients for the image
    and for the location.

    >>> image = torch.arange(16.0).reshape(1, 1, 4, 4)
    >>> Glimpse(2)(image, torch.zeros(1, 2)).output
    tensor([[[[[ 5.,  6.],
               [ 9., 10.]]]]])
    """

    def __init__(self, size: int, scales: int = 1, *, factor: int = 2) -> None:
        super().__init__()
        for name, number in (("size", size), ("scales", scales), ("factor", factor)):
            if number < 1:
                raise ValueError(f"{name} of Glimpse must be 1 or more, got {number}")
        self.size, self.scales, self.factor = size, scales, factor

    def forward(
        self,
        image: Float[Tensor, "b c height width"],
        location: Float[Tensor, "b 2"],
        *,
        weights: Request | None = None,
    ) -> Attended:
        """Return the patches of the image around the location at all scales, (b, scales, c, size, size).

        `weights=full()` also gives (b, scales, height, width): the weight of each pixel in each patch, with sum 1 for a
        patch inside the image.
        """
        float_tensor(image, "image")
        float_tensor(location, "location")
        if image.ndim != 4:
            raise ValueError(f"image must be (b, c, height, width), got {tuple(image.shape)}")
        if location.shape != (image.shape[0], 2):
            raise ValueError(f"location must be (x, y) for each image, {(len(image), 2)}, got {tuple(location.shape)}")
        only_full(weights, "Glimpse")
        across = self._readings(location[:, 0], image.shape[-1])
        down = self._readings(location[:, 1], image.shape[-2])
        # The weights are computed before the cast to the image's dtype, because positions need more digits than half
        # precision has.
        rows = torch.einsum("bsiy,bcyx->bsicx", down.to(image.dtype), image)
        patches = torch.einsum("bsicx,bsjx->bscij", rows, across.to(image.dtype))
        if weights is None:
            return Attended(patches)
        share = down.mean(2).unsqueeze(-1) * across.mean(2).unsqueeze(-2)
        return Attended(patches, share.to(image.dtype))

    def _readings(self, location: Float[Tensor, "b"], length: int) -> Float[Tensor, "b scales size length"]:
        """Return, for one axis of the image, the weight of each pixel in each entry of the patch."""
        location = location.float() if location.dtype in HALF else location
        options = {"device": location.device, "dtype": location.dtype}
        centre = ((location + 1) * length - 1) / 2  # the location in pixels (pixel centres are at 0, 1, …)
        fine = self.factor ** torch.arange(self.scales, **options)
        offsets = (torch.arange(self.size, **options) - (self.size - 1) / 2) * fine.unsqueeze(-1)
        places = centre[:, None, None, None] + offsets.unsqueeze(-1)  # shape (b, scales, size, 1)
        distance = (places - torch.arange(length, **options)).abs()
        # The sum of `fine` triangles 1 − |distance|, one pixel apart, is a trapezoid.
        fine = fine[:, None, None]
        return ((fine + 1) / 2 - distance).clamp(0, 1) / fine
