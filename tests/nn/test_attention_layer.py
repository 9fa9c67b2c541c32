"""The layer `Attention`, which attends to a memory with one head: scores, use in decoders, padding, hard attention."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import oracles
from regard.core.masks import causal, padding
from regard.core.normalizers import Hard, Sparsemax
from regard.core.requests import Top, entropy, full, received, rows, top
from regard.core.scores import Additive, ScaledDot
from regard.nn.attention import Attention, SelfAttention
from regard.nn.protocol import Attends, Projected

SCORES = ["additive", "dot", "scaled_dot", "cosine", "bilinear"]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def weight_of(layer: nn.Module, name: str) -> list[list[float]]:
    return dict(layer.named_parameters())[name].tolist()


def by_loops(layer: Attention, score: str, query: Tensor, memory: Tensor, allowed: oracles.Allowed) -> oracles.Answer:
    """Return the result of the layer's formulas, as the papers give them, in loops over lists of numbers."""
    parts = dict(layer.named_parameters())
    queries, keys, values = query.tolist(), memory.tolist(), memory.tolist()

    def mapped(rows: list, weight: str) -> list:
        matrix = parts[weight].tolist()
        return [[[oracles.dot(row, vector) for row in matrix] for vector in batch] for batch in rows]

    if "query.weight" in parts:
        queries = mapped(queries, "query.weight")
    if "key.weight" in parts:
        keys = mapped(keys, "key.weight")
    if "value.weight" in parts:
        values = mapped(values, "value.weight")
    rules = {
        "additive": lambda q, k, h: oracles.additive(q, k, parts["score.weight"].tolist()),
        "dot": lambda q, k, h: oracles.dot(q, k),
        "bilinear": lambda q, k, h: oracles.dot(q, k),
        "scaled_dot": lambda q, k, h: oracles.scaled_dot(q, k),
        "cosine": lambda q, k, h: oracles.cosine(q, k),
    }
    one_head = [[[row] for row in rows] for rows in (queries, keys, values)]
    return oracles.attend(*one_head, rules[score], oracles.softmax, allowed)


@pytest.mark.parametrize("value_size", [None, 2])
@pytest.mark.parametrize("score", SCORES)
def test_each_score_is_its_formula(score: str, value_size: int | None) -> None:
    layer = Attention(
        5, 7, score=score, hidden_size=None if score == "bilinear" else 11, value_size=value_size
    ).double()
    query, memory = rand(3, 2, 5), rand(3, 13, 7)
    found = layer(query, memory, mask=torch.arange(13) < torch.tensor([[13], [5], [0]]), weights=full())
    right = by_loops(layer, score, query, memory, oracles.padding([13, 5, 0]))
    assert_close(found.output, torch.tensor(right.output, dtype=torch.float64).squeeze(1), rtol=0, atol=1e-12)
    assert_close(found.weights, torch.tensor(right.weights, dtype=torch.float64).squeeze(1), rtol=0, atol=1e-12)
    assert layer.output_size == found.output.shape[-1] == (7 if value_size is None else 2)


def test_additive_attention_by_hand() -> None:
    """With w = (1, 1) and W_q = W_k = I, the scores are 0 and 2 tanh 1; the weights have the ratio 1 : e^(2 tanh 1)."""
    layer = Attention(2, score="additive")
    assert layer.query is not None
    assert layer.key is not None
    assert layer.score.weight is not None
    with torch.no_grad():
        layer.query.weight.copy_(torch.eye(2))
        layer.key.weight.copy_(torch.eye(2))
        layer.score.weight.fill_(1.0)
    found = layer(torch.zeros(1, 1, 2), torch.tensor([[[0.0, 0.0], [1.0, 1.0]]]), weights=full())
    share = math.exp(2 * math.tanh(1)) / (1 + math.exp(2 * math.tanh(1)))
    assert_close(found.weights, torch.tensor([[[1 - share, share]]]))
    assert_close(found.output, torch.tensor([[[share, share]]]))


@pytest.mark.parametrize("score", ["dot", "scaled_dot", "cosine"])
def test_equal_sizes_need_no_parameters(score: str) -> None:
    layer = Attention(5, score=score)
    assert list(layer.parameters()) == []
    query, memory = torch.randn(2, 3, 5), torch.randn(2, 7, 5)
    scaled = {"dot": 1.0, "scaled_dot": 5**-0.5, "cosine": 1.0}[score]
    if score == "cosine":
        scores = nn.functional.cosine_similarity(query.unsqueeze(2), memory.unsqueeze(1), -1)
    else:
        scores = query @ memory.mT * scaled
    assert_close(layer(query, memory).output, scores.softmax(-1) @ memory)


def test_bilinear_projects_the_memory_to_the_query() -> None:
    layer = Attention(5, 7, score="bilinear")
    assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == [("key.weight", (5, 7))]
    projected = layer.project(torch.randn(2, 3, 7))
    assert projected.key.shape == (2, 3, 5)


@pytest.mark.parametrize("score", SCORES)
def test_it_is_what_a_decoder_asks_for(score: str) -> None:
    """The result for all queries at once equals that of single queries over a memory that is projected only once."""
    layer: Attends = Attention(5, 7, score=score, hidden_size=6, value_size=3).double()
    query, memory = rand(2, 4, 5), rand(2, 11, 7)
    mask = torch.arange(11) < torch.tensor([[11], [6]])
    projected = layer.project(memory, mask=mask)
    assert isinstance(projected, Projected)
    whole, state = layer.attend(query, projected, weights=full())
    assert state is None
    assert not layer.stateful
    assert isinstance(layer, Attention)
    assert_close(whole.output, layer(query, memory, mask=mask).output, rtol=0, atol=1e-12)
    for t in range(4):
        one, state = layer.attend(query[:, t : t + 1], projected, state=state, weights=full())
        assert_close(one.output, whole.output[:, t : t + 1], rtol=0, atol=1e-12)
        assert isinstance(whole.weights, Tensor)
        assert_close(one.weights, whole.weights[:, t : t + 1], rtol=0, atol=1e-12)
    index = torch.tensor([1, 1, 0])
    beams, _ = layer.attend(query[index], projected.reorder(index))
    assert_close(beams.output, whole.output[index], rtol=0, atol=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_padding_changes_nothing(score: str) -> None:
    layer = Attention(5, 7, score=score, hidden_size=6).double()
    query, memory = rand(2, 3, 5), rand(2, 11, 7)
    short = layer(query, memory[:, :6]).output
    memory[:, 6:] = math.nan
    real = (torch.arange(11) < 6).expand(2, 11)
    assert_close(layer(query, memory, mask=real).output, short, rtol=0, atol=1e-12)
    assert_close(layer(query, memory, mask=padding(torch.tensor([6, 6]))).output, short, rtol=0, atol=1e-12)


def test_masks_of_positions_of_pairs_and_by_rule() -> None:
    layer = Attention(5, 7).double()
    query, memory = rand(2, 4, 5), rand(2, 4, 7)
    pairs = torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 4, 4)
    assert_close(layer(query, memory, mask=pairs).output, layer(query, memory, mask=causal()).output)
    nothing = layer(query, memory, mask=torch.zeros(2, 4, dtype=torch.bool), weights=full())
    assert torch.equal(nothing.output, torch.zeros(2, 4, 7, dtype=torch.float64))
    assert isinstance(nothing.weights, Tensor)
    assert nothing.weights.sum() == 0
    with pytest.raises(ValueError, match=r"mask must be \(b, k\) for positions or \(b, q, k\) for pairs, got shape"):
        layer(query, memory, mask=torch.ones(2, 1, 4, 4, dtype=torch.bool))


def test_requests_have_no_axis_of_heads() -> None:
    layer = Attention(5, 7)
    query, memory = torch.randn(2, 3, 5), torch.randn(2, 11, 7)
    everything = layer(query, memory, weights=full()).weights
    assert isinstance(everything, Tensor)
    assert everything.shape == (2, 3, 11)
    assert_close(layer(query, memory, weights=rows([2])).weights, everything[:, 2:])
    assert_close(layer(query, memory, weights=received()).weights, everything.sum(1))
    found = layer(query, memory, weights=top(2)).weights
    assert isinstance(found, Top)
    assert_close(found.values, everything.topk(2).values)
    spread = layer(query, memory, weights=entropy()).weights
    assert_close(spread, -(everything * everything.log()).sum(-1))


def test_hard_attention_samples_in_training_and_decides_after() -> None:
    layer = Attention(5, 7, normalize=Hard(estimator="reinforce"))
    query, memory = torch.randn(2, 3, 5), torch.randn(2, 11, 7)
    draws = {tuple(layer(query, memory, weights=full()).weights.argmax(-1).flatten().tolist()) for _ in range(9)}  # type: ignore[union-attr]
    assert len(draws) > 1
    trained = layer(query, memory)
    assert trained.log_prob is not None
    assert trained.log_prob.shape == (2, 3)
    trained.log_prob.sum().backward()
    assert layer.score.weight is not None
    assert layer.score.weight.grad is not None
    soft = Attention(5, 7)
    soft.load_state_dict(layer.state_dict())
    layer.eval()
    best = soft(query, memory, weights=full()).weights
    for _ in range(3):
        chosen = layer(query, memory, weights=full()).weights
        assert isinstance(chosen, Tensor)
        assert isinstance(best, Tensor)
        assert torch.equal(chosen.argmax(-1), best.argmax(-1))


def test_all_queries_of_a_sequence_read_the_expected_value_or_none_does() -> None:
    """With `expected=0.3`, three tenths of the sequences return the expected value for all their queries; the layer
    returns this choice as its state."""
    layer = Attention(5, 7, normalize=Hard("reinforce", expected=0.3))
    query, projected = torch.randn(300, 2, 5), layer.project(torch.randn(300, 11, 7))
    first, state = layer.attend(query, projected, generator=torch.Generator().manual_seed(1))
    assert state is not None
    assert abs(state.float().mean() - 0.3) < 5 * (0.3 * 0.7 / 300) ** 0.5
    second, after = layer.attend(query, projected, state=state)
    for found in (first, second):
        assert found.log_prob is not None
        assert torch.equal(found.log_prob == 0, state[:, None].expand(300, 2))
    assert after is state
    assert layer.eval().attend(query, projected)[1] is None


def test_dropout_is_for_training() -> None:
    layer = Attention(5, 7, dropout=0.5)
    query, memory = torch.randn(2, 3, 5), torch.randn(2, 11, 7)
    one, two = (layer(query, memory, generator=torch.Generator().manual_seed(3)).output for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, layer(query, memory, generator=torch.Generator().manual_seed(4)).output)
    layer.eval()
    assert torch.equal(layer(query, memory).output, layer(query, memory).output)


def test_a_record_or_a_function_serves_as_score() -> None:
    query, memory = torch.randn(2, 3, 5), torch.randn(2, 11, 5)
    capped = Attention(5, score=ScaledDot(softcap=2.0))
    scores = 2 * torch.tanh(query @ memory.mT / 5**0.5 / 2)
    assert_close(capped(query, memory).output, scores.softmax(-1) @ memory)
    distance = Attention(5, score=lambda q, k: -torch.cdist(q, k))
    assert_close(distance(query, memory).output, (-torch.cdist(query, memory)).softmax(-1) @ memory)
    owned = Attention(5, score=Additive(nn.Parameter(torch.randn(5))))
    assert [name for name, _ in owned.named_parameters()] == ["score.weight"]
    constant = Attention(5, score=Additive(torch.randn(5)))
    assert [name for name, _ in constant.named_buffers()] == ["score.weight"]
    module = nn.Bilinear(5, 5, 1)
    learned = Attention(5, score=_Pairs(module))
    assert {name for name, _ in learned.named_parameters()} == {"score.record.inner.weight", "score.record.inner.bias"}
    learned(query, memory).output.sum().backward()
    assert module.weight.grad is not None


class _Pairs(nn.Module):
    """A user-defined score with learned parameters."""

    def __init__(self, inner: nn.Bilinear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = torch.broadcast_tensors(query.unsqueeze(-2), key.unsqueeze(-3))
        return self.inner(query.contiguous(), key.contiguous()).squeeze(-1)


def test_a_loaded_weight_is_the_one_that_scores() -> None:
    """The layer uses weights that replace its own by assignment, by a functional call, or by a change of dtype."""
    one, two = Attention(5, 7), Attention(5, 7)
    query, memory = torch.randn(2, 3, 5), torch.randn(2, 11, 7)
    right = one(query, memory).output
    assert not torch.allclose(two(query, memory).output, right)
    assert_close(torch.func.functional_call(two, one.state_dict(), (query, memory)).output, right)
    two.load_state_dict(one.state_dict(), assign=True)
    assert_close(two(query, memory).output, right)
    assert_close(two.double()(query.double(), memory.double()).output.float(), right)


@pytest.mark.parametrize("score", SCORES)
def test_gradients(score: str) -> None:
    layer = Attention(3, 4, score=score, hidden_size=2, value_size=2).double()
    query, memory = rand(2, 2, 3).requires_grad_(), rand(2, 5, 4).requires_grad_()
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(query: Tensor, memory: Tensor, *weights: Tensor) -> Tensor:
        given = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(layer, given, (query, memory), {"mask": mask}).output

    assert torch.autograd.gradcheck(run, (query, memory, *parameters), fast_mode=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"score": "dot"},
            "dot scores compare vectors of one size, query_size is 5 and memory_size 7: give hidden_size",
        ),
        ({"score": "cosine"}, "give hidden_size to project both"),
        ({"score": "luong"}, "score must be one of dot, scaled_dot, cosine, bilinear, additive, .* got 'luong'"),
    ],
)
def test_scores_that_cannot_be_made_are_named(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(5, 7, **arguments)  # type: ignore[arg-type]


def test_wrong_sizes_are_named() -> None:
    layer = Attention(5, 7)
    with pytest.raises(ValueError, match="query has size 6, the layer expects 5"):
        layer(torch.randn(2, 3, 6), torch.randn(2, 4, 7))
    with pytest.raises(ValueError, match="memory has size 5, the layer expects 7"):
        layer(torch.randn(2, 3, 5), torch.randn(2, 4, 5))


def test_autocast() -> None:
    layer, alone = Attention(5, 7), SelfAttention(5, 7, 3)
    query, memory = torch.randn(2, 3, 5), torch.randn(2, 11, 7)
    with torch.autocast("cpu", torch.bfloat16):
        found, own = layer(query, memory).output, alone(query).output
    assert_close(found.float(), layer(query, memory).output, rtol=0.05, atol=0.05)
    assert_close(own.float(), alone(query).output, rtol=0.05, atol=0.05)


# Tests of `SelfAttention`.


def test_self_attention_is_three_maps_and_a_scaled_product() -> None:
    layer = SelfAttention(5, key_size=3, value_size=2).double()
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "query.weight": (3, 5),
        "key.weight": (3, 5),
        "value.weight": (2, 5),
    }
    x = rand(2, 7, 5)
    maps = [weight_of(layer, f"{name}.weight") for name in ("query", "key", "value")]
    query, key, value = (
        [[[[oracles.dot(row, vector) for row in each] for vector in batch]] for batch in x.tolist()] for each in maps
    )
    right = oracles.attend(query, key, value, lambda q, k, h: oracles.scaled_dot(q, k), oracles.softmax)
    found = layer(x, weights=full())
    assert_close(found.output, torch.tensor(right.output, dtype=torch.float64).squeeze(1), rtol=0, atol=1e-12)
    assert_close(found.weights, torch.tensor(right.weights, dtype=torch.float64).squeeze(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "sizes", [{"dim_in": 5, "dim_k": 3, "dim_v": 2}, {"size": 5, "key_size": 3, "value_size": 2}], ids=str
)
def test_self_attention_takes_both_names_of_its_sizes(sizes: dict[str, int]) -> None:
    layer = SelfAttention(**sizes)
    assert (layer.query.weight.shape, layer.value.weight.shape) == ((3, 5), (2, 5))


@pytest.mark.usefixtures("as_installed")
def test_self_attention_names_the_size_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="dim_v must be 1 or more, got 0"):
        SelfAttention(dim_in=5, dim_k=3, dim_v=0)
    with pytest.raises(ValueError, match="x has size 4, the layer expects dim_in = 5"):
        SelfAttention(dim_in=5, dim_k=3, dim_v=2)(torch.zeros(1, 2, 4))
    with pytest.raises(TypeError, match="dim_k was given twice: as dim_k and as key_size"):
        SelfAttention(5, dim_k=3, dim_v=2, key_size=3)


def test_the_future_does_not_reach_the_past() -> None:
    layer, x = SelfAttention(5, 3, 2), torch.randn(2, 7, 5)
    before = layer(x, mask=causal()).output
    x[:, 4:] = torch.randn(2, 3, 5)
    after = layer(x, mask=causal()).output
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])
    real = torch.arange(7) < torch.tensor([[7], [4]])
    assert_close(layer(x, mask=real).output[1, :4], layer(x[1:, :4]).output[0])


def test_other_normalisers() -> None:
    layer = Attention(5, 7, normalize=Sparsemax())
    weights = layer(torch.randn(2, 3, 5) * 9, torch.randn(2, 11, 7) * 9, weights=full()).weights
    assert isinstance(weights, Tensor)
    assert (weights == 0).any()
    assert_close(weights.sum(-1), torch.ones(2, 3))
