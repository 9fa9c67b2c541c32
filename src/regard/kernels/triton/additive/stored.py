"""The launches of small and middle-sized calls, which store their scores: two forward and four or five backward."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.kernels.triton.additive import bias_gradient, stored_gradient, stored_scores
from regard.kernels.triton.additive.pairs import EVERY, Pairs
from regard.kernels.triton.additive.plan import Block, Gradients, Inputs, trait

_WARPS = 4
_KEYS = 64  # number of keys of a program that multiplies matrices
_PROGRAMS = 264  # two for each multiprocessor of an H200


class Tiles(NamedTuple):
    """Tile sizes of the kernels; benchmarks try others."""

    queries: int = 8  # number of queries in the registers of a thread
    keys: int = 2
    lanes: int = 8  # number of lanes that share the hidden units of a pair
    rows: int = 2  # number of queries that a thread processes at a time in the gradients
    quads: int = 4  # number of groups of four keys that it holds
    columns: int = 128  # number of value columns


DEFAULT = Tiles()


def _up(n: int, step: int) -> int:
    return -(-n // step)


class Recipe:
    """Shared data of the launches of one kind of call: sizes in tiles, constants, and the compiled kernels."""

    def __init__(self, inputs: Inputs, tiles: Tiles) -> None:
        (b, h, q, self.f), (_, g, k, _), self.e = inputs.query.shape, inputs.key.shape, inputs.value.shape[3]
        queries = min(tiles.queries, triton.next_power_of_2(q))
        width, self.width = tiles.keys * _WARPS * (32 // tiles.lanes), 4 * tiles.quads * _WARPS
        q_pad, k_pad = _up(q, queries) * queries, _up(k, self.width) * self.width
        self.numbers = h, g, q, k, q_pad, k_pad  # in the order of the kernels' arguments
        self.room = b * h, q_pad, k_pad
        self.parts = k_pad // self.width  # number of parts of the query's gradient
        self.compiled: dict[str, Any] = {}
        # float32 products hold two parts of each operand: with more columns, registers would spill
        most = tiles.columns // 2 if inputs.query.dtype == torch.float32 else tiles.columns
        rows, columns = 32 if q > 16 else 16, min(most, max(16, triton.next_power_of_2(self.e)))
        tall, narrow = 64 if q > 32 else rows, min(most // 2, columns)
        # tiles of dS have fewer rows if there would be too few programs to fill the device
        few = 16 if b * h * (k_pad // _KEYS) * _up(q, rows) < _PROGRAMS else rows
        pairwise = {"EXACT": not inputs.native or inputs.query.dtype == torch.float32, "NATIVE": inputs.native}
        product = {"NATIVE": inputs.native, "PRECISION": inputs.precision}
        self.plans: dict[str, tuple[Any, tuple[int, int, int], dict[str, Any], Block]] = {
            "scores": (
                stored_scores.pair_scores, (b * h * (k_pad // width), q_pad // queries, 1),
                {**pairwise, "VECTOR": _aligned(inputs), "QI": queries, "KJ": tiles.keys, "LF": tiles.lanes,
                 "WARPS": _WARPS}, Block(queries, width),
            ),
            "values": (
                stored_scores.weighted_values, (b * h, _up(q, rows), _up(self.e, columns)),
                {**product, "BM": rows, "BN": _KEYS, "BE": columns}, Block(rows, _KEYS, stages=2),
            ),
            "dS": (
                stored_gradient.score_gradient, (b * h * (k_pad // _KEYS), _up(q_pad, few), 1),
                {**product, "BM": few, "BN": _KEYS, "BE": columns if few < 32 else narrow}, Block(few, _KEYS),
            ),
            "dV": (
                stored_gradient.value_gradient, (b * g, _up(k, _KEYS), _up(self.e, narrow)),
                {**product, "BM": tall, "BN": _KEYS, "BE": narrow}, Block(tall, _KEYS, stages=2),
            ),
            "features": (
                stored_gradient.feature_gradients, (b * g * self.parts, _up(self.f, 32), 1),
                {**pairwise, "QB": min(tiles.rows, queries), "KQ": tiles.quads, "WARPS": _WARPS},
                Block(tiles.rows, 32, registers=128),  # four programs per multiprocessor
            ),
        }  # fmt: skip

    def launch(self, name: str, *args: Any, kind: Any = None) -> None:
        """Launch one of the kernels; a cached choice bypasses Triton's dispatcher, which costs 0.1 ms.

        `kind` selects the kernel together with the operands.
        """
        kernel, grid, constants, block = self.plans[name]
        key = name if kind is None else (name, kind)
        found = self.compiled.get(key)
        if found is not None:
            found[grid](*args, *constants.values())
            return
        found = kernel[grid](*args, **constants, **block.options)
        if isinstance(kernel, triton.runtime.JITFunction):  # the interpreter returns nothing
            self.compiled[key] = found


_recipes: dict[Any, Recipe] = {}
_MANY = 4096


def recipe(inputs: Inputs, pairs: Pairs, tiles: Tiles) -> Recipe:
    """Return the recipe of a call, created at the first call of its kind."""
    key = inputs.traits, None if pairs is EVERY else trait(pairs), inputs.query.device, tiles
    found = _recipes.get(key)
    if found is None:
        if len(_recipes) >= _MANY:  # every length adds entries
            _recipes.clear()
        found = _recipes[key] = Recipe(inputs, tiles)
    return found


def _aligned(inputs: Inputs) -> bool:
    """Return whether four features of any row can be loaded at once."""

    def fits(x: Tensor) -> bool:
        *steps, last = x.stride()
        return last == 1 and not any(n % 4 for n in steps) and x.data_ptr() % (4 * x.element_size()) == 0

    return inputs.query.shape[3] % 4 == 0 and fits(inputs.query) and fits(inputs.key) and fits(inputs.weight)


def pair_scores(inputs: Inputs, pairs: Pairs, plan: Recipe) -> Tensor:
    """Return the scores of all pairs in base 2 (b * h, q, k), padded to whole tiles."""
    q, k = inputs.query, inputs.key
    scores = torch.empty(plan.room, device=q.device, dtype=torch.float32)
    plan.launch("scores", q, *q.stride(), k, *k.stride(), inputs.weight, inputs.weight_step, pairs, scores,
                *plan.numbers, plan.f)  # fmt: skip
    return scores


def forward(inputs: Inputs, pairs: Pairs, tiles: Tiles = DEFAULT) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (b, h, q, e), log-sum-exp (b, h, q), and the stored scores for the backward pass."""
    query, value, plan = inputs.query, inputs.value, recipe(inputs, pairs, tiles)
    scores = pair_scores(inputs, pairs, plan)
    output = torch.empty(*query.shape[:3], plan.e, device=query.device, dtype=value.dtype)
    lse = torch.empty(query.shape[:3], device=query.device, dtype=torch.float32)
    plan.launch("values", scores, value, *value.stride(), pairs, output, lse, *plan.numbers, plan.e)
    return output, lse, scores


def feature_gradients(inputs: Inputs, pairs: Pairs, plan: Recipe, slab: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and weight from dS in the shape of the stored scores, 0 in their padding."""
    query, key = inputs.query, inputs.key
    partial = any(x is not None for x in (pairs.low, pairs.high, pairs.lengths))  # some rows are then not written
    parts = (torch.zeros if partial else torch.empty)(
        (plan.parts, *query.shape), device=query.device, dtype=query.dtype if plan.parts == 1 else torch.float32
    )
    grad_key = torch.empty(key.shape, device=key.device, dtype=key.dtype)
    by_weight = torch.empty(
        query.shape[0] * plan.parts, query.shape[1], plan.f, device=query.device, dtype=torch.float32
    )
    plan.launch("features", query, *query.stride(), key, *key.stride(), inputs.weight, inputs.weight_step, pairs, slab,
                parts, grad_key, by_weight, *plan.numbers, plan.f)  # fmt: skip
    grad_query = parts[0] if plan.parts == 1 else parts.sum(0).to(query.dtype)
    return grad_query, grad_key, by_weight.sum(0) if inputs.weight.dim() == 2 else by_weight.sum((0, 1))


def backward(
    inputs: Inputs,
    pairs: Pairs,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    *,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    scores: Tensor | None = None,
    tiles: Tiles = DEFAULT,
) -> Gradients:
    """Compute all gradients; the scores are recomputed if the forward pass did not pass them on."""
    value, plan = inputs.value, recipe(inputs, pairs, tiles)
    scores = pair_scores(inputs, pairs, plan) if scores is None else scores
    slab, grad_value = torch.empty_like(scores), torch.empty(value.shape, device=value.device, dtype=value.dtype)
    steps = grad_output.stride()
    kind = steps, grad_output.data_ptr() % 16, grad_lse is None
    change = None if grad_lse is None else grad_lse.float()
    plan.launch("dS", scores, value, *value.stride(), grad_output, *steps, output, lse, change, pairs, slab,
                *plan.numbers, plan.e, kind=kind)  # fmt: skip
    plan.launch("dV", scores, grad_output, *steps, lse, pairs, grad_value, *plan.numbers, plan.e, kind=kind)
    grad_query, grad_key, grad_weight = feature_gradients(inputs, pairs, plan, slab)
    heads, _, n_q, n_k, q_pad, k_pad = plan.numbers
    grad_bias, grad_table = None, None
    if bias is not None:
        grad_bias = slab.view(-1, heads, q_pad, k_pad)[:, :, :n_q, :n_k].sum_to_size(bias.shape)
    if table is not None:
        wide = bias_gradient.by_distance(slab, None, plan.room, (n_q, n_k), 0, table)
        grad_table = wide.view(-1, heads, table.shape[1]).sum(0)
    return Gradients(grad_query, grad_key, grad_value, grad_weight, grad_bias, grad_table)
