"""Measures the cost of `regard.watch`: python tests/look/measure_watch.py

Time: the processor time of BERT-base with random weights on one core, with and without watching, in alternation.
Memory: the size of the record of one attention call with 8,192 tokens and 32 heads of size 64, and the error of its
weights when queries and keys are stored in 24 bits per number.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.look.watch import watch

TOKENS, HEADS, SIZE = 8192, 32, 64


class Layer(nn.Module):
    """A model of one attention call. Its values have only 8 elements, because the weights do not depend on them."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key[..., :8], is_causal=True, enable_gqa=True)


def memory() -> None:
    """Print the bytes that the record of one attention call takes for several dtypes, and the error of its weights."""
    torch.manual_seed(0)
    for dtype, key_heads in ((torch.float32, 8), (torch.bfloat16, 32), (torch.float32, 32)):
        query, key = (torch.randn(1, n, TOKENS, SIZE).to(dtype) for n in (HEADS, key_heads))
        model = Layer()
        with torch.no_grad(), watch(model) as trace:
            model(query, key)
        [record] = trace
        rows = [0, 1, 100, 1000, 4000, 8191]
        expected = plain(query.double(), key.double(), rows)
        worst = float((record.weights(queries=rows).double() - expected).abs().max())
        kept = f"{trace.nbytes / 2**20:.1f} MiB"
        print(
            f"{dtype}, {key_heads} key heads: kept {kept}, error {worst:.0e}, check {record.check():.0e}; {record.note}"
        )


def plain(query: Tensor, key: Tensor, rows: list[int]) -> Tensor:
    """Return the causal attention weights of some rows, computed directly in float64."""
    key = key[0].repeat_interleave(HEADS // key.shape[1], 0)
    scores = query[0][:, rows] @ key.mT / SIZE**0.5
    late = torch.arange(TOKENS)[None] > torch.tensor(rows)[:, None]
    return scores.masked_fill(late, -torch.inf).softmax(-1)


def effect(rounds: int = 7) -> None:
    """Print the slowdown of BERT-base while it is watched, and the change of its output."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = BertModel(BertConfig()).eval()
    ids = torch.randint(30000, (4, 128))

    def run() -> Any:
        with torch.no_grad():
            return model(ids).last_hidden_state

    def watched() -> Any:
        with watch(model):
            return run()

    # These two calls of the model also warm it up before the measurement of times.
    difference = float((run() - watched()).abs().max())
    spent = [(_seconds(run), _seconds(watched)) for _ in range(rounds)]
    apart = [seen / unseen - 1 for unseen, seen in spent]
    best = min(seen for _, seen in spent) / min(unseen for unseen, _ in spent) - 1
    print(
        f"BERT-base, 4 × 128 tokens, {min(unseen for unseen, _ in spent):.2f} s: watching adds "
        f"{statistics.median(apart):+.1%} (median of {rounds} pairs), {best:+.1%} (best of each); "
        f"output changes by {difference:.0e}"
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    memory()
    effect()
