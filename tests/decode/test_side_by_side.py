"""Beam search with grouped hypotheses or fixed shapes gives the results of beam search without either."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from regard.decode import beam as beam_module
from regard.decode.beam import beam
from regard.decode.graph_search import Captures
from regard.decode.greedy import greedy
from regard.decode.penalties import Gnmt
from regard.decode.records import Hypothesis
from regard.decode.sample import sample
from regard.models.frame import EncoderDecoder
from regard.models.memory import Memory
from regard.models.transformer.beams import TransformerBeams, why_not
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder, TransformerState
from regard.nn.multihead import MultiHeadAttention

pytestmark = pytest.mark.slow

BEGIN, END, WORDS, MOST = 1, 2, 11, 13
WIDTH = 3
EVERYWHERE = ("cpu", "cuda")


def model(positions: str | None = "sinusoidal", norm: str = "pre", device: str = "cpu", **options) -> EncoderDecoder:
    torch.manual_seed(31)
    common = {"heads": 2, "layers": 2, "positions": positions, "norm": norm}
    made = EncoderDecoder(TransformerEncoder(13, 8, **common), TransformerDecoder(WORDS, 8, **common, **options))
    for parameter in made.parameters():  # larger weights than at initialisation, so that outputs vary
        nn.init.normal_(parameter, std=0.7)
    return made.double().eval().to(device)


def batch(rows: int = 19, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return sources, their lengths (one is 0), and the maximal length of each output."""
    generator = torch.Generator().manual_seed(5)
    source = torch.randint(3, 13, (19, 7), generator=generator)
    lengths, limit = (torch.randint(1, high, (19,), generator=generator) for high in (8, MOST + 1))
    lengths[4], limit[7] = 0, 0
    return tuple(part[:rows].to(device) for part in (source, lengths, limit))


@torch.no_grad()
def search(made: EncoderDecoder, way: str, rows: int = 19, captures: Captures | None = None, **options):
    """Run beam search by the named method: hypotheses one by one, grouped, or with fixed shapes."""
    device = str(next(made.parameters()).device)
    source, lengths, limit = batch(rows, device)
    state = made.decoder.start(made.encoder(source, lengths), limit=MOST + 1, weights=True)
    start = torch.full((rows,), BEGIN, device=device)
    if way == "fixed" and captures is None:
        captures = Captures(devices=EVERYWHERE)
    with pytest.MonkeyPatch.context() as patch:
        if way == "one by one":
            patch.setattr(beam_module, "GROUPED_WIDTH", 0)
        if way == "side by side":
            captures = Captures(devices=())
        return beam(
            made.step,
            state,
            **{"start": start, "stop": END, "limit": limit, "width": WIDTH, "captures": captures, **options},
        )


def same(found: list[list[Hypothesis]], wanted: list[list[Hypothesis]]) -> None:
    """Assert that hypotheses have equal tokens, and scores and weights equal up to float64 rounding."""
    assert [[one.tokens for one in row] for row in found] == [[one.tokens for one in row] for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        for one, two in zip(row, other, strict=True):
            assert one.score == pytest.approx(two.score, rel=1e-9)
            assert one.log_prob == pytest.approx(two.log_prob, rel=1e-9)
            torch.testing.assert_close(one.log_probs, two.log_probs, rtol=1e-8, atol=1e-9)
            torch.testing.assert_close(one.weights, two.weights, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["side by side", "fixed"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", None])
def test_the_same_hypotheses_as_one_by_one(positions, norm, way):
    made = model(positions, norm)
    assert why_not(made.decoder) is None
    options = {"n_best": WIDTH, "minimum": 2, "never": (0, BEGIN)}
    wanted = search(made, "one by one", **options)
    lengths = {len(one.tokens) for row in wanted for one in row}
    assert len(lengths) > 3  # hypotheses have different lengths: some end early, some at their length limit
    same(search(made, way, **options), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["side by side", "fixed"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layers_without_residuals(norm, way):
    made = model("sinusoidal", norm, residual=False)
    assert why_not(made.decoder) is None
    same(search(made, way, n_best=WIDTH), search(made, "one by one", n_best=WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["side by side", "fixed"])
@pytest.mark.parametrize(
    "options",
    [
        {"width": 1, "n_best": 1},
        {"width": 2, "n_best": 1, "length_penalty": None},
        {"width": 5, "n_best": 5, "minimum": 4},
        {"width": 4, "n_best": 2, "length_penalty": Gnmt(2.0), "never": (4, 7)},
        {"width": 16, "n_best": 7},
    ],
)
def test_whatever_is_asked(options, way):
    made = model()
    same(search(made, way, **options), search(made, "one by one", **options))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["side by side", "fixed"])
def test_rows_dropped_or_kept(way):
    made = model()
    wanted = search(made, "one by one", n_best=2)
    for shrink in (0.01, 0.5, None):
        same(search(made, way, n_best=2, shrink=shrink), wanted)


@pytest.mark.slow
def test_fixed_shapes_serve_many_searches():
    made, captures = model(), Captures(devices=EVERYWHERE)
    # 17 to 19 rows are rounded up to 24, so the three searches share the storage of one captured graph.
    for rows in (19, 17, 18):
        same(search(made, "fixed", rows, captures, n_best=2), search(made, "one by one", rows, n_best=2))
    assert len(captures.held) == 1
    same(search(made, "fixed", 5, captures, n_best=2), search(made, "one by one", 5, n_best=2))
    same(search(made, "fixed", 5, captures, n_best=1), search(made, "one by one", 5, n_best=1))
    assert len(captures.held) == 3


def test_no_more_are_kept_than_asked():
    made, captures = model(), Captures(keep=2, devices=EVERYWHERE)
    for rows in (3, 4, 5, 6):
        search(made, "fixed", rows, captures)
    assert [session.static.rows for session in captures.held] == [5, 6]


def test_new_weights_are_seen():
    made, captures = model(), Captures(devices=EVERYWHERE)
    search(made, "fixed", captures=captures)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.9)  # an optimizer changes parameters in place, too
    same(search(made, "fixed", captures=captures), search(made, "one by one"))
    for parameter in made.parameters():
        parameter.data = parameter.data * 1.1  # a new tensor moves the parameter to another memory address
    same(search(made, "fixed", captures=captures), search(made, "one by one"))
    assert len(captures.held) == 2


@pytest.mark.parametrize("rows", [19, 17])
def test_a_search_that_broke_leaves_nothing_behind(rows):
    made, captures = model(), Captures(devices=EVERYWHERE)
    kept = {name: held.clone() for name, held in made.state_dict().items()}
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(math.nan)
    with pytest.raises(ValueError, match="step gave logits that are NaN"):
        search(made, "fixed", captures=captures)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(kept[name])
    same(search(made, "fixed", rows, captures), search(made, "one by one", rows))
    assert len(captures.held) == 1  # the search reuses the storage of the search that failed


def test_the_memory_that_graphs_share_ends_with_the_last_of_them(monkeypatch):
    handles = iter(range(100))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    captures, first, second = Captures(), torch.device("cuda", 0), torch.device("cuda", 1)
    held = SimpleNamespace(graph=SimpleNamespace(pool=lambda: "shared"), device=first)
    fresh = SimpleNamespace(graph=None, device=first)
    captures.held = [held, fresh]
    assert captures.pool(first) == "shared"
    assert captures.pool(second) == 0
    captures.held = [fresh]
    assert captures.pool(first) == 1


def never_stops(device: str = "cpu") -> EncoderDecoder:
    made = model(device=device, tied=False)
    with torch.no_grad():
        made.decoder.output.bias[END] = -math.inf
    return made


@pytest.mark.parametrize("devices", [EVERYWHERE, ()])
def test_greedy_answers_where_it_may_not_stop(devices):
    made = never_stops()
    source, lengths, limit = batch()
    state = made.decoder.start(made.encoder(source, lengths), limit=MOST + 1, weights=True)
    options = {"start": torch.full((19,), BEGIN), "stop": END, "limit": limit}
    found = greedy(made.step, state, **options, captures=Captures(devices=devices))
    assert [len(one.tokens) for one in found] == limit.tolist()
    assert {one.log_prob for one in found} == {one.score for one in found} == {-math.inf}
    plain = Plain(made.decoder.start(made.encoder(source, lengths), limit=MOST + 1, weights=True))
    wanted = greedy(plain.step, plain, **options)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.log_probs, two.log_probs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("devices", [EVERYWHERE, ()])
def test_greedy_is_a_beam_of_one(devices):
    made = model()
    source, lengths, limit = batch()
    wanted = [row[0] for row in search(made, "one by one", width=1, length_penalty=None)]
    state = made.decoder.start(made.encoder(source, lengths), limit=MOST + 1, weights=True)
    found = greedy(
        *(made.step, state),
        **{"start": torch.full((19,), BEGIN), "stop": END, "limit": limit, "captures": Captures(devices=devices)},
    )
    same([[one] for one in found], [[one] for one in wanted])


def test_samples_are_those_of_the_plain_step():
    made = model()
    source, lengths, limit = batch()
    found = []
    for wrap in (lambda state: state, Plain):
        state = wrap(made.decoder.start(made.encoder(source, lengths), limit=MOST + 1, weights=True))
        step = made.step if isinstance(state, TransformerState) else state.step
        generator = torch.Generator().manual_seed(3)
        options = {"start": torch.full((19,), BEGIN), "stop": END, "limit": limit, "generator": generator}
        found.append([[one] for one in sample(step, state, **options)])
    same(found[0], found[1])


class Plain:
    """A decoder state with only the methods that beam search requires."""

    def __init__(self, state: TransformerState) -> None:
        self.state = state

    def step(self, state: "Plain", tokens: Tensor):
        done = state.state.decoder.step(state.state, tokens)
        return type(done)(done.logits, Plain(done.state), done.weights)

    def reorder(self, index: Tensor) -> "Plain":
        return Plain(self.state.reorder(index))


def test_a_search_may_begin_behind_a_prefix():
    made = model("rotary")
    source, lengths, limit = batch()
    found = []
    for side in (16, 0):
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(beam_module, "GROUPED_WIDTH", side)
            state = made.decoder.start(made.encoder(source, lengths), weights=True)
            for token in (BEGIN, 5, 7):
                state = made.step(state, torch.full((19,), token)).state
            start = torch.full((19,), 9)
            # The search must not use captured graphs, whose storage starts at position 0.
            captures = Captures(devices=EVERYWHERE)
            found.append(beam(made.step, state, start=start, stop=END, limit=limit, width=WIDTH, captures=captures))
            assert captures.held == []
    same(found[0], found[1])


def test_a_step_of_the_callers_own_is_called_every_time():
    made, calls = model(), []

    def step(state, tokens):
        calls.append(tokens.shape[0])
        done = made.step(state, tokens)
        done.logits[:, 5] = -math.inf
        return done

    source, lengths, limit = batch()
    state = made.decoder.start(made.encoder(source, lengths))
    captures = Captures(devices=EVERYWHERE)
    start = torch.full((19,), BEGIN)
    found = beam(step, state, start=start, stop=END, limit=limit, width=WIDTH, captures=captures)
    assert captures.held == []
    assert len(calls) > 4
    assert calls[0] == 19
    assert 5 not in {token for [one] in found for token in one.tokens}


def test_the_memory_is_not_copied_for_each_hypothesis():
    made = model()
    source, lengths, _ = batch()
    with torch.no_grad():
        state = made.decoder.start(made.encoder(source, lengths)).grouped()
        assert isinstance(state, TransformerBeams)
        key = state.memory[0][0]
        state = made.step(state, torch.full((19,), BEGIN)).state
        state = state.regroup(torch.zeros(19, 4, dtype=torch.long))
        step = made.step(state, torch.randint(3, WORDS, (19 * 4,)))
    assert step.logits.shape == (19 * 4, WORDS)
    assert step.state.memory[0][0] is key
    assert step.state.seen.sum(-1).tolist() == [[2] * 4] * 19


def test_padding_of_the_memory_cannot_matter():
    made = model()
    torch.manual_seed(3)
    values = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False, False], [True] * 5])
    spoilt = values.masked_fill(~mask.unsqueeze(-1), math.nan)
    logits = []
    for keys in (values, spoilt):
        state = made.decoder.start(Memory(keys, keys, mask, keys[:, 0])).grouped()
        logits.append(made.step(state, torch.tensor([3, 4])).logits)
    assert torch.equal(logits[0], logits[1])


def other(kind: str) -> TransformerDecoder:
    made = model("alibi" if kind == "alibi" else "relative" if kind == "relative" else "sinusoidal").decoder
    layer = made.stack.layers[1]
    if kind == "training":
        made.train()
    if kind == "score":
        layer.self_attention = MultiHeadAttention(8, 2, score="additive").double()
    if kind == "groups":
        layer.cross_attention = MultiHeadAttention(8, 2, kv_heads=1).double()
    if kind == "parts":
        layer.feed_forward = nn.Linear(8, 8).double()
    if kind == "hooks":
        layer.cross_attention.register_forward_hook(lambda *_: None)
    return made


@pytest.mark.parametrize("kind", ["alibi", "relative", "score", "groups", "parts", "hooks", "training"])
def test_unusual_decoders_go_one_by_one(kind):
    decoder = other(kind)
    assert why_not(decoder) is not None
    source, lengths, _ = batch()
    assert decoder.start(model().encoder(source, lengths)).grouped() is None
    assert why_not(model().decoder) is None


def test_a_hook_still_sees_every_step():
    made, seen = model(), []
    made.decoder.stack.layers[0].register_forward_hook(lambda *_: seen.append(1))
    found = search(made, "fixed")
    assert len(seen) > 4
    same(found, search(model(), "one by one"))


def test_autocast_and_observers_go_one_by_one():
    from regard.core import attention as core

    decoder = model().decoder
    with torch.autocast("cpu", torch.bfloat16):
        assert why_not(decoder) == "autocast is on"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "observers", (lambda problem, run: run(),))
        assert "watches" in str(why_not(decoder))


def test_keys_that_nobody_sees_are_dropped():
    """All four hypotheses repeatedly continue one parent, so the cache drops the keys of the three others."""
    made = model()
    source, lengths, _ = batch(3)
    with torch.no_grad():
        state = made.decoder.start(made.encoder(source, lengths)).grouped()
        plain = made.decoder.start(made.encoder(source, lengths))
        state, plain = (made.step(each, torch.full((3,), BEGIN)).state for each in (state, plain))
        state = state.regroup(torch.zeros(3, 4, dtype=torch.long))
        for time in range(12):
            tokens = torch.tensor([3, 4, 5, 6]).roll(time).repeat(3)
            step, other = made.step(state, tokens), made.step(plain, tokens[2::4])
            torch.testing.assert_close(step.logits[2::4], other.logits)
            state, plain = step.state.regroup(torch.full((3, 4), 2)), other.state
    # 49 keys were written to the cache, which removed keys that no hypothesis uses.
    assert state.seen.shape[2] < 13 + 12
    assert state.seen.sum(-1).tolist() == [[13] * 4] * 3


def test_what_was_written_is_what_the_cache_holds():
    """For each hypothesis, grouped keys and values equal those of the ungrouped caches."""
    made = model("rotary")
    source, lengths, _ = batch(2)
    with torch.no_grad():
        memory = made.encoder(source, lengths)
        plain, beams = made.decoder.start(memory), made.decoder.start(memory).grouped()
        for token in (1, 5, 6):
            tokens = torch.full((2,), token)
            one, two = made.step(plain, tokens), made.step(beams, tokens)
            torch.testing.assert_close(one.logits, two.logits)
            plain, beams = one.state, two.state
        stored = beams.storage[1][:, :, :3]
        for part, held in zip(stored.split(2, 1), plain.caches[1].read(), strict=True):
            torch.testing.assert_close(part, held)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Captures(keep=0), "keep must be 1 or more; got 0"),
        (lambda: beams(3).reorder(torch.tensor([0])), "rows have 3 hypotheses each: regroup names their parents"),
        (lambda: fixed().reorder(torch.tensor([0])), "shapes are fixed at 2 rows"),
    ],
)
def test_wrong_use_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@torch.no_grad()
def beams(slots: int) -> TransformerBeams:
    made = model()
    source, lengths, _ = batch(2)
    state = made.decoder.start(made.encoder(source, lengths)).grouped()
    return made.step(state, torch.tensor([1, 1])).state.regroup(torch.zeros(2, slots, dtype=torch.long))


def fixed():
    made = model()
    source, lengths, _ = batch(2)
    return made.decoder.start(made.encoder(source, lengths)).grouped().static(3, 9)


def test_learned_positions_decline_room_they_do_not_have():
    from regard.nn.positions import LearnedPositions

    made = model(LearnedPositions(8, 20))
    source, lengths, _ = batch(2)
    state = made.decoder.start(made.encoder(source, lengths)).grouped()
    assert state.static(3, 16) is not None
    assert state.static(3, 17) is None


@pytest.mark.cuda
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_captured_is_one_by_one(positions):
    made, captures = model(positions, device="cuda"), Captures()
    for rows in (19, 18, 19):
        options = {"n_best": WIDTH, "minimum": 2, "never": (0, BEGIN)}
        same(search(made, "captured", rows, captures, **options), search(made, "one by one", rows, **options))
    assert len(captures.held) == 1
    assert captures.held[0].graph is not None
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.9)
    same(search(made, "captured", captures=captures), search(made, "one by one"))
    same(search(made, "captured"), search(made, "one by one"))  # this search is given no cache of captured graphs


@pytest.mark.cuda
def test_one_graph_after_another():
    made, captures = model(device="cuda"), Captures(keep=1)
    for rows in (3, 5, 3):  # with keep=1, each search replaces the one cached graph
        same(search(made, "captured", rows, captures), search(made, "one by one", rows))
    assert len(captures.held) == 1
    assert captures.held[0].graph is not None


@pytest.mark.cuda
def test_captured_is_one_by_one_in_float32():
    made = model("sinusoidal", "post", device="cuda").float()
    wanted = search(made, "one by one", n_best=2)
    found = search(made, "captured", captures=Captures(), n_best=2)
    assert [[one.tokens for one in row] for row in found] == [[one.tokens for one in row] for row in wanted]
    for [one, *_], [two, *_] in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.weights, two.weights, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
def test_captured_greedy_in_bfloat16_stays_close_to_the_model():
    """Captured greedy search returns the log-probabilities that the model gives for the whole output at once."""
    made = model("sinusoidal", device="cuda").to(torch.bfloat16)
    source, lengths, limit = batch(device="cuda")
    state = made.decoder.start(made.encoder(source, lengths), limit=MOST + 1)
    start = torch.full((19,), BEGIN, device="cuda")
    found = greedy(made.step, state, start=start, stop=END, limit=limit, captures=Captures())
    for row, one in enumerate(found):
        if not one.tokens or not int(lengths[row]):
            continue
        prefix = torch.tensor([[BEGIN, *one.tokens[:-1]]], device="cuda")
        with torch.no_grad():
            decoded = made(source[row : row + 1, : int(lengths[row])], prefix)
            expected = made.logits(decoded.states).float().log_softmax(-1)[0]
        index = torch.tensor(one.tokens, device="cuda")[:, None]
        torch.testing.assert_close(one.log_probs, expected.gather(1, index)[:, 0].cpu(), rtol=0.1, atol=0.3)
