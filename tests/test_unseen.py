"""Keys that no query may attend are found without looking at a pair: what fused kernels on a GPU rely on."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import regard
from regard.core.backends import sdpa
from regard.core.clauses import clauses
from regard.core.hygiene import seen_keys

QUERIES, KEYS = 5, 11
IDS = (
    torch.tensor([[3, 1, 1, 7, 3], [2, 2, 2, 2, 2]]),
    torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3], [2, 3] * 5 + [2]]),
)
MASKS = {
    "causal": regard.causal(),
    "causal, shifted": regard.causal(3),
    "ahead": regard.window(1, 2, offset=4),
    "lengths": regard.padding([4, 0]),
    "segments": regard.segments(*IDS),
    "one row of ids for all": regard.segments(torch.tensor([1, 1, 2, 3, 3]), IDS[1]),
    "dense": torch.arange(2 * QUERIES * KEYS).reshape(2, 1, QUERIES, KEYS) % 17 == 3,
}


@pytest.mark.parametrize("name", MASKS)
def test_seen_keys_are_those_some_query_may_attend(name: str) -> None:
    shape = (2, 3, QUERIES, KEYS)
    mask = MASKS[name] if isinstance(MASKS[name], regard.Mask) else regard.dense(MASKS[name])
    mask = mask.aligned(shape)
    allowed = mask.allowed(range(QUERIES), range(KEYS), torch.device("cpu")).expand(shape)
    seen = seen_keys(clauses(mask, QUERIES, KEYS), QUERIES, KEYS, torch.device("cpu"))
    assert torch.equal(seen.expand(2, 3, KEYS), allowed.any(-2))


def test_no_mask_of_keys_no_list_of_them() -> None:
    assert seen_keys(clauses(regard.causal(6), QUERIES, KEYS), QUERIES, KEYS, torch.device("cpu")) is None
    assert seen_keys(clauses(None, QUERIES, KEYS), QUERIES, KEYS, torch.device("cpu")) is None


COMPILED = """
import torch, regard
query, key, value = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 7)
lengths = torch.tensor([4, 9])
attend = lambda *tensors: regard.attention(*tensors, mask=regard.padding(lengths)).output
clean = attend(query, key, value)
key[0, :, 4:], value[1, :, 9:] = torch.nan, torch.inf
compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(query, key, value), clean)
"""


def test_compiled_attention_is_clean_of_padding_too() -> None:
    """In a process of its own: the checks of shapes in these tests cannot be compiled."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closed_as", [torch.finfo(torch.float64).min, -math.inf])
@pytest.mark.parametrize("how", ["dense", "lengths and causal", "shifted", "window", "window, all rows see"])
def test_what_a_kernel_makes_of_an_empty_row_does_not_change_the_meaning(
    monkeypatch: pytest.MonkeyPatch, how: str, closed_as: float
) -> None:
    """cuDNN's takes a bool mask as the lowest number, which gives such a row a mean; others might give it NaN."""
    query, key, value = (torch.randn(2, 3, 600, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    closed = torch.ones(600, 600, dtype=torch.bool).tril(-2)
    closed[40] = False
    mask = {
        "dense": regard.dense(closed),
        "lengths and causal": regard.padding([0, 500]) & regard.causal(),
        "shifted": regard.causal(-3),
        "window": regard.window(4, 0, offset=-2),
        "window, all rows see": regard.window(4, 0),  # but for those that fill the last block
    }[how]
    calls = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float, **_: object) -> Tensor:
        calls.append(attn_mask.shape)
        scores = query @ key.mT * scale
        return torch.softmax(torch.where(attn_mask, scores, closed_as), -1) @ value

    def learn(backend: str) -> list[Tensor]:
        output = regard.attention(query, key, value, mask=mask, backend=backend).output
        return [
            output,
            *torch.autograd.grad(output, (query, key, value), torch.cos(torch.arange(4.0)).expand_as(output)),
        ]

    true = learn("reference")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    spoilt = learn("sdpa")
    monkeypatch.setattr(sdpa, "_wants_full_rows", lambda device: True)
    found = learn("sdpa")
    assert calls
    if how != "window, all rows see":
        assert not torch.allclose(spoilt[0], true[0])
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b)
