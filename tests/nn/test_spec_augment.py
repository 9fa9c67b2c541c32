"""SpecAugment: which entries of the features are masked, how many, and only in training."""

import pytest
import torch

from regard.nn.spec_augment import SpecAugment


def test_nothing_is_masked_in_evaluation():
    given = torch.randn(2, 7, 5)
    assert SpecAugment().eval()(given) is given


def test_bands_are_masked_in_all_frames_and_no_wider_than_allowed():
    torch.manual_seed(1)
    layer = SpecAugment(bands=1, band_width=3, spans=0, fill=9.0)
    masked = layer(torch.zeros(400, 3, 11))[:, :, :] == 9.0
    assert bool((masked == masked[:, :1]).all())
    widths = masked[:, 0].sum(-1)
    assert set(widths.tolist()) == {0, 1, 2, 3}
    runs = (masked[:, 0, 1:] & ~masked[:, 0, :-1]).sum(-1) + masked[:, 0, 0]
    assert int(runs.max()) == 1
    assert bool(masked[:, 0].any(0).all())  # over all recordings, each frequency band is masked at least once


def test_spans_lie_within_the_recording_and_are_a_share_of_it_at_most():
    torch.manual_seed(2)
    layer = SpecAugment(bands=0, spans=1, span_width=100, share=0.25)
    lengths = torch.tensor([40, 8]).repeat(300)
    masked = (layer(torch.ones(600, 40, 2), lengths) == 0).all(-1)
    assert bool((masked.sum(-1) <= lengths // 4).all())
    assert int(masked[::2].sum(-1).max()) == 10
    assert not bool(masked[1::2, 8:].any())


def test_gradients_pass_where_nothing_is_masked():
    torch.manual_seed(3)
    given = torch.ones(4, 9, 6, requires_grad=True)
    SpecAugment(bands=2, band_width=2, spans=1, span_width=3)(given).sum().backward()
    assert set(given.grad.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("given", [{"bands": -1}, {"share": 1.5}])
def test_settings_out_of_bounds_are_refused(given):
    with pytest.raises(ValueError, match="must"):
        SpecAugment(**given)
