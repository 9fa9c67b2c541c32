"""Training step of a Transformer-base of regard, nn.Transformer and HF Marian, eager and compiled, in one run.

    python benchmarks/transformer.py --device cuda            all contenders, about three minutes (most of it compiling)
    python benchmarks/transformer.py --device cuda --only regard-compiled,torch-compiled
    python benchmarks/transformer.py --device cpu --tiny      a check that everything runs

All contenders do the same work: 6 + 6 layers of size 512, 8 heads, feed-forward 2048 with ReLU, dropout 0.1 on weights,
activations, residuals and embeddings, one embedding for source, target and output, label smoothing 0.1, AdamW (fused),
bfloat16 autocast over float32 parameters, 256 × 32 source and 256 × 32 target tokens of a vocabulary of 32,000.
torch.compile compiles the whole loss of nn.Transformer and of Marian; `torch-graphed` also runs the step as one CUDA
graph, as regard does. `regard-compiled` is `compile_layers` and one CUDA graph for each step, `regard-whole` compiles
the whole loss instead. The line of a contender is printed as soon as it is measured.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels import cuda_graphs
from regard.models.frame import EncoderDecoder
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder
from regard.models.transformer.layer_compilation import compile_layers
from regard.nn.cross_entropy import linear_cross_entropy

SMOOTHING = 0.1


@dataclass(frozen=True)
class Setting:
    batch: int = 256
    length: int = 32
    vocabulary: int = 32000
    size: int = 512
    heads: int = 8
    hidden: int = 2048
    layers: int = 6
    dropout: float = 0.1
    backend: str = "inductor"


TINY = Setting(batch=5, length=7, vocabulary=101, size=32, heads=4, hidden=64, layers=2, backend="aot_eager")


@dataclass(frozen=True)
class Row:
    side: str
    milliseconds: float
    tokens_per_second: float
    peak_mib: float
    compile_seconds: float
    first_loss: float
    last_loss: float


# ---------------------------------------------------------------- the contenders: functions of (source, prefix, target)


def regard_model(setting: Setting, device: str) -> EncoderDecoder:
    embedding = nn.Embedding(setting.vocabulary, setting.size)
    nn.init.normal_(embedding.weight, std=setting.size**-0.5)
    options: dict[str, Any] = {
        "layers": setting.layers, "heads": setting.heads, "feed_forward": setting.hidden, "norm": "post",
        "dropout": setting.dropout, "embedding": embedding,
    }  # fmt: skip
    encoder = TransformerEncoder(setting.vocabulary, setting.size, **options)
    return EncoderDecoder(encoder, TransformerDecoder(setting.vocabulary, setting.size, **options)).to(device)


class Torch(nn.Module):
    """nn.Transformer with the additions of its tutorial: embeddings, positions, a tied output."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embedding = nn.Embedding(setting.vocabulary, setting.size)
        nn.init.normal_(self.embedding.weight, std=setting.size**-0.5)
        self.body = nn.Transformer(
            setting.size, setting.heads, setting.layers, setting.layers, setting.hidden, setting.dropout,
            batch_first=True,
        )  # fmt: skip
        self.dropout = nn.Dropout(setting.dropout)
        angles = torch.arange(setting.length)[:, None] / 10000 ** (torch.arange(0, setting.size, 2) / setting.size)
        self.register_buffer("positions", torch.stack((angles.sin(), angles.cos()), -1).flatten(-2))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(setting.length))

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens) * self.embedding.embedding_dim**0.5 + self.positions)

    def forward(self, source: Tensor, prefix: Tensor) -> Tensor:
        done = self.body(self.embedded(source), self.embedded(prefix), tgt_mask=self.mask, tgt_is_causal=True)
        return F.linear(done, self.embedding.weight)


def marian_model(setting: Setting) -> nn.Module:
    from transformers import MarianConfig, MarianMTModel

    return MarianMTModel(
        MarianConfig(
            vocab_size=setting.vocabulary, d_model=setting.size, encoder_layers=setting.layers,
            decoder_layers=setting.layers, encoder_attention_heads=setting.heads,
            decoder_attention_heads=setting.heads, encoder_ffn_dim=setting.hidden, decoder_ffn_dim=setting.hidden,
            activation_function="relu", dropout=setting.dropout, attention_dropout=setting.dropout,
            activation_dropout=setting.dropout, scale_embedding=True, max_position_embeddings=1024, pad_token_id=0,
            eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None, use_cache=False,
            attn_implementation="sdpa",
        )
    )  # fmt: skip


def plain_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=SMOOTHING)


def sequence_loss(model: EncoderDecoder, source: Tensor, prefix: Tensor, target: Tensor) -> Tensor:
    """Return mean cross-entropy of the target tokens, without all logits in memory."""
    states = model(source, prefix).states
    loss, count = linear_cross_entropy(states, model.output_weight, target, bias=model.output_bias, smoothing=SMOOTHING)
    return loss / count.clamp(min=1)


def in_bfloat16(loss: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    def narrow(*batch: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss(*batch)

    return narrow


def contender(side: str, setting: Setting, device: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Return the model and the loss function of the contender `side`, compiled as its name says."""
    peer, _, how = side.partition("-")
    if peer == "regard":
        ours = regard_model(setting, device)
        model: nn.Module = ours

        def loss(source: Tensor, prefix: Tensor, target: Tensor) -> Tensor:
            return sequence_loss(ours, source, prefix, target)

    elif peer == "torch":
        model = theirs = Torch(setting).to(device)

        def loss(source: Tensor, prefix: Tensor, target: Tensor) -> Tensor:
            return plain_loss(theirs(source, prefix), target)

    else:
        model = marian = marian_model(setting).to(device)

        def loss(source: Tensor, prefix: Tensor, target: Tensor) -> Tensor:
            return plain_loss(marian(input_ids=source, decoder_input_ids=prefix).logits, target)

    loss = in_bfloat16(loss, device)
    if side == "regard-compiled":
        compile_layers(model, dynamic=False, backend=setting.backend)
    elif how in ("compiled", "graphed", "whole"):
        loss = torch.compile(loss, dynamic=False, backend=setting.backend)
    return model.train(), loss


SIDES = [
    "regard-compiled", "torch-compiled", "regard-eager", "torch-eager", "marian-eager", "torch-graphed",
    "marian-compiled", "regard-whole",
]  # fmt: skip


# ---------------------------------------------------------------- measurement


def batch_of(setting: Setting, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (setting.batch, setting.length)
    source, target = (torch.randint(2, setting.vocabulary, shape, generator=generator) for _ in range(2))
    prefix = torch.cat((torch.ones(setting.batch, 1, dtype=torch.long), target[:, :-1]), 1)
    return source.to(device), prefix.to(device), target.to(device)


def step_of(side: str, model: nn.Module, loss: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    cuda = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda, capturable=cuda)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        batch_loss = loss(*batch)
        batch_loss.backward()
        optimizer.step()
        return batch_loss.detach()

    return graphed(step) if cuda and side in ("regard-compiled", "regard-whole", "torch-graphed") else step


def graphed(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return forward pass, backward pass and update as one CUDA graph, captured at the first batch; shapes are
    fixed."""
    recorded: list[tuple[list[Tensor], torch.cuda.CUDAGraph, Tensor]] = []

    def run(*batch: Tensor) -> Tensor:
        if not recorded:
            held, device = [t.clone() for t in batch], batch[0].device
            with cuda_graphs.aside(device):
                for _ in range(3):  # warm-up: lazy initialisation, compilation, and memory of the allocator
                    step(*held)
            recorded.append((held, *cuda_graphs.capture(lambda: step(*held), device)))
        held, graph, loss = recorded[0]
        for place, tensor in zip(held, batch, strict=True):
            place.copy_(tensor)
        graph.replay()
        return loss

    return run


def timed(step: Callable[[], Any], count: int, device: str) -> Iterator[float]:
    """Yield milliseconds of each step; steps are enqueued without synchronisation, as in training."""
    if device != "cuda":
        for _ in range(count):
            start = time.perf_counter()
            step()
            yield (time.perf_counter() - start) * 1e3
        return
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    yield from (a.elapsed_time(b) for a, b in pairwise(events))


def measured(side: str, setting: Setting, device: str, count: int, shown: int) -> Row:
    """Return the table's row of a contender; for `regard-compiled`, also print the `shown` kernels that take the
    longest.
    """
    cuda = device == "cuda"
    torch.manual_seed(11)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model, loss = contender(side, setting, device)
    batch = batch_of(setting, device)
    step = step_of(side, model, loss, device)
    start = time.perf_counter()
    first = step(*batch).item()
    compiled = time.perf_counter() - start
    for _ in range(min(10, count)):
        step(*batch)
    times = list(timed(lambda: step(*batch), count, device))
    last = step(*batch).item()
    typical = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else float("nan")
    tokens = 2 * setting.batch * setting.length
    if shown and cuda and side == "regard-compiled":
        kernels(side, lambda: step(*batch), shown)
    return Row(side, typical, tokens / typical * 1e3, peak, compiled, first, last)


def kernels(side: str, step: Callable[[], Any], most: int) -> None:
    """Print the time of a step by kernel."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in events)
    print(f"kernels of {side}: {total / 1e3:.2f} ms in {sum(e.count for e in events)} launches")
    for event in events[:most]:
        print(f"  {event.device_time_total / 1e3:8.3f} ms  {event.count:5d} ×  {event.key[:90]}", flush=True)


def agreement(setting: Setting, device: str) -> dict[str, float]:
    """Return regard's training loss under bfloat16 autocast, and the loss from all logits in float32, of the same
    weights, without dropout."""
    torch.manual_seed(11)
    model = regard_model(setting, device).eval()
    source, prefix, target = batch_of(setting, device)
    with torch.no_grad():
        rows = [slice(i, i + 32) for i in range(0, setting.batch, 32)]  # the logits of 32 rows are stored at a time
        plain = [
            plain_loss(model.logits(model(source[r], prefix[r]).states).float(), target[r]) * len(source[r])
            for r in rows
        ]
        exact = sum(x.item() for x in plain) / setting.batch
        with torch.autocast(device, torch.bfloat16):
            rounded = sequence_loss(model, source, prefix, target).item()
    return {"loss_float32": exact, "loss_bfloat16": rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="comma-separated beginnings of names")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="the N longest kernels of our step too")
    arguments = parser.parse_args()
    setting = TINY if arguments.tiny else Setting()
    only = [name for name in arguments.only.split(",") if name]
    sides = [side for side in SIDES if not only or any(side.startswith(name) for name in only)]

    print(json.dumps(agreement(setting, arguments.device)), flush=True)
    if not arguments.json:
        print(f"{'side':<16} {'ms':>8} {'tokens/s':>11} {'peak MiB':>9} {'compile s':>10} {'loss':>7} {'after':>7}")
    rows: list[Row] = []
    for side in sides:
        try:
            row = measured(side, setting, arguments.device, arguments.steps, arguments.profile)
        except Exception as error:  # a contender that fails does not stop the others
            print(f"{side:<16} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            gc.collect()
        rows.append(row)
        if arguments.json:
            print(json.dumps(asdict(row)), flush=True)
            continue
        print(
            f"{row.side:<16} {row.milliseconds:8.2f} {row.tokens_per_second:11,.0f} {row.peak_mib:9,.0f} "
            f"{row.compile_seconds:10.1f} {row.first_loss:7.3f} {row.last_loss:7.3f}",
            flush=True,
        )
    ours = [row.milliseconds for row in rows if row.side.startswith("regard")]
    theirs = {row.side: row.milliseconds for row in rows if not row.side.startswith("regard")}
    if ours and theirs:
        best = min(theirs, key=lambda side: theirs[side])
        print(f"ours is {theirs[best] / min(ours):.2f} × the best of the others ({best})")


if __name__ == "__main__":
    main()
