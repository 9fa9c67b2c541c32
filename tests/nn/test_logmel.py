"""Log-mel features of sound against numbers computed with librosa 0.11, and changes of the sound that must not change
them."""

import numpy as np
import pytest
import torch

from regard.nn.logmel import LogMel, level, mel_filters

# log₁₀ of librosa.feature.melspectrogram(y=y, sr=rate, n_fft=…, hop_length=…, win_length=…, n_mels=…), not below −10,
# of the sound that `sound` returns: values by (frame, band), then the mean and the standard deviation of all values.
LIBROSA = {
    (8000, 40): (
        {(0, 0): -0.832224, (3, 7): 1.0794, (10, 20): -6.952259, (12, 39): -9.179043, (20, 20): -1.658414},
        (-4.410807, 3.212787),
    ),
    (16_000, 80): (
        {(0, 0): -0.247378, (3, 7): -2.820884, (10, 20): 1.424353, (12, 79): -10.0, (20, 40): -2.037424},
        (-5.145904, 3.594322),
    ),
}


def sound(rate: int) -> torch.Tensor:
    t = np.arange(rate // 5) / rate
    tones = 0.5 * np.sin(2 * np.pi * 440 * t) + 0.3 * np.sin(2 * np.pi * (600 + 900 * t) * t)
    return torch.from_numpy(tones + 0.1 * np.cos(2 * np.pi * 3000 * t))


@pytest.mark.parametrize(("rate", "bands"), LIBROSA)
def test_features_are_those_of_librosa(rate, bands):
    cells, (mean, deviation) = LIBROSA[rate, bands]
    features = LogMel(rate, bands=bands).double()(sound(rate)[None])[0]
    assert features.shape == (21, bands)
    for (frame, band), value in cells.items():
        assert float(features[frame, band]) == pytest.approx(value, abs=1e-4)
    assert float(features.mean()) == pytest.approx(mean, abs=1e-4)
    assert float(features.std(correction=0)) == pytest.approx(deviation, abs=1e-4)


def test_single_precision_is_as_good_where_there_is_sound():
    wide = LogMel(8000).double()(sound(8000)[None])
    narrow = LogMel(8000)(sound(8000).float()[None])
    loud = wide > -6
    torch.testing.assert_close(narrow.double()[loud], wide[loud], atol=1e-4, rtol=0)


def test_filters_have_the_area_one():
    filters = mel_filters(16_000, 4096, 23)
    torch.testing.assert_close(filters.sum(0) * 16_000 / 4096, torch.ones(23).double(), atol=0.02, rtol=0)


def test_a_tone_is_in_the_band_around_it():
    features = LogMel(8000, bands=40)(torch.sin(2 * torch.pi * 1000 * torch.arange(4000) / 8000)[None])[0]
    centre = mel_filters(8000, 256, 40).argmax(0) * 8000 / 256
    assert abs(float(centre[int(features[25].argmax())]) - 1000) < 80


def test_a_batch_is_as_one_by_one():
    layer, given = LogMel(8000, bands=11), torch.randn(3, 1700)
    torch.testing.assert_close(layer(given), torch.cat([layer(one[None]) for one in given]))
    assert layer(given).shape[1] == layer.frames(1700) == 22


def test_how_loud_it_was_recorded_makes_no_difference():
    layer, given = LogMel(8000), torch.randn(1, 2000)
    torch.testing.assert_close(level(layer(given)[0]), level(layer(0.01 * given)[0]), atol=1e-5, rtol=0)


def test_a_hop_of_no_sample_is_refused():
    with pytest.raises(ValueError, match="hop and window must have samples"):
        LogMel(8000, hop=1e-5)
