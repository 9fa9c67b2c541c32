"""The `regard bench` commands. Each command imports its module of measurements only when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(help="Measure regard and its peers on this machine.", no_args_is_help=True, rich_markup_mode=None)

Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; cuda where there is one.", metavar="DEVICE")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes: does everything run? The times mean nothing.")]


@bench.command("attention")
def _attention(
    as_json: Json = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Only cases with NAME in their name; may be repeated.", metavar="NAME")
    ] = None,
    quick: Quick = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for benchmarks.md and its chart.", file_okay=False, metavar="DIR")
    ] = None,
) -> None:
    """Measure time, memory and error of every attention mechanism against other libraries."""
    from regard.bench.attention_bench import attention

    attention(only=only or [], quick=quick, as_json=as_json, out=out)


@bench.command("decoding")
def _decoding(
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    quick: Quick = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder whose decoding.md gets the table.", file_okay=False, metavar="DIR")
    ] = None,
) -> None:
    """Measure beam search in sentences per second, against HF generate and CTranslate2 with the same weights."""
    from regard.bench.decoding_bench import decoding

    decoding(device=device, quick=quick, as_json=as_json, out=out)


@bench.command("layers")
def _layers(
    lengths: Annotated[
        str | None,
        typer.Option(help="Positions, with commas between; 128 to 8192 on a CPU, to 32768 on CUDA.", metavar="N,N,…"),
    ] = None,
    width: Annotated[int, typer.Option("--size", help="Features of every layer.", min=2, max=8192, metavar="N")] = 256,
    kernel: Annotated[int, typer.Option(help="Positions a convolution reads.", min=2, max=1024, metavar="N")] = 7,
    reach: Annotated[
        int, typer.Option(help="Positions to either side of restricted attention.", min=1, metavar="N")
    ] = 128,
    device: Device = None,
    as_json: Json = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder whose layers.md gets the tables, and their drawing.", file_okay=False, metavar="DIR"),
    ] = None,
) -> None:
    """Measure time, memory and steps over length: self-attention, recurrent, convolutional and linear layers."""
    from regard.bench.layers_bench import layers

    layers(lengths=lengths, width=width, kernel=kernel, reach=reach, device=device, as_json=as_json, out=out)


@bench.command("scaling")
def _scaling(
    workers: Annotated[
        str | None,
        typer.Option(help="Numbers of processes, with commas between; 1,2,4 on a CPU.", metavar="N,N,…"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps that are timed; the best counts. 3 on a CPU, 12 on a GPU.", min=1, metavar="N"),
    ] = None,
    device: Device = None,
    as_json: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder whose scaling.md gets the tables.", file_okay=False, metavar="DIR")
    ] = None,
) -> None:
    """Measure tokens per second, memory and bytes sent of DDP, FSDP2 and context parallelism, with a checked model."""
    from regard.bench.scaling_bench import scaling

    scaling(workers=workers, steps=steps, device=device, as_json=as_json, out=out)


@bench.command("cold")
def _cold(
    device: Device = None,
) -> None:
    """Measure the first call of each mechanism in new processes, with empty caches and with filled ones."""
    from regard.bench.cold_start import cold

    cold(device)


@bench.command("sweep")
def _sweep(
    seed: Annotated[int, typer.Option(help="Another seed draws other calls.", metavar="N")] = 0,
    cases: Annotated[int, typer.Option(help="The number of calls.", min=1, metavar="N")] = 120,
    case: Annotated[int | None, typer.Option(help="Measure the case of this index alone.", min=0, metavar="N")] = None,
    ordinary: Annotated[bool, typer.Option("--ordinary", help="Measure a fixed list of ordinary calls.")] = False,
    device: Device = None,
    minutes: Annotated[
        float | None, typer.Option(help="Draw no further case after this time.", min=0, metavar="N")
    ] = None,
    processes: Annotated[
        int, typer.Option(help="Compile all cases in this many processes first.", min=0, metavar="N")
    ] = 0,
    to: Annotated[
        str | None, typer.Option("--json", help="Write everything to a file as JSON; - prints it.", metavar="FILE")
    ] = None,
) -> None:
    """Measure random calls of every kind against the fastest alternative in torch."""
    from regard.bench.sweep.command import sweep

    sweep(
        seed=seed,
        cases=cases,
        only=case,
        fixed=ordinary,
        device=device,
        minutes=minutes,
        to=to,
        processes=processes,
    )
