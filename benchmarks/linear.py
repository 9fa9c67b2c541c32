"""Linear attention compared with scaled_dot_product_attention: time, extra memory, accuracy. Prints the tables of
docs/linear.md.

OMP_NUM_THREADS=1 python benchmarks/linear.py cost                # each case in a process of its own
OMP_NUM_THREADS=1 python benchmarks/linear.py cost --device cuda --lengths 1024 8192 65536
OMP_NUM_THREADS=1 python benchmarks/linear.py decode --lengths 1024 4096 16384 65536
OMP_NUM_THREADS=1 python benchmarks/linear.py accuracy
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from regard.core.linear import linear_step

HEADS, SIZE = 8, 64
WAYS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "softmax": lambda x, causal: F.scaled_dot_product_attention(x, x, x, is_causal=causal),
    "performer": lambda x, causal: regard.linear_attention(x, x, x, causal=causal),
    "elu": lambda x, causal: regard.linear_attention(x, x, x, features=regard.EluFeatures(), causal=causal),
}


def peak(device: str) -> int:
    """Return the peak memory of this process so far, in bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def clock(device: str) -> float:
    """Return a time in seconds. On the CPU it is processor time, which other programs disturb less than wall-clock
    time."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def measure(way: str, length: int, causal: bool, train: bool, device: str, dtype: torch.dtype, repeats: int) -> None:
    """Print milliseconds and extra MiB of one case."""

    def once(x: Tensor) -> None:
        output = WAYS[way](x, causal)
        if train:
            output.backward(torch.ones_like(output))
            x.grad = None

    def make(length: int) -> Tensor:
        return torch.randn(1, HEADS, length, SIZE, device=device, dtype=dtype, requires_grad=train)

    once(make(128))  # a first call loads libraries, starts threads and samples default features
    checkpoint(torch.exp, make(1), use_reentrant=False)
    x = make(length)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = peak(device)
    once(x)
    extra = peak(device) - before
    print(f"{fastest(partial(once, x), repeats, device) * 1e3:.1f} {extra / 2**20:.0f}")


def cost(arguments: argparse.Namespace) -> None:
    """Print a Markdown table of `ms / MiB`, with a row for each length."""
    for train in (False, True):
        for causal in (False, True):
            print(f"\n{'forward and backward' if train else 'forward'}, {'causal' if causal else 'all keys'}\n")
            print("| n | " + " | ".join(WAYS) + " |\n|---:|" + "---:|" * len(WAYS))
            for length in arguments.lengths:
                cells = []
                for way in WAYS:
                    case = ["--case", way, str(length), str(int(causal)), str(int(train))]
                    settings = ["--device", arguments.device, "--dtype", arguments.dtype]
                    command = [sys.executable, __file__, "cost", *settings, "--repeats", str(arguments.repeats), *case]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    cells.append(" / ".join(done.stdout.split()))
                print(f"| {length:,} | " + " | ".join(cells) + " |", flush=True)


def decode(arguments: argparse.Namespace) -> None:
    """Print a Markdown table of milliseconds for one more token after a prefix of each length; softmax uses a full
    cache."""
    print("| past | softmax | performer | elu |\n|---:|---:|---:|---:|")
    for length in arguments.lengths:
        past = torch.randn(1, HEADS, length, SIZE, device=arguments.device, dtype=getattr(torch, arguments.dtype))
        token = torch.randn_like(past[:, :, :1])
        calls: list[Callable[[], object]] = [partial(F.scaled_dot_product_attention, token, past, past)]
        for features in (None, regard.EluFeatures()):
            _, state = linear_step(None, past, past, past, features)
            calls.append(partial(linear_step, state, token, token, token, features))
        cells = [fastest(call, 20 * arguments.repeats, arguments.device) for call in calls]
        print(f"| {length:,} | " + " | ".join(f"{cell * 1e3:.2f}" for cell in cells) + " |", flush=True)


def fastest(call: Callable[[], object], repeats: int, device: str) -> float:
    """Return seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = clock(device)
        call()
        times.append(clock(device) - start)
    return min(times)


def accuracy(length: int = 1024, draws: int = 5) -> None:
    """Print the relative distance of Performer attention from softmax attention, for increasing standard deviation of
    the scores."""
    counts = (64, 266, 1024, 4096)
    print("| spread of the scores | mean of the values | " + " | ".join(f"m = {count}" for count in counts) + " |")
    print("|---:|---:|" + "---:|" * len(counts))
    for spread in (0.25, 0.5, 1.0, 2.0, 4.0):
        generator = torch.Generator().manual_seed(0)
        query, key, value = torch.randn(3, HEADS, length, SIZE, generator=generator)
        query, key = query * spread**0.5, key * spread**0.5  # `spread` is the standard deviation of q·k/√d
        exact = F.scaled_dot_product_attention(query, key, value)
        errors = [(value.mean(-2, keepdim=True) - exact).norm() / exact.norm()]
        for count in counts:
            draw = [regard.PerformerFeatures.draw(SIZE, count, generator=generator) for _ in range(draws)]
            outputs = [regard.linear_attention(query, key, value, features=features) for features in draw]
            errors.append(torch.stack([(output - exact).norm() / exact.norm() for output in outputs]).mean())
        print(f"| {spread} | " + " | ".join(f"{float(error):.2f}" for error in errors) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "decode", "accuracy"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", nargs=4, metavar=("WAY", "LENGTH", "CAUSAL", "TRAIN"), help="one case alone")
    arguments = parser.parse_args()
    if arguments.what == "accuracy":
        accuracy()
    elif arguments.what == "decode":
        with torch.no_grad():
            decode(arguments)
    elif arguments.case:
        way, length, causal, train = arguments.case
        dtype = getattr(torch, arguments.dtype)
        measure(way, int(length), causal == "1", train == "1", arguments.device, dtype, arguments.repeats)
    else:
        cost(arguments)


if __name__ == "__main__":
    main()
