"""Recurrent encoder and decoder: padding; a whole prefix compared with single steps, and the library's hand-written
loops with a simple loop."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forked
from regard.core.normalizers import Hard, Sparsemax
from regard.core.requests import entropy, full, received, rows, top
from regard.kernels.additive import query_scores
from regard.kernels.recurrent import bahdanau_cpu, gru
from regard.models.frame import EncoderDecoder
from regard.models.memory import Memory
from regard.models.recurrent.cells import Recurrence
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.recurrent.encoder import RecurrentEncoder
from regard.nn.attention import Attention
from regard.nn.coverage import CoverageAttention
from regard.nn.local import LocalAttention
from regard.nn.location import LocationAttention
from regard.nn.monotonic import MonotonicAttention

B, K, T, D, M, E, H, VOCABULARY = 3, 11, 5, 7, 10, 4, 6, 13

MECHANISMS = {
    "none": lambda: None,
    "additive": lambda: Attention(D, M, score="additive", hidden_size=H),
    "bilinear": lambda: Attention(D, M, score="bilinear"),
    "dot": lambda: Attention(D, M, score="dot", hidden_size=H),
    "cosine": lambda: Attention(D, M, score="cosine", hidden_size=H, value_size=3),
    "sparse": lambda: Attention(D, M, score="additive", normalize=Sparsemax()),
    "hard": lambda: Attention(D, M, score="additive", normalize=Hard()),
    "local_m": lambda: LocalAttention(D, M, reach=2, kind="monotonic", hidden_size=H),
    "local_p": lambda: LocalAttention(D, M, reach=2, kind="predictive", hidden_size=H),
    "monotonic": lambda: MonotonicAttention(D, M, noise=0.0),
    "location": lambda: LocationAttention(D, M, filters=2, kernel_size=3),
    "coverage": lambda: CoverageAttention(D, M),
}
ORDERS = {"bahdanau": ("bahdanau", False), "luong": ("luong", False), "feeding": ("luong", True)}
NETWORKS = {
    "gru": Recurrence(embedding_size=E),
    "lstm": Recurrence(cell="lstm", embedding_size=E),
    "deep": Recurrence(cell="lstm", layers=2, embedding_size=E),
}


def decoder_of(mechanism: str, order: str = "bahdanau", network: str = "gru") -> RecurrentDecoder:
    name, feeding = ORDERS[order]
    return RecurrentDecoder(
        VOCABULARY,
        D,
        memory_size=M,
        attention=MECHANISMS[mechanism](),
        order=name,
        input_feeding=feeding,
        recurrence=NETWORKS[network],
        summary_size=M + 1,
    ).double()


def memory_of(lengths: list[int] | None = None) -> Memory:
    values = torch.randn(B, K, M, dtype=torch.float64)
    mask = None if lengths is None else torch.arange(K) < torch.tensor(lengths).unsqueeze(-1)
    return Memory(values, values, mask, torch.randn(B, M + 1, dtype=torch.float64))


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


# Tests of the encoder.


def gru_by_loop(cells: dict[str, Tensor], inputs: Tensor, order: list[int]) -> dict[int, Tensor]:
    """Return the GRU's state after each position of one sequence (k, e), in one direction, from the formulas."""
    size = cells["weight_hh"].shape[1]
    state, found = torch.zeros(size, dtype=inputs.dtype), {}
    for j in order:
        x = (cells["weight_ih"] @ inputs[j] + cells["bias_ih"]).split(size)
        h = (cells["weight_hh"] @ state + cells["bias_hh"]).split(size)
        reset, update = torch.sigmoid(x[0] + h[0]), torch.sigmoid(x[1] + h[1])
        state = (1 - update) * torch.tanh(x[2] + reset * h[2]) + update * state
        found[j] = state
    return found


def test_the_encoder_reads_each_sequence_alone_from_both_ends():
    encoder = RecurrentEncoder(VOCABULARY, 5, embedding_size=E).double()
    source, lengths = tokens(B, K), [K, 4, 1]
    memory = encoder(source, torch.tensor(lengths))
    assert memory.mask.sum(-1).tolist() == lengths
    assert memory.keys is memory.values
    parameters = dict(encoder.network.named_parameters())
    for row, length in enumerate(lengths):
        inputs = encoder.embedding(source[row])
        ways = {"_l0": list(range(length)), "_l0_reverse": list(reversed(range(length)))}
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        found = [gru_by_loop({n: parameters[n + way] for n in names}, inputs, order) for way, order in ways.items()]
        expected = torch.stack([torch.cat([direction[j] for direction in found]) for j in range(length)])
        close(memory.values[row, :length], expected)
        assert not memory.values[row, length:].any()
        close(memory.summary[row], torch.cat((found[0][length - 1], found[1][0])))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_padding_changes_nothing(cell):
    encoder = RecurrentEncoder(VOCABULARY, 5, cell=cell, layers=2).double().eval()
    source, lengths = tokens(B, K), torch.tensor([6, 2, 5])
    long = encoder(source, lengths)
    changed = source.clone()
    changed[:, 6:] = tokens(B, K - 6)
    changed[1, 2:] = tokens(K - 2)
    again = encoder(changed, lengths)
    assert torch.equal(long.values, again.values)
    assert torch.equal(long.summary, again.summary)
    short = encoder(source[:, :6], lengths)
    close(long.values[:, :6], short.values)
    close(long.summary, short.summary)
    alone = encoder(source[1:2, :2])
    close(long.values[1:2, :2], alone.values)
    close(long.summary[1:2], alone.summary)
    assert alone.mask is None


def test_a_source_of_nothing_is_zeros():
    encoder = RecurrentEncoder(VOCABULARY, 5)
    memory = encoder(tokens(2, 3), torch.tensor([0, 3]))
    assert not memory.values[0].any()
    assert not memory.summary[0].any()
    assert memory.values[1].any()
    memory.summary.sum().backward()
    assert encoder.embedding.weight.grad.isfinite().all()


def test_one_direction_and_wrong_lengths(as_installed):
    encoder = RecurrentEncoder(VOCABULARY, 5, bidirectional=False)
    memory = encoder(tokens(2, 3))
    assert memory.values.shape == (2, 3, 5) == (2, 3, encoder.memory_size)
    torch.testing.assert_close(memory.summary, memory.values[:, -1])
    with pytest.raises(ValueError, match="lengths must be between 0 and 3, got 2 to 4"):
        encoder(tokens(2, 3), torch.tensor([2, 4]))
    with pytest.raises(ValueError, match="one number for each of the 2 sources"):
        encoder(tokens(2, 3), torch.tensor([2]))


# Tests of the decoder: one forward pass over a whole prefix equals decoding it step by step.


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_whole_is_step_by_step(mechanism, order, network):
    decoder = decoder_of(mechanism, order, network).eval()
    memory, prefix = memory_of([K, 4, 7]), tokens(B, T)
    decoded = decoder(memory, prefix, weights=full())
    logits = decoder.logits(decoded.states)
    state = decoder.start(memory, limit=T)
    for i in range(T):
        step = decoder.step(state, prefix[:, i])
        close(step.logits, logits[:, i])
        if mechanism == "none":
            assert step.weights is None
            assert decoded.weights is None
        else:
            close(step.weights, decoded.weights[:, i])
            assert not step.weights[~memory.mask].any()
        state = step.state


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_future_and_the_padding_are_not_seen(mechanism, order):
    decoder, memory, prefix = decoder_of(mechanism, order).eval(), memory_of([K, 4, 7]), tokens(B, T)
    before = decoder(memory, prefix)
    other = prefix.clone()
    other[:, 3:] = (other[:, 3:] + 1) % VOCABULARY
    after = decoder(memory, other)
    assert torch.equal(before.states[:, :3], after.states[:, :3])
    assert not torch.equal(before.states[:, 3:], after.states[:, 3:])
    noisy = memory.values.masked_fill(~memory.mask.unsqueeze(-1), 1e3)
    close(decoder(Memory(noisy, noisy, memory.mask, memory.summary), prefix).states, before.states)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mechanism", ["additive", "location"])
def test_rows_are_reordered(mechanism, order):
    decoder, memory = decoder_of(mechanism, order).eval(), memory_of([K, 4, 7])
    index, prefix = torch.tensor([2, 0, 0, 1]), tokens(B, 2)
    state = decoder.step(decoder.start(memory), prefix[:, 0]).state
    step = decoder.step(state, prefix[:, 1])
    moved = decoder.step(state.reorder(index), prefix[index, 1])
    close(moved.logits, step.logits[index])
    close(moved.weights, step.weights[index])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mechanism", ["additive", "dot"])
def test_other_views_of_the_weights(mechanism, order):
    decoder, memory, prefix = decoder_of(mechanism, order), memory_of([K, 4, 7]), tokens(B, T)
    weights = decoder(memory, prefix, weights=full()).weights
    for request in (rows([3, 0]), received(), entropy()):
        close(decoder(memory, prefix, weights=request).weights, request.of(weights))
    found = decoder(memory, prefix, weights=top(2)).weights
    close(found.values, top(2).of(weights).values)
    assert decoder(memory, prefix).weights is None


@pytest.mark.parametrize("order", ORDERS)
def test_hard_attention_reports_its_choices(order):
    decoder, memory, prefix = decoder_of("hard", order), memory_of(), tokens(B, T)
    draws = [decoder(memory, prefix, weights=full(), generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(draws[0].weights, draws[1].weights)
    assert draws[0].log_prob.shape == (B, T)
    assert (draws[0].log_prob < 0).all()
    close(draws[0].weights.sum(-1), torch.ones(B, T).double())
    draws[0].log_prob.sum().backward()
    assert decoder.attention.query.weight.grad.any()


def test_without_attention_only_the_summary_is_seen():
    decoder, memory, prefix = decoder_of("none"), memory_of(), tokens(B, T)
    other = Memory(memory.keys + 1, memory.values + 1, memory.mask, memory.summary)
    assert torch.equal(decoder(memory, prefix).states, decoder(other, prefix).states)
    third = Memory(memory.keys, memory.values, memory.mask, memory.summary + 1)
    assert not torch.equal(decoder(memory, prefix).states, decoder(third, prefix).states)


# Tests of the library's optimised decoder loop against a simple loop.


class Loop(nn.Module):
    """A reference with a decoder's parameters: a loop over torch's GRU cell and tanh scores, which attends before or
    after the GRU step."""

    def __init__(self, decoder: RecurrentDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, memory: Memory, prefix: Tensor) -> tuple[Tensor, Tensor]:
        decoder, network, attention = self.decoder, self.decoder.network, self.decoder.attention
        state = torch.tanh(decoder.bridge(memory.summary))
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        parameters = [getattr(network, name) for name in names]
        keys, states, found = memory.values @ attention.key.weight.T, [], []
        fed = torch.zeros_like(state)

        def attend(state: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh((state @ attention.query.weight.T).unsqueeze(1) + keys)
            scores = (hidden * attention.score.weight).sum(-1)
            if memory.mask is not None:
                scores = scores.masked_fill(~memory.mask, float("-inf"))
            weights = torch.softmax(scores, -1)
            return (weights.unsqueeze(-1) * memory.values).sum(1), weights

        for token in prefix.T:
            embedded = decoder.embedding(token)
            if decoder.order == "bahdanau":
                context, weights = attend(state)
                state = torch.gru_cell(torch.cat((embedded, context), -1), state, *parameters)
                fed = torch.tanh(decoder.readout(torch.cat((state, context, embedded), -1)))
            else:
                state = torch.gru_cell(torch.cat((embedded, fed), -1), state, *parameters)
                context, weights = attend(state)
                fed = torch.tanh(decoder.readout(torch.cat((context, state), -1)))
            states.append(fed)
            found.append(weights)
        return torch.stack(states, 1), torch.stack(found, 1)


def gradients(module: nn.Module, memory: Memory, prefix: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return decoder states and attention weights, and gradients of a loss of these by encoder outputs and
    parameters."""
    values, summary = (tensor.detach().clone().requires_grad_() for tensor in (memory.values, memory.summary))
    memory = Memory(values, values, memory.mask, summary)
    if isinstance(module, Loop):
        states, weights = module(memory, prefix)
    else:
        decoded = module(memory, prefix, weights=full())
        states, weights = decoded.states, decoded.weights
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in (states, weights))
    wanted = [p for name, p in module.named_parameters() if name.split(".")[-2:-1] != ["output"]]
    return [states, weights], list(torch.autograd.grad(loss, [values, summary, *wanted]))


@pytest.mark.parametrize("lengths", [None, [K, 4, 7]])
@pytest.mark.parametrize("order", ["bahdanau", "feeding"])
def test_the_fast_loop_is_the_plain_loop(order, lengths):
    decoder, memory, prefix = decoder_of("additive", order), memory_of(lengths), tokens(B, T)
    for fast, plain in zip(gradients(decoder, memory, prefix), gradients(Loop(decoder), memory, prefix), strict=True):
        for actual, expected in zip(fast, plain, strict=True):
            close(actual, expected)


@pytest.mark.parametrize("order", ["bahdanau", "feeding"])
def test_the_fast_loop_has_the_gradients_of_differences(order):
    decoder, memory, prefix = decoder_of("additive", order), memory_of([K, 4, 7]), tokens(B, 2)

    def states(values: Tensor, summary: Tensor) -> Tensor:
        return decoder(Memory(values, values, memory.mask, summary), prefix).states

    inputs = (memory.values.requires_grad_(), memory.summary.requires_grad_())
    assert torch.autograd.gradcheck(states, inputs, fast_mode=True)
    [first] = torch.autograd.grad(states(*inputs).sum(), memory.summary, create_graph=False)
    assert first.any()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(states(*inputs).sum(), memory.summary, create_graph=True)


@pytest.mark.parametrize("order", ["bahdanau", "feeding"])
def test_words_that_come_again_are_mapped_once(order):
    """In a large batch each distinct word is embedded and mapped once; outputs and gradients are the same."""
    decoder, rows = decoder_of("additive", order), 67
    memory = memory_of()
    values, summary = (x[torch.arange(rows) % B] for x in (memory.values, memory.summary))
    memory, prefix = Memory(values, values, None, summary), tokens(rows, T)
    for fast, plain in zip(gradients(decoder, memory, prefix), gradients(Loop(decoder), memory, prefix), strict=True):
        for actual, expected in zip(fast, plain, strict=True):
            close(actual, expected)


@pytest.mark.parametrize("order", ["bahdanau", "feeding"])
def test_an_empty_memory_reads_zeros_and_nan_does_not_leak(order):
    decoder, memory, prefix = decoder_of("additive", order), memory_of([K, 0, 7]), tokens(B, T)
    values = memory.values.masked_fill(~memory.mask.unsqueeze(-1), float("nan")).requires_grad_()
    decoded = decoder(Memory(values, values, memory.mask, memory.summary), prefix, weights=full())
    assert not decoded.weights[1].any()
    close(decoded.states, decoder(memory, prefix).states)
    decoded.states.sum().backward()
    assert values.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in decoder.parameters() if p.grad is not None)


@pytest.mark.slow
def test_the_compiled_scores_are_those_of_tanh(as_installed):
    """The call is so large that scores are computed by exponentials; at scale 300 the keys are too large for these."""
    size, features, length = 8, 256, 64
    decoder = RecurrentDecoder(
        VOCABULARY, size, memory_size=size, attention=Attention(size, size, hidden_size=features)
    )
    values, summary = torch.randn(16, length, size), torch.randn(16, size)
    prefix = tokens(16, length)
    for scale in (1.0, 300.0):
        found = {}
        for dtype in (torch.float32, torch.float64):
            model = decoder.to(dtype)
            big = (values * scale).to(dtype).requires_grad_()
            decoded = model(Memory(big, big, None, summary.to(dtype)), prefix, weights=full())
            loss = decoded.states.square().mean() + decoded.weights.square().sum(-1).mean()
            found[dtype] = [decoded.weights.detach(), *torch.autograd.grad(loss, [big, model.attention.query.weight])]
        for actual, expected in zip(*found.values(), strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
        decoder.float()


@pytest.mark.slow
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [32, 19])
def test_the_compiled_loop_is_the_loop(features, precision, monkeypatch, as_installed):
    """The compiled decoder loop, here also used for small calls, agrees with a simple Python loop in float64: with and
    without blocks of 16 features, and in bfloat16 by autocast."""
    for module in (bahdanau_cpu, gru, query_scores):
        monkeypatch.setattr(module, "_WORTH", 0)
    decoder = RecurrentDecoder(VOCABULARY, D, memory_size=M, attention=Attention(D, M, hidden_size=features))
    encoder = RecurrentEncoder(VOCABULARY, M // 2)
    source, prefix, lengths = tokens(B, K), tokens(B, T), torch.tensor([4, K, 7])
    found = {}
    for dtype in (precision, torch.float64):
        model = EncoderDecoder(encoder, decoder).to(torch.promote_types(dtype, torch.float32))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            decoded = model(source, prefix, lengths, weights=full())
        generator = torch.Generator().manual_seed(1)
        both = (decoded.states, decoded.weights)
        loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in both)
        wanted = [p for name, p in model.named_parameters() if ".output." not in name]
        found[dtype] = [*(x.detach() for x in both), *torch.autograd.grad(loss, wanted)]
    error = 1e-5 if precision == torch.float32 else 0.06
    for actual, expected in zip(*found.values(), strict=True):
        assert float((actual.double() - expected).norm() / expected.norm()) < error


@pytest.mark.interpreted
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernels_are_the_loop(masked, monkeypatch):
    from regard.kernels.recurrent.bahdanau import Given, unrolled
    from regard.kernels.triton import few_row_products

    torch.manual_seed(0)
    # The limit is so small that the kernel splits its sums into several parts.
    monkeypatch.setattr(few_row_products, "_SHARE", 16)
    t, b, k, f, d = 3, 2, 5, 37, 21
    shapes = [(t, b, 3 * d), (b, k, f), (f,), (b, k, 3 * d), (b, d), (3 * d + f, d), (3 * d + f,)]
    given = [torch.randn(shape) / 2 for shape in shapes]
    upstream = torch.randn(t, b, d), torch.randn(t, b, k)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool() if masked else None
    found = []
    # In float64 the decoder's loop runs in torch operations, without the Triton kernel.
    for dtype in (torch.float32, torch.float64):
        leaves = [x.detach().to(dtype).clone().requires_grad_() for x in given]
        out = unrolled(Given(*leaves, mask))
        sum((x * y).sum() for x, y in zip(out, upstream, strict=True)).backward()
        found.append([*out, *(x.grad for x in leaves)])
    for actual, expected in zip(*found, strict=True):
        actual, expected = actual.detach().double(), expected.detach()
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.cuda
@pytest.mark.parametrize("order", ["bahdanau", "feeding"])
@pytest.mark.parametrize("keys", [K, 150])
def test_cuda_graphs_are_the_loop(keys, order):
    """Calls of the same shapes run eagerly at first, then are captured as a CUDA graph, then replayed."""
    decoder = decoder_of("additive", order).cuda().float()
    exact = decoder_of("additive", order).cuda()
    exact.load_state_dict(decoder.state_dict())
    for _ in range(4):
        values = torch.randn(B, keys, M, device="cuda", dtype=torch.float64)
        mask = torch.arange(keys, device="cuda") < torch.tensor([[keys], [4], [7]], device="cuda")
        memory = Memory(values, values, mask, torch.randn(B, M + 1, device="cuda", dtype=torch.float64))
        narrow = Memory(values.float(), values.float(), mask, memory.summary.float())
        prefix = tokens(B, T).cuda()
        results = []
        for model, given in ((decoder, narrow), (exact, memory)):
            model.zero_grad()
            decoded = model(given, prefix, weights=full())
            (decoded.states.sum() + decoded.weights.square().sum()).backward()
            moved = [p.grad for p in model.network.parameters()]
            results.append([decoded.states.detach(), decoded.weights.detach(), *moved])
        for actual, expected in zip(*results, strict=True):
            error = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=error)


# Tests of training.


@pytest.mark.parametrize("order", ORDERS)
def test_bfloat16_autocast(order):
    decoder, memory, prefix = decoder_of("additive", order).float(), memory_of([K, 4, 7]), tokens(B, T)
    memory = Memory(memory.keys.float(), memory.values.float(), memory.mask, memory.summary.float())
    expected = decoder.logits(decoder(memory, prefix).states)
    with torch.autocast("cpu", torch.bfloat16):
        logits = decoder.logits(decoder(memory, prefix).states)
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.03)
    logits.float().sum().backward()
    assert decoder.attention.query.weight.grad.isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
def test_dropout_is_for_training(order):
    name, feeding = ORDERS[order]
    decoder = RecurrentDecoder(
        VOCABULARY,
        D,
        memory_size=M,
        attention=MECHANISMS["additive"](),
        order=name,
        input_feeding=feeding,
        recurrence=Recurrence(layers=2, dropout=0.5),
        summary_size=M + 1,
    ).double()
    memory, prefix = memory_of(), tokens(B, T)
    assert not torch.equal(decoder(memory, prefix).states, decoder(memory, prefix).states)
    decoder.eval()
    assert torch.equal(decoder(memory, prefix).states, decoder(memory, prefix).states)


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(("mechanism", "order"), [("additive", "bahdanau"), ("dot", "feeding"), ("none", "bahdanau")])
def test_eight_examples_are_learned_by_heart(mechanism, order):
    size, vocabulary = 24, 9
    attention = Attention(size, 2 * size, score=mechanism, hidden_size=size) if mechanism != "none" else None
    name, feeding = ORDERS[order]
    decoder = RecurrentDecoder(
        vocabulary, size, memory_size=2 * size, attention=attention, order=name, input_feeding=feeding
    )
    model = EncoderDecoder(RecurrentEncoder(vocabulary, size), decoder)
    source, target = torch.randint(1, vocabulary, (8, 6)), torch.randint(1, vocabulary, (8, 5))
    prefix = torch.cat((torch.zeros(8, 1).long(), target[:, :-1]), 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(120):
        loss = F.cross_entropy(model.logits(model(source, prefix).states).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.05
    state, token = model.start(source), prefix[:, 0]
    for i in range(target.shape[1]):
        step = model.step(state, token)
        state, token = step.state, step.logits.argmax(-1)
        assert torch.equal(token, target[:, i])


COMPILED = """
import torch
from regard.models.memory import Memory
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.nn.attention import Attention
torch.manual_seed(0)
decoder = RecurrentDecoder(13, 7, memory_size=10, attention=Attention(7, 10)).double()
values, summary = torch.randn(3, 5, 10).double().requires_grad_(), torch.randn(3, 10).double()
prefix = torch.tensor([[1, 2], [3, 4], [5, 6]])

def states(values, summary, prefix):
    return decoder(Memory(values, values, None, summary), prefix).states

results = []
for function in (states, torch.compile(states, backend="aot_eager")):
    found = function(values, summary, prefix)
    results.append([found, *torch.autograd.grad(found.sum(), values)])
torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
print("equal")
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_compiler_changes_nothing():
    """This code runs in a separate process, because torch.compile cannot trace the run-time type checks of the tests.

    Dynamo does not compile torch's recurrent networks, only the code around them.
    """
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.stdout.strip() == "equal", done.stderr


# Tests of invalid arguments.


def test_wrong_arguments_are_named(as_installed):
    with pytest.raises(ValueError, match="order must be one of bahdanau, luong, got 'vaswani'"):
        RecurrentDecoder(5, 4, memory_size=3, order="vaswani")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input_feeding goes with order='luong'"):
        RecurrentDecoder(5, 4, memory_size=3, input_feeding=True)
    with pytest.raises(ValueError, match="cell must be one of gru, lstm, got 'rnn'"):
        Recurrence(cell="rnn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        RecurrentEncoder(5, 4, layers=0)
    with pytest.raises(ValueError, match="dropout must be at least 0 and less than 1, got 1"):
        Recurrence(dropout=1.0)
