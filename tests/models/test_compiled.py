"""The Transformer under torch.compile and torch.export: one graph, few compilations, and the results of eager mode."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import regard
from regard.models.frame import EncoderDecoder
from regard.models.memory import Memory
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder
from regard.models.transformer.layer_compilation import compile_layers
from regard.nn.cross_entropy import linear_cross_entropy

WORDS, SIZE, HEADS = 23, 12, 3
pytestmark = [pytest.mark.installed, pytest.mark.slow]


def sequence_loss(model, source, prefix, target, lengths=None, *, smoothing=0.0):
    """Return the mean cross-entropy of the target tokens."""
    states = model(source, prefix, lengths).states
    loss, count = linear_cross_entropy(states, model.output_weight, target, bias=model.output_bias, smoothing=smoothing)
    return loss / count.clamp(min=1)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(2018)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(**options) -> EncoderDecoder:
    embedding = nn.Embedding(WORDS, SIZE)
    options = {"layers": 1, "heads": HEADS, "feed_forward": 16, "embedding": embedding, **options}
    return EncoderDecoder(TransformerEncoder(WORDS, SIZE, **options), TransformerDecoder(WORDS, SIZE, **options))


def drawn(batch: int, source: int, target: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = torch.randint(1, source + 1, (batch,))
    prefix = torch.randint(WORDS, (batch, target))
    return torch.randint(WORDS, (batch, source)), prefix, prefix.roll(-1, 1), lengths


def test_forward_and_loss_have_no_graph_break():
    model = pair(dropout=0.1).train()
    found = torch._dynamo.explain(lambda *batch: sequence_loss(model, *batch, smoothing=0.1))(*drawn(3, 7, 5))
    assert found.graph_count == 1, found.break_reasons
    assert found.graph_break_count == 0


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # the filtered warning comes from torch's own compiler
@pytest.mark.parametrize("positions", ["relative", "rotary", "alibi"])
def test_no_graph_break_with_other_positions(positions):
    model = pair(positions=positions, dropout=0.1).train()
    found = torch._dynamo.explain(lambda *batch: sequence_loss(model, *batch))(*drawn(3, 7, 5))
    assert found.graph_break_count == 0, found.break_reasons


def test_a_bool_mask_of_the_memory_breaks_nothing():
    decoder = TransformerDecoder(WORDS, SIZE, layers=1, heads=HEADS, dropout=0.1).train()

    def states(keys: Tensor, mask: Tensor, prefix: Tensor) -> Tensor:
        return decoder(Memory(keys, keys, mask, keys.mean(1)), prefix).states

    mask = torch.arange(7) < torch.tensor([[7], [2], [4]])
    found = torch._dynamo.explain(states)(torch.randn(3, 7, SIZE), mask, torch.randint(WORDS, (3, 5)))
    assert found.graph_break_count == 0, found.break_reasons


@pytest.mark.parametrize(("norm", "padded"), [("pre", True), ("post", False)])
def test_five_lengths_take_two_compilations_at_most(norm, padded):
    model, counter = pair(norm=norm, dropout=0.1).train(), CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def loss(source: Tensor, prefix: Tensor, target: Tensor, lengths: Tensor | None) -> Tensor:
        return sequence_loss(model, source, prefix, target, lengths, smoothing=0.1)

    for source_length, target_length in zip(range(4, 24, 4), range(3, 33, 6), strict=True):
        source, prefix, target, lengths = drawn(5, source_length, target_length)
        assert loss(source, prefix, target, lengths if padded else None).isfinite()
    assert counter.frame_count <= 2


def test_other_batch_sizes_compile_once_more():
    model, counter = pair().train(), CompileCounter()
    loss = torch.compile(lambda *b: sequence_loss(model, *b), backend=counter, fullgraph=True)
    for batch in (2, 3, 5, 8, 13):
        assert loss(*drawn(batch, 7, 6)).isfinite()
    assert counter.frame_count <= 2


def test_compiled_gradients_are_the_plain_ones():
    plain = pair().train().double()
    compiled, counter = copy.deepcopy(plain), CompileCounterWithBackend("aot_eager")
    loss = torch.compile(lambda *b: sequence_loss(compiled, *b, smoothing=0.1), backend=counter, fullgraph=True)
    for target_length in (5, 9, 11):
        batch = drawn(3, 7, target_length)
        found, expected = loss(*batch), sequence_loss(plain, *batch, smoothing=0.1)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(x, list(m.parameters())) for x, m in ((found, compiled), (expected, plain))]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_layers_of_a_kind_share_a_compilation():
    model, counter = pair(layers=3).eval(), CompileCounterWithBackend("eager")
    source, prefix, target, lengths = drawn(3, 7, 5)
    expected = sequence_loss(model, source, prefix, target, lengths)
    compile_layers(model, backend=counter, fullgraph=True)
    torch.testing.assert_close(sequence_loss(model, source, prefix, target, lengths), expected)
    # Three encoder layers share one graph, three decoder layers another; the two token embeddings need one each.
    assert counter.frame_count <= 4


def test_the_encoder_is_exported_for_inference():
    encoder = TransformerEncoder(WORDS, SIZE, layers=2, heads=HEADS).eval()

    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, source: Tensor, lengths: Tensor) -> Tensor:
            return self.encoder(source, lengths).values

    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=512)
    source, _, _, lengths = drawn(3, 7, 5)
    with torch.no_grad():
        exported = torch.export.export(
            Values(), (source, lengths), dynamic_shapes={"source": {0: batch, 1: length}, "lengths": {0: batch}}
        )
    for rows, words in ((3, 7), (5, 11)):
        source, _, _, lengths = drawn(rows, words, 3)
        torch.testing.assert_close(exported.module()(source, lengths), encoder(source, lengths).values)


@pytest.mark.parametrize(
    ("score", "poison"),
    [("cosine", math.nan), ("cosine", -math.inf), ("bilinear", math.nan), ("bilinear", math.inf), ("scaled", math.nan)],
)
def test_what_padding_holds_reaches_no_gradient(score, poison):
    """Compiled code cannot inspect values, so it replaces masked keys and values before it uses them."""
    records = {"cosine": regard.Cosine(), "bilinear": regard.Bilinear(torch.eye(8)), "scaled": regard.ScaledDot()}
    key, value, mask = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8), regard.padding(torch.tensor([4, 6]))
    key[0, :, 4:] = value[0, :, 4:] = poison
    leaves = [x.requires_grad_() for x in (torch.randn(2, 2, 5, 8), key, value)]

    def call(query, key, value):
        return regard.attention(query, key, value, score=records[score], mask=mask).output

    found = torch.compile(call, backend="aot_eager")(*leaves)
    gradients = torch.autograd.grad(found.square().sum(), leaves)
    assert found.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert torch.count_nonzero(gradients[1][0, :, 4:]) == 0
