"""Additive kernels on a GPU: errors against float64 first, then times, memory and peers, and a summary.

    python benchmarks/additive_gpu.py                 about three minutes
    python benchmarks/additive_gpu.py --tune          other tile sizes too, kernel by kernel
    python benchmarks/additive_gpu.py --only error

A failed item does not stop the others. Items are first run once in several processes, which fills the compilers'
caches on disk, and then one by one for the numbers.
"""

import argparse
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

from regard.core.scores import ACTIVATIONS
from regard.kernels.additive.fused import additive_attention
from regard.kernels.triton.additive.backward import backward
from regard.kernels.triton.additive.forward import forward
from regard.kernels.triton.additive.pairs import Pairs
from regard.kernels.triton.additive.plan import DEFAULT, Block, Inputs

BIG = {"b": 1, "h": 8, "q": 4096, "k": 4096, "f": 64, "e": 64}
PAIRS = 8 * 4096 * 4096 * 64 / 1e9
BF, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
SUMMARY: dict[str, Any] = {}


# ---------------------------------------------------------------- errors


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    activation: str,
    allowed: Tensor | None = None,
    bias: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute the reference with every pair-feature in memory."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    weight = weight if weight.dim() == 1 else weight[:, None, None, :]
    x = ACTIVATIONS[activation](query[:, :, :, None] + key[:, :, None])
    scores = (x * weight).sum(-1) + bias
    if allowed is None:
        return torch.softmax(scores, -1).to(value.dtype) @ value, torch.logsumexp(scores, -1)
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.where(allowed.any(-1, keepdim=True), torch.softmax(scores, -1), 0.0)
    return weights.to(value.dtype) @ value, torch.logsumexp(scores, -1)


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


def check(
    dtype: torch.dtype,
    *,
    settings: Callable[..., dict[str, Any]] | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
    activation: str = "tanh",
    form: str = "auto",
    b: int = 2,
    h: int = 4,
    g: int = 2,
    q: int = 211,
    k: int = 307,
    f: int = 61,
    e: int = 53,
) -> str:
    """Return errors of output, log-sum-exp and gradients, and in brackets those of the reference in the same dtype."""
    torch.manual_seed(4)
    made: dict[str, Any] = {"device": "cuda"}
    query = (torch.randn(b, h, q, f, **made) * scale + shift).to(dtype)
    key = (torch.randn(b, g, k, f, **made) * scale - shift).to(dtype)
    value, weight = torch.randn(b, g, k, e, **made).to(dtype), (torch.randn(h, f, **made) / f**0.5).to(dtype)
    out_grad, lse_grad = torch.randn(b, h, q, e, **made), torch.randn(b, h, q, **made)
    chosen = settings(b=b, h=h, q=q, k=k) if settings else {}
    allowed = allowed_pairs(chosen, b, h, q, k)
    learned = [chosen[x] for x in ("bias", "relative") if x in chosen]

    def run(cast: torch.dtype, fused: bool) -> list[Tensor]:
        leaves = [x.detach().clone().to(cast).requires_grad_() for x in (query, key, value, weight)]
        wide = cast is torch.float64
        more = [x.detach().clone().to(cast if wide else x.dtype).requires_grad_() for x in learned]
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
    told, worst = [], {"forward": 0.0, "gradient": 0.0}
    for n, a, r, t in zip(names, found, rough, true, strict=True):
        mine, theirs = error(a, t), error(r, t)
        told.append(f"{n} {mine:.1e}({theirs:.1e})")
        side = "forward" if n in ("out", "lse") else "gradient"
        worst[side] = max(worst[side], mine / max(theirs, 1e-7))
    verdict = "ok  " if worst["forward"] <= 2.0 and worst["gradient"] <= 3.0 else "OVER"
    return f"{verdict} forward {worst['forward']:.1f}x gradient {worst['gradient']:.1f}x plain | " + " ".join(told)


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
    """Check dropout with values of one: the output is then Σ p keep / 0.75, one on average; equal seeds give equal
    bits."""
    make = lambda n: torch.randn(1, 2, n, 32, device="cuda", dtype=dtype)  # noqa: E731
    query, key, value = make(512).requires_grad_(), make(700), torch.ones(1, 2, 700, 16, device="cuda", dtype=dtype)
    weight = torch.randn(32, device="cuda", dtype=dtype) * 0.2
    runs = [additive_attention(query, key, value, weight, dropout=0.25, seed=s)[0] for s in (7, 7, 8)]
    same, other = torch.equal(runs[0], runs[1]), torch.equal(runs[0], runs[2])
    grads = [torch.autograd.grad(additive_attention(query, key, value, weight, dropout=0.25, seed=7)[0].float().sum(),
                                 query)[0] for _ in range(2)]  # fmt: skip
    mean, equal = runs[0].float().mean(), torch.equal(*grads)
    return f"mean {mean:.4f}, same seed equal {same}, other seed equal {other}, gradients equal {equal}"


def poison_check(dtype: torch.dtype) -> str:
    """Check that NaN beyond the lengths and in a masked key does not leak, and that NaN in an allowed value does."""
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
    return (
        f"against clean {error(out, clean):.1e}, gradients finite {fine}, allowed NaN seen {bool(seen.isnan().all())}"
    )


# ---------------------------------------------------------------- times


def inputs_of(dtype: torch.dtype, b: int, h: int, q: int, k: int, f: int, e: int) -> tuple[Inputs, Tensor]:
    torch.manual_seed(0)

    def make(n: int, d: int) -> Tensor:
        return torch.randn(b, h, n, d, device="cuda", dtype=dtype)

    weight = torch.randn(f, device="cuda", dtype=dtype) / f**0.5
    return Inputs(make(q, f), make(k, f), make(k, e), weight, None, "tanh"), make(q, e)


def milliseconds(run: Callable[[], Any], rounds: int = 10) -> float:
    """Return the median time over batches of consecutive calls."""
    for _ in range(2 if rounds > 1 else 1):
        run()
    times = []
    for _ in range(5 if rounds > 1 else 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(rounds):
            run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / rounds)
    return sorted(times)[(len(times) - 1) // 2]


def graphed(run: Callable[[], Any]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def kernel_times(run: Callable[[], Any], rounds: int = 3) -> dict[str, float]:
    """Return milliseconds per round of every kernel."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / 1000 / rounds for e in profile.key_averages() if e.self_device_time_total}


def parts_of(run: Callable[[], Any], most: int = 6) -> str:
    parts = sorted(kernel_times(run).items(), key=lambda x: -x[1])
    return " ".join(f"{name[:24]} {took:.3f}" for name, took in parts[:most])


def forward_tile(dtype: torch.dtype, field: str, block: Block, warm: bool = False, **more: Any) -> str:
    inputs, _ = inputs_of(dtype, **BIG)
    tuning = DEFAULT._replace(**{field: block}, **more)

    def run() -> tuple[Tensor, Tensor]:
        return forward(inputs, Pairs(), tuning=tuning)[:2]

    out = run()[0]
    if warm:
        return ""
    own = sum(took for name, took in kernel_times(run).items() if name.startswith(field))
    return f"kernel {own:.3f} ms = {PAIRS / own * 1000:,.0f} G/s | {accuracy(inputs, out)}"


def accuracy(inputs: Inputs, out: Tensor) -> str:
    some = (inputs.query[:1, :1, :64], inputs.key[:1, :1], inputs.value[:1, :1], inputs.weight)
    true = plain(*(x.double() for x in some), "tanh")[0]
    return f"error {error(out[:1, :1, :64], true):.1e}({error(plain(*some, 'tanh')[0], true):.1e})"


def backward_tile(dtype: torch.dtype, warm: bool = False, **changes: Any) -> str:
    inputs, grad = inputs_of(dtype, **BIG)
    tuning = DEFAULT._replace(**changes)
    out, lse, _ = forward(inputs, Pairs(), tuning=tuning)

    def run() -> Any:
        return backward(inputs, Pairs(), out, lse, grad, None, tuning=tuning)

    run()
    return "" if warm else f"backward {milliseconds(run, 3):.3f} ms | {parts_of(run)}"


def forward_item(dtype: torch.dtype, sizes: dict[str, int], title: str, warm: bool = False) -> str:
    inputs, _ = inputs_of(dtype, **sizes)

    def run() -> Tensor:
        return additive_attention(inputs.query, inputs.key, inputs.value, inputs.weight)[0]

    out = run()
    if warm:
        return ""
    pairs = sizes["b"] * sizes["h"] * sizes["q"] * sizes["k"] * sizes["f"] / 1e9
    eager, replay = milliseconds(run), milliseconds(graphed(run))
    wrong = accuracy(inputs, out)
    SUMMARY[f"{title} forward"] = (
        f"{eager:.3f} ms = {pairs / eager * 1000:,.0f} G/s; in a CUDA graph "
        f"{replay:.3f} ms = {pairs / replay * 1000:,.0f} G/s; {wrong}"
    )
    return SUMMARY[f"{title} forward"] + " | " + parts_of(run)


def train_item(dtype: torch.dtype, sizes: dict[str, int], title: str, warm: bool = False, rounds: int = 3) -> str:
    inputs, grad = inputs_of(dtype, **sizes)
    leaves = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value, inputs.weight)]

    def run() -> Any:
        return torch.autograd.grad(additive_attention(*leaves)[0], leaves, grad)

    if warm and sizes["q"] > 8192:
        return ""
    run()
    if warm:
        return ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    took = milliseconds(run, rounds)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    own = sum(x.numel() * x.element_size() for x in (*leaves[:3], grad)) / 2**20
    SUMMARY[f"{title} forward+backward"] = took
    SUMMARY[f"{title} peak"] = f"+{peak:,.0f} MiB beside inputs and output of {own:,.0f}"
    replay = f"in a CUDA graph {milliseconds(graphed(run), rounds):.3f} ms, " if sizes is BIG else ""
    return f"{took:.3f} ms, {replay}peak {SUMMARY[f'{title} peak']} | " + parts_of(run, 8)


def plain_item(dtype: torch.dtype, compiled: bool, train: bool, title: str, warm: bool = False) -> str:
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
    SUMMARY[title] = milliseconds(run, 1)
    return f"{SUMMARY[title]:.2f} ms, peak +{(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f} MiB"


# ---------------------------------------------------------------- the list of items


def items(tune: bool) -> list[tuple[str, str, Callable[[bool], str]]]:
    found: list[tuple[str, str, Callable[[bool], str]]] = []

    def add(group: str, name: str, function: Callable[..., str], *args: Any, **kw: Any) -> None:
        found.append((group, name, lambda warm: function(*args, **kw, **({"warm": warm} if group != "error" else {}))))

    causal = {"settings": lambda **_: {"band": (None, 0)}, "q": 700, "k": 700, "f": 32, "b": 1}
    square = {"q": 1024, "k": 1024, "f": 64, "e": 64, "b": 1, "h": 2}
    for dtype, tag in ((FULL, "f32"), (BF, "bf16"), (HALF, "f16")):
        add("error", f"{tag} plain heads", check, dtype)
        add("error", f"{tag} n1024 f64 e64", check, dtype, **square)
    for dtype, tag in ((FULL, "f32"), (BF, "bf16")):
        add("error", f"{tag} every mask and bias", check, dtype, settings=everything)
        add("error", f"{tag} causal, 700 keys", check, dtype, **causal)
        add("error", f"{tag} x3", check, dtype, scale=3.0)
        add("error", f"{tag} x10", check, dtype, scale=10.0)
        add("error", f"{tag} x100", check, dtype, scale=100.0)
        add("error", f"{tag} a 60, b -59", check, dtype, shift=59.5)
        for activation in ("sigmoid", "gelu", "leaky_relu"):
            add("error", f"{tag} {activation}", check, dtype, activation=activation)
        add("error", f"{tag} dropout", dropout_check, dtype)
        add("error", f"{tag} NaN", poison_check, dtype)
    long = {**BIG, "q": 8192, "k": 8192}
    for dtype, tag in ((BF, "bf16"), (FULL, "f32")):
        add("forward", tag, forward_item, dtype, BIG, tag)
        add("train", tag, train_item, dtype, BIG, tag)
    add("forward", "f16", forward_item, HALF, BIG, "f16")
    add("forward", "bf16 n8192", forward_item, BF, long, "bf16 n8192")
    add("forward", "bf16 b2 n1024", forward_item, BF, {**BIG, "b": 2, "q": 1024, "k": 1024}, "bf16 b2 n1024")
    add("forward", "f32 n2048 f128", forward_item, FULL, {**BIG, "q": 2048, "k": 2048, "f": 128}, "f32 n2048 f128")
    for dtype, tag in ((BF, "bf16"), (FULL, "f32")):
        huge = {**BIG, "q": 32768, "k": 32768}
        add("train", f"{tag} n32768", train_item, dtype, huge, f"{tag} n32768", rounds=1)
    if tune:
        tiles(add)
    for dtype, tag in ((BF, "bf16"), (FULL, "f32")):
        for train in (False, True):
            title = f"{tag} torch.compile {'forward+backward' if train else 'forward'}"
            add("peer", title, plain_item, dtype, True, train, title)
    add("peer", "bf16 eager forward+backward", plain_item, BF, False, True, "bf16 eager forward+backward")
    return found


def tiles(add: Callable[..., None]) -> None:
    """Measure other tile sizes than the default ones."""
    for pieces in (1, 2):
        for block in (Block(128, 256, 64, 8, 4), Block(128, 128, 64, 8, 4), Block(64, 128, 64, 4, 4)):
            add("tile", f"{tuple(block)} {pieces=}", forward_tile, BF, "series_forward", block, pieces=pieces)
    for block in (Block(128, 32, 4), Block(128, 32, 16), Block(128, 64, 8)):
        add("tile", f"exact_forward {tuple(block)}", forward_tile, FULL, "exact_forward", block)
    for block in (Block(128, 32, 4), Block(128, 32, 8)):
        add("tile", f"exact_score {tuple(block)}", backward_tile, FULL, exact_score=block)
    for block in (Block(32, 32, 1), Block(32, 32, 8), Block(64, 16, 4)):
        add("tile", f"exact_feature {tuple(block)}", backward_tile, FULL, exact_feature=block)
    add("tile", "series_feature 128", backward_tile, BF, series_feature=Block(128, 128, 64, 8, 3))


def summary() -> None:
    print("\nB1 H8 n4096 h64 value 64; error: relative, against float64 (plain arithmetic of the type in brackets)")
    for name in ("bf16 forward", "f32 forward", "f16 forward"):
        print(f"  {name:28s} {SUMMARY.get(name, 'missing')}")
    for tag in ("bf16", "f32"):
        own = SUMMARY.get(f"{tag} forward+backward", float("nan"))
        line = f"  {tag + ' forward+backward':28s} {own:.2f} ms"
        for peer in ("torch.compile", "eager"):
            if f"{tag} {peer} forward+backward" in SUMMARY:
                other = SUMMARY[f"{tag} {peer} forward+backward"]
                line += f"; {peer} {other:.1f} ms, {other / own:.1f} times as long"
        print(f"{line}; peak {SUMMARY.get(f'{tag} peak')}")
        step = SUMMARY.get(f"{tag} n32768 forward+backward", float("nan"))
        print(f"  {tag + ' n32768 training step':28s} {step:.0f} ms; peak {SUMMARY.get(f'{tag} n32768 peak')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="groups: error, tile, forward, train, peer; with commas")
    parser.add_argument("--tune", action="store_true", help="try other tile sizes")
    parser.add_argument("--warm", default="", help="internal: FIRST:STEP, run these items once")
    parser.add_argument("--limit", type=float, default=250.0, help="seconds after which nothing new is begun")
    parser.add_argument("--workers", type=int, default=12)
    chosen = parser.parse_args()
    began = time.time()
    todo = [item for item in items(chosen.tune) if not chosen.only or item[0] in chosen.only.split(",")]
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
        command = [sys.executable, __file__, "--only", chosen.only, *(["--tune"] if chosen.tune else [])]
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
            print(f"{group:7s} {name:34s} {run(False)}", flush=True)
        except Exception as problem:
            text = traceback.format_exc().strip().splitlines()
            what = f"{type(problem).__name__}: {str(problem)[:300]} @ {text[-3:-1]}"
            print(f"{group:7s} {name:34s} FAILED {what}", flush=True)
        if group in ("peer", "train"):
            torch.cuda.empty_cache()
    summary()
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    main()
