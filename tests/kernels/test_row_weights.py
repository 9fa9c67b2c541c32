"""The Triton kernels that mask and normalise rows of stored scores, against the formulas in float64."""

import pytest
import torch
from drawn_masks import mask_of
from torch import Tensor

import regard
from interpreting import DEVICES

# Masks and biases by name: batch, heads, key heads, queries, keys, and settings.
CASES: dict[str, tuple[tuple[int, int, int, int, int], dict]] = {
    "plain": ((2, 3, 1, 5, 37), {}),
    "one key": ((2, 2, 2, 3, 1), {}),
    "causal": ((1, 2, 1, 67, 67), {"band": (None, 0)}),
    "window": ((1, 1, 1, 31, 27), {"band": (-7, 3)}),
    "padding": ((3, 2, 1, 7, 41), {"lengths": [41, 5, 0]}),
    "segments": ((2, 2, 2, 33, 33), {"segments": True, "band": (None, 0)}),
    "mask": ((2, 2, 1, 7, 41), {"mask": True}),
    "bias": ((2, 2, 1, 7, 41), {"bias": True}),
    "softcap and distances": ((2, 2, 2, 9, 17), {"alibi": True, "cap": 2.0, "lengths": [17, 3]}),
    "long": ((1, 1, 1, 2, 3000), {"lengths": [2777]}),
}


class Drawn:
    """The scores, mask and bias of a case; `allowed` and `exact` are computed here, without the library's kernels."""

    def __init__(self, case: str, device: str, **settings: object) -> None:
        from regard.core.backends.kernel_arguments import pairs_of
        from regard.core.problem import build

        (b, h, g, q, k), given = CASES[case]
        torch.manual_seed(7)
        self.shape, self.cap = (b, h, q, k), given.get("cap")
        self.scores = (3 * torch.randn(b, h, q, k)).to(device)
        self.value = torch.randn(b, g, k, 24).to(device)
        bias = torch.randn(1, h, q, k).to(device) if "bias" in given else None
        if bias is not None:
            bias[..., 3] = -torch.inf
        slopes = torch.tensor([0.5, 0.125], device=device)
        mask, self.alibi = mask_of(given, b, q, k, device), "alibi" in given
        problem = build(
            torch.zeros(b, h, q, 8, device=device), torch.zeros(b, g, k, 8, device=device), self.value,
            regard.Dot(), regard.Softmax(), mask, regard.alibi(slopes) if self.alibi else bias, 0.0, None, None,
        )  # fmt: skip
        self.pairs = pairs_of(problem)(problem.mask, problem.bias, problem.device)
        self.allowed = torch.ones(b, h, q, k, dtype=torch.bool, device=device)
        if mask is not None:
            self.allowed &= mask.aligned((b, h, q, k)).allowed(range(q), range(k), torch.device(device))
        exact = self.scores.double()
        exact = exact if self.cap is None else self.cap * torch.tanh(exact / self.cap)
        if bias is not None:
            exact, self.allowed = exact + bias.double(), self.allowed & (bias != -torch.inf)
        if self.alibi:
            distance = (torch.arange(q)[:, None] - torch.arange(k)).abs().to(device)
            exact = exact - slopes.double()[:, None, None] * distance
        self.exact = torch.where(self.allowed, exact, -torch.inf)
        self.filled = self.allowed.any(-1, keepdim=True)

    def softmax(self) -> Tensor:
        safe = torch.where(self.filled, self.exact, 0.0)
        return torch.where(self.filled, torch.softmax(safe, -1), 0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "scores"])
def test_weights(case: str, kind: str, device: str) -> None:
    from regard.kernels.triton.row_weights import weigher

    drawn = Drawn(case, device)
    right = {
        "softmax": drawn.softmax(),
        "sigmoid": torch.sigmoid(drawn.exact - 1.5),
        "scores": drawn.exact,
    }[kind]
    run = weigher(drawn.shape, kind, torch.float32, True, cap=drawn.cap, shift=-1.5)
    weights, allowed = run(drawn.scores, drawn.pairs)
    assert allowed is not None
    assert torch.equal(allowed, drawn.allowed)
    torch.testing.assert_close(weights.double(), right, rtol=1e-5, atol=2e-6)
    assert torch.equal(weights == 0, right == 0) or kind == "scores"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_choices(case: str, factor: float, device: str) -> None:
    """Hard attention chooses the largest allowed score, the first one on a tie."""
    from regard.kernels.triton.row_weights import chooser

    drawn = Drawn(case, device)
    output, log_prob = chooser(drawn.shape, drawn.value, cap=drawn.cap, factor=factor)(
        drawn.scores, drawn.value, drawn.pairs
    )
    value = drawn.value.repeat_interleave(drawn.shape[1] // drawn.value.shape[1], 1)
    index = drawn.exact.argmax(-1, keepdim=True)
    right = torch.where(drawn.filled, value.gather(-2, index.expand(*index.shape[:-1], 24)), 0.0)
    assert torch.equal(output, right)
    logarithms = torch.log_softmax(torch.where(drawn.filled, drawn.exact * factor, 0.0), -1).gather(-1, index)
    right = torch.where(drawn.filled, logarithms, 0.0).squeeze(-1)
    torch.testing.assert_close(log_prob.double(), right, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_and_nan(device: str) -> None:
    """Of equal scores the first is chosen; NaN counts as the largest score, unless it is masked."""
    from regard.kernels.triton.additive.pairs import EVERY, Pairs
    from regard.kernels.triton.row_weights import chooser, weigher

    scores = torch.tensor([[1.0, 4, 4, 0], [1, 2, torch.nan, 9], [3, 2, 1, torch.nan]], device=device)[None, None]
    value = torch.arange(4.0, device=device).view(1, 1, 4, 1)
    run = chooser((1, 1, 3, 4), value)
    output, log_prob = run(scores, value, EVERY)
    assert output.flatten().tolist() == [1, 2, 3]
    assert log_prob.flatten().isnan().tolist() == [False, True, True]
    first_three = Pairs(lengths=torch.tensor([3], device=device))
    output, log_prob = run(scores, value, first_three)
    assert output.flatten().tolist() == [1, 2, 0]
    assert log_prob.flatten().isnan().tolist() == [False, True, False]
    weights, _ = weigher((1, 1, 3, 4), "softmax", torch.float32, True)(scores, first_three)
    assert weights.isnan().any(-1).flatten().tolist() == [False, True, False]
    assert weights[0, 0, 2, 3] == 0
