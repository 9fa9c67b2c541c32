"""Positional encodings against their formulas, the shift of sinusoids, and attention with and without positions."""

import cmath
import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from regard.core.masks import causal
from regard.nn.multihead import MultiHeadAttention
from regard.nn.positions import Alibi, LearnedPositions, RelativePositions, Rotary, SinusoidalPositions


def sinusoid(position: int, size: int) -> list[float]:
    """Return the encoding of Vaswani et al. 2017, section 3.5, in Python numbers."""
    return [
        (math.sin if feature % 2 == 0 else math.cos)(position / 10000 ** (2 * (feature // 2) / size))
        for feature in range(size)
    ]


def test_sinusoids_are_the_papers() -> None:
    expected = torch.tensor([sinusoid(t, 14) for t in range(11)], dtype=torch.float64)
    assert_close(SinusoidalPositions(14).table(11, dtype=torch.float64), expected, rtol=0, atol=1e-13)


def test_sinusoids_of_late_positions_keep_their_digits() -> None:
    late = SinusoidalPositions(6).table(1, offset=1_000_003)
    assert_close(late[0], torch.tensor(sinusoid(1_000_003, 6)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", [1, 5, 37])
def test_a_shift_is_one_linear_map_for_all_positions(shift: int) -> None:
    """Sinusoids satisfy p(t + k) = M_k p(t): a map fitted to 50 positions holds for all others, and is a rotation."""
    size = 6
    table = SinusoidalPositions(size).table(400, dtype=torch.float64)
    before, after = table[: 400 - shift], table[shift:]
    found = torch.linalg.lstsq(before[:50], after[:50]).solution
    assert_close(before @ found, after, rtol=0, atol=1e-6)
    by_formula = torch.zeros(size, size, dtype=torch.float64)
    for pair in range(size // 2):
        angle = shift / 10000 ** (2 * pair / size)
        # The rotation of a row vector (sin, cos) by the shift's angle.
        turn = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        by_formula[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = torch.tensor(turn, dtype=torch.float64)
    assert_close(before @ by_formula, after, rtol=0, atol=1e-12)


def test_learned_positions_have_no_such_map() -> None:
    """For a table of random vectors, no linear map shifts all positions, as one does for sinusoids."""
    table = LearnedPositions(6, 400).table(400).detach().double()
    found = torch.linalg.lstsq(table[:50], table[1:51]).solution
    assert (table[:-1] @ found - table[1:]).abs().max() > 0.01


@pytest.mark.parametrize("positions", [SinusoidalPositions(6), LearnedPositions(6, 17)])
def test_tables_are_added_from_the_offset_on(positions: SinusoidalPositions | LearnedPositions) -> None:
    x = torch.randn(3, 5, 6)
    whole = positions(torch.cat((torch.zeros(3, 7, 6), x), 1))
    assert_close(positions(x, offset=7), whole[:, 7:])
    assert_close(positions(x, offset=torch.tensor(7)), whole[:, 7:])
    assert_close(positions(x) - x, positions.table(5).expand(3, 5, 6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_inputs_dtype_stays(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, 4, dtype=dtype)
    assert SinusoidalPositions(4)(x).dtype == dtype
    assert LearnedPositions(4, 5)(x).dtype == dtype
    assert Rotary(4)(x.unsqueeze(1)).dtype == dtype


def test_learned_positions_learn_where_they_were_used() -> None:
    positions = LearnedPositions(3, capacity=7)
    positions(torch.zeros(2, 4, 3), offset=2).sum().backward()
    assert positions.weight.grad is not None
    assert_close(positions.weight.grad[:, 0], torch.tensor([0.0, 0, 2, 2, 2, 2, 0]))
    again = LearnedPositions(3, capacity=7)
    again.load_state_dict(positions.state_dict())
    assert_close(again.table(7), positions.table(7), rtol=0, atol=0)


def test_a_table_that_is_too_short_says_so() -> None:
    with pytest.raises(ValueError, match="positions 3 to 7 asked, the table holds 7"):
        LearnedPositions(3, capacity=7)(torch.zeros(1, 5, 3), offset=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SinusoidalPositions(7), "size must be an even number of at least 2 .* got 7"),
        (lambda: Rotary(0), "head_size must be an even number"),
        (lambda: LearnedPositions(0, 3), "size and capacity must be at least 1, got 0 and 3"),
        (lambda: Alibi(0), "heads must be at least 1, got 0"),
        (lambda: RelativePositions(3, 0), "head_size and reach must be at least 1, got 3 and 0"),
        (lambda: SinusoidalPositions(4)(torch.zeros(1, 2, 6)), "x has size 6, the positions are for size 4"),
        (lambda: Rotary(4)(torch.zeros(1, 1, 2, 6)), "x has size 6, the positions are for size 4"),
    ],
)
def test_wrong_sizes_are_named(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


# Tests of `Rotary`.


def rotated(vector: list[float], position: int, base: float) -> list[float]:
    """Return the rotation of Su et al. 2021 by complex numbers: features i and i + d/2 form one number."""
    half = len(vector) // 2
    turned = [
        complex(vector[i], vector[i + half]) * cmath.exp(1j * position * base ** (-2 * i / len(vector)))
        for i in range(half)
    ]
    return [z.real for z in turned] + [z.imag for z in turned]


def test_rotary_turns_pairs_by_their_angle() -> None:
    x = torch.randn(2, 3, 5, 14, dtype=torch.float64)
    expected = [[[rotated(v, t + 11, 500.0) for t, v in enumerate(head)] for head in batch] for batch in x.tolist()]
    found = Rotary(14, base=500.0)(x, offset=11)
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert_close(Rotary(14, base=500.0)(x, offset=torch.tensor(11)), found, rtol=0, atol=0)


def test_rotary_products_know_the_distance_alone() -> None:
    rotary = Rotary(6)
    query, key = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)
    near = (rotary(query, offset=3) * rotary(key, offset=8)).sum()
    far = (rotary(query, offset=1_000_003) * rotary(key, offset=1_000_008)).sum()
    other = (rotary(query, offset=3) * rotary(key, offset=9)).sum()
    assert_close(near, far, rtol=0, atol=1e-8)
    assert abs(near - other) > 1e-3
    assert_close(rotary(query, offset=77).norm(), query.norm())


def test_rotary_in_half_precision_keeps_late_angles() -> None:
    x = torch.randn(1, 1, 1, 6)
    late = Rotary(6)(x.bfloat16(), offset=100_003)
    assert_close(late.float(), Rotary(6)(x.bfloat16().float(), offset=100_003), rtol=0.01, atol=0.01)


# Tests of `Alibi`.


def test_slopes_are_the_papers() -> None:
    assert Alibi(8).slopes.tolist() == [1 / 2**i for i in range(1, 9)]
    # As in the code of the ALiBi paper, 12 heads have the slopes of 8 heads, then every other slope of 16 heads.
    assert_close(Alibi(12).slopes[8:], torch.tensor([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]))
    assert len(Alibi(1).slopes) == 1


def test_alibi_is_minus_slope_times_distance() -> None:
    values = Alibi(2).bias(offset=3).values(range(2), range(5), torch.float64)
    expected = [[[-slope * abs(i + 3 - j) for j in range(5)] for i in range(2)] for slope in (1 / 16, 1 / 256)]
    assert_close(values, torch.tensor(expected, dtype=torch.float64))


# Tests of attention with and without positions.


@pytest.mark.parametrize("score", ["scaled_dot", "additive", "cosine"])
def test_without_positions_attention_is_a_bag_of_words(score: str) -> None:
    layer = MultiHeadAttention(12, 3, score=score).double()
    query, memory = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert_close(layer(query, memory[:, order]).output, layer(query, memory).output, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary", "alibi", "relative"])
def test_with_positions_the_order_counts(kind: str) -> None:
    inside: dict[str, nn.Module] = {"rotary": Rotary(4), "alibi": Alibi(3), "relative": RelativePositions(4, 2)}
    before: dict[str, nn.Module] = {"sinusoidal": SinusoidalPositions(12), "learned": LearnedPositions(12, 7)}
    layer = MultiHeadAttention(12, 3, positions=inside.get(kind)).double()  # pyrefly: ignore[bad-argument-type]
    place = before.get(kind, nn.Identity())
    query, memory = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    changed = layer(query, place(memory[:, order])).output - layer(query, place(memory)).output
    assert changed.abs().max() > 1e-4


def test_a_sequence_without_positions_moves_with_its_order() -> None:
    """Self-attention: permuted inputs give permuted outputs, so the order has no effect."""
    layer = MultiHeadAttention(12, 3).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert_close(layer(x[:, order]).output, layer(x).output[:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("positions", [Rotary(4), Alibi(3), RelativePositions(4, 2)])
def test_relative_kinds_see_distances_alone(positions: Rotary | Alibi | RelativePositions) -> None:
    """Tokens after five masked tokens have the outputs of the same tokens at the start of a sequence."""
    layer = MultiHeadAttention(12, 3, positions=positions).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    behind = torch.cat((torch.randn(2, 5, 12, dtype=torch.float64), x), 1)
    unseen = torch.arange(12) >= 5
    late = layer(behind, mask=causal() & unseen).output[:, 5:]
    assert_close(late, layer(x, mask=causal()).output, rtol=0, atol=1e-12)


def test_positions_compile_with_lengths_that_change(as_installed: None) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    sinusoidal, learned, rotary = SinusoidalPositions(4), LearnedPositions(4, 64), Rotary(4)

    def all_three(x: Tensor) -> Tensor:
        return rotary(learned(sinusoidal(x)).unsqueeze(1))

    compiled = torch.compile(all_three, fullgraph=True, backend=count)
    for length in (5, 7, 11, 13, 17):
        x = torch.randn(2, length, 4)
        assert_close(compiled(x), all_three(x))
    assert graphs <= 2
