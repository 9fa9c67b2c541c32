"""What is worked out for a mask object is stored for the object, not longer, and not past a change of its tensors."""

import gc
import weakref
from typing import Any

import pytest
import torch

import regard
from regard.core.mask_cache import aligned, stored

DEVICE = torch.device("meta")  # any device but the CPU, where nothing is stored


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
    ids[2] = 7  # through the tensor of which the mask has a view
    second = make(mask)
    assert second is not first
    assert make(mask) is second


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


def test_what_cannot_be_followed_is_not_stored() -> None:
    lengths = torch.tensor([2, 3])
    mask = regard.padding(lengths)
    assert make(mask, device=torch.device("cpu")) is not make(mask, device=torch.device("cpu"))
    with torch.inference_mode():
        uncounted = regard.padding(torch.tensor([2, 3]))
        inside = make(mask)
        assert make(mask) is inside
    assert make(uncounted) is not make(uncounted)
    assert make(mask) is not inside  # tensors of inference mode are not for autograd


def test_aligned_masks_keep_their_identity() -> None:
    mask = regard.causal() & regard.padding(torch.tensor([2, 3]))
    first = aligned(mask, (2, 1, 4, 4), DEVICE)
    assert aligned(mask, (2, 1, 4, 4), DEVICE) is first
    assert aligned(mask, (2, 1, 5, 4), DEVICE) is not first
    band = regard.causal()
    assert aligned(band, (2, 1, 4, 4), DEVICE) is band
