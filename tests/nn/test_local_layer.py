"""Layers of local attention (Luong et al. 2015) against the paper's formulas, query by query in Python numbers."""

import math
import sys

import pytest
import torch

import forked
from regard.core.normalizers import Hard
from regard.core.requests import entropy, full, received, top
from regard.core.scores import Cosine
from regard.nn.local import LocalAttention

BATCH, QUERIES, KEYS, SIZE, MEMORY, HIDDEN, REACH = 2, 5, 13, 3, 7, 4, 2
KINDS = ["monotonic", "predictive"]


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(BATCH, QUERIES, SIZE, dtype=torch.float64)
    memory = torch.randn(BATCH, KEYS, MEMORY, dtype=torch.float64)
    return query, memory, torch.arange(KEYS) < torch.tensor([[KEYS], [9]])


def a_layer(kind: str, **options: object) -> LocalAttention:
    layer = LocalAttention(SIZE, MEMORY, reach=REACH, kind=kind, **{"hidden_size": HIDDEN, **options}).double()
    if layer.predict is not None:
        with torch.no_grad():
            layer.predict[2].weight.mul_(6)  # with larger weights, different queries predict different window centres
    return layer


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def times(linear: torch.nn.Linear, vector: list[float]) -> list[float]:
    return [dot(row, vector) for row in linear.weight.tolist()]


def by_hand(layer: LocalAttention, query: list, memory: list) -> tuple[list, list]:
    """Return outputs, and weights over all keys, of one sequence, by scaled dot products in Python numbers."""
    outputs, rows = [], []
    for t, q in enumerate(query):
        if layer.kind == "predictive":
            v = layer.predict[2].weight[0].tolist()
            hidden = [math.tanh(x) for x in times(layer.predict[0], q)]
            centre = len(memory) / (1 + math.exp(-dot(v, hidden)))
        else:
            centre = t
        asked = times(layer.scoring.query, q)
        every = [dot(asked, times(layer.scoring.key, h)) / math.sqrt(HIDDEN) for h in memory]
        if layer.kind == "hard":
            centre = every.index(max(every))
        scores = {s: score for s, score in enumerate(every) if abs(s - centre) <= REACH}
        total = math.fsum(math.exp(x) for x in scores.values())
        row = [0.0] * len(memory)
        for s, score in scores.items():
            bell = math.exp(-((s - centre) ** 2) / (2 * (REACH / 2) ** 2)) if layer.kind != "monotonic" else 1.0
            row[s] = math.exp(score) / total * bell
        rows.append(row)
        outputs.append([math.fsum(a * h[c] for a, h in zip(row, memory, strict=True)) for c in range(MEMORY)])
    return outputs, rows


@pytest.mark.parametrize("kind", [*KINDS, "hard"])
def test_it_is_the_papers_window(kind):
    layer = a_layer(kind).eval()
    query, memory, mask = inputs()
    found = layer(query, memory, mask=mask, weights=full())
    assert found.weights.shape == (BATCH, QUERIES, KEYS)
    for b in range(BATCH):
        length = int(mask[b].sum())
        outputs, rows = by_hand(layer, query[b].tolist(), memory[b, :length].tolist())
        torch.testing.assert_close(found.output[b], torch.tensor(outputs, dtype=torch.float64))
        torch.testing.assert_close(found.weights[b, :, :length], torch.tensor(rows, dtype=torch.float64))
        assert not found.weights[b, :, length:].any()


def test_weights_of_the_monotonic_kind_sum_to_one_and_of_the_other_to_less():
    query, memory, _ = inputs()
    sums = a_layer("monotonic")(query, memory, weights=full()).weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert (a_layer("predictive")(query, memory, weights=full()).weights.sum(-1) < 1).all()


def test_queries_beyond_the_memory_read_nothing():
    layer = LocalAttention(SIZE, reach=1).double()
    query, memory = torch.randn(1, 6, SIZE).double(), torch.randn(1, 3, SIZE).double()
    found = layer(query, memory, weights=full())
    # The window of query 3 is keys 2 … 4, but the last key is key 2.
    assert found.weights[0, 3].tolist() == [0.0, 0.0, 1.0]
    assert not found.output[0, 4:].any()
    assert not found.weights[0, 4:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_stand_anywhere(kind):
    layer = a_layer(kind)
    query, memory, _ = inputs()
    mask = torch.tensor([False, True, True, False, True, True, True, True, False, True, True, True, False])
    alone = layer(query, memory[:, mask], weights=full())
    memory[:, ~mask] = torch.nan
    found = layer(query, memory, mask=mask.expand(BATCH, -1), weights=full())
    torch.testing.assert_close(found.output, alone.output)
    torch.testing.assert_close(found.weights[..., mask], alone.weights)
    assert not found.weights[..., ~mask].any()


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_is_all_at_once(kind):
    layer = a_layer(kind)
    query, memory, mask = inputs()
    projected = layer.project(memory, mask=mask)
    whole, end = layer.attend(query, projected)
    state, outputs = None, []
    for part in query.split([1, 2, 2], 1):
        found, state = layer.attend(part, projected, state=state)
        outputs.append(found.output)
    torch.testing.assert_close(torch.cat(outputs, 1), whole.output)
    assert layer.stateful == (kind == "monotonic")
    if kind == "monotonic":
        assert state[0].tolist() == end[0].tolist() == [QUERIES] * BATCH
    else:
        assert state is None


def test_only_the_window_is_scored():
    seen = []

    def score(query, key):
        seen.append(key.shape[-2])
        return query @ key.mT

    layer = LocalAttention(SIZE, reach=REACH, score=score)
    layer(torch.randn(BATCH, QUERIES, SIZE), torch.randn(BATCH, 1009, SIZE))
    assert seen
    assert max(seen) <= 2 * REACH + 1


def test_a_state_may_place_each_sequence_by_itself():
    """The layer's state holds the next query position of each sequence; positions differ if beams are reordered or
    sequences start later."""
    layer = a_layer("monotonic")
    query, memory, _ = inputs()
    projected = layer.project(memory)
    found, _ = layer.attend(query[:, :1], projected, state=(torch.tensor([3, 8]),), weights=full())
    assert [row.nonzero().flatten().tolist() for row in found.weights[:, 0]] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score", ["dot", "scaled_dot", "cosine", "bilinear", "additive", Cosine(3.0)])
def test_any_score_and_its_gradients(kind, score):
    layer = a_layer(kind, score=score)
    query, memory, mask = inputs()
    query, memory = query[:, :3].clone().requires_grad_(), memory.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, m, *_: layer(q, m, mask=mask, weights=full()).output,
        (query, memory, *layer.parameters()),
        fast_mode=True,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_without_a_real_place_gives_zeros(kind):
    layer = a_layer(kind)
    query, memory, mask = inputs()
    mask[1] = False
    memory[1] = torch.nan
    memory.requires_grad_()
    query.requires_grad_()
    found = layer(query, memory, mask=mask, weights=full())
    found.output.sum().backward()
    assert not found.output[1].any()
    assert not found.weights[1].any()
    assert not memory.grad[1].any()
    assert not query.grad[1].any()
    none = layer(query, memory[:, :0], weights=full())
    assert none.weights.shape == (BATCH, QUERIES, 0)
    assert not none.output.any()


def test_what_may_be_asked_of_the_weights():
    layer = a_layer("predictive")
    query, memory, mask = inputs()
    weights = layer(query, memory, mask=mask, weights=full()).weights
    assert layer(query, memory, mask=mask).weights is None
    torch.testing.assert_close(layer(query, memory, mask=mask, weights=received()).weights, weights.sum(1))
    torch.testing.assert_close(layer(query, memory, mask=mask, weights=top(2)).weights.values, weights.topk(2).values)
    assert layer(query, memory, mask=mask, weights=entropy()).weights.shape == (BATCH, QUERIES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_it_runs_in_half_precision(kind, how):
    query, memory, mask = inputs()
    layer, query, memory = (
        LocalAttention(SIZE, MEMORY, reach=REACH, kind=kind, hidden_size=HIDDEN),
        query.float(),
        memory.float(),
    )
    expected = layer(query, memory, mask=mask).output
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(query, memory, mask=mask, weights=full()).output
    else:
        found = layer.bfloat16()(query.bfloat16(), memory.bfloat16(), mask=mask, weights=full()).output
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.1)


def test_places_are_counted_exactly_in_half_precision():
    """bfloat16 has 8 binary digits: it would round the position 1,001 to 1,000."""
    layer = LocalAttention(2, reach=1).bfloat16()
    query, memory = torch.zeros(1, 1, 2).bfloat16(), torch.zeros(1, 1009, 2).bfloat16()
    found, _ = layer.attend(query, layer.project(memory), state=(torch.tensor([1001]),), weights=full())
    assert found.weights.nonzero()[:, 2].tolist() == [1000, 1001, 1002]


def test_the_state_dict_makes_the_same_layer():
    layer, other = a_layer("predictive"), a_layer("predictive")
    query, memory, mask = inputs()
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(query, memory, mask=mask).output, layer(query, memory, mask=mask).output)


@torch.no_grad()
def test_hard_locking_samples_a_place_in_training_and_says_how_likely_it_was():
    layer = a_layer("hard")
    query, memory, mask = inputs()
    scores = (layer.scoring.query(query) @ layer.scoring.key(memory).mT / math.sqrt(HIDDEN)).masked_fill(
        ~mask.unsqueeze(1), -math.inf
    )
    log_probs, places = scores.log_softmax(-1), set()
    for seed in range(20):
        found = layer(query, memory, mask=mask, weights=full(), generator=torch.Generator().manual_seed(seed))
        for b in range(BATCH):
            for t in range(QUERIES):
                inside = found.weights[b, t].nonzero().flatten().tolist()
                candidates = [p for p in range(int(mask[b].sum())) if set(inside) == window_of(p, int(mask[b].sum()))]
                likely = [p for p in candidates if math.isclose(log_probs[b, t, p], found.log_prob[b, t], abs_tol=1e-9)]
                assert likely, f"no place explains the window {inside} and the log-probability {found.log_prob[b, t]}"
                places.add((b, t, likely[0]))
    # The window centres differ between calls, because they are sampled.
    assert len(places) > BATCH * QUERIES


def window_of(place: int, length: int) -> set[int]:
    return set(range(max(0, place - REACH), min(length, place + REACH + 1)))


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("estimator", ["straight_through", "gumbel", "reinforce"])
def test_hard_locking_learns_by_each_estimator(estimator):
    """Training with a reward for attending to one key increases the attention weight of this key."""
    torch.manual_seed(3)
    layer = a_layer("hard", lock=Hard(estimator))
    query, memory, _ = inputs()
    wanted = torch.tensor([4, 9])
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)

    def weight() -> torch.Tensor:
        weights = layer.eval()(query, memory, weights=full()).weights
        return weights[torch.arange(BATCH), :, wanted].mean()

    before = weight()
    for _ in range(150):
        found = layer.train()(query, memory, weights=full())
        gain = found.weights[torch.arange(BATCH), :, wanted]
        loss = -gain.mean()
        if estimator == "reinforce":
            loss = loss - ((gain.detach() - gain.detach().mean()) * found.log_prob).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert weight() > before + 0.15


COMPILED = """
import torch
from regard.core.normalizers import Hard
from regard.core.requests import full
from regard.nn import LocalAttention
query, memory = torch.randn(2, 3, 6), torch.randn(2, 11, 6)
mask = torch.arange(11) < torch.tensor([[11], [8]])
layer = LocalAttention(6, reach=2, kind="predictive")
plain = layer(query, memory, mask=mask, weights=full())
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(query, memory, mask=mask, weights=full())
torch.testing.assert_close((compiled.output, compiled.weights), (plain.output, plain.weights))
"""


@pytest.mark.process
@pytest.mark.slow
def test_it_compiles_whole():
    """Runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests."""
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("as_installed")
def test_bad_arguments_are_named():
    query, memory, mask = inputs()
    with pytest.raises(ValueError, match="reach must be at least 1, got 0"):
        LocalAttention(3, reach=0)
    with pytest.raises(ValueError, match="kind must be monotonic, predictive or hard, got 'soft'"):
        LocalAttention(3, reach=1, kind="soft")
    with pytest.raises(ValueError, match="give hidden_size to project both to it"):
        LocalAttention(3, 7, reach=1)
    layer = a_layer("monotonic")
    with pytest.raises(ValueError, match=r"memory must be \(b, k, 7\), got \(2, 13, 5\)"):
        layer(query, memory[..., :5])
    with pytest.raises(ValueError, match=r"query must be \(2, q, 3\), got \(2, 5, 2\)"):
        layer(query[..., :2], memory)
    with pytest.raises(ValueError, match=r"mask must be a bool tensor \(2, 13\), True for real positions"):
        layer(query, memory, mask=mask[:1])
