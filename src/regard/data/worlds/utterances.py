"""The built-in data of speech: utterances from a formant synthesiser, and the times of each word and letter.

Each utterance has its own voice: pitch, size of the vocal tract, speed, breath and background noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regard.data.worlds.phones import LEXICON, PHONES, Phone, Spelling
from regard.data.worlds.random_choices import Splits

WORDS = tuple(LEXICON)
MOST = 12  # the largest number of words in an utterance
_HOP, _SIZE = 0.008, 0.02  # in seconds: distance between frames; the window of a frame has about 1.6 `_SIZE`
_GLIDE = 5  # duration of the transition between two sounds, in frames

Times = tuple[tuple[float, float], ...]


@dataclass(frozen=True, eq=False)
class Utterance:
    """Samples at `rate`, the transcript, and the start and end in seconds of each word and of each character.

    The blanks between words count as characters.
    """

    samples: NDArray[np.float32]
    rate: int
    words: tuple[str, ...]
    times: Times
    letter_times: Times

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Voice:
    """A speaker in a room: pitch in Hz, formants and durations relative to those in `PHONES`, loudness and noise."""

    pitch: float
    formants: float
    slowness: float
    breath: float
    tilt: float
    noise: float  # amplitude of the room's noise, relative to the voice
    loudness: float

    @classmethod
    def sampled(cls, random: np.random.Generator) -> "Voice":
        return cls(
            pitch=float(90 * 2 ** random.uniform(0, 1.4)),
            formants=float(random.uniform(0.88, 1.18)),
            slowness=float(random.uniform(0.8, 1.25)),
            breath=float(random.uniform(0.02, 0.15)),
            tilt=float(random.uniform(0.7, 1.3)),
            noise=float(10 ** random.uniform(-2.2, -1.1)),
            loudness=float(10 ** random.uniform(-1.0, -0.15)),
        )


def utterances(
    seed: int | Sequence[int], *, count: int, words: tuple[int, int] = (1, 5), rate: int = 8000
) -> Iterator[Utterance]:
    """Yield utterances of `words` words, each with its own voice; the same seed gives the same utterances.

    >>> [item.text for item in utterances(5, count=2)]
    ['left zero left eight', 'up right three']
    """
    low, high = words
    if not 1 <= low <= high <= MOST:
        raise ValueError(f"words must be (fewest, most) within 1 to {MOST}, not {words}")
    random = np.random.Generator(np.random.PCG64(seed))
    for _ in range(count):
        said = [WORDS[n] for n in random.integers(len(WORDS), size=random.integers(low, high + 1))]
        yield spoken(said, Voice.sampled(random), random, rate=rate)


def splits(
    seed: int,
    *,
    train: int,
    valid: int,
    test: int,
    longer: int = 0,
    words: tuple[int, int] = (1, 5),
    beyond: tuple[int, int] = (6, 8),
    rate: int = 8000,
) -> Splits[Utterance]:
    """Return training, validation and test utterances of `words` words, and `longer` utterances of `beyond` words.

    >>> parts = splits(1, train=3, valid=1, test=1, longer=1)
    >>> [len(part) for part in (parts.train, parts.valid, parts.test, parts.longer)]
    [3, 1, 1, 1]
    """
    if beyond[0] <= words[1]:
        raise ValueError(f"beyond must be more than words, not {beyond} after {words}")
    parts = ((train, words), (valid, words), (test, words), (longer, beyond))
    samples = (utterances((seed, n), count=count, words=size, rate=rate) for n, (count, size) in enumerate(parts))
    return Splits(*map(tuple, samples))


def spoken(words: Sequence[str], voice: Voice, random: np.random.Generator, *, rate: int = 8000) -> Utterance:
    """Synthesise words with a voice, with pauses around and between them; `random` samples all other variation."""
    plan = _Plan(voice, random)
    plan.pause(random.uniform(0.06, 0.2))
    for place, word in enumerate(words):
        if place:
            plan.blank(random.uniform(0.03, 0.2))
        plan.word(LEXICON[word])
    plan.pause(random.uniform(0.06, 0.2))
    samples = _sounding(plan.frames(), voice, random, rate)
    return Utterance(samples, rate, tuple(words), tuple(plan.word_times), tuple(plan.letter_times))


class _Plan:
    """The sequence of sounds of an utterance, each with its duration in frames."""

    def __init__(self, voice: Voice, random: np.random.Generator) -> None:
        self._voice, self._random = voice, random
        self._phones: list[Phone] = []
        self._frames: list[int] = []
        self.word_times: list[tuple[float, float]] = []
        self.letter_times: list[tuple[float, float]] = []

    @property
    def now(self) -> float:
        return sum(self._frames) * _HOP

    def pause(self, seconds: float) -> None:
        self._phones.append(PHONES["-"])
        self._frames.append(max(1, round(seconds / _HOP)))

    def blank(self, seconds: float) -> None:
        """Add the pause between two words, which is one character of the transcript: the blank."""
        begin = self.now
        self.pause(seconds)
        self.letter_times.append((round(begin, 4), round(self.now, 4)))

    def word(self, spelling: Spelling) -> None:
        first = self.now
        last = (first, first)
        for letters, names in spelling:
            begin = self.now
            for name in names:
                phone = PHONES[name]
                slow = self._voice.slowness * self._random.uniform(0.85, 1.15)
                self._phones.append(phone)
                self._frames.append(max(2, round(phone.seconds * slow / _HOP)))
            # A silent letter gets the times of the sound before it.
            last = (round(begin, 4), round(self.now, 4)) if names else last
            self.letter_times += [last] * len(letters)
        self.word_times.append((round(first, 4), round(self.now, 4)))

    def frames(self) -> NDArray[np.float64]:
        """Return a row for each frame: three formants, amplitude of the voice, amplitude, centre and width of the
        noise."""
        table = np.array([phone.numbers for phone in self._phones])
        rows = np.repeat(table, self._frames, 0)
        for column in range(rows.shape[1]):
            smooth = np.convolve(np.pad(rows[:, column], _GLIDE // 2, "edge"), np.ones(_GLIDE) / _GLIDE, "valid")
            # Amplitudes are smoothed less than formants, so that short bursts of sound are preserved.
            rows[:, column] = smooth if column < 3 else (smooth + rows[:, column]) / 2
        return rows


def _sounding(frames: NDArray[np.float64], voice: Voice, random: np.random.Generator, rate: int) -> NDArray[np.float32]:
    """Synthesise samples of frames: pulses and noise, filtered frame by frame and added under overlapping windows."""
    hop, size = round(_HOP * rate), 2 ** round(np.log2(_SIZE * rate * 1.6))
    count = len(frames) * hop
    pulses = _pulses(count, voice, random, rate)
    breath = random.standard_normal(count + size)
    window = np.hanning(size + 1)[:size]
    starts = np.arange(len(frames)) * hop
    at = starts[:, None] + np.arange(size)
    hertz = np.arange(size // 2 + 1) * rate / size
    voiced, noisy = _responses(frames, hertz, voice)
    spectrum = np.fft.rfft(pulses[at] * window) * voiced + np.fft.rfft(breath[at] * window) * noisy
    pieces = np.fft.irfft(spectrum, size) * window
    samples = np.zeros(count + size)
    for shift in range(0, size, hop):  # adds `hop` samples of every window, which do not overlap those of other windows
        part = pieces[:, shift : shift + hop]
        wide = np.zeros((len(frames), hop))
        wide[:, : part.shape[1]] = part
        samples[shift : shift + count] += wide.ravel()
    # Each window starts at the time of its frame, so that the frame's sound is centred half a window later: remove this
    # delay.
    samples = samples[size // 2 - hop // 2 :][:count]
    samples /= np.abs(samples).max() + 1e-9
    samples = voice.loudness * (samples + voice.noise * 0.3 * random.standard_normal(count))
    return np.clip(samples, -1, 1).astype(np.float32)


def _pulses(count: int, voice: Voice, random: np.random.Generator, rate: int) -> NDArray[np.float64]:
    """Return one pulse per period of a pitch that decreases and varies."""
    time = np.arange(count + 2048) / rate
    fall = 1 - random.uniform(0.0, 0.12) * time / time[-1]
    waver = 1 + 0.03 * np.sin(2 * np.pi * random.uniform(1.5, 4) * time + random.uniform(0, 6.3))
    phase = np.cumsum(voice.pitch * fall * waver / rate)
    pulses = np.zeros(len(time))
    pulses[1:] = np.floor(phase[1:]) > np.floor(phase[:-1])
    return pulses * np.sqrt(rate / voice.pitch)


def _responses(
    frames: NDArray[np.float64], hertz: NDArray[np.float64], voice: Voice
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the frequency response of the vocal tract in each frame: for the voice, and for the noise."""
    formants = frames[:, :3] * voice.formants
    widths = np.array([60.0, 90.0, 140.0])
    near = 1 / (1 + ((hertz - formants[..., None]) / widths[:, None]) ** 2)
    envelope = (near * np.array([1.0, 0.6, 0.3])[:, None]).sum(1) + 0.01
    slope = 1 / (1 + hertz / 500) ** (0.5 * voice.tilt)
    loud, noise, centre, width = (frames[:, n, None] for n in range(3, 7))
    voiced = loud * envelope * slope
    hiss = noise * np.exp(-(((hertz - centre * voice.formants) / width) ** 2))
    return voiced, 0.4 * hiss + voice.breath * 0.2 * voiced
