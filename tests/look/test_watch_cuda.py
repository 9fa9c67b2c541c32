"""Tests of `regard.watch` on a GPU: fused kernels, compiled models and half precision, compared with float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watching import Bare

from regard.core.attention import attention
from regard.core.masks import causal
from regard.core.scores import Additive
from regard.look.compact_floats import Short
from regard.look.watch import watch

pytestmark = pytest.mark.cuda

B, H, G, N, D = 2, 6, 3, 67, 32


def tensors(dtype=torch.float32, key_heads=G):
    sizes = (H, key_heads, key_heads)
    return [torch.randn(B, heads, N, D, device="cuda", dtype=dtype) for heads in sizes]


def plain(query, key, *, is_causal=False):
    query, key = query.double().cpu(), key.double().cpu().repeat_interleave(H // key.shape[1], 1)
    scores = query @ key.mT / math.sqrt(D)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(N, N).tril().bool(), -math.inf)
    return scores.softmax(-1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_kernels(dtype, is_causal):
    query, key, value = tensors(dtype)
    model = Bare(lambda *t: F.scaled_dot_product_attention(*t, is_causal=is_causal, enable_gqa=True))
    expected = model(query, key, value)
    with watch(model) as trace:
        found = model(query, key, value)
    assert torch.equal(found, expected)
    [record] = trace
    for item in range(B):
        weights = record.weights(batch=item)
        assert weights.device.type == "cpu"
        torch.testing.assert_close(weights, plain(query, key, is_causal=is_causal)[item], rtol=2e-3, atol=1e-4)
        assert record.check(batch=item) < (1e-3 if dtype == torch.float32 else 2e-2)


def test_a_compiled_flex_attention_with_a_bias():
    from torch.nn.attention.flex_attention import flex_attention

    fused = torch.compile(flex_attention)
    model = Bare(lambda *t: fused(*t, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j).abs()))
    query, key, value = tensors(key_heads=H)
    with torch.no_grad(), watch(model) as trace:
        model(query, key, value)
    [record] = trace
    place = torch.arange(N, dtype=torch.float64)
    scores = query.double().cpu() @ key.double().cpu().mT / math.sqrt(D) - 0.1 * (place[:, None] - place).abs()
    torch.testing.assert_close(record.weights(), scores.softmax(-1).float()[0], rtol=2e-3, atol=1e-4)
    assert record.check() < 1e-3


def test_our_own_kernels():
    query, key, value = tensors(torch.bfloat16, key_heads=H)
    weight = torch.randn(D, device="cuda", dtype=torch.bfloat16) / 4
    model = Bare(lambda *t: attention(*t, score=Additive(weight), mask=causal()).output)
    with torch.no_grad(), watch(model) as trace:
        model(query, key, value)
    [record] = trace
    assert record.check() < 2e-2
    assert not record.weights()[:, 3, 4:].any()
    torch.testing.assert_close(record.weights().sum(-1), torch.ones(H, N))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_encoder_s_fast_path_in_half_precision():
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval().to("cuda", torch.float16)
    x = torch.randn(2, 9, 32, device="cuda", dtype=torch.float16)
    padding = torch.arange(9, device="cuda") >= torch.tensor([[9], [5]], device="cuda")
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        with watch(model) as trace:
            found = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert len(trace) == 2
    assert not trace["layers.1.self_attn"].weights(batch=1)[..., 5:].any()
    assert trace["layers.0.self_attn"].check() < 1e-2


def test_a_compiled_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=96, vocab_size=101)
    config._attn_implementation = "sdpa"
    model = transformers.LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)
    ids = torch.randint(5, 101, (2, 19), device="cuda")
    with torch.no_grad():
        compiled = torch.compile(model)
        with watch(compiled) as trace:
            compiled(ids)
        model.set_attn_implementation("eager")
        truth = model(ids, output_attentions=True).attentions
    assert [record.name for record in trace] == [f"model.layers.{n}.self_attn" for n in range(2)]
    for record, weights in zip(trace, truth, strict=True):
        torch.testing.assert_close(record.weights(batch=1), weights[1].float().cpu(), rtol=0, atol=2e-2)
        assert record.check(batch=1) < 2e-2


def test_fewer_bits_are_the_same_bits_as_on_the_cpu():
    x = torch.randn(2, 3, 40, 16)
    here, there = Short(x), Short(x.cuda())
    assert torch.equal(here.take(lambda part: part), there.take(lambda part: part).cpu())
    query, key, value = tensors()
    model = Bare(lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True))
    with watch(model, exact=0) as trace:
        model(query, key, value)
    [record] = trace
    assert "24 bits" in record.note
    torch.testing.assert_close(record.weights(), plain(query, key)[0], rtol=2e-3, atol=1e-4)
