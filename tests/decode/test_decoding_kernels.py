"""The Triton kernels of decoding in CUDA graphs, interpreted on the CPU and compiled on a GPU."""

import pytest
import torch
from torch import Tensor

from interpreting import DEVICES

# Device, dtype and tolerance; under Triton's interpreter only float32 is tested, because it supports no other.
KINDS = [
    pytest.param("cpu", torch.float32, 1e-5, marks=pytest.mark.interpreted, id="interpreted-float32"),
    pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.cuda, id="cuda-float32"),
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.cuda, id="cuda-bfloat16"),
]


def plain_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, keys: int) -> Tensor:
    """Return softmax(scale · q kᵀ + bias) v over the first `keys` keys, in float64, one head after another."""
    rows, heads, slots, size = query.shape
    out = torch.zeros(rows, slots, heads * size, dtype=torch.float64, device=query.device)
    for b in range(rows):
        for h in range(heads):
            scores = query[b, h].double() @ key[b, h, :keys].double().T * scale
            if bias is not None:
                scores = scores + bias[b, 0, :, :keys].double()
            out[b, :, h * size : (h + 1) * size] = scores.softmax(-1) @ value[b, h, :keys].double()
    return out


@pytest.mark.parametrize(("device", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize(("rows", "heads", "slots", "size", "room"), [(2, 2, 4, 16, 24), (1, 3, 5, 19, 135)])
@torch.no_grad()
def test_attention(
    rows: int, heads: int, slots: int, size: int, room: int, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    from regard.kernels.triton.beam_attention import attend

    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    packed, stored = draw(rows, slots, 3 * heads, size), draw(rows, room, 2 * heads, size)
    query = packed[:, :, :heads].transpose(1, 2)
    key, value = stored.transpose(1, 2).split(heads, 1)
    seen = torch.rand(rows, slots, room, generator=generator) < 0.4
    seen[:, :, 0] = True
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf).to(device).unsqueeze(1)
    for time in (0, room // slots // 2, room // slots):
        keys = min(room, (time + 1) * slots)
        found = attend(query, key, value, bias, scale=0.3, time=torch.tensor([time], device=device))
        wanted = plain_attention(query, key, value, bias, 0.3, keys)
        torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
    late = bias.clone()
    late[:, :, :, : room // 2] = -torch.inf  # this bias masks the first half of the keys
    late[..., -1] = 0
    for mask in (late, late[:, :, :1], None):
        wanted = plain_attention(query, key, value, mask, 0.3, room)
        found = attend(query, key, value, mask, scale=0.3)
        torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_norm(bias: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    from regard.kernels.triton.beam_attention import added_norm

    norm = torch.nn.LayerNorm(37, eps=1e-3, bias=bias)
    torch.nn.init.normal_(norm.weight)
    x, added = torch.randn(3, 5, 37).mul(3).to(device, dtype), torch.randn(3, 5, 37).to(device, dtype)
    wanted = norm.double().to(device)(x.double() + added.double())
    found = added_norm(x, added, norm.to(dtype))
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize(("vocabulary", "count"), [(37, 8), (2048, 2), (5003, 4)])
@torch.no_grad()
def test_ranking(vocabulary: int, count: int, device: str, dtype: torch.dtype, tolerance: float) -> None:
    from regard.decode.records import Bounds
    from regard.kernels.triton.token_ranking import rank

    generator, rows = torch.Generator().manual_seed(5), 3
    # The logits are multiples of 1/8, so that many of them are equal.
    logits = (torch.randint(-40, 40, (rows, vocabulary), generator=generator) / 8).to(device, dtype)
    logits[0, 5:] = -torch.inf
    for never in ((), (0, 3), (vocabulary - 1,)):
        for minimum, time in ((0, 0), (3, 2), (3, 3)):
            barred = torch.tensor(never, device=device) if never else None
            start = torch.zeros(rows, dtype=torch.long, device=device)
            limits = Bounds(start, 2, start, 0, minimum, barred)
            log_probs, stop = limits.distribution(logits.float(), time)
            wanted, index = log_probs.sort(dim=1, descending=True, stable=True)
            values, tokens, at_stop = rank(
                *(logits, barred, torch.tensor([time], device=device)), stop=2, minimum=minimum, count=count
            )
            torch.testing.assert_close(at_stop, stop, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(values, wanted[:, :count], rtol=1e-5, atol=1e-5)
            known = wanted[:, :count] > -torch.inf
            assert torch.equal(tokens[known], index[:, :count][known])
            assert int(tokens.max()) < vocabulary
    for value in (torch.nan, torch.inf):
        logits[1, 7] = value
        *_, tokens, at_stop = rank(logits, None, torch.tensor([0], device=device), stop=2, minimum=0, count=count)
        assert at_stop.isnan().tolist() == [row == 1 for row in range(rows)]
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("width", "n_best", "vocabulary", "steps"), [(4, 3, 23, 6), (1, 1, 5, 5), (3, 1, 3, 5), (2, 2, 2, 3)]
)
@torch.no_grad()
def test_front(width: int, n_best: int, vocabulary: int, steps: int, device: str) -> None:
    """Compare the kernel of a beam-search step with its reference, over searches of random logits with ties, length
    limits and small vocabularies."""
    from regard.decode.beam_state import Front, advance
    from regard.decode.graph_search import copy_front
    from regard.decode.penalties import Gnmt, best_divisors, divisors
    from regard.decode.ranking import best
    from regard.decode.records import bounds
    from regard.kernels.triton.beam_update import advance as fused

    generator = torch.Generator().manual_seed(width)
    rows = 6
    limit = torch.randint(0, steps, (rows,), generator=generator).to(device)
    limit[0] = steps - 1
    limits = bounds(torch.ones(rows, dtype=torch.long, device=device), 1, limit, 0, ())
    table = divisors(Gnmt(0.6), steps + 1, limits.start.device)
    hope = best_divisors(table, limits.limit)
    fronts = []
    for _ in range(2):
        fresh = Front.fresh(limits, width, n_best, slots=width)
        parts = {name: part.clone() for name, part in vars(fresh).items() if isinstance(part, Tensor)}
        fronts.append(Front(**parts, width=width))
    wanted, found = fronts
    found.closed[5] = wanted.closed[5] = True
    broken = torch.zeros(rows, dtype=torch.bool, device=device)
    trail = [torch.zeros(steps, rows, width, dtype=torch.long, device=device) for _ in range(2)]
    trail.append(torch.zeros(steps, rows, width, device=device))
    for time in range(steps):
        logits = torch.randint(-6, 6, (rows * width, vocabulary), generator=generator).float().to(device) / 2
        if time == 2:
            logits[width * 3] = torch.nan
            logits[width * 5] = torch.nan  # the search of this row has ended, so its logits are not used
        now = torch.tensor([time], device=device)
        log_probs, at_stop = limits.distribution(logits, time)
        values, tokens = best(log_probs, 2 * width)
        if time == 2:
            values, tokens = values.nan_to_num(-1.0), tokens.clamp(max=vocabulary - 1)
        shaped = [part.unflatten(0, (-1, width)) for part in (values, tokens, at_stop)]
        options = (limits, now, table[time + 1], hope[:, time])
        before = wanted.closed.clone()
        copy_front(advance(wanted, shaped[0], shaped[1], shaped[2], *options), wanted)
        fused(
            *(found.tensors(), (values, tokens, at_stop)), stop=1, limit=limits.limit, table=table,
            hope=hope.contiguous(), time=now, broken=broken, trail=trail,
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
