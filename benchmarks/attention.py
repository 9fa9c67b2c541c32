"""Ten typical calls of `regard.attention`: the backend of each, the reasons against other backends, its estimated cost,
and its measured time.

python benchmarks/attention.py                the table with times
python benchmarks/attention.py --no-time      the plan alone: nothing is computed, so any length is fast
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch.utils.benchmark import Timer

import regard

HEADS, SIZE = 8, 64


def calls(length: int, device: str) -> dict[str, Callable[[], tuple[tuple[torch.Tensor, ...], dict[str, Any]]]]:
    """Return, by the name of each call, a function that creates the arguments of `regard.attention`, so that the
    arguments of only one call are in memory.
    """

    def draw(queries: int = length, heads: int = HEADS) -> torch.Tensor:
        return torch.randn(1, heads, queries, SIZE, device=device, requires_grad=True)

    def inputs(queries: int = length, groups: int = HEADS) -> tuple[torch.Tensor, ...]:
        return draw(queries), draw(heads=groups), draw(heads=groups)

    lengths = torch.tensor([length * 3 // 4], device=device)
    documents = torch.arange(length, device=device) // max(1, length // 4)
    packed = regard.segments(documents, documents) & regard.causal()
    slopes = torch.tensor([2.0 ** -(head + 1) for head in range(HEADS)], device=device)
    additive = regard.Additive(torch.randn(SIZE, device=device))
    return {
        "nothing but `query, key, value`": lambda: (inputs(), {}),
        "`mask=causal()`": lambda: (inputs(), {"mask": regard.causal()}),
        "`mask=padding(lengths)`": lambda: (inputs(), {"mask": regard.padding(lengths)}),
        "one new query, 2 key heads, `mask=causal(offset=…)`": lambda: (
            inputs(1, 2),
            {"mask": regard.causal(offset=length - 1)},
        ),
        "`mask=window(128, 0)`": lambda: (inputs(), {"mask": regard.window(128, 0)}),
        "`mask=segments(…) & causal()`": lambda: (inputs(), {"mask": packed}),
        "`bias=alibi(slopes), mask=causal()`": lambda: (
            inputs(),
            {"bias": regard.alibi(slopes), "mask": regard.causal()},
        ),
        "`score=Additive(w)`": lambda: (inputs(), {"score": additive}),
        "`normalize=Sparsemax()`": lambda: (inputs(), {"normalize": regard.Sparsemax()}),
        "`weights=top(8)`": lambda: (inputs(), {"weights": regard.top(8)}),
    }


def milliseconds(tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> tuple[float, float]:
    """Return the median time of the forward pass, and that of the forward and backward pass together."""

    def forward() -> torch.Tensor:
        return regard.attention(*tensors, **options).output

    def both() -> None:
        forward().sum().backward()

    timers = (Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads()) for run in (forward, both))
    first, second = (1e3 * timer.blocked_autorange(min_run_time=0.3).median for timer in timers)
    return first, second


def main(
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 512,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    time: Annotated[bool, typer.Option(help="Make the calls, too.")] = True,
) -> None:
    """Print the table, in Markdown."""
    torch.manual_seed(0)
    print(f"{HEADS} heads of size {SIZE}, {length} tokens, float32, {device}, torch {torch.__version__}\n")
    print("| call | backend | refused | GFLOP | MiB |" + (" forward, ms | and backward, ms |" if time else ""))
    print("|---|---|---|---|---|" + ("---|---|" if time else ""))
    for name, make in calls(length, device).items():
        tensors, options = make()
        plan = regard.explain(*tensors, **options)
        refused = "; ".join(f"{backend}: {reason}" for backend, reason in plan.refused.items()) or "none"
        row = f"| {name} | {plan.backend} | {refused} | {plan.flops / 1e9:.3g} | {plan.bytes / 2**20:.3g} |"
        if time:
            row += "".join(f" {duration:,.1f} |" for duration in milliseconds(tensors, options))
        print(row, flush=True)


if __name__ == "__main__":
    typer.run(main)
