"""Additive kernels on a GPU: errors against float64 first, then times of tile choices, kernel by kernel.

    python benchmarks/additive_gpu.py            everything, about four minutes
    python benchmarks/additive_gpu.py --only series_forward

Each item survives the others' failures.  Items are first run once in several processes, which fills the compilers'
caches on disk, and then one by one for the numbers.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch import Tensor

from regard.core.backends.additive import additive_attention
from regard.core.backends.additive import triton_launch as launch
from regard.core.backends.additive.triton_launch import Block, Inputs
from regard.core.backends.additive.triton_pairs import Pairs

BIG = {"b": 1, "h": 8, "q": 4096, "k": 4096, "f": 64, "e": 64}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": torch.nn.functional.gelu,
    "leaky_relu": torch.nn.functional.leaky_relu,
}


# ---------------------------------------------------------------- errors


def plain(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, activation: str, allowed: Tensor | None = None,
          bias: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification: every pair-feature in memory."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    weight = weight if weight.dim() == 1 else weight[:, None, None, :]
    x = ACTIVATIONS[activation](query[:, :, :, None] + key[:, :, None])
    scores = (x * weight).sum(-1) + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    pivot = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    return torch.exp(scores - pivot[..., None]).to(value.dtype) @ value, lse


def error(found: Tensor, true: Tensor) -> float:
    return ((found.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30)).item()


def allowed_pairs(settings: dict[str, Any], b: int, h: int, q: int, k: int) -> Tensor:
    i, j = torch.arange(q, device="cuda")[:, None], torch.arange(k, device="cuda")[None, :]
    allowed = torch.ones(b, h, q, k, dtype=torch.bool, device="cuda")
    low, high = settings.get("band", (None, None))
    allowed &= (j - i >= low) if low is not None else True
    allowed &= (j - i <= high) if high is not None else True
    if "lengths" in settings:
        allowed &= j < settings["lengths"][:, None, None, None]
    if "query_ids" in settings:
        allowed &= settings["query_ids"][:, None, :, None] == settings["key_ids"][:, None, None, :]
    if "mask" in settings:
        allowed &= settings["mask"]
    return allowed


def check(name: str, dtype: torch.dtype, *, settings: Callable[..., dict[str, Any]] | None = None, scale: float = 1.0,
          shift: float = 0.0, activation: str = "tanh", form: str = "auto", b: int = 2, h: int = 4, g: int = 2,
          q: int = 211, k: int = 307, f: int = 61, e: int = 53) -> str:  # fmt: skip
    """Errors of output, log-sum-exp and gradients, and in brackets those of plain arithmetic in the same type."""
    torch.manual_seed(len(name))
    made = dict(device="cuda")
    query = (torch.randn(b, h, q, f, **made) * scale + shift).to(dtype)
    key = (torch.randn(b, g, k, f, **made) * scale - shift).to(dtype)
    value, weight = torch.randn(b, g, k, e, **made).to(dtype), (torch.randn(h, f, **made) / f**0.5).to(dtype)
    out_grad, lse_grad = torch.randn(b, h, q, e, **made), torch.randn(b, h, q, **made)
    chosen = settings(b=b, h=h, q=q, k=k) if settings else {}
    allowed = allowed_pairs(chosen, b, h, q, k)
    learned = [chosen[x] for x in ("bias", "relative") if x in chosen]

    def run(cast: torch.dtype, fused: bool) -> list[Tensor]:
        leaves = [x.detach().clone().to(cast).requires_grad_() for x in (query, key, value, weight)]
        more = [x.detach().clone().to(torch.float64 if cast is torch.float64 else x.dtype).requires_grad_() for x in learned]
        extra = dict(zip([x for x in ("bias", "relative") if x in chosen], more, strict=True))
        if fused:
            out, lse = additive_attention(*leaves, activation=activation, form=form, **{**chosen, **extra})
        else:
            bias = extra.get("bias", 0.0)
            if "relative" in extra:
                radius = extra["relative"].shape[1] // 2
                step = torch.arange(k, device="cuda")[None] - torch.arange(q, device="cuda")[:, None]
                bias = bias + extra["relative"][:, step.clamp(-radius, radius) + radius]
            out, lse = plain(*leaves, activation, allowed, bias)
        real = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
        loss = (out.double() * out_grad.double()).sum() + (real.double() * lse_grad.double()).sum()
        return [out.detach(), real.detach(), *torch.autograd.grad(loss, [*leaves, *more])]

    true, found, rough = run(torch.float64, False), run(dtype, True), run(dtype, False)
    names = ["out", "lse", "dq", "dk", "dv", "dw", *(x for x in ("bias", "relative") if x in chosen)]
    parts = [f"{n} {error(a, t):.1e}({error(r, t):.1e})" for n, a, r, t in zip(names, found, rough, true, strict=True)]
    worst = max(error(a, t) / max(error(r, t), 1e-7) for a, r, t in zip(found, rough, true, strict=True))
    return f"worst {worst:4.1f}x plain | " + " ".join(parts)


def everything(b: int, h: int, q: int, k: int) -> dict[str, Any]:
    return {
        "band": (-90, 70),
        "lengths": torch.tensor([k - 40, k][:b], device="cuda"),
        "query_ids": (torch.arange(q, device="cuda") // 101).expand(b, q),
        "key_ids": (torch.arange(k, device="cuda") // 101).expand(b, k),
        "mask": torch.rand(b, 1, q, k, device="cuda") > 0.2,
        "bias": torch.randn(1, h, q, k, device="cuda"),
        "relative": torch.randn(h, 31, device="cuda"),
    }


def dropout_check(dtype: torch.dtype) -> str:
    """Values of one: the output is then Σ p keep / 0.75, one on average; twice the same seed is bit for bit equal."""
    make = lambda n: torch.randn(1, 2, n, 32, device="cuda", dtype=dtype)  # noqa: E731
    query, key, value = make(512).requires_grad_(), make(700), torch.ones(1, 2, 700, 16, device="cuda", dtype=dtype)
    weight = torch.randn(32, device="cuda", dtype=dtype) * 0.2
    runs = [additive_attention(query, key, value, weight, dropout=0.25, seed=s)[0] for s in (7, 7, 8)]
    same, other = torch.equal(runs[0], runs[1]), torch.equal(runs[0], runs[2])
    grads = [torch.autograd.grad(additive_attention(query, key, value, weight, dropout=0.25, seed=7)[0].float().sum(),
                                 query)[0] for _ in range(2)]  # fmt: skip
    return f"mean {runs[0].float().mean():.4f} same seed equal {same}, other seed equal {other}, gradients equal {torch.equal(*grads)}"


def poison_check(dtype: torch.dtype) -> str:
    """NaN beyond the lengths and in a masked key must not leak; NaN in an allowed value must."""
    make = lambda n, e=32: torch.randn(1, 2, n, e, device="cuda", dtype=dtype)  # noqa: E731
    query, key, value, weight = make(200), make(300), make(300, 16), torch.randn(32, device="cuda", dtype=dtype)
    lengths = torch.tensor([250], device="cuda")
    mask = torch.ones(1, 1, 200, 300, dtype=torch.bool, device="cuda")
    mask[..., 17] = False
    clean = additive_attention(query, key, value, weight, lengths=lengths, mask=mask)[0]
    bad_key, bad_value = key.clone(), value.clone()
    for t in (bad_key, bad_value):
        t[:, :, 250:], t[:, :, 17] = float("nan"), float("inf") if t is bad_value else float("nan")
    leaves = [t.requires_grad_() for t in (query.clone(), bad_key, bad_value)]
    out = additive_attention(*leaves, weight, lengths=lengths, mask=mask)[0]
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    value[:, :, 3] = float("nan")
    seen = additive_attention(query, key, value, weight, lengths=lengths, mask=mask)[0]
    fine = all(g.isfinite().all().item() for g in grads)
    return f"clean equal {torch.equal(clean, out)}, gradients finite {fine}, allowed NaN seen {bool(seen.isnan().all())}"


# ---------------------------------------------------------------- times


def inputs_of(dtype: torch.dtype, b: int, h: int, q: int, k: int, f: int, e: int) -> tuple[Inputs, Tensor]:
    torch.manual_seed(0)
    make = lambda n, d: torch.randn(b, h, n, d, device="cuda", dtype=dtype)  # noqa: E731
    weight = torch.randn(f, device="cuda", dtype=dtype) / f**0.5
    return Inputs(make(q, f), make(k, f), make(k, e), weight, None, "tanh"), make(q, e)


def milliseconds(run: Callable[[], Any], rounds: int = 10) -> float:
    for _ in range(2):
        run()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def kernel_times(run: Callable[[], Any], rounds: int = 3) -> dict[str, float]:
    """Milliseconds per round of every kernel."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / 1000 / rounds for e in profile.key_averages() if e.self_device_time_total}


def forward_item(dtype: torch.dtype, field: str, block: Block | None, sizes: dict[str, int] = BIG, warm: bool = False,
                 **more: Any) -> str:  # fmt: skip
    inputs, _ = inputs_of(dtype, **sizes)
    tuning = dataclasses.replace(launch.DEFAULT, **({field: block} if block else {}), **more)
    run = lambda: launch.forward(inputs, Pairs(), tuning=tuning)  # noqa: E731
    out = run()[0]
    if warm:
        return ""
    total = milliseconds(run)
    parts = kernel_times(run)
    own = sum(t for n, t in parts.items() if n.startswith(field))
    pairs = sizes["b"] * sizes["h"] * sizes["q"] * sizes["k"] * sizes["f"] / 1e9
    rest = " ".join(f"{n} {t * 1000:.0f}us" for n, t in sorted(parts.items(), key=lambda x: -x[1]) if n != field)
    small = slice(0, 64)
    true = plain(inputs.query[:1, :1, small].double(), inputs.key[:1, :1].double(), inputs.value[:1, :1].double(),
                 inputs.weight.double(), "tanh")[0]  # fmt: skip
    wrong = error(out[:1, :1, small], true)
    return f"total {total:.3f} ms = {pairs / total * 1000:,.0f} G/s | kernel {own:.3f} ms = {pairs / max(own, 1e-9) * 1000:,.0f} G/s | error {wrong:.1e} | {rest}"


def both_item(dtype: torch.dtype, sizes: dict[str, int] = BIG, warm: bool = False, detail: bool = True, **changes: Any) -> str:
    inputs, grad = inputs_of(dtype, **sizes)
    tuning = dataclasses.replace(launch.DEFAULT, **changes)
    out, lse = launch.forward(inputs, Pairs(), tuning=tuning)
    run = lambda: launch.backward(inputs, Pairs(), out, lse, grad, None, tuning=tuning)  # noqa: E731
    run()
    if warm:
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total = milliseconds(run, 5)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    front = milliseconds(lambda: launch.forward(inputs, Pairs(), tuning=tuning), 5)
    parts = sorted(kernel_times(run, 2).items(), key=lambda x: -x[1])
    text = " ".join(f"{n[:34]} {t:.3f}" for n, t in parts[: 9 if detail else 4])
    return f"forward {front:.3f} + backward {total:.3f} = {front + total:.3f} ms, peak +{peak:,.0f} MiB | {text}"


def plain_item(dtype: torch.dtype, compiled: bool, train: bool, warm: bool = False) -> str:
    inputs, grad = inputs_of(dtype, **BIG)
    leaves = [x.requires_grad_(train) for x in (inputs.query, inputs.key, inputs.value, inputs.weight)]

    def attend(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        scores = (torch.tanh(q[:, :, :, None] + k[:, :, None]) * w).sum(-1)
        return torch.softmax(scores, -1) @ v

    call = torch.compile(attend) if compiled else attend

    def run() -> None:
        out = call(*leaves)
        if train:
            torch.autograd.grad(out, leaves, grad)

    run()
    if warm:
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    time_ms = milliseconds(run, 3)
    return f"{time_ms:.2f} ms, peak +{(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f} MiB"


# ---------------------------------------------------------------- the list

BF, HALF, FULL = torch.bfloat16, torch.float16, torch.float32


def items() -> list[tuple[str, str, Callable[[bool], str]]]:
    found: list[tuple[str, str, Callable[[bool], str]]] = []

    def add(group: str, name: str, function: Callable[..., str], *args: Any, **kw: Any) -> None:
        found.append((group, name, lambda warm: function(*args, **kw, **({"warm": warm} if group != "error" else {}))))

    for dtype, tag in ((FULL, "f32"), (BF, "bf16"), (HALF, "f16")):
        add("error", f"{tag} plain heads", check, tag, dtype)
    for dtype, tag in ((FULL, "f32"), (BF, "bf16")):
        add("error", f"{tag} every mask and bias", check, tag, dtype, settings=everything)
        add("error", f"{tag} causal, 700 keys", check, tag, dtype, settings=lambda **_: {"band": (None, 0)}, q=700, k=700, f=32, b=1)
        add("error", f"{tag} x10", check, tag, dtype, scale=10.0)
        add("error", f"{tag} a 60, b -59", check, tag, dtype, shift=59.5)
        add("error", f"{tag} gelu", check, tag, dtype, activation="gelu")
        add("error", f"{tag} dropout", dropout_check, dtype)
        add("error", f"{tag} NaN", poison_check, dtype)
    add("error", "f32 x100", check, "f32", FULL, scale=100.0)
    add("error", "bf16 x3 (more harmonics)", check, "bf16", BF, scale=3.0)
    add("error", "bf16 n1024 f64 e64", check, "bf16", BF, q=1024, k=1024, f=64, e=64, b=1, h=2)
    add("error", "f32 n1024 f64 e64", check, "f32", FULL, q=1024, k=1024, f=64, e=64, b=1, h=2)
    add("error", "bf16 leaky_relu", check, "bf16", BF, activation="leaky_relu")

    blocks = [Block(128, 128, 64, 8, 3), Block(128, 256, 64, 8, 3), Block(128, 256, 64, 8, 4), Block(256, 128, 64, 8, 3),
              Block(128, 128, 64, 8, 2, 128), Block(128, 128, 64, 4, 2), Block(128, 128, 128, 8, 2)]  # fmt: skip
    for block in blocks:
        add("series_forward", str(tuple(block)), forward_item, BF, "series_forward", block)
    add("series_forward", "f16", forward_item, HALF, "series_forward", None)
    add("series_forward", "n8192", forward_item, BF, "series_forward", None, {**BIG, "q": 8192, "k": 8192})
    add("series_forward", "b2 n1024", forward_item, BF, "series_forward", None, {**BIG, "b": 2, "q": 1024, "k": 1024})
    for block in (Block(128, 32, 64, 4, 3), Block(128, 32, 64, 4, 3, 168), Block(128, 32, 64, 4, 3, 128),
                  Block(256, 32, 64, 8, 3), Block(128, 64, 64, 4, 3)):  # fmt: skip
        add("exact_forward", str(tuple(block)), forward_item, FULL, "exact_forward", block)
    add("exact_forward", "ieee products", forward_item, FULL, "exact_forward", None, precision="ieee")
    add("exact_forward", "b1 n2048 f128", forward_item, FULL, "exact_forward", None, {**BIG, "q": 2048, "k": 2048, "f": 128})
    for dtype in (BF, FULL):
        add("backward", f"{dtype} as is", both_item, dtype)
    for mega in (32, 128):
        add("backward", f"bf16 slab {mega}", both_item, BF, slab_bytes=mega << 20, detail=False)
        add("backward", f"f32 slab {mega}", both_item, FULL, slab_bytes=mega << 20, detail=False)
    for block in (Block(128, 128, 64, 8, 4), Block(128, 128, 128, 8, 2), Block(128, 128, 64, 4, 2)):
        add("backward", f"series_score {tuple(block)}", both_item, BF, series_score=block, detail=False)
    for block in (Block(128, 256, 64, 8, 4), Block(128, 128, 64, 8, 3), Block(128, 128, 64, 4, 3), Block(256, 128, 64, 8, 3)):
        add("backward", f"series_feature {tuple(block)}", both_item, BF, series_feature=block, detail=False)
    for block in (Block(128, 32, 64, 4, 3, 168), Block(256, 32, 64, 8, 3)):
        add("backward", f"exact_score {tuple(block)}", both_item, FULL, exact_score=block, detail=False)
    for block in (Block(64, 32), Block(64, 64), Block(32, 64), Block(64, 16), Block(32, 16, warps=2)):
        add("backward", f"exact_feature {tuple(block)}", both_item, FULL, exact_feature=block, detail=False)
    for dtype, tag in ((BF, "bf16"), (FULL, "f32")):
        for train in (False, True):
            add("peer", f"{tag} torch.compile {'forward+backward' if train else 'forward'}", plain_item, dtype, True, train)
    add("peer", "bf16 eager forward+backward", plain_item, BF, False, True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a group: error, series_forward, exact_forward, backward, peer")
    parser.add_argument("--warm", default="", help="internal: FIRST:STEP, run these items once")
    parser.add_argument("--limit", type=float, default=250.0, help="seconds after which nothing new is begun")
    parser.add_argument("--workers", type=int, default=12)
    chosen = parser.parse_args()
    began = time.time()
    todo = [item for item in items() if chosen.only in ("", item[0])]
    if chosen.warm:
        first, step = map(int, chosen.warm.split(":"))
        for group, name, run in todo[first::step]:
            try:
                if not (group == "peer" and "eager" in name):
                    run(True)
            except Exception as problem:
                print(f"warm {group} {name}: {str(problem)[:200]}", flush=True)
        return
    if chosen.workers:
        command = [sys.executable, __file__, "--only", chosen.only]
        crowd = [subprocess.Popen([*command, "--warm", f"{n}:{chosen.workers}"], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL) for n in range(chosen.workers)]  # fmt: skip
        for worker in crowd:
            try:
                worker.wait(timeout=max(1.0, began + 130.0 - time.time()))
            except subprocess.TimeoutExpired:
                worker.kill()
        print(f"caches filled after {time.time() - began:.0f} s", flush=True)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for group, name, run in todo:
        if time.time() - began > chosen.limit:
            print("out of time before", group, name)
            break
        try:
            print(f"{group:14s} {name:34s} {run(False)}", flush=True)
        except Exception as problem:
            text = traceback.format_exc().strip().splitlines()
            print(f"{group:14s} {name:34s} FAILED {type(problem).__name__}: {str(problem)[:300]} @ {text[-3:-1]}", flush=True)
        torch.cuda.empty_cache() if group == "peer" else None
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    main()
