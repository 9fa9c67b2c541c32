"""The kernel chosen for a recent call is reused only if nothing that the choice depends on has changed.

Each test runs with the lookup in Python and with the lookup compiled from C, which also runs the call.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.core import recent_calls

SHAPE = (2, 3, 23, 16)
OFTEN = 3  # number of calls with new shapes and options after which `recall` returns the stored choice of a kernel
MOST = 4096  # number of calls after which it returns the choice, whatever tests ran before in the same process
SOFTMAX = regard.Softmax()


class Own(torch.Tensor):
    """A user-defined subclass of Tensor."""


@pytest.fixture(scope="module")
def compiled() -> Callable[..., Any] | None:
    """Return the compiled lookup, which is loaded after many repeated calls; None if it cannot be compiled."""
    x = torch.randn(1, 1, 2, 8)
    for _ in range(MOST):
        if recent_calls.compiled_call is not None:
            break
        regard.attention(x, x, x)
    return recent_calls.compiled_call


@pytest.fixture(params=["python", "compiled"], autouse=True)
def lookup(
    request: pytest.FixtureRequest, compiled: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.param == "compiled" and compiled is None:
        pytest.skip("no C compiler, or no headers of Python")
    monkeypatch.setattr(recent_calls, "compiled_call", compiled if request.param == "compiled" else None)


def recalled(*tensors: Any, mask: Any = None, dropout: Any = 0.0, score: Any = regard.ScaledDot()) -> bool:
    find = recent_calls.compiled_call or recent_calls.recall
    return find(*tensors, score, SOFTMAX, mask, None, dropout, None) is not None


def repeat(*tensors: Any, mask: Any = None) -> None:
    """Compute a call until `recall` returns its stored choice of a kernel."""
    for _ in range(MOST):
        regard.attention(*tensors, mask=mask)
        if recalled(*tensors, mask=mask):
            return


@pytest.fixture
def known() -> list[torch.Tensor]:
    """Return the tensors of a call that ran so often that `recall` returns its stored choice of a kernel."""
    tensors = [torch.randn(SHAPE) for _ in range(3)]
    repeat(*tensors)
    assert recalled(*tensors)
    return tensors


def test_other_values_are_recalled_and_give_the_same_result_as_the_reference(known: list[torch.Tensor]) -> None:
    others = [torch.randn(SHAPE) for _ in range(3)]
    assert recalled(*others)
    expected = regard.attention(*others, backend="reference").output
    torch.testing.assert_close(regard.attention(*others).output, expected)


def test_requested_weights_of_a_repeated_call(known: list[torch.Tensor]) -> None:
    for _ in range(OFTEN):
        attended = regard.attention(*known, weights=regard.full())
    right = regard.attention(*known, weights=regard.full(), backend="reference")
    torch.testing.assert_close(attended.output, right.output)
    torch.testing.assert_close(attended.weights, right.weights)
    assert attended.log_prob is None


def test_values_that_a_kernel_refuses_are_computed_by_another(known: list[torch.Tensor]) -> None:
    """With Inf in a masked value, the kernel of the repeated call computes no result."""
    mask = regard.padding(torch.tensor([22, 23]))
    repeat(*known, mask=mask)
    known[2][0, 0, 22, 3] = torch.inf
    right = regard.attention(*known, mask=mask, backend="reference").output
    assert right.isfinite().all()
    torch.testing.assert_close(regard.attention(*known, mask=mask).output, right)


def test_an_error_of_a_repeated_call_reaches_the_caller(known: list[torch.Tensor]) -> None:
    lengths = torch.tensor([22, 23])
    repeat(*known, mask=regard.padding(lengths))
    with pytest.raises(ValueError, match="length"):
        regard.attention(*known, mask=regard.padding(torch.tensor([22, 24])))


def test_one_tensor_may_be_query_key_and_value() -> None:
    one = torch.randn(SHAPE)
    repeat(one, one, one)
    assert recalled(one, one, one)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda x: x.double(),
    "length": lambda x: x[:, :, :22].contiguous(),
    "strides": lambda x: x.mT.contiguous().mT,
    "gradient": lambda x: x.clone().requires_grad_(),
    "device": lambda x: x.to("meta"),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "subclass": lambda x: x.as_subclass(Own),
    "sparse": lambda x: x.to_sparse(),
    "number": lambda x: 1.0,
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("change", CHANGES)
def test_another_tensor_is_not_recalled(known: list[torch.Tensor], change: str, place: int) -> None:
    tensors: list[Any] = list(known)
    tensors[place] = CHANGES[change](known[place])
    assert not recalled(*tensors)


# torch warns that nested tensors are a prototype.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_a_nested_tensor_is_not_recalled(known: list[torch.Tensor], place: int) -> None:
    """torch's function that compares tensors with stored metadata would end the process for a nested tensor, which has
    no strides."""
    tensors = list(known)
    tensors[place] = torch.nested.nested_tensor([known[0][0], known[0][1]])
    assert not recalled(*tensors)


@pytest.mark.parametrize(
    "records", [{"mask": regard.causal()}, {"dropout": 0.5}, {"score": regard.ScaledDot(2.0)}, {"score": regard.Dot()}]
)
def test_other_records_are_not_recalled(known: list[torch.Tensor], records: dict[str, Any]) -> None:
    assert not recalled(*known, **records)


def test_equal_bands_are_recalled_by_value() -> None:
    x = torch.randn(2, 3, 29, 16)
    repeat(x, x, x, mask=regard.causal())
    assert recalled(x, x, x, mask=regard.causal())
    assert not recalled(x, x, x, mask=regard.causal(1))
    assert not recalled(x, x, x, mask=regard.window(3, 0))


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu"),
    "inference": torch.inference_mode,
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "dual numbers": forward_ad.dual_level,
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_another_mode_is_not_recalled(known: list[torch.Tensor], mode: str) -> None:
    with MODES[mode]():
        assert not recalled(*known)


def test_a_repeated_call_is_traced_as_a_first_one(known: list[torch.Tensor]) -> None:
    graph = make_fx(lambda *tensors: regard.attention(*tensors).output)(*known)
    others = [torch.randn(SHAPE) for _ in range(3)]
    torch.testing.assert_close(graph(*others), regard.attention(*others, backend="reference").output)


def test_values_that_are_refused_draw_random_numbers_once(known: list[torch.Tensor]) -> None:
    """The next random number after a call with dropout is that after the first such call."""
    mask = regard.padding(torch.tensor([22, 23]))
    known[0][0, 0, 3, 3] = torch.nan

    def after() -> float:
        torch.manual_seed(0)
        regard.attention(*known, mask=mask, dropout=0.5)
        return torch.rand(()).item()

    first = after()
    for _ in range(OFTEN):
        assert after() == first


def test_grad_mode_is_part_of_a_call() -> None:
    length = 31 if recent_calls.compiled_call is None else 37  # a length that no test has used before
    leaf = torch.randn(2, 3, length, 16, requires_grad=True)
    for context in (nullcontext, torch.no_grad):
        with context():
            assert not recalled(leaf, leaf, leaf)
            for _ in range(OFTEN):
                assert regard.attention(leaf, leaf, leaf).output.requires_grad is (context is nullcontext)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_inside_torch_func_nothing_is_recalled(known: list[torch.Tensor], transform: Callable[..., Any]) -> None:
    seen: list[bool] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.extend([recalled(x, x, x), recalled(*known)])
        return x.sum()

    transform(watched)(known[0] if transform is torch.func.grad else known[0].expand(2, *SHAPE))
    assert seen == [False, False]


def test_deterministic_algorithms_are_part_of_a_call(known: list[torch.Tensor]) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not before)
    try:
        assert not recalled(*known)
    finally:
        torch.use_deterministic_algorithms(before)


def test_new_masks_of_the_same_kind_are_recalled_and_other_kinds_are_not() -> None:
    x, lengths = torch.randn(2, 3, 19, 16), torch.tensor([7, 19])
    repeat(x, x, x, mask=regard.padding(lengths))
    assert recalled(x, x, x, mask=regard.padding(torch.tensor([1, 2])))
    assert not recalled(x, x, x)
    assert not recalled(x, x, x, mask=regard.padding(lengths.int()))
    assert not recalled(x, x, x, mask=regard.padding(torch.tensor([[1], [2]])))
    assert not recalled(x, x, x, mask=regard.padding(lengths) & regard.causal())
    expected = regard.attention(x, x, x, mask=regard.padding(torch.tensor([3, 11])), backend="reference").output
    torch.testing.assert_close(regard.attention(x, x, x, mask=regard.padding(torch.tensor([3, 11]))).output, expected)


def test_tensors_of_masks_are_not_kept_alive() -> None:
    x, mask = torch.randn(2, 3, 19, 16), torch.ones(19, 19, dtype=torch.bool)
    alive = weakref.ref(mask)
    for _ in range(OFTEN):
        regard.attention(x, x, x, mask=mask)
    del mask
    assert alive() is None


def test_a_table_that_begins_to_learn_is_a_new_call() -> None:
    """The calls pass one bias object, but between them `requires_grad` of its table changes."""
    x, table = torch.randn(SHAPE), torch.randn(3, 45)
    bias = regard.relative(table)
    for learning in (False, True):
        table.requires_grad_(learning)
        for _ in range(OFTEN):
            output = regard.attention(x, x, x, bias=bias).output
            assert output.requires_grad is learning
    assert torch.autograd.grad(output.sum(), table)[0].shape == table.shape


def test_a_mask_is_compared_by_its_present_tensors() -> None:
    """Two masks are used alternately, and the lengths of one change in place: results equal those of new masks."""
    x, lengths = torch.randn(SHAPE), torch.tensor([5, 9])
    masks = [regard.padding(lengths), regard.padding(torch.tensor([23, 2])) & regard.causal()]
    for step in range(2 * OFTEN):
        lengths.fill_(3 + step)
        fresh = [regard.padding(lengths.clone()), regard.padding([23, 2]) & regard.causal()]
        for mask, new in zip(masks, fresh, strict=True):
            right = regard.attention(x, x, x, mask=new, backend="reference").output
            torch.testing.assert_close(regard.attention(x, x, x, mask=mask).output, right)


def test_records_of_remembered_calls_are_not_kept_alive() -> None:
    x, weight = torch.randn(SHAPE), torch.randn(16, 16)
    mask, score = regard.padding(torch.tensor([5, 9])), regard.Bilinear(weight)
    for _ in range(OFTEN):
        regard.attention(x, x, x, mask=mask, score=score)
    freed = [weakref.ref(mask), weakref.ref(score), weakref.ref(weight)]
    del mask, score, weight
    assert [each() for each in freed] == [None, None, None]


@pytest.mark.parametrize("length", [-1, 9])
@pytest.mark.parametrize("beside", [None, regard.causal()], ids=["alone", "causal"])
@pytest.mark.parametrize("score", [regard.Additive(torch.ones(6)), regard.ScaledDot()], ids=["additive", "dot"])
def test_new_lengths_out_of_range_are_refused_in_repeated_calls(
    score: regard.Score, beside: regard.Mask | None, length: int
) -> None:
    """A repeated call reads the lengths of a new mask without the checks of the first call."""
    torch.manual_seed(6)
    query, key, value = (torch.randn(2, 3, n, 6) for n in (4, 8, 8))

    def call(*lengths: int) -> torch.Tensor:
        padding = regard.padding(torch.tensor(lengths))
        return regard.attention(
            query, key, value, score=score, mask=padding if beside is None else padding & beside
        ).output

    for _ in range(3):
        full, cut = call(8, 8), call(8, 3)
    assert torch.equal(full[0], cut[0])
    torch.testing.assert_close(cut[1], attended(score, query[1], key[1, :, :3], value[1, :, :3], beside))
    with pytest.raises(ValueError, match="length"):
        call(8, length)
    assert torch.equal(call(8, 3), cut)


def attended(
    score: regard.Score, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: regard.Mask | None
) -> torch.Tensor:
    """Return attention by its formula; `mask` is None or causal()."""
    scores = score(query, key)
    if mask is not None:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return torch.softmax(scores, -1) @ value
