"""The error of a call against float64, relative to its budget, on a few rows of the first sequence.

The budget, the allowed error, is the one that the repository's tests use: twice the error of the eager form in the same
dtype for an output, three times for a gradient. If the eager form is nearly exact, four rounding errors (4 ε times the
norm of the result) replace its error. Errors are norms. The upstream gradient is 0 outside the checked rows, so that
only the checked rows contribute to gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.bench.sweep.cases import Case
from regard.bench.sweep.contests import Contender, Contest
from regard.bench.sweep.tensors import BATCHED, Tensors, example

ROWS = 16
ELEMENTS = {"cpu": 2**23, "cuda": 2**27}  # largest number of elements of a tensor in the reference computation
OUTPUT, GRADIENT, ROUNDINGS = 2.0, 3.0, 4.0
LARGEST = 1e30  # error, in budgets, that is reported for NaN and Inf


@dataclass(frozen=True)
class Truth:
    """The float64 results for the checked rows, and the allowed norm of the error of each result."""

    rows: Tensor
    exact: dict[str, Tensor]
    allowed: dict[str, float]


def rows_checked(case: Case, inputs: Tensors) -> Tensor:
    """Return the indices of the checked queries, spread evenly over the first sequence without its padding."""
    real = case.queries
    if "lengths" in inputs and case.queries == case.keys:
        real = min(real, int(inputs["lengths"][0]))
    wide = case.size if case.score == "additive" else 1
    count = max(1, min(ROWS, real, ELEMENTS[case.device] // max(1, case.heads * case.keys * wide)))
    spread = torch.linspace(0, real - 1, count).round().long()
    return spread.unique().to(case.device)


def truth(case: Case, contest: Contest) -> Truth:
    """Return the float64 results of a case, and the allowed error of each result."""
    rows = rows_checked(case, contest.inputs)
    exact = _of_reference(case, contest, torch.float64, rows)
    plain = _of_reference(case, contest, case.torch_dtype, rows)
    upstream = float(_upstream(case, exact["output"]).norm())
    epsilon = torch.finfo(case.torch_dtype).eps
    allowed = {}
    for name, right in exact.items():
        unit = 0.0 if name == "output" else upstream if name != "weights" else len(rows) ** 0.5
        least = ROUNDINGS * epsilon * max(float(right.norm()), unit)
        off = float((plain[name].double() - right).norm())
        factor = OUTPUT if name in ("output", "weights") else GRADIENT
        allowed[name] = factor * max(off if off < float("inf") else 0.0, least)
    return Truth(rows, exact, allowed)


def budgets(case: Case, contest: Contest, contender: Contender, truth: Truth) -> dict[str, float]:
    """Return the errors of a contender's output, weights and gradients, each divided by its budget."""
    with torch.set_grad_enabled(case.gradients):
        output, weights = contender.call()
    results = {"output": output.detach()[:1].index_select(-2, truth.rows)}
    if weights is not None and "weights" in truth.exact:
        results["weights"] = _weights_of_rows(case, weights, truth.rows)
    if case.gradients:
        upstream = torch.zeros_like(output)
        upstream[:1].index_copy_(-2, truth.rows, _upstream(case, results["output"]))
        grads = torch.autograd.grad(output, contender.leaves, upstream, allow_unused=True)
        places = {id(leaf): grad for leaf, grad in zip(contender.leaves, grads, strict=True)}
        for name, leaf in contest.inputs.items():
            grad = places.get(id(leaf))
            if grad is not None and name in truth.exact:
                results[name] = grad[:1] if name in BATCHED else grad
    off = {name: float((tensor.double() - truth.exact[name]).norm()) for name, tensor in results.items()}
    # NaN is replaced, because max() may ignore it and JSON cannot represent it.
    return {
        name: error / max(truth.allowed[name], 1e-30) if error < LARGEST else LARGEST for name, error in off.items()
    }


def _of_reference(case: Case, contest: Contest, dtype: torch.dtype, rows: Tensor) -> dict[str, Tensor]:
    some = example(case, contest.inputs, dtype, gradients=case.gradients)
    with torch.set_grad_enabled(case.gradients):
        output, weights = contest.reference(some, rows)
    results: dict[str, Tensor] = {}
    if case.request == "rows":  # this request returns the weights of the first and the last query
        ends = torch.tensor([0, case.queries - 1], device=case.device)
        weights = contest.reference(some, ends)[1]
    if case.request == "received":
        weights = _received(case, contest, some)
    if weights is not None:
        results["weights"] = weights.detach()
    results["output"] = output.detach()
    if case.gradients:
        learned = {name: tensor for name, tensor in some.items() if tensor.requires_grad}
        grads = torch.autograd.grad(output, list(learned.values()), _upstream(case, output), allow_unused=True)
        results |= {name: grad for name, grad in zip(learned, grads, strict=True) if grad is not None}
    return results


def _weights_of_rows(case: Case, weights: Tensor, rows: Tensor) -> Tensor:
    """Return the requested weights of the first sequence at the rows of the reference."""
    weights = weights.detach()[:1]
    if case.request in ("rows", "received"):
        return weights
    return weights.index_select(-1 if case.request in ("entropy", "logsumexp") else -2, rows)


def _received(case: Case, contest: Contest, some: Tensors) -> Tensor:
    """Return the sum of the weights that each key receives from all queries, computed in blocks of queries."""
    wide = case.size if case.score == "additive" else 1
    block = max(1, ELEMENTS[case.device] // (case.heads * case.keys * wide))
    total = torch.zeros((), device=case.device)
    with torch.no_grad():
        for rows in torch.arange(case.queries, device=case.device).split(block):
            weights = contest.reference(some, rows)[1]
            assert weights is not None
            total = total + weights
    return total


def _upstream(case: Case, output: Tensor) -> Tensor:
    """Return a gradient of the output that varies over positions, with equal values in every dtype."""
    slope = torch.linspace(-1, 2, output.numel(), device=output.device).reshape(output.shape)
    return slope.to(case.torch_dtype).to(output.dtype)
