"""The kernels of captured decoding: under Triton's interpreter in a process of its own, and on CUDA where there is."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plain_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, keys: int) -> Tensor:
    """softmax(scale · q k + bias) v over the first keys, in float64, head by head."""
    rows, heads, slots, size = query.shape
    out = torch.zeros(rows, slots, heads * size, dtype=torch.float64, device=query.device)
    for b in range(rows):
        for h in range(heads):
            scores = query[b, h].double() @ key[b, h, :keys].double().T * scale
            if bias is not None:
                scores = scores + bias[b, 0, :, :keys].double()
            out[b, :, h * size : (h + 1) * size] = scores.softmax(-1) @ value[b, h, :keys].double()
    return out


def check_attention(dtype: torch.dtype, tolerance: float) -> None:
    from regard.models.triton_beams import attend

    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    for rows, heads, slots, size, room in ((2, 2, 4, 16, 24), (1, 3, 5, 19, 135)):
        packed, stored = draw(rows, slots, 3 * heads, size), draw(rows, room, 2 * heads, size)
        query = packed[:, :, :heads].transpose(1, 2)
        key, value = stored.transpose(1, 2).split(heads, 1)
        seen = torch.rand(rows, slots, room, generator=generator) < 0.4
        seen[:, :, 0] = True
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf).to(DEVICE).unsqueeze(1)
        for time in (0, room // slots // 2, room // slots):
            keys = min(room, (time + 1) * slots)
            found = attend(query, key, value, bias, scale=0.3, time=torch.tensor([time], device=DEVICE))
            wanted = plain_attention(query, key, value, bias, 0.3, keys)
            torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
        late = bias.clone()
        late[:, :, :, : room // 2] = -torch.inf  # all that comes first is shut out
        late[..., -1] = 0
        for mask in (late, late[:, :, :1], None):
            wanted = plain_attention(query, key, value, mask, 0.3, room)
            found = attend(query, key, value, mask, scale=0.3)
            torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def check_norm(dtype: torch.dtype, tolerance: float) -> None:
    from regard.models.triton_beams import added_norm

    for bias in (True, False):
        norm = torch.nn.LayerNorm(37, eps=1e-3, bias=bias)
        torch.nn.init.normal_(norm.weight)
        x, added = torch.randn(3, 5, 37).mul(3).to(DEVICE, dtype), torch.randn(3, 5, 37).to(DEVICE, dtype)
        wanted = norm.double().to(DEVICE)(x.double() + added.double())
        found = added_norm(x, added, norm.to(dtype))
        torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def check_ranking(dtype: torch.dtype) -> None:
    from regard.decode.records import Bounds
    from regard.decode.triton_ranking import rank

    generator = torch.Generator().manual_seed(5)
    for rows, vocabulary, count in ((3, 37, 8), (3, 2048, 2), (3, 5003, 4)):
        logits = (torch.randint(-40, 40, (rows, vocabulary), generator=generator) / 8).to(DEVICE, dtype)  # many ties
        logits[0, 5:] = -torch.inf
        for never in ((), (0, 3), (vocabulary - 1,)):
            for minimum, time in ((0, 0), (3, 2), (3, 3)):
                barred = torch.tensor(never, device=DEVICE) if never else None
                start = torch.zeros(rows, dtype=torch.long, device=DEVICE)
                limits = Bounds(start, 2, start, 0, minimum, barred)
                log_probs, stop = limits.distribution(logits.float(), time)
                wanted, index = log_probs.sort(dim=1, descending=True, stable=True)
                values, tokens, at_stop = rank(
                    *(logits, barred, torch.tensor([time], device=DEVICE)), stop=2, minimum=minimum, count=count
                )
                torch.testing.assert_close(at_stop, stop, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(values, wanted[:, :count], rtol=1e-5, atol=1e-5)
                known = wanted[:, :count] > -torch.inf
                assert torch.equal(tokens[known], index[:, :count][known])
                assert int(tokens.max()) < vocabulary
        for value in (torch.nan, torch.inf):
            logits[1, 7] = value
            *_, tokens, at_stop = rank(logits, None, torch.tensor([0], device=DEVICE), stop=2, minimum=0, count=count)
            assert at_stop.isnan().tolist() == [row == 1 for row in range(rows)]
            assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary


def check_front() -> None:
    """The kernel against the plain way, over searches of random logits with ties, limits and small vocabularies."""
    from regard.decode.captured import _put
    from regard.decode.front import Front, advance
    from regard.decode.penalties import Gnmt, best_divisors, divisors
    from regard.decode.ranking import best
    from regard.decode.records import bounds
    from regard.decode.triton_front import advance as fused

    for width, n_best, vocabulary, steps in ((4, 3, 23, 6), (1, 1, 5, 5), (3, 1, 3, 5), (2, 2, 2, 3)):
        generator = torch.Generator().manual_seed(width)
        rows = 6
        limit = torch.randint(0, steps, (rows,), generator=generator).to(DEVICE)
        limit[0] = steps - 1
        limits = bounds(torch.ones(rows, dtype=torch.long, device=DEVICE), 1, limit, 0, ())
        table = divisors(Gnmt(0.6), steps + 1, limits.start.device)
        hope = best_divisors(table, limits.limit)
        fronts = []
        for _ in range(2):
            fresh = Front.fresh(limits, width, n_best, slots=width)
            parts = {name: part.clone() for name, part in vars(fresh).items() if isinstance(part, Tensor)}
            fronts.append(Front(**parts, width=width))
        wanted, found = fronts
        found.closed[5] = wanted.closed[5] = True
        broken = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
        trail = [torch.zeros(steps, rows, width, dtype=torch.long, device=DEVICE) for _ in range(2)]
        trail.append(torch.zeros(steps, rows, width, device=DEVICE))
        for time in range(steps):
            logits = torch.randint(-6, 6, (rows * width, vocabulary), generator=generator).float().to(DEVICE) / 2
            if time == 2:
                logits[width * 3] = torch.nan
                logits[width * 5] = torch.nan  # closed: it does not matter
            now = torch.tensor([time], device=DEVICE)
            log_probs, at_stop = limits.distribution(logits, time)
            values, tokens = best(log_probs, 2 * width)
            if time == 2:
                values, tokens = values.nan_to_num(-1.0), tokens.clamp(max=vocabulary - 1)
            shaped = [part.unflatten(0, (-1, width)) for part in (values, tokens, at_stop)]
            options = (limits, now, table[time + 1], hope[:, time])
            before = wanted.closed.clone()
            _put(advance(wanted, shaped[0], shaped[1], shaped[2], *options), wanted)
            fused(
                *(found, (values, tokens, at_stop)), stop=1, limit=limits.limit, table=table, hope=hope.contiguous(),
                time=now, broken=broken, trail=trail,
            )  # fmt: skip
            known = wanted.sums > -torch.inf
            assert torch.equal(found.sums, wanted.sums)
            for name in ("tokens", "parents"):
                assert torch.equal(getattr(found, name)[known], getattr(wanted, name)[known])
            assert torch.equal(trail[0][time][known], wanted.tokens[known])
            assert torch.equal(trail[1][time][known], wanted.parents[known])
            assert torch.equal(trail[2][time][known].double(), wanted.values[known])
            assert torch.equal(found.done_score, wanted.done_score)
            held = wanted.done_score > -torch.inf
            for name in ("done_sum", "done_time", "done_slot"):
                assert torch.equal(getattr(found, name)[held], getattr(wanted, name)[held])
            assert torch.equal(found.count, wanted.count)
            assert torch.equal(found.closed, wanted.closed)
            if time == 2:
                assert broken.tolist() == [row == 3 and not bool(before[3]) for row in range(rows)]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: kernels go unchecked")
def test_the_kernels_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_on_cuda(dtype: torch.dtype, tolerance: float) -> None:
    check_attention(dtype, tolerance)
    check_norm(dtype, tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranking_on_cuda(dtype: torch.dtype) -> None:
    check_ranking(dtype)


@pytest.mark.cuda
def test_the_front_on_cuda() -> None:
    check_front()


if __name__ == "__main__":
    with torch.no_grad():
        check_attention(torch.float32, 1e-5)
        check_norm(torch.float32, 1e-5)
        check_ranking(torch.float32)
        check_front()
