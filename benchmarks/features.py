"""Log-mel features per second, on the CPU and on a GPU if there is one; with one CPU thread, per second of processor
time.

python benchmarks/features.py [--rate 16000] [--bands 80] [--minutes 10]
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch

from regard.nn.logmel import LogMel


def measure(device: str, rate: int, bands: int, minutes: float) -> None:
    layer = LogMel(rate, bands=bands).to(device)
    sound = torch.randn(round(6 * minutes), 10 * rate, device=device)  # six recordings of ten seconds per minute
    clock = time.perf_counter if device == "cuda" or torch.get_num_threads() > 1 else time.process_time
    best = float("inf")
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        began = clock()
        frames = layer(sound)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, clock() - began)
    count = frames.shape[0] * frames.shape[1]
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    speed = f"{count / best:,.0f} frames of {bands} bands a second, {count / best / 100:,.0f} × real time"
    print(f"{device}{threads}: {speed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=16_000)
    parser.add_argument("--bands", type=int, default=80)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        measure(device, options.rate, options.bands, options.minutes)


if __name__ == "__main__":
    main()
