"""A program that test_ring.py runs: it computes attention over 2 and over 4 processes, and writes results to a folder.

    python ring_processes.py FOLDER

Each process writes SIZE-RANK.json, which holds for each case the largest differences from the result of one process and
the bytes that it sent, and for each invalid call its error message.
"""

import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ring_cases import BIASES, CASES, LENGTH, MASKS, SCORES, Case, expected, ids, inputs, positions
from torch import Tensor

import regard

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def difference(found: Tensor, wanted: Tensor, dtype: torch.dtype = torch.float64) -> float:
    """Return the difference, absolute in float64, else relative to the largest number; infinities must match."""
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    finite = wanted.isfinite()
    if not torch.equal(found[~finite], wanted[~finite]):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    scale = 1.0 if dtype == torch.float64 else max(1.0, float(wanted[finite].abs().max()))
    return float((found - wanted)[finite].abs().max()) / scale


def run_case(case: Case, rank: int, size: int, group: Any = None, device: str = "cpu") -> dict[str, float | int]:
    """Return the differences of output and gradients between attention over the group and on one CPU process."""
    dtype = DTYPES[case.dtype]
    mine = [positions(rank, size, length, case.balanced) for length in (case.queries, LENGTH, LENGTH)]
    query, key, value, slopes, total_slopes, *learned = (t.to(device, dtype) for t in inputs(case))
    query, key, value = (t[:, :, at].requires_grad_() for t, at in zip((query, key, value), mine, strict=True))
    slopes, total_slopes = slopes[:, :, mine[0]], total_slopes[:, :, mine[0]]
    learned = [t.requires_grad_() for t in learned]
    own = learned[: len(SCORES[case.score].shapes)]
    with regard.parallel.traffic() as sent:
        attended = regard.parallel.attention(
            query, key, value, group=group, balanced=case.balanced,
            score=SCORES[case.score].record(*own),
            mask=MASKS[case.mask][0](ids()[:, mine[1]].to(device)),
            bias=BIASES[case.bias][0](learned[-1]) if case.bias else None,
            weights=regard.logsumexp() if case.total else None,
        )  # fmt: skip
        loss = (attended.output * slopes).sum()
        if case.total:
            loss = loss + (torch.where(attended.weights == -math.inf, 0, attended.weights) * total_slopes).sum()
        loss.backward()
    regard.parallel.reduce_gradients(learned, group)

    whole = expected(case)
    found: dict[str, float | int] = {
        "output": difference(attended.output, whole.output[:, :, mine[0]], dtype),
        "sent forward": sent.forward, "sent backward": sent.backward, "sent masks": sent.masks,
    }  # fmt: skip
    if case.total:
        found["output"] = max(found["output"], difference(attended.weights, whole.total[:, :, mine[0]]))
    pairs = zip((query, key, value), mine, whole.gradients[:3], strict=True)
    parts = [difference(t.grad, gradient[:, :, at], dtype) for t, at, gradient in pairs]
    learnt = [difference(t.grad, g, dtype) for t, g in zip(learned, whole.gradients[3:], strict=True)]
    found["gradients"] = max(parts + learnt)
    return found


def layers(rank: int, size: int) -> dict[str, dict[str, float]]:
    """Return the differences between layers under `regard.parallel.context` and the same layers on one process."""
    return {
        **{name: _layer(make, rank, size) for name, make in LAYERS.items()},
        "transformer with positions": _stack(rank, size),
        "unshard": _unshard(rank, size),
        "NaN in padding": _nan(rank, size),
    }


def _multihead(**options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: regard.nn.MultiHeadAttention(12, heads=2, **options)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "multihead": _multihead(),
    "multihead, rotary": _multihead(positions=regard.nn.Rotary(6)),
    "multihead, alibi": _multihead(positions=regard.nn.Alibi(2)),
    "multihead, additive": _multihead(score="additive"),
    "multihead, grouped heads": _multihead(kv_heads=1),
}


def _compared(layer: torch.nn.Module, run: Callable[[Tensor], Tensor], rank: int, size: int) -> dict[str, float]:
    """Return the differences of a layer's outputs and gradients between whole sequences on one process and the
    sequences split over all processes."""
    torch.manual_seed(3)
    whole = torch.randn(2, LENGTH, 12, dtype=torch.float64)
    slopes = torch.randn(2, LENGTH, 12, dtype=torch.float64)
    x = whole.clone().requires_grad_()
    output = run(x)
    (output * slopes).sum().backward()
    wanted = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()

    part = regard.parallel.shard(whole).requires_grad_()
    with regard.parallel.context():
        found = run(part)
    (found * regard.parallel.shard(slopes)).sum().backward()
    regard.parallel.reduce_gradients(layer)
    at = positions(rank, size, LENGTH, True)
    gradients = [difference(part.grad, x.grad[:, at])]
    gradients += [difference(p.grad, g) for p, g in zip(layer.parameters(), wanted, strict=True)]
    return {"output": difference(found, output.detach()[:, at]), "gradients": max(gradients)}


def _layer(make: Callable[[], torch.nn.Module], rank: int, size: int) -> dict[str, float]:
    torch.manual_seed(5)
    layer = make().double()
    mask = regard.causal() & regard.padding([LENGTH, 31])
    return _compared(layer, lambda x: layer(x, mask=mask).output, rank, size)


def _stack(rank: int, size: int) -> dict[str, float]:
    torch.manual_seed(5)
    embed = regard.nn.SinusoidalPositions(12)
    learned = regard.nn.LearnedPositions(12, LENGTH)
    attention = regard.nn.MultiHeadAttention(12, heads=3)
    layer = regard.nn.TransformerEncoderLayer(attention, regard.nn.FeedForward(12, 24))
    both = torch.nn.ModuleList([learned, layer]).double()
    return _compared(both, lambda x: layer(learned(embed(x)), mask=regard.window(9, 1)).output, rank, size)


def _unshard(rank: int, size: int) -> dict[str, float]:
    whole = torch.arange(2.0 * LENGTH * 3).reshape(2, LENGTH, 3)
    worst = 0.0
    for balanced in (True, False):
        part = regard.parallel.shard(whole, balanced=balanced).requires_grad_()
        at = positions(rank, size, LENGTH, balanced)
        again = regard.parallel.unshard(part, balanced=balanced)
        (again * whole).sum().backward()
        worst = max(worst, difference(part, whole[:, at]), difference(again, whole))
        worst = max(worst, difference(part.grad, size * whole[:, at]))
        worst = max(worst, difference(regard.parallel.positions(len(at), balanced=balanced), at))
    return {"output": worst, "gradients": 0.0}


def _nan(rank: int, size: int) -> dict[str, float]:
    """Return how much output and gradients change if keys and values after a sequence's end are NaN."""
    torch.manual_seed(4)
    query, key, value = (torch.randn(2, 3, LENGTH, 5, dtype=torch.float64) for _ in range(3))
    found = []
    for bad in (0.0, math.nan):
        key[1, :, 13:], value[1, :, 13:] = bad, -bad
        leaves = [regard.parallel.shard(t, dim=2).requires_grad_() for t in (query, key, value)]
        attended = regard.parallel.attention(*leaves, mask=regard.padding([29, 13]) & regard.causal())
        found.append([attended.output, *torch.autograd.grad(attended.output.square().sum(), leaves)])
    worst = [difference(dirty, clean) for clean, dirty in zip(*found, strict=True)]
    return {"output": worst[0], "gradients": max(worst[1:])}


def bad_calls(rank: int, size: int) -> dict[str, Callable[[], object]]:
    """Return calls that must raise on every process, even if only one process has invalid arguments."""
    x = torch.randn(2, 2, 8, 4)
    odd = torch.randn(2, 2, 7, 4)
    first = rank == 0

    def call(x: Tensor = x, **options: Any) -> object:
        with regard.parallel.context(balanced=options.pop("balanced", True)):
            return regard.attention(x, x, x, **options)

    def cached() -> object:
        with regard.parallel.context():
            return regard.nn.MultiHeadAttention(4, 2)(x[:, 0], cache=regard.nn.KeyValueCache())

    def linear() -> object:
        with regard.parallel.context():
            return regard.linear_attention(x, x, x, features=regard.EluFeatures())

    return {
        "length": lambda: regard.parallel.shard(torch.zeros(2, 8 * size + 2, 3)),
        "odd part": lambda: call(odd),
        "odd part in order": lambda: call(odd, balanced=False).output.shape,
        "other length on rank 0": lambda: call(x[:, :, :4] if first else x),
        "other dtype on rank 0": lambda: call(x.double() if first else x),
        "other mask on rank 0": lambda: call(mask=regard.causal() if first else None),
        "other lengths on rank 0": lambda: call(mask=regard.padding([3, 4] if first else [5, 6])),
        "other score on rank 0": lambda: call(score=regard.Dot() if first else regard.ScaledDot()),
        "other layout on rank 0": lambda: call(balanced=first),
        "gradients on rank 0 alone": lambda: call(x.clone().requires_grad_() if first else x),
        "sparsemax on rank 0": lambda: call(normalize=regard.Sparsemax() if first else regard.Softmax()),
        "sparsemax": lambda: call(normalize=regard.Sparsemax()),
        "dropout": lambda: call(dropout=0.1),
        "all weights": lambda: call(weights=regard.full()),
        "a mask of pairs": lambda: call(mask=torch.ones(8, 8, dtype=torch.bool)),
        "a bias of pairs": lambda: call(bias=torch.zeros(8, 8)),
        "a backend": lambda: call(backend="reference"),
        "lengths beyond the whole": lambda: call(mask=regard.padding([8 * size + 1, 3])),
        "whole ids": lambda: call(
            mask=regard.segments(torch.zeros(2, 8 * size).long(), torch.zeros(2, 8 * size).long())
        ),
        "a cache": cached,
        "linear attention": linear,
        "no group": lambda: regard.parallel.shard(x, group="world"),  # type: ignore[arg-type]
    }


def message(call: Callable[[], object]) -> str:
    try:
        return f"no error: {call()}"
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def process(rank: int, size: int, folder: Path) -> None:
    """Run all cases, layers and invalid calls in one process of a group, and write the results."""
    torch.set_num_threads(1)
    where = {"init_method": f"file://{folder}/meeting-{size}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", **where)
    found: dict[str, Any] = {"cases": {case.name: run_case(case, rank, size) for case in CASES}}
    found["layers"] = layers(rank, size)
    found["errors"] = {name: message(call) for name, call in bad_calls(rank, size).items()}
    found["after errors"] = run_case(CASES[0], rank, size)
    if size == 4:  # a group of some of the processes, whose ranks differ from the global ranks
        pairs = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        group = pairs[0 if rank in (1, 3) else 1]
        found["subgroup"] = run_case(Case(mask="causal"), dist.get_rank(group), 2, group)
    (folder / f"{size}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(folder: Path) -> int:
    """Run groups of 2 and 4 processes, one after another; if a process fails, the others of its group are ended."""
    fork = multiprocessing.get_context("fork")  # processes are forked, so that they need not import torch again
    for size in (2, 4):
        group = [fork.Process(target=process, args=(rank, size, folder)) for rank in range(size)]
        for each in group:
            each.start()
        while any(each.is_alive() for each in group) and not any(each.exitcode for each in group):
            time.sleep(0.05)
        failed = any(each.exitcode for each in group)
        for each in group:
            if failed and each.is_alive():
                each.terminate()
            each.join()
        if failed:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
