"""The Triton kernel of decoding steps (few queries, many keys): interpreted, and compiled on CUDA."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels import availability

WEIGHTS = {
    "scaled dot": lambda size: None,
    "one vector": lambda size: torch.randn(size),
    "one of each head": lambda size: torch.randn(4, size),
    "a column": lambda size: torch.randn(size, 3)[:, 1],
    "of each head, turned": lambda size: torch.randn(size, 4).T,
}
# (queries, keys, multiprocessors of the GPU); the kernel splits the keys into one range, four to eight ranges, and one.
STEPS = [(1, 37, 1), (1, 523, 40), (3, 263, 264)]
SIZES = {37: (19, 11), 523: (130, 150), 263: (19, 11)}
# With 37 keys, all five entries of `WEIGHTS` are tested; with 523 and 263 keys, the first three.
CASES = [(*step, name) for step in STEPS for name in list(WEIGHTS)[: 5 if step[1] == 37 else 3]]
PLAIN = [(*step, name) for step in STEPS for name in ("scaled dot", "one of each head")]


def score_of(weight: Tensor | None) -> Any:
    return regard.ScaledDot(0.3) if weight is None else regard.Additive(weight.double())


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("queries", "keys", "workers", "name", "groups"), [(*case, (2, 4)[n % 2]) for n, case in enumerate(CASES)]
)
def test_lengths_under_the_interpreter(queries: int, keys: int, workers: int, name: str, groups: int) -> None:
    from regard.kernels.triton.decode_attention import decode

    torch.manual_seed(5)
    f_size, e_size = SIZES[keys]
    query, key = torch.randn(3, 4, queries, f_size), torch.randn(3, groups, keys, f_size)
    value, weight = torch.randn(3, groups, keys, e_size), WEIGHTS[name](f_size)
    key[2, :, 5:], value[2, :, 5:], key[1] = torch.nan, torch.inf, torch.nan
    # The three sequences attend to all keys, no key and five keys.
    lengths = torch.tensor([keys, 0, 5])
    tensors = [tensor.double() for tensor in (query, key, value)]
    mask = regard.padding(lengths)
    plain = regard.attention(*tensors, score=score_of(weight), mask=mask, backend="reference").output
    found = decode(query, key, value, weight, lengths, None, 0.3, workers)
    torch.testing.assert_close(found.double(), plain, atol=1e-5, rtol=1e-5)
    whole = decode(query[:1], key[:1], value[:1], weight, None, None, 0.3, workers)
    torch.testing.assert_close(whole.double(), plain[:1], atol=1e-5, rtol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize(("queries", "keys", "workers", "name"), PLAIN)
def test_masks_under_the_interpreter(queries: int, keys: int, workers: int, name: str) -> None:
    """The masks exclude single keys, whole blocks of keys, or all keys; masked keys and values are NaN."""
    from regard.kernels.triton.decode_attention import decode

    torch.manual_seed(5)
    sizes = SIZES[keys]
    query, weight = torch.randn(3, 4, queries, sizes[0]), WEIGHTS[name](sizes[0])
    mask = torch.rand(3, keys) < 0.5
    mask[0, :40], mask[1] = False, False
    hidden = torch.where(mask[:, None, :, None], 1.0, torch.nan)
    key, value = (torch.randn(3, 2, keys, size) * hidden for size in sizes)
    tensors, masked = [tensor.double() for tensor in (query, key, value)], regard.dense(mask[:, None, None, :])
    plain = regard.attention(*tensors, score=score_of(weight), mask=masked, backend="reference").output
    found = decode(query, key, value, weight, None, mask, 0.3, workers)
    torch.testing.assert_close(found.double(), plain, atol=1e-5, rtol=1e-5)
    assert not found[1].any()


STEP_MASKS = {
    "none": lambda lengths: None,
    "lengths": lambda lengths: regard.padding(lengths),
    "a column": lambda lengths: regard.padding(lengths[:, None]),
    "one length": lambda lengths: regard.padding(lengths[2]),
    "lengths and a band": lambda lengths: regard.causal(offset=36) & regard.padding(lengths),
    "keys one by one": lambda lengths: regard.dense(torch.arange(37) % 3 == 0),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", STEP_MASKS)
@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
def test_a_stored_route_computes_later_calls(name: str, additive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that is stored for the signature of a call gives right results for new tensors and new mask
    objects."""
    from regard.core.backends import decoding_step
    from regard.core.problem import build

    # The kernel checks that its tensors are on the current device, here the CPU.
    monkeypatch.setattr(availability, "current_device", lambda: None)
    monkeypatch.setattr(decoding_step, "_workers", lambda device: 4)
    torch.manual_seed(5)
    score: Any = regard.Additive(torch.randn(19)) if additive else regard.ScaledDot(0.3)
    steps = []
    for lengths in (torch.tensor([37, 0, 5]), torch.tensor([4, 30, 11])):
        # The layout of a key-value cache, (batch, keys, heads, size), with room for more keys.
        query, key, value = (
            torch.randn(3, n + 2, 4, e).transpose(1, 2)[:, :, :n] for n, e in ((1, 19), (37, 19), (37, 11))
        )
        mask = STEP_MASKS[name](lengths)
        steps.append((query, key, value, score, mask))
    problem = build(*steps[0][:4], regard.Softmax(), steps[0][4], None, 0.0, None, None)
    run = decoding_step.direct(problem, score.weight if additive else None, 0.3)
    assert run is not None
    for query, key, value, score, mask in steps:
        found = run(query, key, value, score, mask, None)
        assert found is not None
        tensors = (tensor.double() for tensor in (query, key, value))
        true = score_of(score.weight if additive else None)
        plain = regard.attention(*tensors, score=true, mask=mask, backend="reference").output
        torch.testing.assert_close(found.double(), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("score", ["additive", "scaled_dot"])
def test_a_step_over_keys_closed_one_by_one_equals_the_plain_form_on_cuda(score: str) -> None:
    query, key, value = (torch.randn(5, 2, n, size, device="cuda") for n, size in ((1, 512), (37, 512), (37, 1024)))
    mask = torch.rand(5, 37, device="cuda") < 0.5
    mask[3] = False
    mechanism = regard.ScaledDot() if score == "scaled_dot" else regard.Additive(torch.randn(512, device="cuda") / 16)
    found, plain = (
        regard.attention(query, key, value, score=mechanism, mask=regard.dense(mask[:, None, None]), backend=backend)
        for backend in ("auto", "reference")
    )
    torch.testing.assert_close(found.output, plain.output, atol=1e-5, rtol=1e-4)
    assert not found.output[3].any()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", ["additive", "scaled_dot"])
@pytest.mark.parametrize("keys", [64, 4099])
def test_a_step_equals_the_plain_form_on_cuda(keys: int, score: str, dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(5, 8, n, 96, device="cuda") for n in (1, keys, keys))
    key, value = key[:, :2].to(dtype), value[:, :2].to(dtype)
    lengths = torch.tensor([2**40, 1, keys // 2, 0, keys - 1], device="cuda")  # a length of 2**40 means all keys
    mechanism = regard.ScaledDot() if score == "scaled_dot" else regard.Additive(torch.randn(96, device="cuda"))
    mask = regard.padding(lengths)
    found = regard.attention(query.to(dtype), key, value, score=mechanism, mask=mask).output
    plain = regard.attention(query.to(dtype), key, value, score=mechanism, mask=mask, backend="reference").output
    torch.testing.assert_close(found, plain, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_long_memory_is_split_on_cuda(dtype: torch.dtype) -> None:
    """The keys are split into several ranges, and no size is a power of two; the second call reuses the stored choice
    of a kernel."""
    query, key, value = (
        torch.randn(2, 3, n, e, device="cuda", dtype=dtype) for n, e in ((2, 72), (5003, 72), (5003, 200))
    )
    key[1, :, 1700:], value[1, :, 1700:] = torch.nan, torch.inf
    mask = regard.padding(torch.tensor([5003, 1700], device="cuda"))
    assert regard.explain(query, key, value, mask=mask).kernel == "triton decode"
    plain = regard.attention(*(t.double() for t in (query, key, value)), mask=mask, backend="reference").output
    for _ in range(2):
        found = regard.attention(query, key, value, mask=mask).output
        assert (found.double() - plain).norm() <= (1e-5 if dtype == torch.float32 else 2e-3) * plain.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("shape", ["vector", "row", "column", "of each head, turned"])
@pytest.mark.parametrize("queries", [1, 40])
def test_a_weight_may_lie_in_memory_as_it_likes(queries: int, shape: str) -> None:
    query, key = torch.randn(2, 4, queries, 32, device="cuda"), torch.randn(2, 4, 500, 32, device="cuda")
    weight = torch.randn(32, 4, device="cuda")
    weight = {
        "vector": weight[:, 0].contiguous(), "row": weight[:, 0].contiguous()[None], "column": weight[:, 1],
        "of each head, turned": weight.T,
    }[shape]  # fmt: skip
    for lead in (2, 1):  # number of leading axes: tensors with and without a batch axis
        tensors = (query, key, key) if lead == 2 else (query[0], key[0], key[0])
        found, plain = (
            regard.attention(*tensors, score=regard.Additive(weight), backend=backend).output
            for backend in ("additive", "reference")
        )
        torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", ["own", "a column", "one for all"])
def test_lengths_may_lie_in_memory_as_they_like(lengths: str) -> None:
    tensor = torch.randn(64, 8, 32, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.randint(1, 32, (64, 2), device="cuda")
    mask = regard.padding(
        {"own": table[:, 0].contiguous(), "a column": table[:, 0], "one for all": table[5, 1]}[lengths]
    )
    # 32 queries use the kernel for short sequences, and one query uses the kernel for decoding steps.
    for queries in (32, 1):
        found, plain = (
            regard.attention(tensor[:, :, :queries], tensor, tensor, mask=mask, backend=backend).output
            for backend in ("auto", "reference")
        )
        torch.testing.assert_close(found, plain, atol=5e-2, rtol=2e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_additive_steps_of_wide_values(dtype: torch.dtype) -> None:
    """Steps of additive attention with a size of 512, for sequences of 1, 41 and all 64 keys; padded keys hold NaN."""
    torch.manual_seed(3)
    query, key, value = (torch.randn(3, 2, n, 512, device="cuda", dtype=dtype) for n in (1, 64, 64))
    key[1, :, 41:], value[1, :, 41:] = torch.nan, torch.inf
    weight = (torch.randn(512, device="cuda") / 23).to(dtype)
    mask = regard.padding(torch.tensor([1, 41, 64], device="cuda"))
    assert regard.explain(query, key, value, score=regard.Additive(weight), mask=mask).kernel == "triton decode"
    wide = [t.double() for t in (query, key, value)]
    plain = regard.attention(*wide, score=regard.Additive(weight.double()), mask=mask, backend="reference").output
    for _ in range(2):
        found = regard.attention(query, key, value, score=regard.Additive(weight), mask=mask).output
        assert (found.double() - plain).norm() <= (4e-3 if dtype == torch.bfloat16 else 1e-3) * plain.norm()
