"""Linear attention with elu and Performer features by compiled C on the CPU, against a sum of all pairs in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.kernels import linear_loops

pytestmark = pytest.mark.skipif(
    not linear_loops.serves(*[torch.zeros(1, 3, 2)] * 3, 2), reason="there is no C compiler"
)

BATCH, HEADS = 2, 3
SIZES = {  # the numbers of queries and keys, and the sizes of keys and values
    "one position": (1, 1, 3, 5),
    "few": (33, 20, 24, 40),
    "more queries than a block": (70, 2, 8, 9),
    "sums": (200, 300, 16, 17),
    "whole vectors": (129, 129, 64, 64),
    "chunks": (257, 257, 17, 100),
}


def drawn(sizes: str, causal: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    queries, keys, size, value_size = SIZES[sizes]
    source = torch.Generator().manual_seed(queries)
    shapes = ((queries, size), (queries if causal else keys, size), (queries if causal else keys, value_size))
    return [
        torch.randn(BATCH, length, HEADS, width, generator=source).to(dtype).transpose(1, 2) for length, width in shapes
    ]


def exact(tensors: list[Tensor], causal: bool, projection: Tensor | None = None) -> Tensor:
    query, key, value = tensors
    if projection is None:
        query, key = F.elu(query) + 1, F.elu(key) + 1
    else:
        narrow = (t * t.shape[-1] ** -0.25 for t in (query, key))
        query, key = ((t @ projection.double().mT - t.square().sum(-1, keepdim=True) / 2).exp() for t in narrow)
    pairs = query @ key.mT
    pairs = pairs.tril() if causal else pairs
    return pairs @ value / pairs.sum(-1, keepdim=True)


def performer(sizes: str) -> regard.PerformerFeatures:
    size = SIZES[sizes][2]
    return regard.PerformerFeatures.draw(size, 3 * size + 1, generator=torch.Generator().manual_seed(0))


def call(tensors: list[Tensor], causal: bool, features: regard.PerformerFeatures | None = None) -> Tensor:
    query, key, value = tensors
    return regard.linear_attention(query, key, value, features=features or regard.EluFeatures(), causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["elu", "performer"])
def test_output_and_gradients(sizes: str, causal: bool, dtype: torch.dtype, kind: str) -> None:
    features = performer(sizes) if kind == "performer" else None
    tensors = drawn(sizes, causal, dtype)
    leaves = [t.clone().requires_grad_() for t in tensors]
    wide = [t.double().requires_grad_() for t in tensors]
    output = call(leaves, causal, features)
    true = exact(wide, causal, features.projection if features else None)
    direction = torch.arange(output.numel()).cos().reshape(output.shape).to(dtype)
    found = [output, *torch.autograd.grad(output, leaves, direction)]
    right = [true, *torch.autograd.grad(true, wide, direction.double())]
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(
            one.detach().double(), other.detach(), rtol=near, atol=near * max(1.0, float(other.detach().abs().max()))
        )
    if dtype == torch.float32:
        assert torch.equal(call(tensors, causal, features), output)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("position", [5, 40, 100, 256])
@pytest.mark.parametrize("kind", ["elu", "performer"])
def test_later_positions_change_no_bit_of_earlier_ones(place: int, number: float, position: int, kind: str) -> None:
    features = performer("chunks") if kind == "performer" else None
    tensors = drawn("chunks", True)
    before = call(tensors, True, features)
    tensors[place][1, 2, position] = number
    after = call(tensors, True, features)
    assert torch.equal(before[:, :, :position], after[:, :, :position])
    if number != 1e30:
        assert not after[1, 2, position].isfinite().all()


def test_the_number_of_threads_changes_nothing() -> None:
    tensors, before = drawn("chunks", True), torch.get_num_threads()
    tensors = [t.repeat(4, 1, 1, 1) for t in tensors]
    outputs = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            outputs.append(call(tensors, True))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
