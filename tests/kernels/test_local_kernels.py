"""C loops and Triton kernels of local attention (a window around a centre), against all pairs in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreting import DEVICES
from regard.kernels import local_attention

BATCH, HEADS, QUERIES, KEYS = 2, 3, 37, 53
LENGTHS = [KEYS, 17]
KINDS = [pytest.param("loops", id="loops"), *(pytest.param(*p.values, marks=p.marks, id=p.id) for p in DEVICES)]
DTYPES = [torch.float32, torch.bfloat16]


def definition(
    query: Tensor, key: Tensor, value: Tensor, centre: Tensor, reach: int, lengths: list[int], gaussian: bool
) -> tuple[Tensor, Tensor]:
    """Return output and weights of local attention (Luong et al. 2015, section 3.2); queries without keys give 0."""
    place = torch.arange(key.shape[-2])
    distance = place - centre.unsqueeze(-1)
    near = (distance.abs() <= reach) & (place < torch.tensor(lengths)[:, None, None, None])
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~near, -1e300)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp() * near
    total = exponentials.sum(-1, keepdim=True)
    weights = exponentials / torch.where(total == 0, 1.0, total)
    if gaussian:
        weights = weights * torch.exp(-distance.square() / (2 * (reach / 2) ** 2))
    return weights @ value, weights


def inputs(size: int = 24, value_size: int = 40, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return query, key (a transposed tensor), value, and window centres, some beyond the first or the last key."""
    query = torch.randn(BATCH, HEADS, QUERIES, size).to(dtype)
    key = torch.randn(BATCH, KEYS, HEADS, size).to(dtype).transpose(1, 2)
    value = torch.randn(BATCH, HEADS, KEYS, value_size).to(dtype)
    return [query, key, value, torch.rand(BATCH, HEADS, QUERIES) * (KEYS + 12) - 6]


def computed(
    kind: str,
    tensors: list[Tensor],
    reach: int,
    change: Tensor,
    lengths: list[int] | None = None,
    gaussian: bool = True,
    **options: Any,
) -> list[Tensor]:
    """Return output, the weights in each window, and gradients of query, key, value and, with a Gaussian, centre."""
    device = "cuda" if kind == "cuda" else "cpu"
    if kind == "loops":
        if not local_attention.available():
            pytest.skip("there is no C compiler")
        make: Any = local_attention.Loops
    else:
        from regard.kernels.triton.local_launches import Launches

        make = Launches
    given = [tensor.to(device) for tensor in tensors]
    extent = None if lengths is None else torch.tensor(lengths, device=device)
    plan = make(*given, reach, 1 / math.sqrt(given[0].shape[-1]), gaussian, **options)
    output, weights, state = plan.forward(*given, extent, True)
    grads = plan.gradients(*given, extent, change.to(device), *state)
    return [tensor.cpu() for tensor in (output, weights, *grads) if tensor is not None]


def expected(
    tensors: list[Tensor], reach: int, change: Tensor, lengths: list[int] | None = None, gaussian: bool = True
) -> list[Tensor]:
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    output, weights = definition(*leaves, reach, lengths or [tensors[1].shape[-2]] * BATCH, gaussian)
    grads = torch.autograd.grad(output, leaves[: 4 if gaussian else 3], change.double())
    place = torch.ceil(leaves[3].detach() - reach).long().unsqueeze(-1) + torch.arange(2 * reach + 1)
    inside = place.clamp(0, tensors[1].shape[-2] - 1)
    return [output, torch.where(place == inside, weights.gather(-1, inside), 0), *grads]


def close(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.detach(), **near)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gaussian", [True, False], ids=["local-p", "local-m"])
@pytest.mark.parametrize("reach", [1, 10])
def test_output_weights_and_gradients(kind: str, dtype: torch.dtype, gaussian: bool, reach: int) -> None:
    tensors, change = inputs(dtype=dtype), torch.randn(BATCH, HEADS, QUERIES, 40).to(dtype)
    found = computed(kind, tensors, reach, change, LENGTHS, gaussian)
    close(found, expected(tensors, reach, change, LENGTHS, gaussian), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "value_size"), [(3, 1), (100, 64), (16, 136)], ids=str)
def test_other_sizes(kind: str, size: int, value_size: int) -> None:
    tensors, change = inputs(size, value_size), torch.randn(BATCH, QUERIES, HEADS, value_size).transpose(1, 2)
    close(computed(kind, tensors, 4, change), expected(tensors, 4, change), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "value_size"), [(72, 72), (96, 24), (40, 128)], ids=str)
def test_vectors_in_two_tiles(
    size: int, value_size: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.kernels.triton import local_launches
    from regard.kernels.triton.additive.plan import Block

    two = local_launches.Tuning(*(Block(32, 32, depth=64, stages=1) for _ in range(3)))
    for table in (local_launches.SINGLE, local_launches.HALF):
        monkeypatch.setitem(table, 128, two)
    tensors, change = inputs(size, value_size, dtype), torch.randn(BATCH, HEADS, QUERIES, value_size).to(dtype)
    tensors[3][0, 1] = torch.rand(QUERIES) * 8
    wanted = expected(tensors, 4, change, LENGTHS)
    tensors[2][0, 1, 20, value_size - 3] = math.inf  # in the second tile, and in no window
    close(computed(device, tensors, 4, change, LENGTHS), wanted, dtype)
    tensors[2][0, 1, 5, value_size - 3] = math.inf
    output, *_ = computed(device, tensors, 4, change, LENGTHS)
    near = (tensors[3][0, 1] - 5).abs() <= 4
    assert output[0, 1, near, value_size - 3].isinf().all()
    torch.testing.assert_close(output[0, 1, ~near].double(), wanted[0][0, 1, ~near].detach(), rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys", "reach"), [(1, 1, 1), (5, 2, 9), (150, 7, 2), (2, 90, 33)], ids=str)
def test_other_lengths(kind: str, queries: int, keys: int, reach: int) -> None:
    tensors = [torch.randn(BATCH, HEADS, n, 8) for n in (queries, keys, keys)]
    tensors.append(torch.rand(BATCH, HEADS, queries) * keys)
    change = torch.randn(BATCH, HEADS, queries, 8)
    close(computed(kind, tensors, reach, change), expected(tensors, reach, change), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_ordered_by_centre(device: str, dtype: torch.dtype) -> None:
    tensors, change = inputs(dtype=dtype), torch.randn(BATCH, HEADS, QUERIES, 40).to(dtype)
    found = computed(device, tensors, 4, change, LENGTHS, ordered=True)
    close(found, expected(tensors, 4, change, LENGTHS), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_window_contains_has_no_effect(kind: str) -> None:
    tensors, change = inputs(), torch.randn(BATCH, HEADS, QUERIES, 40)
    tensors[3] = torch.rand(BATCH, HEADS, QUERIES) * 20
    wanted = expected(tensors, 4, change, LENGTHS)
    tensors[1][..., 24:, :], tensors[2][..., 24:, :] = math.nan, math.inf
    tensors[1][1, :, 17:], tensors[2][1, :, 17:] = -math.inf, math.nan
    close(computed(kind, tensors, 4, change, LENGTHS), wanted, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_without_keys_gives_zeros(kind: str) -> None:
    tensors, change = inputs(), torch.randn(BATCH, HEADS, QUERIES, 40)
    tensors[3][:, :, ::3] = torch.tensor([-5.5, KEYS + 3.5, 1e30, -1e30, -6.1, 4e9, 99.0, 1e5, -1e9] + [77.0] * 4)
    output, weights, query_grad, _, _, slopes = found = computed(kind, tensors, 4, change, [KEYS, 0])
    close(found, expected(tensors, 4, change, [KEYS, 0]), torch.float32)
    for tensor in (output, weights, query_grad, slopes):
        assert not tensor[:, :, ::3].any()
        assert not tensor[1].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_number_in_a_window_that_is_not_finite_reaches_the_rows_that_attend_it_alone(kind: str, bad: float) -> None:
    tensors, change = inputs(), torch.randn(BATCH, HEADS, QUERIES, 40)
    clean = computed(kind, tensors, 4, change)
    key, value = tensors[1:3]
    value[0, 1, 20, 5], key[1, 2, 30] = bad, math.nan
    found = computed(kind, tensors, 4, change)
    by_value, by_key = (torch.zeros(BATCH, HEADS, QUERIES, dtype=torch.bool) for _ in range(2))
    by_value[0, 1] = (tensors[3][0, 1] - 20).abs() <= 4
    by_key[1, 2] = (tensors[3][1, 2] - 30).abs() <= 4
    assert by_value.any()
    assert by_key.any()
    output, weights, query_grad, key_grad, value_grad, slopes = found
    assert not output[by_value][:, 5].isfinite().any()
    assert output[by_key].isnan().all()
    assert query_grad[by_key].isnan().all()
    for tensor, before in ((output, clean[0]), (query_grad, clean[2]), (slopes, clean[5])):
        torch.testing.assert_close(tensor[~(by_value | by_key)], before[~(by_value | by_key)])
    torch.testing.assert_close(weights[~by_key], clean[1][~by_key])
    torch.testing.assert_close(output[by_value][:, 6:], clean[0][by_value][:, 6:])
    assert key_grad[1, 2, 44:].isfinite().all()
    assert value_grad[1, 2, :20].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_incoming_gradient_that_is_not_finite_reaches_the_keys_of_its_window_alone(kind: str) -> None:
    tensors, change = inputs(), torch.randn(BATCH, HEADS, QUERIES, 40)
    tensors[3][0, 1, 7] = 30.5
    clean = computed(kind, tensors, 4, change)
    change[0, 1, 7, 3] = math.nan
    _, _, query_grad, key_grad, value_grad, _ = computed(kind, tensors, 4, change)
    assert query_grad[0, 1, 7].isnan().all()
    assert value_grad[0, 1, 27:35, 3].isnan().all()
    assert key_grad[0, 1, 27:35].isnan().all()
    for tensor, before in ((value_grad, clean[4]), (key_grad, clean[3])):
        torch.testing.assert_close(tensor[0, 1, :27], before[0, 1, :27])
        torch.testing.assert_close(tensor[0, 1, 35:], before[0, 1, 35:])
        torch.testing.assert_close(tensor[1], before[1])


def test_the_loops_refuse_a_centre_that_is_not_finite() -> None:
    if not local_attention.available():
        pytest.skip("there is no C compiler")
    tensors = inputs()
    tensors[3][1, 2, 5] = math.nan
    assert local_attention.Loops(*tensors, 4, 0.5, True).forward(*tensors, None, False) is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_centre_that_is_nan_gives_nan(device: str) -> None:
    tensors, change = inputs(), torch.zeros(BATCH, HEADS, QUERIES, 40)
    tensors[3][1, 2, 5] = math.nan
    output, weights, *_ = computed(device, tensors, 4, change)
    assert output[1, 2, 5].isnan().all()
    assert weights[1, 2, 5].isnan().all()
    assert output[1, 2, 6:].isfinite().all()
