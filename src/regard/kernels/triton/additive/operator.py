"""The Triton kernels as differentiable PyTorch operators, which torch.compile does not trace into."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.additive.small_calls import stores_scores
from regard.kernels.triton.additive import stored
from regard.kernels.triton.additive.backward import backward
from regard.kernels.triton.additive.forward import forward
from regard.kernels.triton.additive.pairs import EVERY, Pairs
from regard.kernels.triton.additive.plan import SPAN, Inputs

_MANY = 64  # largest number of recipes that a function returned by `stored_call` caches, by alignments and masks


def _spans(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest segment id of every SPAN positions."""
    last = ids[:, -1:].expand(-1, -ids.shape[1] % SPAN)
    spans = torch.cat([ids, last], 1).unflatten(1, (-1, SPAN))
    return spans.amin(-1), spans.amax(-1)


def kernel_pairs(
    shape: tuple[int, ...],
    low: int | None,
    high: int | None,
    lengths: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Pairs:
    """Return the masks, biases and dropout of pairs (b, h, q, k) as kernel arguments."""
    fields: dict[str, Any] = {"low": low, "high": high, "lengths": lengths}
    if query_ids is not None and key_ids is not None:
        names = ("query_ids", "key_ids", "query_least", "query_most", "key_least", "key_most")
        fields |= zip(names, (query_ids, key_ids, *_spans(query_ids), *_spans(key_ids)), strict=True)
    if mask is not None:
        wide = mask.expand(shape).view(torch.uint8)
        fields |= zip(("mask", "mask_b", "mask_h", "mask_q", "mask_k"), (wide, *wide.stride()), strict=True)
    if bias is not None:
        wide = bias.expand(shape)
        fields |= zip(("bias", "bias_b", "bias_h", "bias_q", "bias_k"), (wide, *wide.stride()), strict=True)
    if table is not None:
        fields |= {"table": table, "radius": table.shape[1] // 2}
    if dropout > 0.0:
        fields |= {"keep": 1.0 - dropout, "seed": seed}
    return Pairs(**fields) if any(x is not None for x in fields.values()) else EVERY


def _shape(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    return query.shape[0], query.shape[1], query.shape[2], key.shape[2]


def _run_forward(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, lengths: Tensor | None, query_ids: Tensor | None,
    key_ids: Tensor | None, mask: Tensor | None, bias: Tensor | None, table: Tensor | None, low: int | None,
    high: int | None, activation: str, dropout: float, seed: int, form: str, learning: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pairs = kernel_pairs(_shape(query, key), low, high, lengths, query_ids, key_ids, mask, bias, table, dropout, seed)
    inputs = Inputs(query, key, value, weight, lengths, activation)
    if stores_scores(query.shape, key.shape, value.shape[3], query.dtype, activation, form, learning):
        return stored.forward(inputs, pairs)[:2]
    return forward(inputs, pairs, form=form, learning=learning)[:2]


@torch.library.custom_op("regard::additive_forward", mutates_args=())
def additive_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    low: int | None,
    high: int | None,
    activation: str,
    dropout: float,
    seed: int,
    form: str,
    learning: bool,
) -> tuple[Tensor, Tensor]:
    return _run_forward(
        query, key, value, weight, lengths, query_ids, key_ids, mask, bias, table, low, high, activation, dropout, seed,
        form, learning,
    )  # fmt: skip


@additive_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, h, q, _f = query.shape
    return value.new_empty(b, h, q, value.shape[3]), query.new_empty(b, h, q, dtype=torch.float32)


@torch.library.custom_op("regard::additive_backward", mutates_args=())
def additive_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    low: int | None,
    high: int | None,
    activation: str,
    dropout: float,
    seed: int,
    form: str,
    bias_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    pairs = kernel_pairs(_shape(query, key), low, high, lengths, query_ids, key_ids, mask, bias, table, dropout, seed)
    small = stores_scores(query.shape, key.shape, value.shape[3], query.dtype, activation, form, True)
    rest: dict[str, Any] = {} if small else {"form": form}
    found = (stored.backward if small else backward)(
        Inputs(query, key, value, weight, lengths, activation), pairs, output, lse.contiguous(), grad_output,
        None if grad_lse is None else grad_lse.contiguous(),
        bias=bias if bias_gradients else None, table=table if bias_gradients else None, **rest,
    )  # fmt: skip
    given = (query, key, value, weight, bias, table)
    grads = (query.new_empty(0) if a is None or b is None else a.to(b.dtype) for a, b in zip(found, given, strict=True))
    return tuple(grads)  # type: ignore[return-value]


@additive_backward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    bias, table, bias_gradients = rest[4], rest[5], rest[-1]

    def like(x: Tensor | None) -> Tensor:
        return query.new_empty(0) if x is None or not bias_gradients else x.new_empty(x.shape)

    # The gradients are contiguous, whatever the layout of the operands.
    grads = (x.new_empty(x.shape) for x in (query, key, value, weight))
    return (*grads, like(bias), like(table))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.settings = inputs[10:-1]  # the operator's settings without the last one, `learning`


def _gradients(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *operands, output, lse = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    wanted = ctx.needs_input_grad[8] or ctx.needs_input_grad[9]
    *grads, grad_bias, grad_table = additive_backward(
        *operands, output, lse, grad_output, grad_lse, *ctx.settings, wanted
    )
    biases = [grad if ctx.needs_input_grad[at] else None for at, grad in ((8, grad_bias), (9, grad_table))]
    return (*grads, None, None, None, None, *biases, *(None for _ in ctx.settings), None)


additive_forward.register_autograd(_gradients, setup_context=_keep)


class _Learning(torch.autograd.Function):
    """The operators as an autograd function: calling a registered operator takes as long as a short call's kernels.

    The function has no `setup_context`, which only torch.func requires: with it, torch would inspect the function's
    signature in every call.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        query, key, value, weight, lengths, *rest = arguments
        ids_to_table, (low, high, activation, dropout, seed, form) = rest[:5], rest[5:]
        pairs = kernel_pairs(_shape(query, key), low, high, lengths, *ids_to_table, dropout, seed)
        inputs, plan, scores, choice = Inputs(query, key, value, weight, lengths, activation), None, None, None
        if stores_scores(query.shape, key.shape, value.shape[3], query.dtype, activation, form, True):
            plan = stored.recipe(inputs, pairs)
            output, lse, scores, _ = plan.forward(query, key, value, weight, pairs)
        else:
            output, lse, choice = forward(inputs, pairs, form=form, learning=True)
        ctx.save_for_backward(*arguments[:10], output, lse, scores)
        ctx.settings, ctx.kept = arguments[10:], (pairs, plan, choice)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        (pairs, plan, choice), (*operands, output, lse, scores) = ctx.kept, ctx.saved_tensors
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        biases = [x if wanted else None for x, wanted in zip(operands[8:], ctx.needs_input_grad[8:10], strict=True)]
        if plan is not None:
            found = stored.gradients(plan, operands[:4], pairs, output, lse, scores, grad_output, grad_lse, *biases)
        else:
            _, _, activation, *_, form = ctx.settings
            found = backward(
                Inputs(*operands[:5], activation), pairs, output, lse, grad_output,
                None if grad_lse is None else grad_lse.contiguous(),
                bias=biases[0], table=biases[1], form=form, choice=choice,
            )  # fmt: skip
        given = *operands[:4], *operands[8:]
        grads = [x if x is None else x.to(y.dtype) for x, y in zip(found, given, strict=True)]
        return (*grads[:4], None, None, None, None, *grads[4:], *(None for _ in ctx.settings))


class _Stored(torch.autograd.Function):
    """Attention with stored scores and without learned biases, for operands that the caller has checked."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, pairs: Pairs, plan: stored.Recipe
    ) -> Tensor:
        output, lse, scores, _ = plan.forward(query, key, value, weight, pairs)
        ctx.save_for_backward(query, key, value, weight, output, lse, scores, pairs.lengths)
        ctx.pairs, ctx.plan = pairs, plan
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        return (_once if torch.is_grad_enabled() else _stored_gradients)(ctx, *upstream)


class _Weighted(torch.autograd.Function):
    """Attention with stored scores that also returns all weights, for operands that the caller has checked."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, pairs: Pairs, plan: stored.Recipe
    ) -> tuple[Tensor, Tensor | None]:
        output, lse, scores, weights = plan.forward(query, key, value, weight, pairs, weights=True)
        ctx.save_for_backward(query, key, value, weight, output, lse, scores, pairs.lengths)
        ctx.pairs, ctx.plan = pairs, plan
        ctx.set_materialize_grads(False)
        return output, weights

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        return (_once if torch.is_grad_enabled() else _stored_gradients)(ctx, *upstream)


def _stored_gradients(ctx: Any, grad: Tensor | None, grad_weights: Tensor | None = None) -> tuple[Tensor | None, ...]:
    # the lengths are saved, although `pairs` holds them, because torch checks that saved tensors are unchanged
    query, key, value, weight, output, lse, scores, _ = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(output)
    if grad_weights is not None:
        grad_weights = grad_weights.contiguous()
    found = ctx.plan.backward(
        query, key, value, weight, ctx.pairs, output, lse, scores, grad, None, grad_weights
    )  # fmt: skip
    return (*found[:4], None, None)


# `once_differentiable` raises if gradients are differentiated again. It takes as long as a kernel launch, so it is only
# used in a backward pass with create_graph=True.
_once = once_differentiable(_stored_gradients)


def stored_call(learning: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor, Pairs, Hashable], Tensor]:
    """Return a function that computes the output of calls whose operands agree in shape, stride, dtype and device.

    The caller has checked the operands: they have one dtype, and the weight's rows are contiguous. The last argument of
    the returned function is a cache key of the pairs: it must differ if `trait(pairs)` differs. `learning` is False if
    no gradient is required.
    """
    plans: dict[Any, stored.Recipe] = {}

    def run(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, pairs: Pairs, kind: Hashable) -> Tensor:
        places = query.data_ptr() & 15, key.data_ptr() & 15, value.data_ptr() & 15, weight.data_ptr() & 15
        known = places, weight.stride(), kind
        plan = plans.get(known)
        if plan is None:
            if len(plans) >= _MANY:
                plans.clear()
            plan = plans[known] = stored.recipe(Inputs(query, key, value, weight, pairs.lengths, "tanh"), pairs)
        if learning:
            return _Stored.apply(query, key, value, weight, pairs, plan)
        return plan.forward(query, key, value, weight, pairs)[0]

    return run


def stored_weights(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return the output and all weights (b, h, q, k) of operands that the caller has checked, with stored scores."""
    plan = stored.recipe(Inputs(query, key, value, weight, pairs.lengths, "tanh"), pairs)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, weight)):
        return _Weighted.apply(query, key, value, weight, pairs, plan)
    output, _, _, weights = plan.forward(query, key, value, weight, pairs, weights=True)
    assert weights is not None
    return output, weights


def additive(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; the arguments are those of `additive_forward` without the last."""
    learning = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
    if torch.compiler.is_compiling():
        return additive_forward(*arguments, learning)
    return _Learning.apply(*arguments) if learning else _run_forward(*arguments, False)
