"""Tests of deletion and sufficiency curves on small models, against values computed manually."""

import math

import pytest
import torch
from torch import Tensor

from regard.look.faithfulness import Curve, faithfulness, gradient_times_input


def linear(kept: Tensor) -> Tensor:
    """A model whose score is the sum of the present inputs, which contribute 5, 1, 0 and 2."""
    return kept.double() @ torch.tensor([5.0, 1.0, 0.0, 2.0], dtype=torch.float64)


def test_a_right_map_by_hand():
    found = faithfulness(linear, torch.tensor([0.6, 0.1, 0.05, 0.25]), steps=4)
    deletion, sufficiency = found.deletion["map"], found.sufficiency["map"]
    assert deletion.fractions == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert deletion.scores == (8.0, 3.0, 1.0, 0.0, 0.0)
    assert sufficiency.scores == (0.0, 5.0, 7.0, 8.0, 8.0)
    # The areas are sums of trapezoids of width 1/4, so four times the areas are (8+3)/2 + (3+1)/2 + 1/2 + 0 = 8 for
    # deletion and 5/2 + 6 + 7.5 + 8 = 24 for sufficiency.
    assert deletion.area == pytest.approx(8.0 / 4)
    assert sufficiency.area == pytest.approx(24.0 / 4)


def test_a_wrong_map_is_worse_than_random_and_a_right_one_better():
    right = torch.tensor([5.0, 1.0, 0.0, 2.0])
    assert faithfulness(linear, right).gain() > 0.5
    assert faithfulness(linear, -right).gain() < -0.5


def test_random_orderings_of_a_linear_model_go_straight():
    """In random orderings each input is equally likely to be removed, so the mean score decreases linearly."""
    found = faithfulness(linear, torch.ones(4), steps=4, orderings=4000, generator=torch.Generator().manual_seed(3))
    expected = [8.0, 6.0, 4.0, 2.0, 0.0]
    assert found.deletion["random"].scores == pytest.approx(expected, abs=0.15)
    assert found.sufficiency["random"].scores == pytest.approx(expected[::-1], abs=0.15)
    # In some random ordering, the input that contributes 5 is removed first.
    assert found.deletion["random"].low[1] == 3.0
    # In some random ordering, the input that contributes 0 is removed first.
    assert found.deletion["random"].high[1] == 8.0


def test_deletion_and_sufficiency_differ_where_inputs_stand_in_for_each_other():
    """The score is 1 if one of two words is present: removing one of them changes nothing, keeping one suffices."""
    found = faithfulness(lambda kept: kept[:, :2].any(1).float(), torch.tensor([0.9, 0.05, 0.03]), steps=3)
    assert found.deletion["map"].scores == (1.0, 1.0, 0.0, 0.0)
    assert found.sufficiency["map"].scores == (0.0, 1.0, 1.0, 1.0)


def test_against_a_given_baseline():
    baseline = torch.tensor([0.0, 0.0, 1.0, 0.0])
    found = faithfulness(linear, torch.tensor([5.0, 1.0, 0.0, 2.0]), baselines={"gradient × input": baseline}, steps=4)
    # The baseline ranks input 2 first; inputs 0, 1 and 3 are equal, so they follow in their order.
    assert found.deletion["gradient × input"].scores == (8.0, 8.0, 3.0, 2.0, 0.0)
    removed = (8 / 2 + 8 / 2 + 8 / 2 + 3 / 2 + 3 / 2 + 2 / 2 + 2 / 2) / 4
    assert found.deletion["gradient × input"].area == pytest.approx(removed)
    kept = (5 / 2 + (5 + 6) / 2 + (6 + 8) / 2) / 4
    assert found.gain("gradient × input") == pytest.approx((removed - 2.0) + (6.0 - kept))


def test_a_map_compared_with_itself_gains_nothing():
    ranking = torch.tensor([0.3, 0.5, 0.2, 0.0])
    assert faithfulness(linear, ranking, baselines={"same": ranking * 7}).gain("same") == 0.0


def test_few_inputs_and_many_steps_give_each_count_once():
    found = faithfulness(linear, torch.tensor([4.0, 3.0, 2.0, 1.0]), steps=50)
    assert found.deletion["map"].fractions == (0.0, 0.25, 0.5, 0.75, 1.0)


def test_many_inputs_are_removed_in_steps():
    found = faithfulness(lambda kept: kept.float().mean(1), torch.arange(101.0), steps=5)
    assert found.deletion["map"].fractions == tuple(count / 101 for count in (0, 20, 40, 61, 81, 101))


def test_the_model_is_called_on_bounded_blocks():
    seen: list[int] = []

    def score(kept: Tensor) -> Tensor:
        seen.append(len(kept))
        assert kept.dtype == torch.bool
        assert not torch.is_grad_enabled()
        return kept.float().sum(1)

    faithfulness(score, torch.rand(13), steps=13, orderings=7, block=10)
    assert max(seen) == 10
    assert sum(seen) == 2 * 14 * (1 + 7)


def test_the_same_numbers_every_time():
    ranking = torch.rand(11)
    first, second = (faithfulness(lambda kept: kept[:, 3].float(), ranking) for _ in range(2))
    assert first == second


def test_gradient_times_input_is_exact_for_a_linear_model():
    weight = torch.randn(5, 3, dtype=torch.float64)
    inputs = torch.randn(5, 3, dtype=torch.float64)
    expected = torch.tensor(
        [sum(float(w * x) for w, x in zip(*pair, strict=True)) for pair in zip(weight, inputs, strict=True)]
    )
    torch.testing.assert_close(gradient_times_input(lambda x: (weight * x).sum(), inputs), expected.double())


def test_gradient_times_input_of_a_product_by_hand():
    """For f(x, y) = x y, both x · ∂f/∂x and y · ∂f/∂y are x y."""
    result = gradient_times_input(lambda x: x[0, 0] * x[1, 0], torch.tensor([[3.0], [4.0]]))
    assert result.tolist() == [12.0, 12.0]


def test_gradient_times_input_works_without_gradients_and_leaves_no_trace():
    inputs = torch.ones(2, 3)
    with torch.no_grad():
        assert gradient_times_input(lambda x: (2 * x).sum(), inputs).tolist() == [6.0, 6.0]
    assert inputs.grad is None
    assert not inputs.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"importance": torch.tensor([1.0, math.nan, 2.0, 3.0])}, "importance must be finite, got 1 other"),
        ({"baselines": {"b": torch.ones(3)}}, r"baselines\['b'\] must have shape \(4,\), got \(3,\)"),
        ({"baselines": {"random": torch.ones(4)}}, 'must not be called "random"'),
        ({"importance": torch.ones(0)}, "at least one input"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"score": lambda kept: kept.float()}, r"score must give 5 numbers for 5 rows, got \(5, 4\)"),
    ],
)
def test_errors_say_what_was_expected(arguments, message):
    call = {"score": linear, "importance": torch.ones(4), **arguments}
    with pytest.raises(ValueError, match=message):
        faithfulness(call.pop("score"), call.pop("importance"), **call)


def test_gain_over_an_unknown_ordering():
    with pytest.raises(ValueError, match=r"over must be one of \['map', 'random'\], got 'lime'"):
        faithfulness(linear, torch.ones(4)).gain("lime")


def test_the_area_of_an_uneven_curve():
    assert Curve((0.0, 0.2, 1.0), (1.0, 3.0, 1.0)).area == pytest.approx(0.2 * 2 + 0.8 * 2)
