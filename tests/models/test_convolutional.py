"""The small convolutional network: the receptive field of a cell, and invalid arguments."""

import pytest
import torch

from regard.models.vision.convolutional import ConvolutionalNetwork


@pytest.mark.parametrize(
    ("kernels", "seen"),
    [((), 22), ((4, 4, 4), 22), ((4, 2, 4), 18), ((2, 2, 4), 16), ((4, 4, 2), 14), ((2, 2, 2), 8)],
)
def test_a_cell_sees_so_many_pixels_around_its_own(kernels, seen):
    torch.manual_seed(1)
    network = ConvolutionalNetwork(2, widths=(16, 16, 16), kernels=kernels).eval()
    image = torch.randn(1, 2, 48, 40, requires_grad=True)
    cells = network(image)
    assert cells.shape == (1, 16, 6, 5)
    cells[0, :, 3, 2].sum().backward()
    assert image.grad is not None
    pixels = image.grad[0].abs().sum(0)
    rows, columns = pixels.sum(1).nonzero().flatten().tolist(), pixels.sum(0).nonzero().flatten().tolist()
    beside = (seen - 8) // 2
    assert (rows[0], rows[-1]) == (24 - beside, 31 + beside)
    assert (columns[0], columns[-1]) == (16 - beside, 23 + beside)


@pytest.mark.parametrize("kernels", [(4,), (4, 3, 4), (4, 4, 4, 4)])
def test_other_kernels_are_refused(kernels):
    with pytest.raises(ValueError, match="kernels must have 2 or 4 for each of the 3 layers"):
        ConvolutionalNetwork(kernels=kernels)


def test_no_layers_are_refused():
    with pytest.raises(ValueError, match="widths must name at least one layer"):
        ConvolutionalNetwork(widths=())
