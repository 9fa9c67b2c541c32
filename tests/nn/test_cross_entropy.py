"""Output layer and cross-entropy in one function: against float64 loops, in blocks that never store all logits."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.nn.cross_entropy import linear_cross_entropy

TOKENS, SIZE, WORDS = 13, 7, 11
IGNORE = -3


def oracle(
    states: Sequence[Sequence[float]],
    weight: Sequence[Sequence[float]],
    bias: Sequence[float],
    target: Sequence[int],
    smoothing: float,
) -> tuple[float, list[list[float]], list[list[float]], list[float]]:
    """Return the summed loss and its gradients by states, weight and bias, in Python numbers."""
    words, size = len(weight), len(weight[0])
    loss = 0.0
    to_states = [[0.0] * size for _ in states]
    to_weight = [[0.0] * size for _ in weight]
    to_bias = [0.0] * words
    for i, (state, label) in enumerate(zip(states, target, strict=True)):
        if label == IGNORE:
            continue
        logits = [math.fsum(a * b for a, b in zip(state, weight[v], strict=True)) + bias[v] for v in range(words)]
        whole = math.fsum(math.exp(z) for z in logits)
        for v in range(words):
            wanted = smoothing / words + (1 - smoothing if v == label else 0.0)
            chance = math.exp(logits[v]) / whole
            loss -= wanted * math.log(chance)
            to_bias[v] += chance - wanted
            for f in range(size):
                to_states[i][f] += (chance - wanted) * weight[v][f]
                to_weight[v][f] += (chance - wanted) * state[f]
    return loss, to_states, to_weight, to_bias


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    states, weight, bias = torch.randn(TOKENS, SIZE), torch.randn(WORDS, SIZE), torch.randn(WORDS)
    target = torch.randint(WORDS, (TOKENS,))
    target[[2, 7, 12]] = IGNORE
    states, weight, bias = (t.to(dtype).requires_grad_() for t in (states, weight, bias))
    return states, weight, bias, target


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("rows", [None, 1, 5, 13, 100])
@pytest.mark.parametrize("biased", [True, False])
def test_value_and_gradients_are_those_of_the_loops(smoothing, rows, biased):
    states, weight, bias, target = draw()
    found = linear_cross_entropy(
        states, weight, target, bias=bias if biased else None, smoothing=smoothing, ignore=IGNORE, rows=rows
    )
    leaves = [states, weight, *([bias] if biased else [])]
    gradients = torch.autograd.grad(found.loss * 3, leaves)
    shift = bias.tolist() if biased else [0.0] * WORDS
    loss, *true = oracle(states.tolist(), weight.tolist(), shift, target.tolist(), smoothing)
    assert found.count == TOKENS - 3
    torch.testing.assert_close(found.loss, torch.tensor(loss, dtype=torch.float64))
    for gradient, expected in zip(gradients, true, strict=False):
        torch.testing.assert_close(gradient, 3 * torch.tensor(expected, dtype=torch.float64))


def test_gradients_agree_with_finite_differences():
    states, weight, bias, target = draw()

    def mean(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        loss, count = linear_cross_entropy(states, weight, target, bias=bias, smoothing=0.2, ignore=IGNORE, rows=4)
        return loss / count

    assert torch.autograd.gradcheck(mean, (states, weight, bias))


def test_any_axes_before_the_size():
    states, weight = torch.randn(2, 3, 5, SIZE), torch.randn(WORDS, SIZE)
    target = torch.randint(WORDS, (2, 3, 5))
    found = linear_cross_entropy(states, weight, target)
    plain = torch.nn.functional.cross_entropy((states @ weight.T).reshape(-1, WORDS), target.reshape(-1))
    torch.testing.assert_close(found.loss / found.count, plain)


def test_large_logits_do_not_overflow():
    states = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    found = linear_cross_entropy(states, weight, torch.tensor([0, 0]))
    torch.testing.assert_close(found.loss, torch.tensor(2000.0))
    found.loss.backward()
    torch.testing.assert_close(states.grad, torch.tensor([[0.0], [-2.0]]))


def test_an_ignored_row_reaches_nothing_even_if_it_is_nan():
    states, weight, bias, target = draw(torch.float32)
    clean = torch.autograd.grad(
        linear_cross_entropy(states, weight, target, bias=bias, ignore=IGNORE).loss, (states, weight, bias)
    )
    dirty = states.detach().clone()
    dirty[target == IGNORE] = math.nan
    dirty.requires_grad_()
    found = linear_cross_entropy(dirty, weight, target, bias=bias, ignore=IGNORE)
    for a, b in zip(torch.autograd.grad(found.loss, (dirty, weight, bias)), clean, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_nothing_to_count_is_a_loss_of_zero():
    states, weight = torch.randn(4, SIZE, requires_grad=True), torch.randn(WORDS, SIZE)
    found = linear_cross_entropy(states, weight, torch.full((4,), -100))
    assert found.loss.item() == 0.0
    assert found.count.item() == 0
    assert torch.autograd.grad(found.loss, states)[0].count_nonzero() == 0
    empty = linear_cross_entropy(torch.randn(0, SIZE), weight, torch.zeros(0, dtype=torch.long))
    assert empty.loss.item() == 0.0


def test_only_what_is_learned_gets_a_gradient():
    states, weight, bias, target = draw()
    loss = linear_cross_entropy(states, weight.detach(), target, bias=bias.detach(), ignore=IGNORE).loss
    loss.backward()
    assert states.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(states, weight, target, ignore=IGNORE).loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_the_plain_loss_in_it(dtype):
    size, words, tokens = 31, 211, 67
    states, weight = torch.randn(tokens, size).to(dtype), (torch.randn(words, size) / 4).to(dtype)
    target = torch.randint(words, (tokens,))

    def differentiated(states: Tensor, weight: Tensor, fused: bool) -> list[Tensor]:
        states, weight = states.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            loss = linear_cross_entropy(states, weight, target, smoothing=0.1, rows=17).loss
        else:
            loss = torch.nn.functional.cross_entropy(
                (states @ weight.T).to(torch.promote_types(states.dtype, torch.float32)),
                target,
                reduction="sum",
                label_smoothing=0.1,
            )
        return [loss.detach(), *torch.autograd.grad(loss, (states, weight))]

    exact = differentiated(states.double(), weight.double(), fused=False)
    plain, found = (differentiated(states, weight, fused=fused) for fused in (False, True))
    assert [t.dtype for t in found] == [torch.float32, dtype, dtype]
    for name, a, p, t in zip(("loss", "states", "weight"), found, plain, exact, strict=True):
        error, budget = ((x.double() - t).norm() / t.norm() for x in (a, p))
        assert error <= 2 * budget + 1e-4, f"{name}: {error:.1e}, plain {budget:.1e}"


def test_under_autocast_products_are_narrow_and_gradients_have_their_leaves_dtype():
    states, weight, bias, target = draw(torch.float32)
    exact = linear_cross_entropy(states, weight, target, bias=bias, ignore=IGNORE).loss
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(states, weight, target, bias=bias, ignore=IGNORE).loss
    assert found.dtype == torch.float32
    # The loss under autocast differs from the float32 loss, which shows that the products used bfloat16.
    assert found != exact
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=0)
    found.backward()
    for leaf, gradient in zip((states, weight, bias), torch.autograd.grad(exact, (states, weight, bias)), strict=True):
        assert leaf.grad.dtype == torch.float32
        assert (leaf.grad - gradient).norm() < 0.02 * gradient.norm()


class Largest(TorchDispatchMode):
    """Records the number of entries of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "regard":  # the operations inside a custom operator of regard are recorded too
            with self:
                found = func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
        else:
            found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return found


def test_logits_never_stand_whole():
    tokens, size, words = 4099, 5, 2053
    states, weight = torch.randn(tokens, size, requires_grad=True), torch.randn(words, size, requires_grad=True)
    target = torch.randint(words, (tokens,))
    with Largest() as plain:
        torch.nn.functional.cross_entropy(states @ weight.T, target).backward()
    assert plain.numbers == tokens * words  # torch's own loss stores all logits, which the counter detects
    with Largest() as watched:
        linear_cross_entropy(states, weight, target, smoothing=0.1).loss.backward()
    assert 100 * words < watched.numbers <= 2**22 + 128 * words
    with Largest() as narrow:
        linear_cross_entropy(states, weight, target, smoothing=0.1, rows=11).loss.backward()
    assert narrow.numbers == 11 * words


@pytest.mark.slow
def test_compiled_in_one_graph_for_any_number_of_tokens(as_installed):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def mean(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss, count = linear_cross_entropy(states, weight, target, smoothing=0.1)
        return loss / count

    compiled = torch.compile(mean, backend=counter, fullgraph=True, dynamic=True)
    weight = torch.randn(WORDS, SIZE, requires_grad=True)
    for tokens in (3, 17, 29, 31):
        states, target = torch.randn(tokens, SIZE, requires_grad=True), torch.randint(WORDS, (tokens,))
        found, plain = compiled(states, weight, target), mean(states, weight, target)
        torch.testing.assert_close(found, plain)
        for a, b in zip(*(torch.autograd.grad(loss, (states, weight)) for loss in (found, plain)), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": torch.zeros(13, 5)}, "states have size 5, weight has 7"),
        ({"target": torch.zeros(12, dtype=torch.long)}, r"target must have shape \(13,\)"),
        ({"bias": torch.zeros(7)}, r"bias must have shape \(11,\)"),
        ({"smoothing": 1.5}, "smoothing must be between 0 and 1, got 1.5"),
        ({"rows": 0}, "rows must be 1 or more"),
        ({"target": torch.full((13,), 11)}, "target must be from 0 to 10"),
    ],
)
def test_wrong_arguments_are_named(change, message, as_installed):
    arguments = {
        "states": torch.zeros(TOKENS, SIZE),
        "weight": torch.zeros(WORDS, SIZE),
        "target": torch.zeros(TOKENS, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**arguments, **change})


@pytest.mark.interpreted
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("words", [17, 4096, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_agrees_with_the_plain_form_in_the_interpreter(dtype, words, smoothing, gradient):
    from regard.kernels.cross_entropy import _losses
    from regard.kernels.triton.softmax_loss import overwrite

    target = torch.tensor([3, -100, words - 1])
    logits = (torch.randn(3, words) * 3).to(dtype)
    ours, plain = (f(logits.clone(), target, smoothing, -100, gradient) for f in (overwrite, _losses))
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], plain[1], rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)
    assert torch.equal(ours[1], logits) != gradient


@pytest.mark.interpreted
def test_the_kernel_reports_a_target_outside_the_vocabulary_as_nan():
    from regard.kernels.triton.softmax_loss import overwrite

    assert overwrite(torch.zeros(1, 5), torch.tensor([5]), 0.0, -100, False)[0].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cuda_agrees_with_the_cpu(dtype):
    states, weight = torch.randn(301, 64), torch.randn(5003, 64) / 8
    target = torch.randint(5003, (301,))
    target[::7] = -100
    found = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [t.to(device, kind).requires_grad_() for t in (states, weight)]
        loss = linear_cross_entropy(*leaves, target.to(device), smoothing=0.1, rows=100).loss
        found.append([t.double().cpu() for t in (loss, *torch.autograd.grad(loss, leaves))])
    for a, t in zip(found[1], found[0], strict=True):
        assert (a - t).norm() <= {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype] * t.norm()


def test_a_bias_shared_by_many_rows_stays_inside_float16():
    """The gradient of the bias is a sum over all rows, which would overflow in float16."""
    states, weight = torch.zeros(70_000, 4, dtype=torch.float16), torch.zeros(8, 4, dtype=torch.float16)
    bias = torch.zeros(8, requires_grad=True)
    loss, _ = linear_cross_entropy(states, weight, torch.zeros(70_000, dtype=torch.long), bias=bias)
    loss.backward()
    torch.testing.assert_close(bias.grad[0], torch.tensor(-70_000 * 7 / 8), rtol=1e-2, atol=0)
