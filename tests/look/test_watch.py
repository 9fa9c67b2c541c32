"""Tests of `regard.watch`: weights are correct, the model is not changed, and missed calls are reported."""

import copy
import math
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watching import Bare, seen

from regard.core.attention import attention, observers
from regard.core.masks import causal, window
from regard.core.normalizers import Hard, Sigmoid, Sparsemax
from regard.core.requests import full
from regard.core.scores import Additive, Bilinear, ScaledDot
from regard.look.watch import watch

B, H, Q, K, D = 2, 3, 5, 7, 11


def tensors(heads=H, key_heads=H, queries=Q, keys=K, **options):
    return (
        torch.randn(B, heads, queries, D, **options),
        torch.randn(B, key_heads, keys, D, **options),
        torch.randn(B, key_heads, keys, D, **options),
    )


def plain(query, key, scale=None, mask=None, added=None):
    """Compute attention weights in float64, one score at a time."""
    group = query.shape[1] // key.shape[1]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    found = torch.zeros(*query.shape[:-1], key.shape[2], dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:-1])).tolist():
        scores = [
            scale * sum(x * y for x, y in zip(query[b, h, i].tolist(), key[b, h // group, j].tolist(), strict=True))
            + (0.0 if added is None else float(added.expand(found.shape)[b, h, i, j]))
            if mask is None or bool(mask.expand(found.shape)[b, h, i, j])
            else -math.inf
            for j in range(key.shape[2])
        ]
        top = max(scores)
        if top > -math.inf:
            parts = [math.exp(score - top) for score in scores]
            found[b, h, i] = torch.tensor(parts, dtype=torch.float64) / sum(parts)
    return found


def same(record, expected):
    for batch in range(record.batch):
        torch.testing.assert_close(record.weights(batch=batch), expected[batch].float(), rtol=1e-5, atol=1e-6)


MASKS = {
    "none": (None, False),
    "causal": (None, True),
    "bool": (torch.rand(B, 1, Q, K) > 0.4, False),
    "bool over keys": (torch.arange(K)[None] < 5, False),
    "float": (torch.randn(1, H, Q, K), False),
    "float of a sequence": (torch.randn(B, 1, 1, K), False),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_sdpa_with_every_mask(name, scale):
    mask, is_causal = MASKS[name]
    query, key, value = tensors()
    trace = seen(
        lambda *t: F.scaled_dot_product_attention(*t, attn_mask=mask, is_causal=is_causal, scale=scale),
        query,
        key,
        value,
    )
    [record] = trace
    allowed = (
        torch.ones(Q, K).tril().bool() if is_causal else mask if mask is not None and mask.dtype == torch.bool else None
    )
    added = mask if mask is not None and mask.is_floating_point() else None
    same(record, plain(query, key, scale, allowed, added))
    assert record.scale == pytest.approx(scale or 1 / math.sqrt(D))
    assert max(record.check(batch=0), record.check(batch=1)) < 1e-6
    assert record.kind == "sdpa"


def test_grouped_heads_read_the_right_keys():
    query, key, value = tensors(heads=6, key_heads=2)
    [record] = seen(lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True), query, key, value)
    same(record, plain(query, key))
    assert record.heads == 6
    torch.testing.assert_close(record.weights(head=4), record.weights()[4])
    assert record.check() < 1e-6


def test_a_head_by_itself_is_that_head_of_all():
    query, key, value = tensors(heads=6, key_heads=3)
    mask = torch.rand(B, 6, Q, K) > 0.3
    [record] = seen(lambda *t: F.scaled_dot_product_attention(*t, attn_mask=mask, enable_gqa=True), query, key, value)
    for head in range(6):
        torch.testing.assert_close(record.weights(head=head, batch=1), record.weights(batch=1)[head])
        torch.testing.assert_close(
            record.weights(head=head, queries=[3, 1], batch=1), record.weights(batch=1)[head, [3, 1]]
        )


def test_lower_right_causality():
    from torch.nn.attention.bias import causal_lower_right

    query, key, value = tensors()
    [record] = seen(
        lambda *t: F.scaled_dot_product_attention(*t, attn_mask=causal_lower_right(Q, K)), query, key, value
    )
    same(record, plain(query, key, mask=torch.ones(Q, K).tril(K - Q).bool()))


def test_a_row_with_nothing_to_attend_is_zeros():
    mask = torch.ones(Q, K, dtype=torch.bool)
    mask[2] = False
    [record] = seen(lambda *t: F.scaled_dot_product_attention(*t, attn_mask=mask), *tensors())
    assert not record.weights()[:, 2].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    query, key, value = tensors(dtype=dtype)
    [record] = seen(F.scaled_dot_product_attention, query, key, value)
    same(record, plain(query, key))
    assert record.check() < (1e-2 if dtype == torch.bfloat16 else 1e-12)


def test_dropout_is_said_and_the_weights_are_those_before_it():
    query, key, value = tensors()
    [record] = seen(lambda *t: F.scaled_dot_product_attention(*t, dropout_p=0.5), query, key, value)
    same(record, plain(query, key))
    assert record.check() is None
    assert "dropout was active" in record.note


def test_dropout_in_place_leaves_only_the_weights_after_it():
    query, key, value = tensors()
    [record] = seen(lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5, inplace=True) @ v, query, key, value)
    assert "dropout was applied in place" in record.note
    assert record.check() < 1e-6
    assert (record.weights() == 0).any()


def test_dropout_after_a_softmax_by_hand():
    query, key, value = tensors()
    [record] = seen(lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5).to(v.dtype) @ v, query, key, value)
    same(record, plain(query, key, 1.0))
    assert record.check() is None
    assert "dropout was active" in record.note


BY_HAND = {
    "matmul": lambda w, v: torch.matmul(w, v),
    "in half precision": lambda w, v: (w.half() @ v.half()).float(),
    "batched": lambda w, v: torch.bmm(w.flatten(0, 1), v.flatten(0, 1)),
    "einsum": lambda w, v: torch.einsum("bhqk,bhkd->bqhd", w, v),
    "einsum with values first": lambda w, v: torch.einsum("bhkd,bhqk->bhdq", v, w),
    "from the right": lambda w, v: v.mT @ w.mT,
    "two transpositions": lambda w, v: (v.transpose(-1, -2) @ w.transpose(2, 3)).mT,
    "scaled by a head mask": lambda w, v: (w * torch.ones(H, 1, 1)) @ v,
}


@pytest.mark.parametrize("way", BY_HAND)
def test_softmax_by_hand(way):
    query, key, value = tensors()
    [record] = seen(lambda q, k, v: BY_HAND[way](F.softmax(q @ k.mT, -1), v), query, key, value)
    tolerance = 1e-3 if "half" in way else 1e-5
    found = torch.stack([record.weights(batch=batch) for batch in range(record.batch)])
    torch.testing.assert_close(found.reshape(B, H, Q, K), plain(query, key, 1.0).float(), rtol=0, atol=tolerance)
    assert record.check() < tolerance


def test_additive_attention_as_a_product_and_a_sum():
    memory, state = torch.randn(B, K, D), torch.randn(B, D)

    def look(memory, state):
        weights = torch.softmax((memory * state[:, None]).sum(-1, keepdim=True), dim=1)
        return (weights * memory).sum(dim=1)

    [record] = seen(look, memory, state)
    expected = torch.einsum("bkd,bd->bk", memory, state).softmax(-1)
    assert (record.batch, record.queries, record.keys) == (B, 1, K)
    same(record, expected[:, None, None])


def test_heads_folded_into_the_batch_are_told_by_the_layer():
    class Layer(Bare):
        num_heads = H

    query, key, value = (t.flatten(0, 1) for t in tensors())
    layer = Layer(F.scaled_dot_product_attention)
    with watch(layer) as trace:
        layer(query, key, value)
    [record] = trace
    assert (record.batch, record.heads) == (B, H)
    same(record, plain(query.unflatten(0, (B, H)), key.unflatten(0, (B, H))))


def test_a_softmax_that_weighs_nothing_is_no_attention():
    trace = seen(lambda x: (x.softmax(-1) + 1).log(), torch.randn(3, 4))
    assert len(trace) == 0


class Twice(nn.Module):
    """A model that calls one attention layer twice, and then another attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x):
        for layer in (self.shared, self.shared, self.last):
            x = layer(x, x, x, need_weights=False)[0]
        return x


def test_calls_have_the_names_of_their_modules_and_numbers():
    model = Twice().eval()
    with watch(model) as trace:
        model(torch.randn(1, 5, 8))
    assert [(record.name, record.call) for record in trace] == [("shared", 0), ("shared", 1), ("last", 0)]
    assert trace["last"].heads == 4


@pytest.mark.parametrize("keep", ["la*", ["la*", "x"], lambda name: name == "last"])
def test_keep_selects_layers(keep):
    model = Twice().eval()
    with watch(model, keep=keep) as trace:
        model(torch.randn(1, 5, 8))
    assert trace.names == ["last"]
    assert trace.dropped == []


def test_another_model_is_not_recorded():
    mine, other = Twice().eval(), Twice().eval()
    with watch(mine) as trace:
        other(torch.randn(1, 5, 8))
    assert len(trace) == 0


def test_the_limit_holds_and_what_it_dropped_is_said():
    model = Twice().eval()
    x = torch.randn(1, 64, 8)
    with watch(model) as whole:
        model(x)
    limit = whole.nbytes - whole["last"].nbytes // 2
    with watch(model, limit=limit) as trace:
        model(x)
    assert [record.name for record in trace] == ["shared", "shared"]
    assert trace.nbytes < limit
    assert trace.dropped == [f"'last' did not fit the limit of {limit / 2**20:.3g} MiB, once"]


def test_what_only_just_does_not_fit_the_limit_is_kept_in_fewer_bits():
    model = Twice().eval()
    x = torch.randn(1, 64, 8)
    with watch(model) as whole:
        model(x)
    with watch(model, limit=whole.nbytes - 1) as trace:
        model(x)
    assert [record.note is None for record in trace] == [True, True, False]
    assert "24 bits" in trace["last"].note
    assert trace.nbytes < whole.nbytes
    assert trace.dropped == []


def test_only_queries_and_keys_are_kept():
    query, key, value = torch.randn(3, 1, 4, 256, 8)
    [record] = seen(F.scaled_dot_product_attention, query.clone(), key.clone(), value.clone())
    # To check its weights, the record also stores the values and four rows of the output of each head.
    beside = value.nbytes + 4 * 4 * 8 * 4
    assert record.nbytes == query.nbytes + key.nbytes + beside < record.heads * 256 * 256 * 4


def test_views_of_a_cache_are_copied_and_rows_are_kept_as_they_were():
    cache = torch.randn(1, H, 64, D)
    query = torch.randn(1, H, 4, D)

    def step(query, key):
        out = F.scaled_dot_product_attention(query, key, key)
        cache[:, :, :6] = 0.0
        return out

    before = plain(query, cache[:, :, :6])
    [record] = seen(lambda q: step(q, cache[:, :, :6]), query)
    same(record, before)
    cache.normal_()
    before = plain(query[:, :, :1], cache[:, :, :6])
    [record] = seen(lambda q: step(q[:, :, :1], cache[:, :, :6]), query)
    same(record, before)
    assert record.kind == "rows"
    # Stored for each head: a row of 6 weights, and, to check it, the computed and the recorded output of D numbers.
    assert record.nbytes == H * (6 + 2 * D) * 4


def test_a_change_in_place_is_an_error_and_not_a_wrong_map():
    query, key, value = tensors()
    [record] = seen(F.scaled_dot_product_attention, query, key, value)
    key.zero_()
    with pytest.raises(RuntimeError, match="changed in place since"):
        record.weights()


def test_nothing_is_left_behind():
    model = Twice().eval()
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), watch(model):
        raise ZeroDivisionError
    from regard.core import attention as module

    assert module.observers == observers == ()
    assert torch.overrides._get_current_function_mode_stack() == []
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]


def test_outputs_are_the_same_with_and_without_watching():
    model, x = Twice().eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = model(x)
        with watch(model):
            found = model(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", [None, nn.LayerNorm(16)])
def test_the_encoder_writes_at_padded_positions_what_it_writes_unwatched(norm):
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=norm).eval()
    if norm is not None:
        nn.init.normal_(norm.bias)
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch emits one warning that nested tensors are experimental
        expected = model(x, src_key_padding_mask=padding)
    with torch.no_grad(), watch(model) as trace:
        found = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not trace["layers.0.self_attn"].weights(batch=1)[..., 3:].any()
    with torch.no_grad():
        model.train(False)
        grad = model(x, mask=torch.zeros(5, 5), src_key_padding_mask=padding.float() * -1e9)
        with watch(model):
            again = model(x, mask=torch.zeros(5, 5), src_key_padding_mask=padding.float() * -1e9)
    torch.testing.assert_close(again, grad, rtol=0, atol=1e-5)


def test_gradients_flow_while_watching_and_maps_of_them_are_right():
    query, key, value = (t.requires_grad_() for t in tensors(heads=6, key_heads=2))
    goal = torch.randn(B, 6, Q, D)

    def look(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    model = Bare(look)
    with watch(model, gradients=True) as trace:
        (model(query, key, value) * goal).sum().backward()
    weights = plain(query.detach(), key.detach()).float().requires_grad_()
    ((weights @ value.detach().repeat_interleave(3, 1)) * goal).sum().backward()
    [record] = trace
    torch.testing.assert_close(record.gradient(batch=1), weights.grad[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        record.relevance(head=4, queries=[2]),
        (weights * weights.grad).clamp_min(0)[0, 4, 2:3].detach(),
        rtol=1e-4,
        atol=1e-5,
    )
    assert query.grad is not None


def test_gradients_of_softmax_by_hand_and_their_rollout():
    def layer(x):
        return (x @ x.mT / 4).softmax(-1) @ x

    model, x = Bare(lambda x: layer(layer(x))), torch.randn(1, 2, Q, 4, requires_grad=True)
    with watch(model, gradients=True) as trace:
        model(x).square().sum().backward()
    first, second = (record.relevance().mean(0) for record in trace)
    one = torch.eye(Q) + first
    torch.testing.assert_close(trace.rollout(gradients=True), one + second @ one)


def test_asking_for_a_gradient_that_has_not_come_says_so():
    query, key, value = (t.requires_grad_() for t in tensors())
    [record] = seen(F.scaled_dot_product_attention, query, key, value, gradients=True)
    with pytest.raises(ValueError, match=r"no gradient has come to '': call backward\(\)"):
        record.gradient()


REGARD = {
    "scaled dot": {},
    "causal": {"mask": causal(2)},
    "window": {"mask": window(2, 1) & (torch.rand(B, 1, 1, K) > 0.2)},
    "additive": {"score": Additive(torch.randn(H, D))},
    "bilinear": {"score": Bilinear(torch.randn(H, D, D) / D)},
    "own": {"score": lambda q, k: -torch.cdist(q, k)},
    "sparsemax": {"normalize": Sparsemax()},
    "sigmoid": {"normalize": Sigmoid(-1.0)},
    "hard": {"normalize": Hard()},
    "bias": {"bias": torch.randn(H, Q, K)},
}


@pytest.mark.parametrize("name", REGARD)
def test_calls_of_our_own(name):
    query, key, value = tensors()
    expected = attention(query, key, value, weights=full(), **REGARD[name])
    [record] = seen(lambda *t: attention(*t, **REGARD[name]), query, key, value)
    same(record, expected.weights)
    for head in range(H):
        torch.testing.assert_close(record.weights(head=head, batch=1), expected.weights[1, head], rtol=1e-5, atol=1e-6)
    assert record.kind == "regard"
    assert record.check() < 1e-5


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_our_calls_with_other_axes(axes):
    query, key, value = (t[0, 0] if axes == 2 else t[0] if axes == 3 else t[None] for t in tensors())
    mask = torch.rand(B, H, Q, K) > 0.3
    mask = mask[0, 0] if axes == 2 else mask[0] if axes == 3 else mask[None]
    expected = attention(query, key, value, mask=mask, weights=full()).weights
    [record] = seen(lambda *t: attention(*t, mask=mask), query, key, value)
    same(record, expected.reshape(record.batch, record.heads, Q, K))
    assert record.check() < 1e-6


def test_a_drawn_key_is_shown_by_its_chances():
    query, key, value = tensors()
    [record] = seen(lambda *t: attention(*t, normalize=Hard(sample=True)), query, key, value)
    same(record, plain(query, key))
    assert record.check() is None
    assert "drawn" in record.note


def test_learned_scores_are_kept_as_they_were():
    weight = nn.Parameter(torch.randn(D))
    query, key, value = tensors()
    expected = attention(query, key, value, score=Additive(weight), weights=full()).weights.detach()
    [record] = seen(lambda *t: attention(*t, score=Additive(weight)), query, key, value)
    with torch.no_grad():
        weight.zero_()
    same(record, expected)


def test_an_attention_layer_in_which_nothing_was_seen_is_named():
    class FlashAttention(nn.Module):
        def forward(self, x):
            return x * 2

    model = nn.Sequential(FlashAttention())
    with watch(model) as trace:
        model(torch.randn(2, 3))
    assert trace.dropped == ["'0' ran once, but no attention was seen in it"]


def test_an_attention_layer_that_was_passed_by_is_named():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return x @ self.attention.in_proj_weight.T

    model = nn.Sequential(Model())
    with watch(model) as trace:
        model(torch.randn(2, 8))
    [said] = trace.dropped
    assert said.startswith("'0.attention' was not called, though '0' ran")


def test_torchscript_is_named():
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Linear(3, 3))
    model = nn.Sequential(scripted)
    with watch(model) as trace:
        model(torch.randn(2, 3))
    assert trace.dropped == ["'0' is TorchScript: what it attends to cannot be seen"]


def test_other_threads_are_left_alone():
    query, key, value = tensors()

    def elsewhere():
        attention(query, key, value)

    model = Bare(lambda: None)
    with watch(model) as trace:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(trace) == 0


def test_a_compiled_model_is_seen_and_keeps_its_names():
    model = Twice().eval()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(1, 5, 8)
    with torch.no_grad():
        expected = compiled(x)
        with watch(compiled) as trace:
            found = compiled(x)
    assert trace.names == ["shared", "last"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_inference_mode():
    model = Twice().eval()
    with torch.inference_mode(), watch(model) as trace:
        model(torch.randn(1, 5, 8))
    assert trace["last"].weights().sum(-1) == pytest.approx(torch.ones(4, 5))


def test_autocast():
    model = Twice().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), watch(model) as trace:
        model(torch.randn(1, 5, 8))
    assert trace["last"].check() < 2e-2


def test_watching_within_watching():
    model = Twice().eval()
    with watch(model) as outer:
        with watch(model, keep="last") as inner:
            model(torch.randn(1, 5, 8))
        model(torch.randn(1, 5, 8))
    assert len(inner) == 1
    assert len(outer) == 6


def test_what_is_no_model_is_refused(as_installed):
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"), watch("bert"):
        pass
    with pytest.raises(ValueError, match="limit is a number of bytes above 0, got 0"), watch(nn.Linear(2, 2), limit=0):
        pass


def test_training_goes_on_as_if_nobody_watched():
    def train(watched):
        torch.manual_seed(3)
        model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.1, batch_first=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            x = torch.randn(2, 5, 16)
            if watched:
                with watch(model, gradients=True):
                    loss = model(x).square().mean()
            else:
                loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return copy.deepcopy(model.state_dict())

    for (name, expected), found in zip(train(False).items(), train(True).values(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def test_a_fault_in_watching_does_not_stop_the_model(monkeypatch):
    def fail(*_, **__):
        raise ValueError("cannot be told")

    monkeypatch.setattr("regard.look.capture.sdpa_calls.build", fail)
    query, key, value = tensors()
    expected = F.scaled_dot_product_attention(query, key, value)
    model = Bare(F.scaled_dot_product_attention)
    with watch(model) as trace:
        found = model(query, key, value)
    assert torch.equal(found, expected)
    assert len(trace) == 0
    assert trace.dropped == ["'': a call (ValueError: cannot be told) cannot be seen, once"]


def test_weights_by_hand_that_are_written_over_are_an_error_and_not_a_wrong_map():
    kept = []

    def look(query, key, value):
        kept.append((query @ key.mT).softmax(-1))
        return kept[0] @ value

    [record] = seen(look, *tensors())
    kept[0].zero_()
    with pytest.raises(RuntimeError, match="changed in place since"):
        record.weights()


def test_what_watching_computes_itself_is_not_seen_by_another_watcher():
    model = Bare(lambda *t: attention(*t, normalize=Sparsemax()))
    with watch(model) as outer, watch(model) as inner:
        model(*tensors())
    assert len(outer) == len(inner) == 1


def test_our_layers_and_models_are_named():
    from regard.nn.attention import Attention
    from regard.nn.multihead import MultiHeadAttention

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = MultiHeadAttention(8, 2, dropout=0.2)
            self.one = Attention(8, score="additive")

        def forward(self, x):
            return self.one(self.many(x).output, x).output

    model, x = Both(), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    assert [(record.name, record.heads, record.kind) for record in trace] == [
        ("many", 2, "regard"),
        ("one", 1, "regard"),
    ]
    assert "dropout was active" in trace["many"].note
    assert trace["one"].check() < 1e-5
    assert trace.dropped == []


def test_local_attention_is_said_not_to_be_seen():
    from regard.nn.local import LocalAttention

    layer, x = LocalAttention(8, reach=2), torch.randn(2, 7, 8)
    with watch(layer) as trace:
        layer(x, x)
    assert len(trace) == 0
    assert "local attention, whose keys are a window around each query, cannot be seen" in trace.dropped[0]


LONG = {
    "scaled": lambda q, k: (q @ k.mT) * 0.3,
    "divided": lambda q, k: torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(D),
    "with a mask added": lambda q, k: (q @ k.mT) / 3 + torch.full((60, 60), -1e30).triu(1),
    "with a mask filled in": lambda q, k: ((q @ k.mT) / 3).masked_fill(torch.ones(60, 60).triu(1).bool(), -math.inf),
    "with what was learned added in place": lambda q, k: (q @ k.mT).add_(torch.randn(H, 60, 60)),
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("way", LONG)
def test_a_large_matrix_by_hand_is_traced_to_queries_and_keys(monkeypatch, way, dropout):
    monkeypatch.setattr("regard.look.capture.score_matrices.LARGE", 100)
    query, key, value = tensors(queries=60, keys=60)
    kept = []

    def look(query, key, value):
        kept.append(F.softmax(LONG[way](query, key), dim=-1, dtype=torch.float32).to(query.dtype))
        return F.dropout(kept[0], dropout) @ value

    [record] = seen(look, query, key, value)
    same(record, kept[0])
    assert sum(tensor.nbytes for tensor in record.source.holds()) < kept[0].nbytes
    assert (record.check() is None) == (dropout > 0)


def test_a_large_matrix_that_took_another_way_is_kept_as_it_is(monkeypatch):
    monkeypatch.setattr("regard.look.capture.score_matrices.LARGE", 100)
    query, key, value = tensors(queries=60, keys=60)
    for change in (lambda s: s.clamp(-1, 1), lambda s: s.clamp_(-1, 1), lambda s: 2 * (s + torch.ones(60, 60)) ** 2):
        kept = []

        def look(query, key, value, change=change, kept=kept):
            kept.append(change(query @ key.mT).softmax(-1))
            return kept[0] @ value

        [record] = seen(look, query, key, value)
        same(record, kept[0])
        assert [tensor.nbytes for tensor in record.source.holds()] == [kept[0].nbytes]


def test_rows_written_into_one_buffer_are_each_kept():
    memory = torch.randn(B, K, D)

    def steps(memory):
        buffer = torch.zeros(3, B, K)
        for step in range(3):
            weights = torch.softmax(memory[..., step], -1, out=buffer[step])
            torch.bmm(weights.unsqueeze(1), memory)
        return buffer

    trace = seen(steps, memory)
    assert [record.kind for record in trace] == ["rows"] * 3
    for step, record in enumerate(trace):
        same(record, memory[..., step].softmax(-1)[:, None, None])
    joined = trace.joined()[""]
    torch.testing.assert_close(joined.weights(head=0, batch=1), memory[1, :, :3].softmax(0).T)


def test_values_written_over_leave_no_check_rather_than_a_wrong_one():
    query, key, value = tensors()
    [record] = seen(F.scaled_dot_product_attention, query, key, value)
    assert record.check() < 1e-6
    value.zero_()
    assert record.check() is None


def test_a_check_with_large_values_is_made_at_once():
    query, key, value = torch.randn(3, 1, 8, 1024, 64)
    value = value.clone()
    [record] = seen(F.scaled_dot_product_attention, query, key, value)
    value.zero_()
    assert record.check() < 1e-5


def test_a_wrong_record_would_fail_its_check(monkeypatch):
    monkeypatch.setattr(
        "regard.look.capture.sdpa_calls.ScaledDot", lambda scale, softcap: ScaledDot(scale * 1.1, softcap)
    )
    [record] = seen(F.scaled_dot_product_attention, *tensors())
    assert record.check() > 1e-3


def test_a_trace_without_records_says_so():
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 1, 8)
    with watch(nn.Linear(8, 8)) as without:
        nn.functional.relu(x)
    with watch(layer, keep="other") as elsewhere:
        layer(x, x, x)
    for trace in (without, elsewhere):
        assert len(trace.dropped) == 1
        assert "no attention was seen" in repr(trace)
