"""Relative positions (Shaw et al. 2018) against loops over pairs: outputs, gradients, memory, requested weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from regard.core.masks import Mask, causal, padding
from regard.core.normalizers import Hard, Normalizer, Sigmoid, Softmax, Sparsemax
from regard.core.requests import Request, Top, entropy, full, received, rows, top
from regard.core.scores import Cosine, Dot, ScaledDot
from regard.nn.positions import RelativePositions


def shaw(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, offset: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return outputs and weights by equations 3 and 4 of Shaw et al., with a key and a value for each pair."""
    reach, group = len(keys) // 2, query.shape[1] // key.shape[1]
    outputs: list[list[float]] = []
    all_weights: list[list[float]] = []
    for b, heads in enumerate(query.tolist()):
        for h, queries in enumerate(heads):
            for i, q in enumerate(queries):
                terms = []
                for j, k in enumerate(key[b, h // group].tolist()):
                    near = max(-reach, min(reach, j - i - offset)) + reach
                    moved = [x + a for x, a in zip(k, keys[near].tolist(), strict=True)]
                    terms.append(math.fsum(x * y for x, y in zip(q, moved, strict=True)) / math.sqrt(len(q)))
                seen = [j for j in range(len(terms)) if allowed[b, i, j]]
                total = math.fsum(math.exp(terms[j]) for j in seen)
                weights = [math.exp(terms[j]) / total if j in seen else 0.0 for j in range(len(terms))]
                out = [0.0] * value.shape[-1]
                for j in seen:
                    near = max(-reach, min(reach, j - i - offset)) + reach
                    for c, x in enumerate(value[b, h // group, j].tolist()):
                        out[c] += weights[j] * (x + float(values[near, c]))
                outputs.append(out)
                all_weights.append(weights)
    return outputs, all_weights


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("reach", [1, 2, 13])
def test_every_pair_has_its_key_and_value(reach: int, offset: int) -> None:
    positions = RelativePositions(5, reach).double()
    query, key, value = random((2, 6, 7, 5), (2, 3, 11, 5), (2, 3, 11, 5))
    allowed = torch.rand(2, 7, 11) > 0.3
    found = positions.attend(query, key, value, mask=allowed[:, None], weights=full(), offset=offset)
    tables = positions.key_table.detach(), positions.value_table.detach()
    outputs, weights = shaw(query, key, value, *tables, allowed, offset)
    assert_close(found.output.flatten(0, 2), torch.tensor(outputs, dtype=torch.float64), rtol=0, atol=1e-12)
    assert isinstance(found.weights, Tensor)
    assert_close(found.weights.flatten(0, 2), torch.tensor(weights, dtype=torch.float64), rtol=0, atol=1e-12)
    on_device = positions.attend(query, key, value, mask=allowed[:, None], offset=torch.tensor(offset))
    assert_close(on_device.output, found.output, rtol=0, atol=0)


def plain(
    positions: RelativePositions, query: Tensor, key: Tensor, value: Tensor, normalize: Normalizer, mask: Mask
) -> tuple[Tensor, Tensor]:
    """Return output and weights by tensor operations, with a key and a value for each pair, (b, h, q, k, d)."""
    queries, keys = query.shape[-2], key.shape[-2]
    index = (torch.arange(keys) - torch.arange(queries)[:, None]).clamp(-positions.reach, positions.reach)
    each_key = key.unsqueeze(-3) + positions.key_table[index + positions.reach]
    each_value = value.unsqueeze(-3) + positions.value_table[index + positions.reach]
    scores = torch.einsum("bhqd,bhqkd->bhqk", query, each_key) / math.sqrt(query.shape[-1])
    allowed = mask.aligned(tuple(scores.shape)).allowed(range(queries), range(keys), query.device)
    weights = normalize(scores, allowed.expand(scores.shape))
    return torch.einsum("bhqk,bhqkd->bhqd", weights, each_value), weights


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [Softmax(), Sparsemax(), Sigmoid()])
def test_long_inputs_go_in_blocks_that_change_nothing(normalize: Normalizer) -> None:
    """Long inputs are computed in blocks; outputs and gradients equal those of one (b, h, n, n, d) tensor."""
    positions = RelativePositions(2, 3).double()
    query, key, value = (t.requires_grad_() for t in random((1, 3, 997, 2), (1, 3, 997, 2), (1, 3, 997, 2)))
    mask, upstream = causal() & padding(torch.tensor([991])), torch.randn(1, 3, 997, 2, dtype=torch.float64)
    output = positions.attend(query, key, value, normalize=normalize, mask=mask).output
    expected, _ = plain(positions, query, key, value, normalize, mask)
    assert_close(output, expected, rtol=0, atol=1e-11)
    leaves = [query, key, value, positions.key_table, positions.value_table]
    found = torch.autograd.grad(output, leaves, upstream)
    for own, right in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        assert_close(own, right, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("request_", [full(), rows([5, 0, -1, 900]), top(3), received(), entropy()])
def test_requests_are_answered_across_blocks(request_: Request) -> None:
    positions = RelativePositions(2, 3).double()
    query, key, value = random((1, 3, 997, 2), (1, 3, 997, 2), (1, 3, 997, 2))
    found = positions.attend(query, key, value, mask=causal(), weights=request_).weights
    right = request_.of(plain(positions, query, key, value, Softmax(), causal())[1])
    if isinstance(found, Top):
        assert isinstance(right, Top)
        # The first three queries attend to fewer keys than `top` requests, so their indices are not compared.
        assert torch.equal(found.indices[:, :, 3:], right.indices[:, :, 3:])
        found, right = found.values, right.values
    assert_close(found, right, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """Records the number of entries of the largest tensor that an operation returned, except views."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor._base is None and "expand" not in str(func):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_for_each_pair_of_positions() -> None:
    """For n = 1009 positions of size d = 64, forward and backward pass create no tensor of n · n · d numbers."""
    positions = RelativePositions(64, 5)
    query, key, value = (torch.randn(1, 8, 1009, 64, requires_grad=True) for _ in range(3))
    with Largest() as forward:
        output = positions.attend(query, key, value, mask=causal()).output
    with Largest() as backward:
        output.sum().backward()
    # The limit is below 8.1 million scores of all pairs, and far below 521 million numbers with a key for each pair.
    assert 8 * 1009 * 64 <= forward.numel <= 5_000_000
    assert backward.numel <= 5_000_000


@pytest.mark.slow
def test_gradients_of_all_that_is_learned() -> None:
    positions = RelativePositions(3, 2).double()
    query, key, value = (t.requires_grad_() for t in random((2, 2, 5, 3), (2, 1, 7, 3), (2, 1, 7, 3)))
    bias = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *tables: Tensor) -> Tensor:
        return torch.func.functional_call(
            _Attends(positions),
            {"positions.key_table": tables[0], "positions.value_table": tables[1]},
            (query, key, value, bias),
        )

    leaves = (query, key, value, bias, positions.key_table, positions.value_table)
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves, fast_mode=True)


class _Attends(torch.nn.Module):
    def __init__(self, positions: RelativePositions) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return self.positions.attend(query, key, value, mask=causal(2), bias=bias).output


def test_dropout_takes_key_and_position_together() -> None:
    """Values of −3 and position vectors of 3 cancel; dropout drops both or neither, so the output stays 0."""
    positions = RelativePositions(4, 2)
    with torch.no_grad():
        positions.value_table.fill_(3.0)
    query, key = torch.randn(2, 1, 2, 7, 4)
    value = torch.full((1, 2, 7, 4), -3.0)
    for generator in (None, torch.Generator().manual_seed(1)):
        output = positions.attend(query, key, value, dropout=0.5, generator=generator).output
        assert_close(output, torch.zeros_like(output), rtol=0, atol=1e-5)
    kept = positions.attend(query, key, value * 0, dropout=0.5).output / 3
    # With values of 0, the output is the sum of position vectors, which dropout changes.
    assert not torch.allclose(kept, torch.ones_like(kept))


def test_hard_attention_takes_the_value_of_its_choice_with_its_position() -> None:
    positions = RelativePositions(3, 2).double()
    query, key, value = random((2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 3))
    found = positions.attend(query, key, value, normalize=Hard(sample=False), weights=full())
    soft = positions.attend(query, key, value, weights=full())
    assert isinstance(found.weights, Tensor)
    assert isinstance(soft.weights, Tensor)
    choice = soft.weights.argmax(-1)
    assert torch.equal(found.weights.argmax(-1), choice)
    near = (choice - torch.arange(5)).clamp(-2, 2) + 2
    expected = value.gather(2, choice.unsqueeze(-1).expand(-1, -1, -1, 3)) + positions.value_table[near]
    assert_close(found.output, expected)
    assert found.log_prob is not None
    assert found.log_prob.shape == (2, 2, 5)


def test_rows_that_see_nothing_are_zero_and_hidden_nans_stay_hidden() -> None:
    positions = RelativePositions(3, 2)
    query, key, value = (torch.randn(2, 2, 5, 3) for _ in range(3))
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    seen[:, :, 2] = False
    seen[:, :, :, 4] = False
    key[:, :, 4], value[:, :, 4] = math.nan, math.inf
    leaves = [t.requires_grad_() for t in (query, key, value)]
    output = positions.attend(*leaves, mask=seen).output
    assert torch.equal(output[:, :, 2], torch.zeros(2, 2, 3))
    assert output.isfinite().all()
    output.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (*leaves, *positions.parameters()))


def test_dot_scores_are_not_scaled_and_others_are_refused() -> None:
    positions = RelativePositions(4, 2).double()
    query, key, value = random((1, 1, 5, 4), (1, 1, 5, 4), (1, 1, 5, 4))
    assert_close(
        positions.attend(query, key, value, score=Dot()).output,
        # The default scale for size 4 is 1/√4, which doubled queries cancel.
        positions.attend(query * 2, key, value).output,
    )
    with pytest.raises(ValueError, match=r"dot and scaled_dot scores .* got cosine"):
        positions.attend(query, key, value, score=Cosine())
    with pytest.raises(ValueError, match="got a softcap"):
        positions.attend(query, key, value, score=ScaledDot(softcap=3.0))


def test_no_keys_at_all_give_zeros() -> None:
    positions = RelativePositions(4, 2)
    output = positions.attend(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4), torch.randn(1, 2, 0, 4)).output
    assert torch.equal(output, torch.zeros(1, 2, 3, 4))
