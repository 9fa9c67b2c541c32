"""Encoders and decoders converted from torch's modules return the outputs of the originals, with and without masks."""

import pytest
import torch
from torch import Tensor, nn

from regard.core.masks import causal, padding
from regard.models.frame import EncoderDecoder
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder
from regard.models.transformer.stacks import DecoderStack, EncoderStack

BATCH, SOURCE, TARGET, SIZE, HEADS, HIDDEN, LAYERS, WORDS = 3, 7, 5, 12, 2, 17, 3, 19
LENGTHS = torch.tensor([7, 2, 4])
MISSING = torch.arange(SOURCE) >= LENGTHS[:, None]
AHEAD = torch.ones(TARGET, TARGET, dtype=torch.bool).triu(1)
# Tolerances for float32 rounding over a few layers, in any order of the sums.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def perturbed(module: nn.Module) -> nn.Module:
    """Return the module with noise on all parameters: a bias of 0 or a norm's scale of 1 would hide errors."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.eval()


def drawn() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, SOURCE, SIZE), torch.randn(BATCH, TARGET, SIZE)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_an_encoder(norm_first, activation, last, masked, record_property):
    layer = nn.TransformerEncoderLayer(
        SIZE, HEADS, HIDDEN, norm_first=norm_first, activation=activation, batch_first=True
    )
    norm = nn.LayerNorm(SIZE, eps=1e-4) if last else None
    theirs = perturbed(nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False))
    x, _ = drawn()
    found = EncoderStack.from_torch(theirs)(x, mask=padding(LENGTHS) if masked else None).output
    expected = theirs(x, src_key_padding_mask=MISSING if masked else None)
    record_property("torch", (found - expected).abs().max().item())
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_decoder(norm_first, last, masked, record_property):
    layer = nn.TransformerDecoderLayer(SIZE, HEADS, HIDDEN, norm_first=norm_first, batch_first=True)
    theirs = perturbed(nn.TransformerDecoder(layer, LAYERS, nn.LayerNorm(SIZE) if last else None))
    memory, x = drawn()
    found = DecoderStack.from_torch(theirs)(
        x, memory, mask=causal() if masked else None, memory_mask=padding(LENGTHS) if masked else None
    ).output
    given = {"tgt_mask": AHEAD, "memory_key_padding_mask": MISSING} if masked else {}
    expected = theirs(x, memory, **given)
    record_property("torch", (found - expected).abs().max().item())
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_whole_transformer(batch_first, bias):
    theirs = perturbed(nn.Transformer(SIZE, HEADS, LAYERS, 2, HIDDEN, batch_first=batch_first, bias=bias))
    source, target = drawn()
    given = [x if batch_first else x.transpose(0, 1) for x in (source, target)]
    masks = {"src_key_padding_mask": MISSING, "memory_key_padding_mask": MISSING, "tgt_mask": AHEAD}
    expected = theirs(*given, **masks)
    encoder = EncoderStack.from_torch(theirs.encoder, batch_first=True)
    decoder = DecoderStack.from_torch(theirs.decoder, batch_first=True)
    memory = encoder(source, mask=padding(LENGTHS)).output
    found = decoder(target, memory, mask=causal(), memory_mask=padding(LENGTHS)).output
    torch.testing.assert_close(found, expected if batch_first else expected.transpose(0, 1), **CLOSE)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    "convert",
    [
        lambda theirs, **told: EncoderStack.from_torch(theirs.encoder, **told),
        lambda theirs, **told: DecoderStack.from_torch(theirs.decoder, **told),
        lambda theirs, **told: TransformerEncoder.from_torch(theirs.encoder, nn.Embedding(WORDS, SIZE), **told),
        lambda theirs, **told: TransformerDecoder.from_torch(theirs.decoder, nn.Embedding(WORDS, SIZE), **told),
    ],
    ids=["encoder stack", "decoder stack", "encoder", "decoder"],
)
def test_a_stack_that_takes_the_length_first_is_refused_until_told(convert):
    theirs = nn.Transformer(SIZE, HEADS, 1, 1, HIDDEN)
    with pytest.raises(ValueError, match="batch_first=False"):
        convert(theirs)
    assert isinstance(convert(theirs, batch_first=True), nn.Module)


def test_models_around_torchs_layers_decode_token_by_token():
    theirs = perturbed(nn.Transformer(SIZE, HEADS, 2, 2, HIDDEN, batch_first=True))
    embedding = nn.Embedding(WORDS, SIZE)
    ours = EncoderDecoder(
        TransformerEncoder.from_torch(theirs.encoder, embedding),
        TransformerDecoder.from_torch(theirs.decoder, embedding),
    )
    source, prefix = torch.randint(WORDS, (BATCH, SOURCE)), torch.randint(WORDS, (BATCH, TARGET))
    x, y = (embedding(tokens) * SIZE**0.5 for tokens in (source, prefix))
    masks = {"src_key_padding_mask": MISSING, "memory_key_padding_mask": MISSING, "tgt_mask": AHEAD}
    logits = theirs(x, y, **masks) @ embedding.weight.T
    torch.testing.assert_close(ours.logits(ours(source, prefix, LENGTHS).states), logits, rtol=1e-4, atol=1e-5)
    state = ours.start(source, LENGTHS)
    for at in range(TARGET):
        step = ours.step(state, prefix[:, at])
        state = step.state
        torch.testing.assert_close(step.logits, logits[:, at], rtol=1e-4, atol=1e-5)
    assert not any(part.training for part in (ours.encoder, ours.decoder))


def test_weights_are_copied_with_dtype():
    theirs = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(SIZE, HEADS, HIDDEN, batch_first=True, dtype=torch.float64),
        2,
        enable_nested_tensor=False,
    )
    ours = EncoderStack.from_torch(theirs)
    assert {p.dtype for p in ours.parameters()} == {torch.float64}
    shared = {p.data_ptr() for p in theirs.parameters()} & {p.data_ptr() for p in ours.parameters()}
    assert not shared
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_a_stack_of_something_else_is_refused():
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, HEADS, batch_first=True), 1)
    theirs.layers[0] = nn.Identity()
    with pytest.raises(TypeError, match=r"every layer must be an nn\.TransformerEncoderLayer, got Identity"):
        EncoderStack.from_torch(theirs)
