"""The pyramidal speech encoder: halved lengths, odd lengths, and padding without effect."""

import math

import pytest
import torch
from torch import nn

from regard.models.speech.pyramidal_encoder import BothWays, SpeechEncoder

FEATURES, SIZE = 5, 3


def plain_lstm(network, steps):
    """Return the states of an LSTM from its equations, by a loop over a list of vectors; torch's order of gates is
    i, f, g, o."""
    hidden = cell = torch.zeros(network.hidden_size, dtype=steps[0].dtype)
    found = []
    for x in steps:
        gates = network.weight_ih_l0 @ x + network.bias_ih_l0 + network.weight_hh_l0 @ hidden + network.bias_hh_l0
        write, keep, new, show = gates.split(network.hidden_size)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
        hidden = torch.sigmoid(show) * torch.tanh(cell)
        found.append(hidden)
    return found


def plain_both(layer, steps):
    there, back = plain_lstm(layer.forwards, steps), plain_lstm(layer.backwards, steps[::-1])[::-1]
    return [torch.cat(pair) for pair in zip(there, back, strict=True)]


def plain_pyramid(encoder, frames):
    steps = plain_both(encoder.base, list(frames))
    for layer in encoder.pyramid:
        if len(steps) % 2:
            steps = [*steps, torch.zeros_like(steps[0])]
        steps = plain_both(layer, [torch.cat(steps[i : i + 2]) for i in range(0, len(steps), 2)])
    return torch.stack(steps)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 11, 13])
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_the_pyramid_is_the_one_of_the_paper(length, layers):
    encoder = SpeechEncoder(FEATURES, SIZE, layers=layers).double()
    frames = torch.randn(2, length, FEATURES, dtype=torch.float64)
    memory = encoder(frames)
    assert memory.values.shape == (2, math.ceil(length / 2**layers), 2 * SIZE)
    assert encoder.reduction == 2**layers
    for row in range(2):
        expected = plain_pyramid(encoder, frames[row])
        torch.testing.assert_close(memory.values[row], expected)
        torch.testing.assert_close(memory.summary[row], torch.cat([expected[-1, :SIZE], expected[0, SIZE:]]))


def test_a_padded_recording_gives_what_it_gives_alone():
    encoder = SpeechEncoder(FEATURES, SIZE, layers=2).double()
    lengths = torch.tensor([17, 11, 1, 6, 0])
    frames = torch.randn(5, 17, FEATURES, dtype=torch.float64)
    frames[torch.arange(17) >= lengths[:, None]] = math.nan
    memory = encoder(frames, lengths)
    assert memory.mask.sum(1).tolist() == [5, 3, 1, 2, 0]
    for row, length in enumerate(lengths.tolist()):
        steps = math.ceil(length / 4)
        if length:
            alone = encoder(frames[row : row + 1, :length])
            torch.testing.assert_close(memory.values[row, :steps], alone.values[0])
            torch.testing.assert_close(memory.summary[row], alone.summary[0])
        assert not memory.values[row, steps:].any()
    assert not memory.summary[4].any()


def test_more_padding_changes_nothing():
    encoder = SpeechEncoder(FEATURES, SIZE, layers=2)
    frames, lengths = torch.randn(3, 11, FEATURES), torch.tensor([11, 7, 2])
    longer = torch.cat([frames, torch.randn(3, 6, FEATURES)], 1)
    short, long = encoder(frames, lengths), encoder(longer, lengths)
    torch.testing.assert_close(long.values[:, : short.values.shape[1]], short.values)
    torch.testing.assert_close(long.summary, short.summary)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_masked_step_is_as_if_it_were_not_there(kind):
    both = BothWays(kind(FEATURES, SIZE, batch_first=True), kind(FEATURES, SIZE, batch_first=True)).double()
    x = torch.randn(1, 7, FEATURES, dtype=torch.float64)
    mask = torch.tensor([[False, True, True, False, True, True, False]])
    out = both(x, mask)
    torch.testing.assert_close(out[mask], both(x[:, mask[0]])[0])
    assert not out[~mask].any()


def test_both_ways_is_torchs_bidirectional_network():
    whole = nn.LSTM(FEATURES, SIZE, batch_first=True, bidirectional=True)
    both = BothWays(nn.LSTM(FEATURES, SIZE, batch_first=True), nn.LSTM(FEATURES, SIZE, batch_first=True))
    with torch.no_grad():
        for name, tensor in whole.named_parameters():
            direction = both.backwards if name.endswith("_reverse") else both.forwards
            direction.get_parameter(name.removesuffix("_reverse")).copy_(tensor)
    x = torch.randn(2, 7, FEATURES)
    torch.testing.assert_close(both(x), whole(x)[0])


@pytest.mark.usefixtures("as_installed")
def test_every_parameter_learns_and_eight_recordings_are_learnt():
    encoder = SpeechEncoder(FEATURES, 16, layers=2)
    readout = nn.Linear(32, 8)
    frames, lengths = torch.randn(8, 13, FEATURES), torch.tensor([13, 12, 11, 10, 9, 8, 7, 6])
    optimizer = torch.optim.Adam([*encoder.parameters(), *readout.parameters()], 2e-2)
    for step in range(60):
        loss = nn.functional.cross_entropy(readout(encoder(frames, lengths).summary), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
        optimizer.step()
    assert loss.item() < 0.1


def test_dropout_is_between_layers_and_only_in_training():
    encoder = SpeechEncoder(FEATURES, SIZE, layers=1, dropout=0.5)
    frames = torch.randn(2, 8, FEATURES)
    assert not torch.equal(encoder(frames).values, encoder(frames).values)
    encoder.eval()
    assert torch.equal(encoder(frames).values, encoder(frames).values)


def test_state_dict_round_trip_and_autocast():
    first, second = SpeechEncoder(FEATURES, SIZE, layers=2), SpeechEncoder(FEATURES, SIZE, layers=2)
    frames, lengths = torch.randn(2, 9, FEATURES), torch.tensor([9, 5])
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(frames, lengths).values, second(frames, lengths).values)
    with torch.autocast("cpu", torch.bfloat16):
        low = first(frames, lengths)
    torch.testing.assert_close(low.values.float(), first(frames, lengths).values, atol=0.05, rtol=0.05)


@pytest.mark.usefixtures("as_installed")
def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="layers must be at least 0, got -1"):
        SpeechEncoder(FEATURES, SIZE, layers=-1)
    with pytest.raises(ValueError, match=r"one number for each of the 2 recordings, got shape \(3,\)"):
        SpeechEncoder(FEATURES, SIZE)(torch.zeros(2, 8, FEATURES), torch.tensor([8, 8, 8]))
    with pytest.raises(ValueError, match="lengths must be between 0 and 8, got 3 to 9"):
        SpeechEncoder(FEATURES, SIZE)(torch.zeros(2, 8, FEATURES), torch.tensor([3, 9]))


def test_stacked_frames_are_one_step_and_padding_changes_nothing():
    torch.manual_seed(4)
    encoder = SpeechEncoder(3, 5, layers=1, stack=3).double()
    assert encoder.reduction == 6
    frames, lengths = torch.randn(2, 13, 3).double(), torch.tensor([13, 7])
    both = encoder(frames, lengths)
    assert both.values.shape == (2, 3, 10)
    assert both.mask.sum(1).tolist() == [3, 2]
    alone = encoder(frames[1:, :7])
    torch.testing.assert_close(both.values[1, :2], alone.values[0])
    torch.testing.assert_close(both.summary[1], alone.summary[0])
    joined = torch.cat([frames, torch.zeros(2, 2, 3).double()], 1).reshape(2, 5, 9)
    plain = SpeechEncoder(9, 5, layers=1).double()
    plain.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(plain(joined[:1]).values, both.values[:1])
