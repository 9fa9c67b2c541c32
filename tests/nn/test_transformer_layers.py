"""Transformer layers against their formulas and torch's layers, and whole sequences against decoding by steps."""

import math

import pytest
import torch
from torch import Tensor, nn

from regard.core.masks import causal, padding
from regard.core.requests import full, received
from regard.nn.cache import KeyValueCache
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHeadAttention
from regard.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer, unnormalized

BATCH, QUERIES, KEYS, SIZE, HEADS, HIDDEN, MEMORY = 2, 5, 7, 6, 3, 11, 13


def doubled(layer: nn.Module) -> nn.Module:
    """Return the layer in float64 with noise added to all parameters, because biases of 0 would hide errors."""
    layer = layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer.eval()


def encoder_layer(dropout: float = 0.0, **options) -> TransformerEncoderLayer:
    attention = MultiHeadAttention(SIZE, HEADS, dropout=dropout)
    return TransformerEncoderLayer(attention, FeedForward(SIZE, HIDDEN, dropout=dropout), dropout=dropout, **options)


def decoder_layer(dropout: float = 0.0, **options) -> TransformerDecoderLayer:
    return TransformerDecoderLayer(
        MultiHeadAttention(SIZE, HEADS, dropout=dropout),
        MultiHeadAttention(SIZE, HEADS, key_size=MEMORY, dropout=dropout),
        FeedForward(SIZE, HIDDEN, dropout=dropout),
        dropout=dropout,
        **options,
    )


# Tests of Transformer layers against their formulas.


def attended(layer: MultiHeadAttention, query: Tensor, memory: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and weights of multi-head attention, one head after another; `allowed` is (q, k)."""
    matrices, width = layer.projection.parts(), SIZE // HEADS
    shifts = layer.projection.bias.split([SIZE, SIZE, SIZE])
    q, k, v = (x @ w.T + b for x, w, b in zip((query, memory, memory), matrices, shifts, strict=True))
    outputs, weights = [], []
    for head in range(HEADS):
        part = slice(head * width, (head + 1) * width)
        scores = torch.einsum("bqd,bkd->bqk", q[..., part], k[..., part]) / math.sqrt(width)
        chances = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        outputs.append(chances @ v[..., part])
        weights.append(chances)
    joined = torch.cat(outputs, -1) @ layer.output.weight.T + layer.output.bias
    return joined, torch.stack(weights, 1)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    if isinstance(norm, nn.RMSNorm):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * norm.weight
    spread = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + norm.eps).sqrt()
    return spread * norm.weight + norm.bias


def fed(layer: FeedForward, x: Tensor) -> Tensor:
    return (x @ layer.inner.weight.T + layer.inner.bias).clamp(min=0) @ layer.outer.weight.T + layer.outer.bias


@pytest.mark.parametrize("normalization", [nn.LayerNorm, nn.RMSNorm])
def test_post_norm_is_the_papers_formula(normalization):
    layer = doubled(encoder_layer(norm="post", normalization=normalization))
    x = torch.randn(BATCH, QUERIES, SIZE, dtype=torch.float64)
    allowed = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    found = layer(x, mask=causal(), weights=full())
    added, weights = attended(layer.attention, x, x, allowed)
    y = normed(layer.around_attention.norm, x + added)
    y = normed(layer.around_feed_forward.norm, y + fed(layer.feed_forward, y))
    torch.testing.assert_close(found.output, y)
    torch.testing.assert_close(found.weights, weights)


@pytest.mark.parametrize("normalization", [nn.LayerNorm, nn.RMSNorm])
def test_pre_norm_leaves_the_stream_alone(normalization):
    layer = doubled(decoder_layer(norm="pre", normalization=normalization))
    x = torch.randn(BATCH, QUERIES, SIZE, dtype=torch.float64)
    memory = torch.randn(BATCH, KEYS, MEMORY, dtype=torch.float64)
    every = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    allowed = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    found = layer(x, memory, mask=causal(), weights=full())
    own = normed(layer.around_self_attention.norm, x)
    y = x + attended(layer.self_attention, own, own, allowed)[0]
    added, weights = attended(layer.cross_attention, normed(layer.around_cross_attention.norm, y), memory, every)
    y = y + added
    y = y + fed(layer.feed_forward, normed(layer.around_feed_forward.norm, y))
    torch.testing.assert_close(found.output, y)
    torch.testing.assert_close(found.weights, weights)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_residuals_each_part_replaces_the_stream(norm):
    layer = doubled(decoder_layer(norm=norm, residual=False))
    x = torch.randn(BATCH, QUERIES, SIZE, dtype=torch.float64)
    memory = torch.randn(BATCH, KEYS, MEMORY, dtype=torch.float64)
    every, square = torch.ones(QUERIES, KEYS, dtype=torch.bool), torch.ones(QUERIES, QUERIES, dtype=torch.bool)
    found = layer(x, memory).output
    around = (layer.around_self_attention, layer.around_cross_attention, layer.around_feed_forward)
    own, cross, last = (lambda y, part=part: normed(part.norm, y) for part in around)
    if norm == "pre":
        y = attended(layer.self_attention, own(x), own(x), square)[0]
        y = attended(layer.cross_attention, cross(y), memory, every)[0]
        y = fed(layer.feed_forward, last(y))
    else:
        y = own(attended(layer.self_attention, x, x, square)[0])
        y = cross(attended(layer.cross_attention, y, memory, every)[0])
        y = last(fed(layer.feed_forward, y))
    torch.testing.assert_close(found, y)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_normalisation_nothing_bounds_the_stream(norm, residual):
    layer = doubled(encoder_layer(norm=norm, normalization=unnormalized, residual=residual))
    assert not any("norm" in name for name in layer.state_dict())
    x = torch.randn(BATCH, QUERIES, SIZE, dtype=torch.float64)
    y = attended(layer.attention, x, x, torch.ones(QUERIES, QUERIES, dtype=torch.bool))[0] + residual * x
    torch.testing.assert_close(layer(x).output, fed(layer.feed_forward, y) + residual * y)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_feed_forward_by_loops(activation):
    layer = doubled(FeedForward(2, 3, activation=activation))
    x = torch.randn(2, dtype=torch.float64)
    rows, shift = layer.inner.weight.tolist(), layer.inner.bias.tolist()
    inner = [sum(w * a for w, a in zip(row, x.tolist(), strict=True)) + b for row, b in zip(rows, shift, strict=True)]
    if activation == "relu":
        hidden = [max(0.0, z) for z in inner]
    elif activation == "gelu":
        hidden = [z * 0.5 * (1 + math.erf(z / math.sqrt(2))) for z in inner]
    else:
        hidden = [z / (1 + math.exp(-z)) * v for z, v in zip(inner[:3], inner[3:], strict=True)]
    rows, shift = layer.outer.weight.tolist(), layer.outer.bias.tolist()
    outer = [sum(w * h for w, h in zip(row, hidden, strict=True)) + b for row, b in zip(rows, shift, strict=True)]
    torch.testing.assert_close(layer(x), torch.tensor(outer, dtype=torch.float64))


# Tests of Transformer layers against torch's own layers.


def perturbed(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return layer.eval()


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU(), nn.ReLU()])
@pytest.mark.parametrize("bias", [True, False])
def test_an_encoder_layer_of_torch(norm_first, activation, bias):
    options = {"norm_first": norm_first, "activation": activation, "bias": bias, "layer_norm_eps": 1e-3}
    theirs = perturbed(nn.TransformerEncoderLayer(SIZE, HEADS, HIDDEN, dropout=0.2, batch_first=True, **options))
    ours = TransformerEncoderLayer.from_torch(theirs)
    x = torch.randn(BATCH, QUERIES, SIZE)
    lengths = torch.tensor([3, 5])
    missing = torch.arange(QUERIES) >= lengths[:, None]
    # Because gradients are on, torch runs its code for training instead of its fused code for inference.
    expected = theirs(x, src_key_padding_mask=missing)
    torch.testing.assert_close(ours(x, mask=padding(lengths)).output, expected, rtol=1e-5, atol=1e-5)
    ahead = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    torch.testing.assert_close(ours(x, mask=causal()).output, theirs(x, src_mask=ahead), rtol=1e-5, atol=1e-5)
    assert ours.attention.dropout == ours.around_attention.dropout == ours.feed_forward.dropout == 0.2
    assert not ours.training


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_decoder_layer_of_torch(norm_first, batch_first, bias):
    theirs = perturbed(
        nn.TransformerDecoderLayer(
            SIZE, HEADS, HIDDEN, batch_first=batch_first, norm_first=norm_first, bias=bias, activation="gelu"
        )
    )
    ours = TransformerDecoderLayer.from_torch(theirs, batch_first=True)
    x, memory = torch.randn(BATCH, QUERIES, SIZE), torch.randn(BATCH, KEYS, SIZE)
    lengths = torch.tensor([4, 7])
    ahead = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    expected = theirs(*given, tgt_mask=ahead, memory_key_padding_mask=torch.arange(KEYS) >= lengths[:, None])
    expected = expected if batch_first else expected.transpose(0, 1)
    found = ours(x, memory, mask=causal(), memory_mask=padding(lengths)).output
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_converted_layer_are_torchs():
    theirs = perturbed(nn.TransformerEncoderLayer(SIZE, HEADS, HIDDEN, batch_first=True))
    ours = TransformerEncoderLayer.from_torch(theirs)
    x = torch.randn(BATCH, QUERIES, SIZE)
    for layer, run in ((theirs, theirs), (ours, lambda x: ours(x).output)):
        # The converted layer shares no parameters with torch's layer.
        assert all(p.grad is None for p in layer.parameters())
        run(x).pow(2).sum().backward()
    torch.testing.assert_close(ours.feed_forward.inner.weight.grad, theirs.linear1.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        ours.attention.projection.weight.grad, theirs.self_attn.in_proj_weight.grad, rtol=1e-4, atol=1e-4
    )


def test_other_activations_of_torch_are_refused():
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, HIDDEN, activation=nn.GELU(approximate="tanh"), batch_first=True)
    with pytest.raises(ValueError, match="must be ReLU or exact GELU, got GELU"):
        TransformerEncoderLayer.from_torch(layer)


# Tests of masks, caches and training of Transformer layers.


def test_padding_changes_nothing():
    layer = encoder_layer().eval()
    x = torch.randn(1, QUERIES, SIZE)
    padded = torch.cat((x, torch.full((1, 4, SIZE), 1e4)), 1)
    found = layer(padded, mask=padding(torch.tensor([QUERIES]))).output[:, :QUERIES]
    torch.testing.assert_close(found, layer(x).output)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_changed_future_leaves_the_past_bit_equal(norm):
    layer = decoder_layer(norm=norm).eval()
    x, memory = torch.randn(BATCH, QUERIES, SIZE), torch.randn(BATCH, KEYS, MEMORY)
    other = x.clone()
    other[:, 3:] = torch.randn(BATCH, QUERIES - 3, SIZE)
    a, b = (layer(t, memory, mask=causal()).output for t in (x, other))
    torch.testing.assert_close(a[:, :3], b[:, :3], rtol=0, atol=0)
    assert not torch.equal(a[:, 3:], b[:, 3:])


def test_token_by_token_equals_the_whole():
    layer = decoder_layer().eval()
    x, memory = torch.randn(BATCH, QUERIES, SIZE), torch.randn(BATCH, KEYS, MEMORY)
    allowed = (torch.arange(KEYS) < torch.tensor([[3], [7]]))[:, None, None]
    whole = layer(x, memory, mask=causal(), memory_mask=allowed, weights=full())
    cache, memory_cache = KeyValueCache(), KeyValueCache()
    for at in range(QUERIES):
        part = layer(
            x[:, at : at + 1],
            # The first call projects the encoder's output and caches its keys and values.
            memory if at == 0 else None,
            mask=causal(),
            memory_mask=allowed,
            cache=cache,
            memory_cache=memory_cache,
            weights=full(),
        )
        torch.testing.assert_close(part.output, whole.output[:, at : at + 1])
        torch.testing.assert_close(part.weights, whole.weights[:, :, at : at + 1])
    assert cache.length == QUERIES
    assert memory_cache.length == KEYS


def test_keys_and_values_of_a_memory_may_differ():
    attention = MultiHeadAttention(SIZE, HEADS, key_size=MEMORY, value_size=17)
    layer = TransformerDecoderLayer(MultiHeadAttention(SIZE, HEADS), attention, FeedForward(SIZE)).eval()
    x, keys, values = torch.randn(1, 3, SIZE), torch.randn(1, 1, MEMORY), torch.randn(1, 1, 17)
    # A single key has the weight 1 whatever its score is, so only its value affects the output.
    torch.testing.assert_close(layer(x, keys, values).output, layer(x, keys + 1, values).output)
    assert not torch.allclose(layer(x, keys, values).output, layer(x, keys, values + 1).output)


def test_dropout_falls_in_training_only():
    layer, x = encoder_layer(dropout=0.5), torch.randn(BATCH, QUERIES, SIZE)
    assert not torch.equal(layer(x).output, layer(x).output)
    torch.testing.assert_close(layer.eval()(x).output, layer(x).output, rtol=0, atol=0)
    still = encoder_layer(dropout=0.0)
    still.load_state_dict(layer.state_dict())
    # A layer in training with a dropout of 0 gives the output of inference.
    torch.testing.assert_close(still(x).output, layer(x).output)


def test_dropout_keeps_the_mean():
    layer = FeedForward(1, 40000, bias=False, dropout=0.25)
    nn.init.ones_(layer.inner.weight)
    nn.init.constant_(layer.outer.weight, 1 / 40000)
    torch.testing.assert_close(layer(torch.ones(1)), torch.ones(1), rtol=0.02, atol=0)


@pytest.mark.interpreted
def test_relu_and_dropout_in_one_kernel_in_the_interpreter():
    from regard.kernels.triton.relu_dropout import relu_dropout

    torch.manual_seed(5)
    x, seed = torch.randn(37, 53, requires_grad=True), torch.tensor([3])
    out = relu_dropout(x, seed, 0.25)
    kept = out > 0
    assert not kept[x <= 0].any()
    assert 0.7 < kept[x > 0].float().mean() < 0.8
    torch.testing.assert_close(out[kept], x[kept] / 0.75)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], kept / 0.75)
    torch.testing.assert_close(relu_dropout(x, seed, 0.25), out, rtol=0, atol=0)
    assert not torch.equal(relu_dropout(x, seed + 1, 0.25), out)


@pytest.mark.cuda
def test_dropout_of_a_feed_forward_on_cuda_has_the_right_share_and_gradient():
    torch.manual_seed(3)
    layer = FeedForward(64, 4096, dropout=0.25).cuda()
    x = torch.randn(31, 64, device="cuda", requires_grad=True)
    mean = torch.stack([layer(x) for _ in range(300)]).mean(0)
    torch.testing.assert_close(mean, layer.eval()(x), rtol=0, atol=0.05)
    torch.manual_seed(4)
    gradients = torch.stack([torch.autograd.grad(layer.train()(x).sum(), x)[0] for _ in range(300)]).mean(0)
    torch.testing.assert_close(gradients, torch.autograd.grad(layer.eval()(x).sum(), x)[0], rtol=0, atol=0.5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_gradients_agree_with_finite_differences(norm):
    layer = doubled(decoder_layer(norm=norm))
    x = torch.randn(1, 2, SIZE, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(1, 3, MEMORY, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, m: layer(x, m, mask=causal()).output, (x, memory), fast_mode=True)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_under_autocast_a_normalised_stream_is_narrow_and_a_sum_is_not(norm):
    layer, x = encoder_layer(norm=norm).eval(), torch.randn(BATCH, QUERIES, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x).output
    assert found.dtype == {"pre": torch.float32, "post": torch.bfloat16}[norm]
    torch.testing.assert_close(found.float(), layer(x).output, rtol=0, atol=0.05)


def test_weights_are_what_was_asked():
    layer, x = encoder_layer().eval(), torch.randn(BATCH, QUERIES, SIZE)
    assert layer(x).weights is None
    every, sums = layer(x, weights=full()).weights, layer(x, weights=received()).weights
    torch.testing.assert_close(every.sum(-2), sums)


def test_state_dict_round_trip():
    first, second = decoder_layer(), decoder_layer()
    x, memory = torch.randn(BATCH, QUERIES, SIZE), torch.randn(BATCH, KEYS, MEMORY)
    assert not torch.equal(first(x, memory).output, second(x, memory).output)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(x, memory).output, second(x, memory).output, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeedForward(6, activation="tanh"), "activation must be one of relu, gelu, swiglu, got 'tanh'"),
        (lambda: FeedForward(6, dropout=1.0), "dropout must be from 0 to below 1, got 1.0"),
        (lambda: encoder_layer(norm="middle"), "norm must be 'pre' or 'post', got 'middle'"),
        (
            lambda: TransformerEncoderLayer(MultiHeadAttention(6, 3), FeedForward(5)),
            "attention has size 6, FeedForward has 5",
        ),
    ],
)
def test_wrong_parts_are_named(make, message, as_installed):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_decoder_layer_without_memory_does_not_attend_itself_instead():
    with pytest.raises(ValueError, match="memory must be given, or a memory_cache that holds it"):
        decoder_layer()(torch.randn(BATCH, QUERIES, SIZE), memory_cache=KeyValueCache())
