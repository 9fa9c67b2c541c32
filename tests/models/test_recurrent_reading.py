"""The library's own loops of the encoder's GRU, on the CPU and as a CUDA graph, compared with torch's GRU."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.recurrent.encoder import RecurrentEncoder
from regard.models.recurrent.gru_sequence import Read, read, read_cuda
from regard.models.recurrent.token_embeddings import Tokens

B, K, D, E, VOCABULARY = 3, 7, 5, 4, 13
LENGTHS = [None, [7, 3, 0], [5, 5, 2]]


def by_torch(network: nn.GRU, inputs: Tensor, lengths: list[int] | None) -> Read:
    """Return states and last states by torch's GRU, for each row of the inputs (b, k, e) alone, without padding."""
    states, last = [], []
    for row, length in enumerate([K] * B if lengths is None else lengths):
        alone, end = network(inputs[row : row + 1, : max(length, 1)])
        states.append(F.pad(alone[0, :length], (0, 0, 0, K - length)))
        last.append(end.flatten() * (length > 0))
    return Read(torch.stack(states), torch.stack(last))


def by_hand(network: nn.GRU, inputs: Tensor, lengths: list[int] | None) -> Read:
    return read(network, Tokens(inputs.transpose(0, 1), None), None if lengths is None else torch.tensor(lengths))


def captured(network: nn.GRU, inputs: Tensor, lengths: list[int] | None) -> Read:
    mask = None if lengths is None else torch.arange(K) < torch.tensor(lengths).unsqueeze(-1)
    return read_cuda(network, inputs, mask)


def network_of(bidirectional: bool) -> nn.GRU:
    return nn.GRU(E, D, batch_first=True, bidirectional=bidirectional).double()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("way", [by_hand, captured], ids=["hand", "captured"])
def test_states_and_gradients_are_torchs(way: Any, bidirectional: bool, lengths: list[int] | None) -> None:
    network = network_of(bidirectional)
    inputs = torch.randn(B, K, E, dtype=torch.float64, requires_grad=True)
    found, expected = way(network, inputs, lengths), by_torch(network, inputs, lengths)
    torch.testing.assert_close(found, expected)
    wanted, upstream = [inputs, *network.parameters()], [torch.randn(x.shape, dtype=x.dtype) for x in found]
    torch.testing.assert_close(
        torch.autograd.grad(found, wanted, upstream), torch.autograd.grad(expected, wanted, upstream)
    )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_second_derivatives_are_torchs(lengths: list[int] | None) -> None:
    network = network_of(True)
    inputs = torch.randn(B, K, E, dtype=torch.float64, requires_grad=True)
    wanted, found = [inputs, *network.parameters()], []
    for way in (by_hand, by_torch):
        made = way(network, inputs, lengths)
        (slope,) = torch.autograd.grad(made.states.square().sum() + made.last.sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), wanted))
    torch.testing.assert_close(*found)


def test_what_needs_no_gradient_gets_none() -> None:
    network = network_of(False).requires_grad_(False)
    network.get_parameter("weight_hh_l0").requires_grad_()
    inputs = torch.randn(B, K, E, dtype=torch.float64)
    by_hand(network, inputs, None).states.sum().backward()
    assert [name for name, p in network.named_parameters() if p.grad is not None] == ["weight_hh_l0"]


@pytest.mark.parametrize("lengths", [[7, 3, 0], [0, 3, 7], [2, 2, 1]])
def test_the_encoder_gives_rows_back_in_their_order(lengths: list[int]) -> None:
    encoder = RecurrentEncoder(VOCABULARY, D, embedding_size=E).double()
    source = torch.randint(VOCABULARY, (B, K))
    memory = encoder(source, torch.tensor(lengths))
    expected = by_torch(encoder.network, encoder.embedding(source), lengths)
    torch.testing.assert_close((memory.values, memory.summary), tuple(expected))


def test_words_that_come_again_are_mapped_once_to_the_same_numbers() -> None:
    """Each of few distinct words is embedded once for its many tokens; its gradient is the sum over the tokens."""
    encoder = RecurrentEncoder(VOCABULARY, D, embedding_size=E).double()
    source = torch.randint(VOCABULARY, (41, K))
    results = []
    for memory in (encoder(source), Read(*by_rows(encoder, source))):
        values, summary = (memory.values, memory.summary) if not isinstance(memory, Read) else memory
        encoder.zero_grad()
        (values.square().sum() + summary.sum()).backward()
        results.append([values.detach(), summary.detach(), *(p.grad.clone() for p in encoder.parameters())])
    torch.testing.assert_close(*results)


def by_rows(encoder: RecurrentEncoder, source: Tensor) -> tuple[Tensor, Tensor]:
    states, last = encoder.network(encoder.embedding(source))
    return states, torch.cat(tuple(last), -1)


def test_nan_in_padding_reaches_nothing() -> None:
    encoder = RecurrentEncoder(VOCABULARY, D, embedding_size=E).double()
    with torch.no_grad():
        encoder.embedding.weight[0] = torch.nan
    source = torch.randint(1, VOCABULARY, (B, K))
    source[1, 3:] = 0
    memory = encoder(source, torch.tensor([K, 3, K]))
    assert memory.values.isfinite().all()
    assert memory.summary.isfinite().all()
    memory.values.sum().backward()
    assert all(p.grad is not None and p.grad[1:].isfinite().all() for p in encoder.parameters())


@pytest.mark.interpreted
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernels_are_the_loop_in_the_interpreter(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels.triton import few_row_products

    torch.manual_seed(0)
    # The limit is so small that the kernel splits its sums into several parts.
    monkeypatch.setattr(few_row_products, "_SHARE", 16)
    network = nn.GRU(4, 21, batch_first=True, bidirectional=True)
    inputs = torch.randn(3, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool() if masked else None
    found = []
    # In float64 the GRU's loop runs in torch operations, without the Triton kernel.
    for dtype in (torch.float32, torch.float64):
        network.to(dtype).zero_grad()
        x = inputs.clone().to(dtype).requires_grad_()
        states = read_cuda(network, x, mask)
        (states.states.square().sum() + states.last.sum()).backward()
        found.append([*states, x.grad, *(p.grad.clone() for p in network.parameters())])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=2e-5)


@pytest.mark.cuda
def test_the_encoder_on_cuda_is_that_on_the_cpu() -> None:
    """Five calls with other tokens and lengths: after the first ones the loop is a captured CUDA graph."""
    encoder, device = RecurrentEncoder(VOCABULARY, D), RecurrentEncoder(VOCABULARY, D).cuda()
    device.load_state_dict(encoder.state_dict())
    for round_ in range(5):
        source, lengths = torch.randint(VOCABULARY, (B, K)), torch.tensor([K, 4 - round_ % 2, 0])
        results = []
        for model, place in ((device, "cuda"), (encoder, "cpu")):
            model.zero_grad()
            memory = model(source.to(place), lengths.to(place))
            (memory.values.square().sum() + memory.summary.sum()).backward()
            results.append([memory.values.detach(), memory.summary.detach(), *(p.grad for p in model.parameters())])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_under_autocast_the_gradients_are_those_of_float64(lengths: list[int] | None) -> None:
    """The recurrent state stays in float32, so the gradients' error is at most that of torch under autocast."""
    torch.manual_seed(0)
    encoder = RecurrentEncoder(29, 16)
    source = torch.randint(29, (3, 7))
    told = None if lengths is None else torch.tensor(lengths)
    exact = copy.deepcopy(encoder).double()
    memory = exact(source, told)
    upstream = torch.randn(memory.values.shape, dtype=torch.float64)
    expected = torch.autograd.grad((memory.values * upstream).sum(), list(exact.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        found = encoder(source, told)
    assert found.values.dtype == torch.bfloat16
    torch.testing.assert_close(found.values.double(), memory.values.detach(), rtol=0, atol=0.01)
    gradients = torch.autograd.grad((found.values * upstream).sum(), list(encoder.parameters()))
    for actual, wanted in zip(gradients, expected, strict=True):
        assert float((actual.double() - wanted).norm() / wanted.norm()) < 0.02
