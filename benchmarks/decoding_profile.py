"""A profile of one beam search of a Transformer-base. `regard bench decoding` compares its time with other libraries.

    python benchmarks/decoding_profile.py --device cpu           beam 4, 16 sentences × 24 tokens, vocabulary 8,000
    python benchmarks/decoding_profile.py --device cuda          beam 4, 128 sentences × 48 tokens, vocabulary 32,000
    python benchmarks/decoding_profile.py --tiny                 a check that everything runs

Prints the operations of the search (on CUDA, the kernels), sorted by the time of each without the operations that it
calls. The model's weights are random.
"""

import sys
import time
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from regard.bench import decoding_bench as bench
from regard.decode.graph_search import Captures
from regard.models.quantized import quantize


def profiled(setting: bench.Setting, device: str, precision: str, rows: int) -> None:
    """Run three searches as a warm-up, then one under the profiler, and print its operations."""
    model = bench.model_of(setting, device)
    if precision == "int8":
        model = quantize(model)
    decode = bench.regard(model, setting.width, Captures())
    source = torch.randint(3, setting.vocabulary, (setting.sentences, setting.tokens), device=device)
    for _ in range(3):
        begin = time.perf_counter()
        decode(source, setting.tokens)
        seconds = time.perf_counter() - begin
        print(f"{seconds * 1e3:.1f} ms, {setting.sentences / seconds:.1f} sentences/s", flush=True)
    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        decode(source, setting.tokens)
    events = seen.key_averages()
    times = {event: event.self_device_time_total if cuda else event.self_cpu_time_total for event in events}
    print(f"{sum(times.values()) / 1e3:.1f} ms in {sum(event.count for event in events)} calls")
    for event in sorted(times, key=lambda event: -times[event])[:rows]:
        print(f"{times[event] / 1e3:9.2f} ms  {event.count:6d} ×  {event.key[:90]}")


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    tiny: Annotated[bool, typer.Option("--tiny", help="Sizes too small to mean anything.")] = False,
    precision: Annotated[str, typer.Option(help="Of the profile on the CPU: float32 or int8.")] = "float32",
    rows: Annotated[int, typer.Option(help="Lines of the profile.")] = 25,
) -> None:
    """Print the profile."""
    profiled(bench.TINY if tiny else bench.SETTINGS[device], device, precision, rows)


if __name__ == "__main__":
    typer.run(main)
