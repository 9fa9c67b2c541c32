"""Transformer encoder and decoder: positions, padding, causal masks, single steps, training."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from regard.core.requests import full
from regard.models.frame import EncoderDecoder
from regard.models.memory import Memory
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder
from regard.nn.cross_entropy import linear_cross_entropy
from regard.nn.feedforward import FeedForward
from regard.nn.positions import LearnedPositions, RelativePositions

WORDS, OTHERS, SIZE, HEADS, BATCH, SOURCE, TARGET = 17, 13, 12, 3, 5, 7, 11
POSITIONS = ["sinusoidal", "learned", "relative", "rotary", "alibi", None]


def pair(**options) -> EncoderDecoder:
    options = {"layers": 2, "heads": HEADS, "feed_forward": 19, **options}
    return EncoderDecoder(
        TransformerEncoder(WORDS, SIZE, **options), TransformerDecoder(OTHERS, SIZE, **options)
    ).eval()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    source, prefix = torch.randint(WORDS, (BATCH, SOURCE)), torch.randint(OTHERS, (BATCH, TARGET))
    return source, prefix, torch.tensor([7, 3, 1, 6, 2])


def sequence_loss(model, source, prefix, target, lengths=None, *, smoothing=0.0):
    """Return the mean cross-entropy of the target tokens."""
    states = model(source, prefix, lengths).states
    loss, count = linear_cross_entropy(states, model.output_weight, target, bias=model.output_bias, smoothing=smoothing)
    return loss / count.clamp(min=1)


# ---------------------------------------------------------------- tests of the encoder


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_changes_nothing(positions, norm):
    encoder = TransformerEncoder(WORDS, SIZE, layers=2, heads=HEADS, positions=positions, norm=norm).eval()
    source, _, lengths = batch()
    memory = encoder(source, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = encoder(source[row : row + 1, :length])
        torch.testing.assert_close(memory.values[row, :length], alone.values[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(memory.summary[row], alone.summary[0], rtol=1e-4, atol=1e-5)
        assert memory.values[row, length:].count_nonzero() == 0
        assert memory.mask[row].tolist() == [at < length for at in range(SOURCE)]


@pytest.mark.parametrize("positions", POSITIONS)
def test_without_positions_a_sentence_is_a_bag_of_words(positions):
    encoder = TransformerEncoder(WORDS, SIZE, layers=2, heads=HEADS, positions=positions).eval()
    source, order = torch.randint(WORDS, (1, SOURCE)), torch.randperm(SOURCE)
    straight, shuffled = encoder(source).values[:, order], encoder(source[:, order]).values
    assert torch.allclose(straight, shuffled, atol=1e-5) == (positions is None)


def test_the_weights_of_every_layer_are_there():
    encoder = TransformerEncoder(WORDS, SIZE, layers=3, heads=HEADS).eval()
    source, _, lengths = batch()
    found = encoder.read(source, lengths, weights=full())
    assert [tuple(w.shape) for w in found.weights] == [(BATCH, HEADS, SOURCE, SOURCE)] * 3
    torch.testing.assert_close(found.weights[2].sum(-1), torch.ones(BATCH, HEADS, SOURCE))
    # The padding of the second source sequence gets no attention weight.
    assert found.weights[1][1, :, :, 3:].count_nonzero() == 0
    assert encoder.read(source, lengths).weights is None


def test_the_summary_is_the_mean_and_an_empty_source_gives_zeros():
    encoder = TransformerEncoder(WORDS, SIZE, layers=1, heads=HEADS).eval()
    source = torch.randint(WORDS, (2, SOURCE))
    memory = encoder(source, torch.tensor([0, 4]))
    torch.testing.assert_close(memory.summary[1], memory.values[1, :4].mean(0))
    assert memory.summary[0].count_nonzero() == 0
    assert memory.values.isfinite().all()


# ---------------------------------------------------------------- tests of the decoder


@pytest.mark.slow
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_token_by_token_equals_the_whole(positions, norm):
    model = pair(positions=positions, norm=norm)
    source, prefix, lengths = batch()
    memory = model.encoder(source, lengths)
    whole = model.decoder(memory, prefix, weights=full())
    logits = model.logits(whole.states)
    state = model.decoder.start(memory, limit=TARGET, weights=True)
    for at in range(TARGET):
        step = model.step(state, prefix[:, at])
        state = step.state
        torch.testing.assert_close(step.logits, logits[:, at], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step.weights, whole.weights[-1][:, :, at].mean(1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="capacity"):
        model.step(state, prefix[:, 0])


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_changed_future_leaves_the_past_bit_equal(positions):
    model = pair(positions=positions)
    source, prefix, lengths = batch()
    other = prefix.clone()
    other[:, 4:] = (prefix[:, 4:] + 1) % OTHERS
    a, b = (model(source, p, lengths).states for p in (prefix, other))
    torch.testing.assert_close(a[:, :4], b[:, :4], rtol=0, atol=0)
    assert not torch.equal(a[:, 4:], b[:, 4:])


def test_what_is_padding_in_the_memory_is_not_read():
    model = pair()
    source, prefix, lengths = batch()
    memory = model.encoder(source, lengths)
    spoilt = torch.where(memory.mask.unsqueeze(-1), memory.values, 1e4)
    a, b = (model.decoder(Memory(v, v, memory.mask, memory.summary), prefix).states for v in (memory.values, spoilt))
    torch.testing.assert_close(a, b)


def test_states_reorder_as_beams_do():
    model = pair()
    source, prefix, lengths = batch()
    state = model.start(source, lengths, limit=TARGET)
    for at in range(3):
        state = model.step(state, prefix[:, at]).state
    index = torch.tensor([3, 3, 0, 4])
    found = model.step(state.reorder(index), prefix[index, 3]).logits
    expected = model.logits(model(source[index], prefix[index, :4], lengths[index]).states)[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_memory_of_another_size_with_values_of_its_own():
    decoder = TransformerDecoder(OTHERS, SIZE, layers=2, heads=HEADS, memory_size=5).eval()
    keys, values = torch.randn(BATCH, SOURCE, 5), torch.randn(BATCH, SOURCE, 5)
    memory = Memory(keys, values, None, values.mean(1))
    prefix = torch.randint(OTHERS, (BATCH, 2))
    whole = decoder.logits(decoder(memory, prefix).states)
    state = decoder.start(memory)
    first = decoder.step(state, prefix[:, 0])
    torch.testing.assert_close(first.logits, whole[:, 0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole, decoder.logits(decoder(Memory(values, keys, None, memory.summary), prefix).states))


# ---------------------------------------------------------------- tests of construction


def test_one_embedding_for_source_target_and_output():
    embedding = nn.Embedding(WORDS, SIZE)
    options = {"layers": 1, "heads": HEADS, "embedding": embedding}
    model = EncoderDecoder(TransformerEncoder(WORDS, SIZE, **options), TransformerDecoder(WORDS, SIZE, **options))
    assert model.output_weight is embedding.weight
    assert model.output_bias is None
    assert sum(p.shape == (WORDS, SIZE) for p in model.parameters()) == 1
    untied = TransformerDecoder(WORDS, SIZE, tied=False, **options)
    assert untied.output_weight is not embedding.weight
    assert untied.output_bias.shape == (WORDS,)


def test_each_layer_learns_its_own_relative_positions():
    encoder = TransformerEncoder(WORDS, SIZE, layers=2, heads=HEADS, positions=RelativePositions(SIZE // HEADS, 3))
    first, second = (layer.attention.positions for layer in encoder.stack.layers)
    assert first.reach == second.reach == 3
    assert first.key_table is not second.key_table


def test_parts_of_ones_own():
    encoder = TransformerEncoder(
        WORDS,
        SIZE,
        layers=2,
        heads=HEADS,
        feed_forward=lambda: FeedForward(SIZE, 8, activation="swiglu"),
        normalization=nn.RMSNorm,
        positions=LearnedPositions(SIZE, SOURCE),
    )
    assert encoder.stack.layers[1].feed_forward.activation == "swiglu"
    assert isinstance(encoder.stack.norm, nn.RMSNorm)
    assert encoder(torch.randint(WORDS, (2, SOURCE))).values.shape == (2, SOURCE, SIZE)
    with pytest.raises(ValueError, match="the table holds 7"):
        encoder(torch.randint(WORDS, (2, SOURCE + 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": "absolute"}, "positions must be one of sinusoidal, learned, .* got 'absolute'"),
        ({"embedding": nn.Embedding(5, SIZE)}, "embedding must hold 17 tokens of size 12, got 5 of size 12"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerEncoder(WORDS, SIZE, layers=1, heads=HEADS, **change)


def test_wrong_lengths_are_named(as_installed):
    with pytest.raises(ValueError, match="lengths must have one number a source, 2"):
        TransformerEncoder(WORDS, SIZE, layers=1, heads=HEADS)(torch.zeros(2, 3).long(), torch.tensor([3]))


def test_state_dict_round_trip():
    first, second = pair(positions="learned"), pair(positions="learned")
    source, prefix, lengths = batch()
    second.load_state_dict(first.state_dict())
    a, b = (model(source, prefix, lengths).states for model in (first, second))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---------------------------------------------------------------- tests of training


def test_the_fused_loss_is_the_plain_one():
    model = pair().double()
    source, prefix, lengths = batch()
    target = torch.randint(OTHERS, (BATCH, TARGET))
    target[2, 5:] = -100
    fused = sequence_loss(model, source, prefix, target, lengths, smoothing=0.1)
    logits = model.logits(model(source, prefix, lengths).states)
    plain = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(fused, plain)
    names = [name for name, _ in model.named_parameters()]
    for name, a, b in zip(
        names, *(torch.autograd.grad(loss, list(model.parameters())) for loss in (fused, plain)), strict=True
    ):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def eight() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return eight sources, their lengths, prefixes and targets: the reversed sources with an end mark."""
    lengths = torch.tensor([6, 5, 3, 6, 4, 2, 5, 6])
    source = torch.randint(3, OTHERS, (8, 6)) * (torch.arange(6) < lengths[:, None])
    target = torch.full((8, 7), -100)
    prefix = torch.zeros(8, 7, dtype=torch.long)
    prefix[:, 0] = 1
    for row, length in enumerate(lengths.tolist()):
        words = [*source[row, :length].flip(0).tolist(), 2]
        target[row, : length + 1] = torch.tensor(words)
        prefix[row, 1 : length + 1] = torch.tensor(words[:-1])
    return source, prefix, target, lengths


def written(model: EncoderDecoder, source: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """Yield the most likely words of seven steps, each the input of the next step (greedy decoding)."""
    state, word = model.start(source, lengths, limit=7), torch.ones(8, dtype=torch.long)
    for _ in range(7):
        step = model.step(state, word)
        state, word = step.state, step.logits.argmax(-1)
        yield word


@pytest.mark.slow
@pytest.mark.parametrize(("positions", "norm"), [("sinusoidal", "post"), ("rotary", "pre"), ("relative", "pre")])
def test_eight_examples_are_learned_by_heart(positions, norm, as_installed):
    source, prefix, target, lengths = eight()
    options = {"layers": 1, "heads": 4, "feed_forward": 32, "positions": positions, "norm": norm, "dropout": 0.05}
    model = EncoderDecoder(TransformerEncoder(OTHERS, 32, **options), TransformerDecoder(OTHERS, 32, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        sequence_loss(model, source, prefix, target, lengths, smoothing=0.05).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        words = torch.stack(list(written(model, source, lengths)), 1)
    real = target != -100
    assert (words == target)[real].all()


def test_autocast_trains():
    model = pair(dropout=0.1).train()
    source, prefix, lengths = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = sequence_loss(model, source, prefix, prefix, lengths, smoothing=0.1)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    exact = sequence_loss(model.eval(), source, prefix, prefix, lengths, smoothing=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = sequence_loss(model, source, prefix, prefix, lengths, smoothing=0.1)
    torch.testing.assert_close(narrow, exact, rtol=0.02, atol=0)


def test_inner_dropout_falls_inside_the_parts_alone():
    source = torch.tensor([[3, 4, 5, 6, 7]])
    for settings, random in (
        ({"dropout": 0.0, "inner_dropout": 0.6}, True),
        ({"dropout": 0.6, "inner_dropout": 0.0}, True),
        ({"dropout": 0.0, "inner_dropout": 0.0}, False),
        ({"dropout": 0.0}, False),
    ):
        torch.manual_seed(4)
        encoder = TransformerEncoder(11, 8, layers=1, heads=2, **settings).train()
        torch.manual_seed(5)
        first = encoder(source).values
        assert (not torch.equal(first, encoder(source).values)) == random
    torch.manual_seed(6)
    # `inner_dropout` does not apply to embeddings, so the encoder's input is the same in training and evaluation.
    encoder = TransformerEncoder(11, 8, layers=1, heads=2, dropout=0.0, inner_dropout=0.6)
    assert torch.equal(encoder.train().input(source), encoder.eval().input(source))
