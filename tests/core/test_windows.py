"""The time of a window grows with its width, because only the band is computed; results equal the reference's."""

import pytest
import torch

import regard

QUERIES, KEYS, SIZE, VALUE = 403, 509, 7, 5


def ids(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed))


def masks(lead: tuple[int, ...]) -> dict[str, regard.Mask]:
    lengths = torch.arange(lead[0] * lead[-1]).reshape(lead) if len(lead) > 1 else torch.tensor([2, 0])
    packed = regard.segments(ids(*lead, QUERIES, seed=1), ids(*lead, KEYS, seed=2))
    return {
        "around": regard.window(20, 3),
        "ahead": regard.window(3, 9, offset=50),
        "behind": regard.window(7, 0, offset=-30),
        "beyond every key": regard.window(5, 5, offset=2000),
        "causal and window": regard.causal() & regard.window(40, 40),
        "padded": regard.window(20, 3) & regard.padding((lengths * 200).clamp_max(KEYS)),
        "packed": regard.window(20, 30) & packed,
        "padded and packed": regard.window(20, 3) & packed & regard.padding((lengths * 200).clamp_max(KEYS)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", masks((2,)))
@pytest.mark.parametrize("lead", [(2,), (2, 3)], ids=str)
def test_a_window_equals_the_plain_form_in_value_and_gradient(lead: tuple[int, ...], name: str) -> None:
    shapes = ((*lead, 4, QUERIES, SIZE), (*lead, 2, KEYS, SIZE), (*lead, 2, KEYS, VALUE))
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    mask = masks(lead)[name]
    slopes = torch.randn(*lead, 4, QUERIES, VALUE, dtype=torch.float64)
    found, plain = (regard.attention(*inputs, mask=mask, backend=b).output for b in ("sdpa", "reference"))
    torch.testing.assert_close(found, plain)
    for a, b in zip(*(torch.autograd.grad(out, inputs, slopes) for out in (found, plain)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_window_takes_work_and_memory_of_its_width() -> None:
    query = torch.zeros(1, 2, 8192, 16)
    narrow = regard.explain(query, query, query, mask=regard.window(127, 0), backend="sdpa")
    whole = regard.explain(query, query, query, backend="sdpa")
    assert narrow.flops < whole.flops / 60
    # The limit on working memory is a quarter of the bytes of a mask with one byte for each pair.
    assert narrow.bytes < 8192 * 8192 / 4


BEYOND = {
    "longer than int64 before": (regard.window(10**30, 0), regard.causal()),
    "longer than int64 both ways": (regard.window(2**63 - 1, 2**64, offset=5), regard.causal(50)),
    "far ahead": (regard.causal(2**62), regard.causal(50)),
    "far behind": (regard.causal(-(2**62)), regard.causal(-50)),
}


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize("name", BEYOND)
def test_a_band_wider_than_any_sequence_means_what_it_says(name: str, backend: str) -> None:
    query, key = torch.randn(2, 5, SIZE), torch.randn(2, 11, SIZE)
    wide, same = (regard.attention(query, key, key, mask=mask, backend=backend).output for mask in BEYOND[name])
    torch.testing.assert_close(wide, same)
