"""What is computed from a mask is cached with the mask object, until a tensor of the mask changes."""

import gc
import weakref
from typing import Any

import numpy
import pytest
import torch

import regard
from regard.core.mask_cache import aligned, stored

DEVICE = torch.device("meta")  # on the CPU the cache compares the contents of masks; elsewhere, version counters
CPU = torch.device("cpu")


class Result:
    pass


def make(mask: regard.Mask, key: str = "key", device: torch.device = DEVICE) -> Result:
    return stored(mask, device, key, Result)


def masks(ids: torch.Tensor) -> dict[str, Any]:
    return {
        "padding": regard.padding(ids),
        "documents": regard.causal() & regard.segments(ids, ids),
        "dense": ~regard.dense(ids > 0),
    }


@pytest.mark.parametrize("name", masks(torch.ones(3, dtype=torch.long)))
def test_a_mask_used_again_costs_nothing_again(name: str) -> None:
    mask, other = (masks(torch.ones(3, dtype=torch.long))[name] for _ in range(2))
    first = make(mask)
    assert make(mask) is first
    assert make(mask, "another key") is not first
    assert make(other) is not first
    assert make(mask) is first


@pytest.mark.parametrize("name", ["padding", "documents"])
def test_a_change_in_place_is_seen(name: str) -> None:
    ids = torch.ones(5, dtype=torch.long)
    mask = masks(ids[1:4])[name]
    first = make(mask)
    ids[2] = 7  # `mask` holds a view of `ids`, so changing `ids` changes the mask
    second = make(mask)
    assert second is not first
    assert make(mask) is second


@pytest.mark.slow
def test_a_result_goes_with_its_mask() -> None:
    mask = regard.padding(torch.tensor([2, 3]))
    result = weakref.ref(make(mask))
    shaped = weakref.ref(aligned(mask, (2, 1, 4, 4), DEVICE))
    assert result() is not None
    assert shaped() is not None
    del mask
    gc.collect()
    assert result() is None
    assert shaped() is None


def test_a_change_through_numpy_is_seen_on_the_cpu() -> None:
    array = numpy.array([2, 3])
    mask = regard.padding(torch.from_numpy(array))
    first = make(mask, device=CPU)
    assert make(mask, device=CPU) is first
    array[1] = 4
    assert make(mask, device=CPU) is not first
    scores = torch.zeros(2, 1, 1, 4)
    for length in (4, 1):  # the second call must not use the mask that the first call cached
        array[1] = length
        output = regard.attention(
            scores[..., :2], torch.zeros(2, 1, 4, 2), torch.ones(2, 1, 4, 1).cumsum(-2), mask=mask
        )
        # The output is the mean of the values 1 … length.
        assert output.output[1].item() == (length + 1) / 2


def test_what_cannot_be_followed_is_not_stored() -> None:
    lengths = torch.tensor([2, 3])
    mask = regard.padding(lengths)
    long = regard.dense(torch.ones(300, 300, dtype=torch.bool))
    assert make(long, device=CPU) is not make(long, device=CPU)
    assert make(long) is make(long)
    with torch.inference_mode():
        uncounted = regard.padding(torch.tensor([2, 3]))
        inside = make(mask)
        assert make(mask) is inside
    assert make(uncounted) is not make(uncounted)
    assert make(mask) is not inside  # autograd cannot use tensors that were created in inference mode


def test_aligned_masks_keep_their_identity() -> None:
    mask = regard.causal() & regard.padding(torch.tensor([2, 3]))
    first = aligned(mask, (2, 1, 4, 4), DEVICE)
    assert aligned(mask, (2, 1, 4, 4), DEVICE) is first
    assert aligned(mask, (2, 1, 5, 4), DEVICE) is not first
    band = regard.causal()
    assert aligned(band, (2, 1, 4, 4), DEVICE) is band
