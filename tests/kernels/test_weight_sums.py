"""Sums of weights over queries, and entropies, computed from the log-sum-exp, against explicit weights in float64."""

import pytest
import torch
from torch.testing import assert_close

from regard.kernels import weight_sums

BANDS = [(None, None), (None, 0), (None, 3), (-4, 0), (-7, 5), (2, None), (3, 9), (None, -2)]


@pytest.mark.parametrize(("queries", "keys"), [(41, 41), (41, 23), (17, 53)])
@pytest.mark.parametrize(("low", "high"), BANDS)
def test_sums_are_those_of_the_weights(
    low: int | None, high: int | None, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This low limit on the size of a block makes the function compute the rows in several blocks.
    monkeypatch.setattr(weight_sums, "_NUMBERS", 700)
    query, key = (torch.randn(3, n, 7, dtype=torch.float64) for n in (queries, keys))
    lengths = [keys, keys - 5, 0]
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(-1)
    seen = (distance >= (-queries if low is None else low)) & (distance <= (keys if high is None else high))
    seen = seen & (torch.arange(keys) < torch.tensor(lengths)[:, None, None])
    scores = torch.where(seen, query @ key.mT, -torch.inf)
    weights = torch.where(seen, scores.softmax(-1), 0)
    logs = torch.where(weights > 0, weights, 1).log()
    call = (query, key, scores.logsumexp(-1), low, high, lengths)
    assert_close(weight_sums.weight_sums(*call, False), weights.sum(1))
    assert_close(weight_sums.weight_sums(*call, True), -(weights * logs).sum(-1))
