"""Measures how fast the studio serves an attention map of 8,192 tokens × 32 heads: python tests/studio/measure_tiles.py

The `Trace` (recorded attention) of a model with one attention layer stores queries and keys of size 64, and the server
computes every picture of the map from them. The printed times are those of whole HTTP requests, as a browser makes
them.
"""

import random
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from conftest_studio import Studio, running

from regard.look.trace import Trace
from regard.look.watch import watch

TOKENS, HEADS, SIZE = 8192, 32, 64


class Layer(nn.Module):
    """One attention call; its values have only 8 features, because the attention weights do not depend on them."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x[..., :8], is_causal=True)


class Model(nn.Module):
    """A model in which the attention layer has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def watched() -> Trace:
    """Return attention maps (a `Trace`) in which each token attends to its neighbours, to tokens at multiples of a
    distance, and to a few fixed positions."""
    generator = torch.Generator().manual_seed(1)
    place = torch.arange(TOKENS)[:, None] / torch.logspace(0.3, 3, SIZE // 2)
    waves = torch.cat([place.sin(), place.cos()], -1) * torch.linspace(1.0, 1.7, HEADS)[:, None, None]
    x = waves + 0.5 * torch.randn(HEADS, TOKENS, SIZE, generator=generator)
    x[:, :: TOKENS // 7] *= 1.3
    model = Model()
    with torch.no_grad(), watch(model, title=f"{TOKENS:,} tokens × {HEADS} heads") as trace:
        model(x[None])
    return trace


def timed(studio: Studio, path: str) -> float:
    """Return the duration of one request in milliseconds."""
    start = time.perf_counter()
    answer = studio.get(path)
    assert answer.status == 200, answer.body[:200]
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    """Print the times of the first picture of a map, of tiles of several sizes, and of a row."""
    trace = watched()
    print(f"{trace.records[0]}; kept {trace.nbytes / 2**20:.0f} MiB")
    draw = random.Random(0)
    with running((), [trace]) as studio:
        base = "/api/traces/trace-1"
        timed(studio, f"{base}/records")
        thumbs = [timed(studio, f"{base}/thumbnail?record=0&head={head}") for head in range(HEADS)]
        first = [timed(studio, f"{base}/map?record=0&head={head}") for head in range(5)]
        print(f"32 thumbnails        {sum(thumbs):7.0f} ms together")
        print(f"first picture        {statistics.median(first):7.0f} ms, slowest {max(first):.0f} (5 heads)")
        for rows in (4096, 2048, 1024, 512, 256, 64):
            times = []
            for _ in range(8):
                row, column = draw.randrange(TOKENS - rows), draw.randrange(TOKENS - rows)
                place = f"row={row}&column={column}&rows={rows}&columns={rows}"
                times.append(timed(studio, f"{base}/tile?record=0&head={draw.randrange(4)}&{place}"))
            print(f"tile {rows:4} × {rows:4}     {statistics.median(times):7.0f} ms, slowest {max(times):.0f}")
        times = [timed(studio, f"{base}/rows?record=0&head=0&row={draw.randrange(TOKENS)}") for _ in range(8)]
        print(f"one row              {statistics.median(times):7.0f} ms, slowest {max(times):.0f}")


if __name__ == "__main__":
    main()
