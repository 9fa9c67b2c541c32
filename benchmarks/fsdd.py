"""Free Spoken Digit Dataset as folders for `regard train speech`: single digits, or strings of joined digits.

    python benchmarks/fsdd.py fsdd/recordings out-digits                    # single digits
    python benchmarks/fsdd.py fsdd/recordings out-strings --strings 6000    # 3 to 7 digits of one speaker, joined
    python benchmarks/fsdd.py fsdd/recordings out-theo --without theo       # tested on a speaker who is not trained on
    regard train speech --preset fsdd --data out-strings --out runs/strings

The test part has the takes 0 to 4, as the dataset's page says, the validation part 5 and 6, the training part the
others; strings of a part only contain its own takes. `--speeds` adds copies of the training part that are played
slower and faster. The parts are JSON lines with the start and end of each digit in seconds.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np

from regard.data.audio.sound_files import Samples, read_sound, resampled, wav_bytes

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RATE = 8000
TEST, VALID = range(5), range(5, 7)  # numbers of the takes in the test and validation parts
TESTED = (3, 7)  # smallest and largest number of digits of a string outside of training
PAUSE = (0.05, 0.3)  # seconds between two digits of a string


class Clip(NamedTuple):
    digit: int
    speaker: str
    take: int
    samples: Samples


def clips(folder: Path) -> list[Clip]:
    """Return every recording, named {digit}_{speaker}_{take}.wav."""
    recordings = []
    for path in sorted(folder.glob("*.wav")):
        digit, speaker, take = path.stem.split("_")
        recordings.append(Clip(int(digit), speaker, int(take), read_sound(path, RATE, longest=10.0)))
    if not recordings:
        raise SystemExit(f"{folder}: no recordings")
    return recordings


def joined(digits: list[Clip], dice: random.Random) -> tuple[Samples, list[list[float]]]:
    """Return concatenated digits with pauses between them, and the start and end of each digit in seconds."""
    parts: list[Samples] = []
    times = []
    count = 0
    for place, clip in enumerate(digits):
        if place:
            parts.append(np.zeros(round(dice.uniform(*PAUSE) * RATE), np.float32))
            count += len(parts[-1])
        parts.append(clip.samples)
        times.append([round(count / RATE, 4), round((count + len(clip.samples)) / RATE, 4)])
        count += len(clip.samples)
    return np.concatenate(parts), times


def strings(part: list[Clip], count: int, lengths: tuple[int, int], dice: random.Random) -> list[list[Clip]]:
    """Return strings of digits, each by one speaker."""
    by_speaker: dict[str, list[Clip]] = {}
    for clip in part:
        by_speaker.setdefault(clip.speaker, []).append(clip)
    return [dice.choices(by_speaker[dice.choice(sorted(by_speaker))], k=dice.randint(*lengths)) for _ in range(count)]


def write(name: str, out: Path, said: list[list[Clip]], dice: random.Random, speeds: list[float]) -> None:
    rows = []
    for number, digits in enumerate(said):
        for speed in speeds:
            samples, times = joined(digits, dice)
            if speed != 1.0:
                samples = resampled(samples, round(RATE * speed), RATE)
            sound = f"sounds/{name}-{number}-{speed:g}.wav"
            (out / sound).write_bytes(wav_bytes(samples, RATE))
            text = " ".join(WORDS[clip.digit] for clip in digits)
            seconds = [[round(begin / speed, 4), round(end / speed, 4)] for begin, end in times]
            rows.append(json.dumps({"sound": sound, "text": text, "times": seconds}))
    (out / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{out / name}.jsonl: {len(rows):,} recordings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--strings", type=int, default=0, help="training strings; 0: single digits")
    parser.add_argument("--lengths", type=int, nargs=2, default=(3, 7), help="digits of a training string")
    parser.add_argument("--without", help="a speaker who is tested on and not trained on")
    parser.add_argument("--speeds", default="1", help="of the training part, such as 0.9,1,1.1")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    (options.out / "sounds").mkdir(parents=True, exist_ok=True)
    every = clips(options.recordings)
    others = [clip for clip in every if clip.speaker != options.without]
    parts = {
        "train": [clip for clip in others if clip.take not in (*TEST, *VALID)],
        "valid": [clip for clip in others if clip.take in VALID],
        "test": [clip for clip in every if clip.take in TEST]
        if options.without is None
        else [clip for clip in every if clip.speaker == options.without],
    }
    counts = {"train": options.strings, "valid": 200, "test": 500}
    speeds = [float(speed) for speed in options.speeds.split(",")]
    for name, part in parts.items():
        dice = random.Random(f"{options.seed} {name}")
        said = [[clip] for clip in part]
        if options.strings:
            lengths = tuple(options.lengths) if name == "train" else TESTED
            said = strings(part, counts[name], lengths, dice)
        write(name, options.out, said, dice, speeds if name == "train" else [1.0])


if __name__ == "__main__":
    main()
