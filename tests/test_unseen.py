"""Keys that no query may attend are found without looking at a pair: what fused kernels on a GPU rely on."""

import subprocess
import sys

import pytest
import torch

import regard
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
