"""`explain` reports how `attention` would compute a call: the backend, why not the others, and the cost."""

import re
from pathlib import Path

import pytest
import torch

import regard
from cases import mlp


def inputs(*, heads: int = 4, groups: int = 4, length: int = 512, size: int = 32) -> list[torch.Tensor]:
    return [torch.randn(1, n, length, size) for n in (heads, groups, groups)]


SHORT, LONG, VERY_LONG = inputs(length=16), inputs(length=1024), inputs(length=20000)
WIDE = [tensor.double() for tensor in SHORT]
WEIGHT = torch.randn(32)
JUDGE = mlp(torch.randn(8, 64), torch.randn(8), torch.randn(8))

# Tensors and options of a call, its backend on a CPU, a backend that refuses it, and a word of the reason.
TYPICAL = {
    "plain": (LONG, {}, "loops", ("flex", "cuda")),
    "plain and very long": (VERY_LONG, {}, "sdpa", ("loops", "long")),
    "causal": (LONG, {"mask": regard.causal()}, "loops", ("flex", "cuda")),
    "padding": (VERY_LONG, {"mask": regard.padding(torch.tensor([700]))}, "sdpa", ("loops", "long")),
    "grouped heads": (inputs(heads=8, groups=2), {}, "loops", ("flex", "cuda")),
    "cosine": (LONG, {"score": regard.Cosine(scale=10.0)}, "loops", ("flex", "cuda")),
    "bilinear": (VERY_LONG, {"score": regard.Bilinear(torch.randn(32, 32))}, "sdpa", ("flex", "cuda")),
    "alibi": (VERY_LONG, {"bias": regard.alibi(torch.rand(4)), "mask": regard.causal()}, "sdpa", ("flex", "cuda")),
    "few weights": (SHORT, {"weights": regard.entropy()}, "loops", ("flex", "cuda")),
    "float64": (WIDE, {}, "sdpa", ("loops", "float64")),
    "few weights in float64": (WIDE, {"weights": regard.entropy()}, "reference", ("sdpa", "weights are requested")),
    "few keys, other values": (
        [*WIDE[:2], torch.randn(1, 4, 16, 20).double()],
        {},
        "reference",
        ("sdpa", "another size"),
    ),
    "top weights": (VERY_LONG, {"weights": regard.top(8)}, "sdpa", ("loops", "to select the largest")),
    "softcap": (VERY_LONG, {"score": regard.ScaledDot(softcap=30.0)}, "blocked", ("sdpa", "softcap")),
    "additive": (LONG, {"score": regard.Additive(WEIGHT)}, "additive", ("sdpa", "additive")),
    "additive, gelu": (LONG, {"score": regard.Additive(WEIGHT, "gelu")}, "blocked", ("additive", "gelu")),
    "mlp": (LONG, {"score": JUDGE}, "blocked", ("sdpa", "")),
    "sparsemax": (VERY_LONG, {"normalize": regard.Sparsemax()}, "blocked", ("sdpa", "softmax")),
    "hard": (LONG, {"normalize": regard.Hard()}, "loops", ("sdpa", "softmax")),
    "short sparsemax": (WIDE, {"normalize": regard.Sparsemax()}, "reference", ("blocked", "small")),
    "every weight": (WIDE, {"weights": regard.full()}, "reference", ("sdpa", "weights")),
}


@pytest.mark.parametrize("call", TYPICAL)
def test_typical_calls_get_the_right_backend(call: str) -> None:
    tensors, arguments, backend, (refused, word) = TYPICAL[call]
    plan = regard.explain(*tensors, **arguments)
    assert plan.backend == backend
    assert word in plan.refused[refused].lower()
    assert all(plan.refused.values())
    assert backend not in plan.refused
    assert plan.flops > 0
    assert plan.bytes >= 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"normalize": regard.Sparsemax()},
        {"score": regard.Additive(WEIGHT)},
        {"score": regard.ScaledDot(softcap=30.0)},
        {"score": JUDGE},
    ],
    ids=["sparsemax", "additive", "softcap", "mlp"],
)
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_forcing_a_refused_backend_raises_the_reason(backend: str, arguments: dict) -> None:
    reason = regard.explain(*LONG, **arguments).refused[backend]
    for call in (regard.attention, regard.explain):
        with pytest.raises(ValueError, match=re.escape(reason)) as refusal:
            call(*LONG, backend=backend, **arguments)
        assert backend in str(refusal.value)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked", "loops"])
def test_forcing_a_backend_that_serves(backend: str) -> None:
    plan = regard.explain(*LONG, backend=backend)
    assert plan.backend == backend
    assert backend not in plan.refused


# For a pair of a query and a key, each entry of the query and of the value takes two operations: multiply and add.


def test_flops_of_a_plain_call() -> None:
    query, key, value = torch.randn(2, 6, 5, 13), torch.randn(2, 3, 7, 13), torch.randn(2, 3, 7, 11)
    assert regard.explain(query, key, value).flops == 2 * 6 * 5 * 7 * (2 * 13 + 2 * 11)


def test_weights_cost_a_second_look_at_the_keys() -> None:
    x = torch.randn(8, 4096, 64, dtype=torch.float64)
    plain, asked = (regard.explain(x, x, x, weights=weights) for weights in (None, regard.top(8)))
    assert plain.backend == asked.backend == "sdpa"
    assert asked.flops == plain.flops + 8 * 4096 * 4096 * 2 * 64
    assert plain.bytes == 0
    # The weights are computed for a block of rows at a time; all rows would take 512 MiB.
    assert 8 * 2**20 < asked.bytes < 64 * 2**20
    rows = regard.explain(x, x, x, weights=regard.rows([0, 5]), backend="sdpa").bytes
    assert 8 * 2 * 4096 * 4 <= rows < asked.bytes


def test_flops_of_a_causal_call() -> None:
    """A causal mask allows 1 + 2 + 3 + 4 + 5 = 15 of the 5 × 7 pairs."""
    query, key, value = torch.randn(2, 6, 5, 13), torch.randn(2, 3, 7, 13), torch.randn(2, 3, 7, 11)
    plan = regard.explain(query, key, value, mask=regard.causal())
    assert plan.flops == pytest.approx(2 * 6 * 15 * (2 * 13 + 2 * 11), abs=1)


def test_flops_of_a_window() -> None:
    """Each of 1,024 queries attends to its own key and the 3 before it; at the start 3 + 2 + 1 pairs are missing."""
    plan = regard.explain(*LONG, mask=regard.window(3, 0))
    assert plan.flops == pytest.approx(4 * (1024 * 4 - 6) * (2 * 32 + 2 * 32), rel=1e-3)


def test_blocked_needs_less_memory_than_the_matrix() -> None:
    blocked, plain = (regard.explain(*LONG, score=regard.Additive(WEIGHT), backend=b) for b in ("blocked", "reference"))
    assert blocked.bytes < plain.bytes / 4
    # The reference stores 32 hidden units in float32 for each of 4 · 1024² pairs.
    assert plain.bytes >= 4 * 4 * 1024 * 1024 * 32


def test_explain_computes_nothing() -> None:
    """`explain` returns at once for a call that would be far too large to run."""
    tensors = [torch.zeros(1).expand(64, 64, 2**20, 128) for _ in range(3)]
    plan = regard.explain(*tensors)
    assert plan.flops == 64 * 64 * 2**40 * (2 * 128 + 2 * 128)


def test_tensors_without_data_are_explained() -> None:
    """The FLOPs of a mask without tensors are exact; for lengths without data they are an upper bound."""
    x, lengths = torch.zeros(1, 2, 300, 8, device="meta"), torch.zeros(1, dtype=torch.long, device="meta")
    real = torch.zeros(1, 2, 300, 8)
    for mask in (regard.causal(), regard.window(3, 3)):
        assert regard.explain(x, x, x, mask=mask).flops == regard.explain(real, real, real, mask=mask).flops
    plan = regard.explain(x, x, x, mask=regard.padding(lengths))
    assert plan.flops == regard.explain(real, real, real).flops
    for backend in ("auto", "blocked", "reference"):
        output = regard.attention(x, x, x, mask=regard.padding(lengths), backend=backend).output
        assert (output.device.type, output.shape) == ("meta", x.shape)


@pytest.mark.parametrize(
    ("queries", "mask", "dropped"),
    [
        # One query after twenty cached keys may attend to all 21 keys.
        (1, regard.causal(offset=20), True),
        (1, regard.causal(offset=19), False),
        (2, regard.causal(offset=20), True),
        # With this offset, the causal mask masks the last key for the first query.
        (2, regard.causal(offset=19), False),
        (3, regard.window(2, 20), True),
        (3, regard.window(1, 20), False),
    ],
    ids=str,
)
def test_a_band_that_allows_every_pair_is_no_mask(queries: int, mask: regard.Mask, dropped: bool) -> None:
    query, key, value = (torch.randn(1, 1, n, 8, dtype=torch.float64) for n in (queries, 21, 21))
    key[..., -1, :] = torch.inf  # `sdpa` refuses a call with a mask if a key is not finite
    assert ("NaN or Inf" not in str(regard.explain(query, key, value, mask=mask).refused)) == dropped
    both = mask & regard.padding(torch.tensor([20]))
    right = regard.attention(query, key, value, mask=both, backend="reference").output
    torch.testing.assert_close(regard.attention(query, key, value, mask=both).output, right)
    assert right.isfinite().all()


TABLE = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text().split("### Which code computes which call")[1]
ROWS = {row.split("|")[1].strip(): row.split("|")[2] for row in TABLE.splitlines() if row.startswith("| ")}
NAMED = re.findall(r"`(core|kernels)/([\w/]+\.\w+)`", TABLE)


@pytest.mark.parametrize(("folder", "file"), NAMED, ids=[file for _, file in NAMED])
def test_the_files_of_the_table_exist(folder, file):
    assert (Path(regard.__file__).parent / folder / file).is_file()


DOCUMENTS = torch.arange(300) // 50
LISTED = {
    "dot": (300, {}, "dot,"),
    "causal": (300, {"mask": regard.causal()}, "dot,"),
    "cosine": (300, {"score": regard.Cosine(scale=10.0)}, "dot,"),
    "long": (20000, {}, "…,"),
    "window": (300, {"mask": regard.window(8, 0)}, "`mask=window"),
    "padding": (300, {"mask": regard.padding(torch.tensor([200]))}, "padding"),
    "segments": (300, {"mask": regard.segments(DOCUMENTS, DOCUMENTS)}, "padding"),
    "alibi": (300, {"bias": regard.alibi(torch.rand(4))}, "padding"),
    "sigmoid": (300, {"normalize": regard.Sigmoid()}, "padding"),
    "entmax": (300, {"normalize": regard.Entmax()}, "sparsemax"),
    "additive": (300, {"score": regard.Additive(WEIGHT)}, "additive"),
    "own score": (300, {"score": lambda query, key: -torch.cdist(query, key)}, "a score of"),
}


@pytest.mark.parametrize("name", LISTED)
def test_the_table_names_the_kernel_that_runs_on_a_cpu(name):
    length, settings, start = LISTED[name]
    row = next(cell for call, cell in ROWS.items() if call.startswith(start))
    above = ROWS["dot, scaled dot, cosine or bilinear score, with softmax"]
    kernel = regard.explain(*inputs(length=length), **settings).kernel
    assert kernel.split(" (")[0] in row + (above if "as in the first row" in row else "")
