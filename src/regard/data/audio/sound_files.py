"""Reader of sound files: returns their samples as one channel at a given sample rate.

WAV files are parsed here; other formats (FLAC, Ogg, MP3, …) are read by the optional package soundfile.
"""

import functools
import io
import math
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from regard.data.data_files import DataError

Samples = NDArray[np.float32]  # shape (n,), values from −1 to 1

SUFFIXES = {".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff"}
SHORTEST = 0.02  # duration in seconds; a shorter recording has less than one frame of features and is rejected
CLIPPED = 0.2  # a recording counts as clipped if more than this fraction of its samples is at ±1
_RATES = (1000, 768_000)  # the smallest and the largest sample rate that a file may have, in samples a second
_CHANNELS = 64
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_FORMATS = {(_PCM, 8): "u1", (_PCM, 16): "<i2", (_PCM, 32): "<i4", (_FLOAT, 32): "<f4", (_FLOAT, 64): "<f8"}
_ZEROS = 16  # the number of zero crossings of the resampling filter's sinc on each side of its centre
_FINEST = 1000  # the largest denominator of the ratio of two sample rates; the ratio of 16,000 to 44,100 is 160 / 441


class _Header(NamedTuple):
    """The format of a WAV file, and the byte offset and size of its samples."""

    kind: int
    channels: int
    rate: int
    bits: int
    start: int
    size: int


def read_sound(given: Path | bytes, rate: int, *, longest: float, name: str = "the sound") -> Samples:
    """Return the samples of a sound file, resampled to `rate` samples a second; several channels are averaged.

    `given` is a path, or the bytes of a file. A `DataError` is raised if the file is no sound file, or is empty,
    truncated, silent, clipped, or longer than `longest` seconds. The length is read from the header, so that a file
    that is too long is rejected before it is decoded.
    """
    where = name if isinstance(given, bytes) else str(given)
    try:
        with io.BytesIO(given) if isinstance(given, bytes) else Path(given).open("rb") as stream:
            head = stream.read(12)
            if not head:
                raise DataError(f"{where}: the file is empty")
            is_wav = head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE"
            samples, own = _wav(stream, where, longest) if is_wav else _other(stream, where, longest)
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror or error}") from error
    _check(samples, where)
    return resampled(samples, own, rate)


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Return samples at `rate` resampled to the rate `wanted`.

    The filter is a windowed sinc, which passes only frequencies below half of the lower rate.

    >>> same = resampled(np.ones(8, np.float32), 8000, 8000).tolist() == [1.0] * 8
    >>> same, len(resampled(np.ones(441, np.float32), 44100, 16000))
    (True, 160)
    """
    ratio = Fraction(wanted, rate).limit_denominator(_FINEST)
    if ratio == 1 or not len(samples):
        return np.asarray(samples, np.float32)
    new, old = ratio.numerator, ratio.denominator
    kernel, width = _kernel(new, old)
    padded = F.pad(torch.from_numpy(np.asarray(samples, np.float32))[None, None], (width, width + old))
    # The convolution has one output channel for each phase of the new rate; interleaving the channels gives the
    # resampled signal.
    phases = F.conv1d(padded, kernel, stride=old)
    count = -(-len(samples) * new // old)
    return phases[0].T.flatten()[:count].numpy()


@functools.lru_cache(maxsize=8)
def _kernel(new: int, old: int) -> tuple[Tensor, int]:
    """Return the resampling filters (new, 1, taps), one for each output phase, and their half width in input samples.

    `new` / `old` is the ratio of the two sample rates in lowest terms.
    """
    # cutoff frequency as a fraction of the old Nyquist frequency: 3 % below the lower one of the old and the new
    # Nyquist frequency, to leave room for the transition band
    cutoff = 0.97 * min(1.0, new / old)
    width = math.ceil(_ZEROS / cutoff)
    place = torch.arange(-width, width + old, dtype=torch.float64)
    time = place - torch.arange(new, dtype=torch.float64).unsqueeze(1) * old / new
    window = torch.cos((time * cutoff / _ZEROS).clamp(-1, 1) * math.pi / 2).square()
    kernel = torch.sinc(time * cutoff) * cutoff * window
    kernel = kernel / kernel.sum(-1, keepdim=True)  # each filter sums to 1, so that a constant signal stays unchanged
    return kernel.float().unsqueeze(1), width


def wav_bytes(samples: Samples, rate: int) -> bytes:
    """Return the bytes of a mono WAV file with 16-bit samples."""
    data = np.clip(np.rint(np.asarray(samples) * 32767), -32768, 32767).astype("<i2").tobytes()
    form = struct.pack("<HHIIHH", _PCM, 1, rate, 2 * rate, 2, 16)
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _wav(stream: Any, where: str, longest: float) -> tuple[Samples, int]:
    header = _header(stream, where)
    width = header.bits // 8
    count = header.size // (width * header.channels)
    _check_length(count, header.rate, where, longest)
    stream.seek(header.start)
    raw = stream.read(count * width * header.channels)
    if len(raw) < count * width * header.channels:
        available = len(raw) // (width * header.channels)
        raise DataError(f"{where}: the file is cut off: its header has {count:,} samples, the file {available:,}")
    return _mixed(_numbers(raw, header), header.channels), header.rate


def _header(stream: Any, where: str) -> _Header:
    """Return the header of a WAV file by reading its chunks up to the samples; unknown chunks are skipped."""
    form: tuple[int, ...] | None = None
    while len(chunk := stream.read(8)) == 8:
        name, size = chunk[:4], struct.unpack("<I", chunk[4:])[0]
        start = stream.tell()
        if name == b"fmt ":
            form = _form(stream.read(min(size, 64)), where)
        elif name == b"data":
            if form is None:
                raise DataError(f"{where}: the WAV file has samples before their format")
            kind, channels, rate, bits = form
            # A program that writes to a pipe cannot fill in the size; it writes a value near 2³², and the samples
            # then extend to the end of the file.
            if size >= 0xFFFFFF00:
                size = stream.seek(0, 2) - start
            return _Header(kind, channels, rate, bits, start, size)
        stream.seek(start + size + size % 2)
    raise DataError(f"{where}: the WAV file is cut off: it has no samples")


def _form(data: bytes, where: str) -> tuple[int, int, int, int]:
    if len(data) < 16:
        raise DataError(f"{where}: the WAV file is cut off in its format")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", data[:16])
    if kind == _EXTENSIBLE and len(data) >= 26:
        kind = struct.unpack("<H", data[24:26])[0]
    if (kind, bits) not in {*_FORMATS, (_PCM, 24)}:
        raise DataError(f"{where}: a WAV file of format {kind} with {bits} bits, expected PCM or floating point")
    if not 1 <= channels <= _CHANNELS:
        raise DataError(f"{where}: expected 1 to {_CHANNELS} channels, got {channels}")
    _check_rate(rate, where)
    return kind, channels, rate, bits


def _numbers(raw: bytes, header: _Header) -> Samples:
    """Return the raw bytes of a WAV file's samples as floats from −1 to 1."""
    if header.kind == _PCM and header.bits == 24:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return (wide.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
    values = np.frombuffer(raw, _FORMATS[header.kind, header.bits])
    if header.kind == _FLOAT:
        return values.astype(np.float32)
    if header.bits == 8:  # WAV samples of 8 bits are unsigned, unlike all wider ones
        return ((values.astype(np.float32) - 128) / 128).astype(np.float32)
    return (values / 2.0 ** (header.bits - 1)).astype(np.float32)


def _mixed(samples: Samples, channels: int) -> Samples:
    return samples if channels == 1 else samples.reshape(-1, channels).mean(1, dtype=np.float32)


def _other(stream: Any, where: str, longest: float) -> tuple[Samples, int]:
    """Return the samples and the sample rate of a FLAC, Ogg, MP3 or other file that libsndfile can decode."""
    try:
        import soundfile
    except ImportError:
        hint = "other formats need pip install 'regard[audio]'"
        raise DataError(f"{where}: not a WAV file; {hint}") from None
    stream.seek(0)
    try:
        with soundfile.SoundFile(stream) as file:
            _check_rate(file.samplerate, where)
            _check_length(file.frames, file.samplerate, where, longest)
            samples = file.read(dtype="float32", always_2d=True)
            return samples.mean(1, dtype=np.float32), file.samplerate
    except RuntimeError as error:  # the decoding errors of soundfile derive from RuntimeError
        raise DataError(f"{where}: not a sound file that can be read ({error})") from error


def _check_rate(rate: int, where: str) -> None:
    low, high = _RATES
    if not low <= rate <= high:
        raise DataError(f"{where}: expected {low:,} to {high:,} samples a second, got {rate:,}")


def _check_length(count: int, rate: int, where: str, longest: float) -> None:
    if count == 0:
        raise DataError(f"{where}: the file has no samples")
    if count < SHORTEST * rate:
        raise DataError(f"{where}: {1000 * count / rate:.1f} ms of sound, expected at least {1000 * SHORTEST:.0f} ms")
    if count > longest * rate:
        raise DataError(f"{where}: {count / rate:,.1f} s of sound, at most {longest:,.1f} s can be read")


def _check(samples: Samples, where: str) -> None:
    if not np.isfinite(samples).all():
        raise DataError(f"{where}: samples are NaN or infinite")
    most = float(np.abs(samples).max())
    if most == 0:
        raise DataError(f"{where}: the sound is silent")
    share = float((np.abs(samples) >= 0.999).mean())
    if share > CLIPPED:
        raise DataError(f"{where}: the sound is clipped: {share:.0%} of its samples are at the limit")
