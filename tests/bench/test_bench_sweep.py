"""`regard bench sweep`: a seed gives the same cases, contenders agree, and the report is complete.

No test depends on measured times.
"""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import oracles
import regard
from regard.bench.sweep import (
    command,
    contests,
    drawing,
    error_budgets,
    fused_peers,
    plain_forms,
    report,
    tensors,
    timing,
)
from regard.bench.sweep.cases import MASKS, NORMALIZERS, REQUESTS, SCORES, Case
from regard.bench.sweep.contests import Contender
from regard.bench.sweep.ordinary import ordinary
from regard.cli import app

SMALL = Case(3, 7, "cpu", batch=2, heads=3, kv_heads=3, queries=11, keys=11, size=5, value_size=4, before=2)
DRAWN = {device: [drawing.draw(11, index, device) for index in range(400)] for device in ("cpu", "cuda")}


# Tests of the random attention calls that a sweep measures.


def test_a_case_depends_on_seed_index_and_device_alone():
    first = drawing.draw(5, 17, "cuda")
    torch.manual_seed(1)
    assert drawing.draw(5, 17, "cuda") == first
    others = [drawing.draw(6, 17, "cuda"), drawing.draw(5, 18, "cuda"), drawing.draw(5, 17, "cpu")]
    assert all(replace(one, seed=5, index=17, device="cuda") != first for one in others)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_stay_within_their_limits(device):
    for case in DRAWN[device]:
        assert 1 <= case.batch <= 512
        assert 1 <= case.heads <= 32
        assert case.heads % case.kv_heads == 0
        assert 1 <= case.queries <= drawing.LONGEST[device]
        assert 1 <= case.keys <= drawing.LONGEST[device]
        assert drawing._work(case) <= 1 or case.batch == 1
        assert case.dtype != "float16" or device == "cuda"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ordinary_calls_are_frequent_and_every_kind_comes(device):
    cases = DRAWN[device]
    plain = Counter(case.mask for case in cases if case.score == "scaled_dot" and case.normalizer == "softmax")
    assert plain["causal"] > 40
    assert min(plain[name] for name in ("padding", "documents", "window")) > 10
    assert Counter(case.score for case in cases)["additive"] > 40
    assert {case.kind for case in cases} == {"attention", "linear", "local", "multihead", "block"}
    for name, known in (("mask", MASKS), ("score", SCORES), ("normalizer", NORMALIZERS), ("request", REQUESTS)):
        assert {getattr(case, name) for case in cases} == set(known), name
    for name in ("gradients", "new_mask", "cold", "compiled", "tokens_first"):
        assert {getattr(case, name) for case in cases} == {True, False}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ordinary_calls_are_numbered_and_name_the_command_that_repeats_them(device):
    cases = ordinary(device)
    assert [case.index for case in cases] == list(range(len(cases)))
    assert all(case.repeat.endswith(f"--device {device} --ordinary --case {case.index}") for case in cases)
    assert len({(case.call, case.what, case.gradients) for case in cases}) == len(cases)
    assert all(case.heads % case.kv_heads == 0 for case in cases)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_some_peer_that_need_not_compile_has_room(device):
    def fits(case, elements):
        try:
            contests.room(case, elements)
        except ValueError:
            return False
        return True

    for case in (case for case in DRAWN[device] if case.kind == "attention"):
        dense = case.bias != "none" or case.mask not in ("none", "causal")
        masks = case.batch * (1 if case.bias == "none" else case.heads) * case.queries * case.keys
        sdpa = set(fused_peers.every(case, {})) - {"FlexAttention"} and (not dense or fits(case, masks))
        eager = fits(case, case.pairs * (case.size if case.score == "additive" else 1))
        assert sdpa or eager, case


def test_the_call_of_a_case_is_python_that_runs():
    drawn = (case for case in DRAWN["cpu"] if case.kind == "attention" and case.pairs * case.size < 2**20)
    for case in list(drawn)[:20]:
        given = tensors.make(case)
        names = {"regard": regard, **given}
        with torch.no_grad():
            found = eval(case.call, names)
        assert found.output.shape == (case.batch, case.heads, case.queries, case.value_size), case.call


# Tests of the peers of `regard.attention` written in plain torch operations, against loops over numbers.


SCORE = {
    "scaled_dot": lambda given: lambda q, k, h: oracles.scaled_dot(q, k),
    "softcap": lambda given: lambda q, k, h: oracles.scaled_dot(q, k, softcap=30.0),
    "dot": lambda given: lambda q, k, h: oracles.dot(q, k),
    "cosine": lambda given: lambda q, k, h: oracles.cosine(q, k, 10.0),
    "bilinear": lambda given: lambda q, k, h: oracles.bilinear(q, k, given["weight"].tolist()),
    "additive": lambda given: lambda q, k, h: oracles.additive(q, k, given["weight"].tolist()),
}
NORMALIZER = {
    "softmax": oracles.softmax,
    "sparsemax": oracles.sparsemax,
    "entmax": partial(oracles.entmax, alpha=1.5),
    "sigmoid": oracles.sigmoid,
    "hard": oracles.hard,
}
MASK = {
    "none": lambda given: oracles.everywhere,
    "causal": lambda given: oracles.causal(),
    "cache": lambda given: oracles.causal(4),
    "window": lambda given: oracles.window(2, 0),
    "padding": lambda given: oracles.padding(given["lengths"].tolist()),
    "segments": lambda given: oracles.segments(given["ids"].tolist(), given["ids"].tolist()),
    "documents": lambda given: both(MASK["segments"](given), oracles.causal()),
    "causal_padding": lambda given: both(MASK["padding"](given), oracles.causal()),
    "dense": lambda given: lambda b, h, i, j: bool(given["allowed"][i, j]),
}
BIAS = {
    "none": lambda given: None,
    "alibi": lambda given: oracles.alibi(given["slopes"].tolist()),
    "relative": lambda given: oracles.relative(given["table"].tolist()),
    "tensor": lambda given: lambda b, h, i, j: float(given["bias"][h, i, j]),
}


def both(one, two):
    return lambda *place: one(*place) and two(*place)


@pytest.mark.parametrize(
    "case",
    [
        *(replace(SMALL, score=name) for name in SCORE),
        *(replace(SMALL, normalizer=name, mask="causal", keys=6, queries=6) for name in NORMALIZER),
        *(replace(SMALL, mask=name) for name in MASK if name != "cache"),
        replace(SMALL, mask="cache", queries=7),
        *(replace(SMALL, bias=name) for name in BIAS),
        *(replace(SMALL, request=name) for name in ("full", "entropy", "received", "logsumexp")),
        replace(SMALL, kv_heads=1, tokens_first=True),
    ],
    ids=lambda case: f"{case.score}-{case.normalizer}-{case.mask}-{case.bias}-{case.request}-{case.kv_heads}",
)
def test_the_plain_form_is_attention(case):
    given = {k: v.double() if v.is_floating_point() else v for k, v in tensors.make(case).items()}
    answer = oracles.attend(
        *(given[name].tolist() for name in ("query", "key", "value")),
        SCORE[case.score](given),
        NORMALIZER[case.normalizer],
        MASK[case.mask](given),
        BIAS[case.bias](given),
    )
    output, weights = plain_forms.reference(case, given, torch.arange(case.queries))
    torch.testing.assert_close(output, torch.tensor(answer.output, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    field = {"full": "weights", "logsumexp": "log_sum_exp"}.get(case.request, case.request)
    if case.request != "none":
        right = torch.tensor(getattr(answer, field), dtype=torch.float64)
        torch.testing.assert_close(weights, right, rtol=1e-9, atol=1e-9)


def test_rows_and_the_largest_weights():
    weights = torch.tensor([[0.1, 0.9], [0.7, 0.3], [0.5, 0.5]])
    assert plain_forms.requested("rows", weights, weights).tolist() == weights[[0, 2]].tolist()
    torch.testing.assert_close(plain_forms.requested("top", weights, weights)[0], torch.tensor([0.9, 0.1]))


@pytest.mark.parametrize("features", ["elu", "performer"])
def test_the_forms_of_linear_attention_agree(features):
    case = replace(SMALL, kind="linear", features=features, queries=300, keys=300)
    given = {name: tensor.double() for name, tensor in tensors.make(case).items()}
    torch.testing.assert_close(plain_forms.linear(case, given), plain_forms.linear_rows(case, given))
    causal = replace(case, mask="causal")
    torch.testing.assert_close(plain_forms.linear_chunks(causal, given), plain_forms.linear_rows(causal, given))


# Tests of all contenders (`regard.attention` and its peers), which must compute the same results.


CONTESTS = {
    "additive, gradients": replace(SMALL, score="additive", mask="padding", gradients=True, new_mask=True),
    "cosine, documents": replace(SMALL, score="cosine", mask="documents", gradients=True),
    "bilinear": replace(SMALL, score="bilinear", mask="causal_padding"),
    "grouped, window": replace(SMALL, kv_heads=1, mask="window", tokens_first=True),
    "causal": replace(SMALL, mask="causal", gradients=True),
    "decoding step": replace(SMALL, queries=2, mask="cache"),
    "alibi": replace(SMALL, bias="alibi", mask="causal", new_mask=True),
    "relative": replace(SMALL, bias="relative", gradients=True),
    "dense mask and bias": replace(SMALL, bias="tensor", mask="dense", gradients=True),
    "entmax": replace(SMALL, normalizer="entmax", mask="segments", gradients=True),
    "sparsemax, top": replace(SMALL, normalizer="sparsemax", request="top"),
    "sigmoid": replace(SMALL, normalizer="sigmoid", mask="padding"),
    "hard": replace(SMALL, normalizer="hard", request="entropy"),
    "softcap": replace(SMALL, score="softcap", request="rows"),
    "rows": replace(SMALL, request="rows", mask="causal"),
    "received": replace(SMALL, request="received", mask="causal"),
    "entropy, bfloat16": replace(SMALL, request="entropy", dtype="bfloat16"),
    "linear": replace(SMALL, kind="linear", gradients=True),
    "linear, causal": replace(SMALL, kind="linear", mask="causal", features="performer"),
    "local": replace(SMALL, kind="local", value_size=5, gradients=True),
    "multihead": replace(SMALL, kind="multihead", value_size=5, mask="padding", gradients=True),
    "grouped multihead": replace(SMALL, kind="multihead", value_size=5, mask="causal", kv_heads=1),
    "pre-norm block": replace(SMALL, kind="block", value_size=5, mask="causal", gradients=True),
    "post-norm block": replace(SMALL, kind="block", value_size=5, mask="padding", pre_norm=False, new_mask=True),
}


@pytest.mark.parametrize("case", CONTESTS.values(), ids=CONTESTS)
def test_all_contenders_of_a_case_compute_the_same(case):
    contest = timing.contest(case)
    truth = error_budgets.truth(case, contest)
    ours = error_budgets.budgets(case, contest, contest.ours, truth)
    assert set(ours) == set(truth.exact)
    assert max(ours.values()) <= 1, ours
    assert contest.peers
    for name, make in contest.peers.items():
        peer = make()
        for _ in range(2):  # the peer is compared twice, because its second call uses what its first call cached
            off = error_budgets.budgets(case, contest, peer, truth)
        assert off["output"] <= 1, name
        assert max(off.values()) <= 2, (name, off)


def test_a_wrong_output_and_a_wrong_gradient_are_beyond_the_budget():
    case = CONTESTS["causal"]
    contest = timing.contest(case)
    truth = error_budgets.truth(case, contest)

    def shifted():
        output, weights = contest.ours.call()
        return output + 1e-3, weights

    def frozen():  # this attention gives the right output, but its gradient of the key has an added term
        output, weights = contest.ours.call()
        return output + 0.01 * (contest.inputs["key"].sum() - contest.inputs["key"].sum().detach()), weights

    off = error_budgets.budgets(case, contest, Contender(shifted, contest.ours.leaves), truth)
    assert off["output"] > 1
    assert off["key"] <= 1
    off = error_budgets.budgets(case, contest, Contender(frozen, contest.ours.leaves), truth)
    assert off["output"] <= 1
    assert off["key"] > 1


def test_padded_queries_are_not_checked():
    case = replace(SMALL, mask="padding", keys=97, queries=97)
    given = {"lengths": torch.tensor([5, 97])}
    assert error_budgets.rows_checked(case, given).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_the_rule_of_flex_attention_is_the_mask(name):
    case = replace(SMALL, mask=name, queries=7 if name == "cache" else 11)
    given = tensors.make(case)
    b, q, k = (torch.arange(n).reshape(shape) for n, shape in ((2, (2, 1, 1, 1)), (case.queries, (-1, 1)), (11, (-1,))))
    rule = fused_peers._mask_rule(case, given)
    shape = (2, 1, case.queries, 11)
    assert torch.equal(rule(b, None, q, k).expand(shape), ~tensors.blocked(case, given).expand(shape))


@pytest.mark.parametrize("name", ["alibi", "relative", "tensor"])
def test_the_score_of_flex_attention_has_the_bias(name):
    case = replace(SMALL, bias=name)
    given = tensors.make(case)
    h, q, k = torch.arange(3)[:, None, None], torch.arange(11)[:, None], torch.arange(11)
    changed = fused_peers._score_rule(case, given)(torch.zeros(3, 11, 11), None, h, q, k)
    torch.testing.assert_close(changed, tensors.bias(case, given, torch.float32))


@pytest.mark.parametrize("name", ["padding", "documents", "segments"])
def test_sequences_end_to_end_give_the_same_output(name, monkeypatch):
    def one_by_one(query, key, value, edges, _, longest, __, *, window_size=(-1, -1)):
        assert longest == int(edges.diff().max())
        outputs = []
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
            causal = window_size == (-1, 0)
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1))
        return torch.cat(outputs)

    module = SimpleNamespace(varlen_attn=one_by_one)
    monkeypatch.setattr(fused_peers.importlib, "import_module", lambda name: module)
    case = replace(SMALL, mask=name)
    given = tensors.make(case)
    output, _ = fused_peers.varlen(case, given)()
    right, _ = plain_forms.attend(case, given, tensors.blocked(case, given), None)
    # The peer does not compute padded queries, so only the outputs of real queries are compared.
    for b in range(2):
        real = int(given["lengths"][b]) if name == "padding" else 11
        torch.testing.assert_close(output[b, :, :real], right[b, :, :real])


# Tests of the measurements of time and memory in a sweep.


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit measurements of time to one round, because no test depends on times."""
    monkeypatch.setattr(timing, "ROUNDS", {"cpu": (1, 1)})


@pytest.mark.slow
def test_a_peer_that_fails_is_left_out_and_named(quickly, monkeypatch):
    contest = timing.contest(SMALL)

    def broken():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried …")

    zeros = Contender(lambda: (torch.zeros(2, 3, 11, 4), None), ())
    peers = {**contest.peers, "broken": broken, "zeros": lambda: zeros}
    monkeypatch.setattr(timing, "contest", lambda case: replace(contest, peers=peers))
    measured = timing.measure(SMALL)
    assert set(measured.peers) == {"eager", "SDPA"}
    assert measured.left_out["broken"] == "out of memory"
    assert "off by" in measured.left_out["zeros"]
    assert measured.ratio == measured.peers[measured.best] / measured.seconds
    assert "without broken: out of memory" in report.line(measured)


def test_a_case_that_fails_does_not_end_the_sweep(monkeypatch):
    def broken(case):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(timing, "contest", broken)
    measured = timing.measure(SMALL)
    assert measured.failed == "RuntimeError: no kernel"
    numbers = report.distribution([measured])
    assert numbers["failed"] == 1
    assert report.worst([measured]) == [measured]


def test_peak_memory_is_what_is_held_at_once():
    def run():
        for _ in range(3):
            one = torch.empty(2**18)  # a tensor of 1 MiB
            two = torch.empty(2**18)
            del one, two

    assert timing.peak(run, "cpu") == 2 * 2**20


def test_memory_beyond_the_room_of_a_peer_is_said():
    case = replace(SMALL, batch=512, heads=32, kv_heads=32, queries=4096, keys=4096, dtype="float32")
    with pytest.raises(ValueError, match=r"it would take about 3\.07e\+03 GiB"):
        contests.room(case, case.pairs)


# Tests of the report that a sweep writes.


def measured(index: int, ratio: float, error: float = 0.5) -> timing.Measured:
    case = replace(SMALL, index=index)
    return timing.Measured(case, 2.0, 3.0, {"SDPA": 2.0 * ratio, "eager": 900.0}, errors={"output": error})


def test_the_distribution_of_ratios():
    sweep = [measured(0, 4.0), measured(1, 0.5, error=1.5), measured(2, 1.0)]
    numbers = report.distribution(sweep)
    assert math.isclose(numbers["geometric_mean"], 2 ** (1 / 3))
    assert math.isclose(numbers["fifth_percentile"], 0.55)
    assert (numbers["least"], numbers["median"], numbers["slower"]) == (0.5, 1.0, 1)
    assert numbers["beyond_budget"] == [1]
    assert numbers["worst"] == [1, 2, 0]
    text = report.summary(sweep, numbers)
    assert "geometric mean 1.26" in text
    assert "regard bench sweep --device cpu --seed 3 --case 1" in text


def test_only_the_worst_ten_are_listed():
    sweep = [measured(index, 1.0 + index) for index in range(20, 0, -1)]
    assert [one.case.index for one in report.worst(sweep)] == list(range(1, 11))


# Tests of the command `regard bench sweep`.


def small_index() -> int:
    return next(c.index for c in DRAWN["cpu"] if c.kind == "attention" and c.pairs < 2000 and not c.compiled)


@pytest.mark.slow
def test_a_case_is_measured_again_by_its_index(quickly, tmp_path: Path):
    index, to = small_index(), tmp_path / "deep" / "sweep.json"
    done = CliRunner().invoke(
        app, ["bench", "sweep", "--device", "cpu", "--seed", "11", "--case", str(index), "--json", str(to)]
    )
    assert done.exit_code == 0, done.output
    record = json.loads(to.read_text())
    [case] = record["cases"]
    assert Case(**case["case"]) == DRAWN["cpu"][index]
    assert case["repeat"] == f"regard bench sweep --device cpu --seed 11 --case {index}"
    assert case["ratio"] == case["peers"][case["best_peer"]] / case["seconds"]
    assert case["error"] <= 1
    assert record["distribution"]["compared"] == 1
    assert case["repeat"] in done.output


def test_a_sweep_that_reaches_its_minutes_says_so():
    done = CliRunner().invoke(app, ["bench", "sweep", "--device", "cpu", "--cases", "9", "--minutes", "0"])
    assert done.exit_code == 0, done.output
    assert "ended after 0 minutes: 0 of 9 cases" in done.output


@pytest.mark.slow
def test_json_alone_goes_to_standard_output(quickly, capsys):
    command.sweep(seed=11, cases=1, only=small_index(), fixed=False, device="cpu", minutes=None, to="-")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["seed"] == 11
    assert "geometric mean" in printed.err


def test_an_unknown_device_is_refused():
    done = CliRunner().invoke(app, ["bench", "sweep", "--device", "tpu"])
    assert done.exit_code == 2
    assert "must be cpu, or cuda where there is one; got tpu" in " ".join(done.output.split())


def test_a_gradient_of_nan_is_beyond_the_budget():
    """A gradient of NaN is an error: comparisons with NaN are false, so a maximum of errors could lose it."""
    case = CONTESTS["causal"]
    contest = timing.contest(case)

    def undefined():  # the derivative of √0 is infinite, and 0 · ∞ is NaN
        output, weights = contest.ours.call()
        return output + (0 * contest.inputs["key"].sum()).sqrt(), weights

    found = timing.Measured(case)
    contender = Contender(undefined, contest.ours.leaves)
    found.errors = error_budgets.budgets(case, contest, contender, error_budgets.truth(case, contest))
    assert found.errors["output"] <= 1
    assert found.error is not None
    assert found.error > 1
