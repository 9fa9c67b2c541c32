"""Tests of reading sound files as samples: formats, channels, sampling rates, and errors for unsupported files."""

import math
import struct
import sys

import numpy as np
import pytest

from regard.data.audio.sound_files import read_sound, resampled, wav_bytes
from regard.data.data_files import DataError

RATE = 8000


def wav(
    data: bytes, *, kind: int = 1, channels: int = 1, bits: int = 16, rate: int = RATE, extended: bool = False
) -> bytes:
    """Return the bytes of a WAV file, assembled without a library."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extended else kind, channels, rate, rate * block, block, bits)
    if extended:
        form += struct.pack("<HHIH", 22, bits, 0, kind) + bytes(14)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form
    # A RIFF chunk that readers skip, of odd length and so padded by a byte.
    chunks += b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


TONE = 0.5 * np.sin(2 * np.pi * 300 * np.arange(800) / RATE)
PACKED = {
    ("PCM", 8): (1, 8, (np.rint(TONE * 128) + 128).astype("u1").tobytes(), 1 / 128),
    ("PCM", 16): (1, 16, np.rint(TONE * 2**15).astype("<i2").tobytes(), 2**-15),
    ("PCM", 24): (1, 24, b"".join(int(v * 2**23).to_bytes(3, "little", signed=True) for v in TONE), 2**-22),
    ("PCM", 32): (1, 32, (TONE * 2**31).astype("<i4").tobytes(), 1e-6),
    ("float", 32): (3, 32, TONE.astype("<f4").tobytes(), 1e-6),
    ("float", 64): (3, 64, TONE.astype("<f8").tobytes(), 1e-6),
}


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("extended", [False, True])
def test_every_width_gives_the_same_samples(form, extended):
    kind, bits, data, error = PACKED[form]
    found = read_sound(wav(data, kind=kind, bits=bits, extended=extended), RATE, longest=1.0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, TONE, atol=error)


def test_channels_are_mixed():
    both = np.stack([np.full(400, 8192), np.full(400, 16384)], 1).astype("<i2")
    found = read_sound(wav(both.tobytes(), channels=2), RATE, longest=1.0)
    np.testing.assert_allclose(found, np.full(400, 0.375))


@pytest.mark.parametrize(
    ("old", "new"), [(44_100, 16_000), (16_000, 8000), (8000, 16_000), (22_050, 8000), (8001, 8000)]
)
def test_a_tone_stays_the_tone_at_another_rate(old, new):
    time = np.arange(old // 2) / old
    found = resampled(np.sin(2 * np.pi * 700 * time).astype(np.float32), old, new)
    wanted = np.sin(2 * np.pi * 700 * np.arange(len(found)) / new)
    assert abs(len(found) - new / 2) <= 1
    ratio_error = 2e-3 if old != 8001 else 0.4  # 8,001 Hz is treated as 8,000 Hz, so the phase error grows over time
    np.testing.assert_allclose(found[100:-100], wanted[100:-100], atol=ratio_error)


def test_what_the_lower_rate_cannot_hold_is_left_out():
    high = np.sin(2 * np.pi * 5000 * np.arange(8000) / 16_000).astype(np.float32)
    assert np.abs(resampled(high, 16_000, 8000)[50:-50]).max() < 1e-3


def test_samples_come_back_from_a_file_as_they_were(tmp_path):
    (tmp_path / "a.wav").write_bytes(wav_bytes(TONE.astype(np.float32), RATE))
    np.testing.assert_allclose(read_sound(tmp_path / "a.wav", RATE, longest=1.0), TONE, atol=2**-15)


GOOD = wav(np.rint(TONE * 2**15).astype("<i2").tobytes())
BAD = {
    "the file is empty": b"",
    "the file has no samples": wav(b""),
    "1.2 ms of sound, expected at least 20 ms": wav(bytes(20)),
    "the file is cut off: its header has 800 samples, the file 750": GOOD[:-100],
    "the WAV file is cut off: it has no samples": GOOD[:40],
    "the WAV file is cut off in its format": GOOD[:22],
    "the WAV file has samples before their format": GOOD[:12] + GOOD[48:],
    "the sound is silent": wav(bytes(1600)),
    "the sound is clipped: 100% of its samples are at the limit": wav(np.full(800, 32767, "<i2").tobytes()),
    "samples are NaN or infinite": wav(np.full(800, math.nan, "<f4").tobytes(), kind=3, bits=32),
    "a WAV file of format 85 with 16 bits, expected PCM or floating point": wav(bytes(1600), kind=85),
    "expected 1 to 64 channels, got 0": wav(bytes(1600), channels=0),
    "expected 1,000 to 768,000 samples a second, got 10": wav(bytes(1600), rate=10),
}


@pytest.mark.parametrize("message", BAD)
def test_a_file_that_cannot_be_used_is_an_error_that_says_why(message, tmp_path):
    path = tmp_path / "bad.wav"
    path.write_bytes(BAD[message])
    with pytest.raises(DataError) as caught:
        read_sound(path, RATE, longest=1.0)
    assert str(caught.value) == f"{path}: {message}"


def test_an_hour_is_refused_by_its_header_alone(tmp_path):
    hour = 3600 * RATE * 2
    head = GOOD[: GOOD.index(b"data") + 4] + struct.pack("<I", hour)
    with pytest.raises(DataError, match=r"3,600\.0 s of sound, at most 30\.0 s can be read"):
        read_sound(head, RATE, longest=30.0)


def test_other_formats_need_soundfile(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match=r"the sound: not a WAV file; other formats need pip install 'regard\[audio\]'"):
        read_sound(b"fLaC" + bytes(100), RATE, longest=1.0)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_sound(tmp_path / "none.wav", RATE, longest=1.0)


def test_flac_is_read_through_soundfile(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.flac", np.stack([TONE, TONE], 1), RATE)
    np.testing.assert_allclose(read_sound(tmp_path / "a.flac", RATE, longest=1.0), TONE, atol=1e-4)
    with pytest.raises(DataError, match="not a sound file that can be read"):
        read_sound(b"OggS" + bytes(64), RATE, longest=1.0)
