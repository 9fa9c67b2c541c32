"""Kernel launches of small and middle-sized calls, which store all scores: two launches forward, three backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.kernels.triton.additive import bias_gradient, stored_gradient, stored_scores
from regard.kernels.triton.additive.pairs import EVERY, Pairs
from regard.kernels.triton.additive.plan import Block, Gradients, Inputs, launcher, trait

_WARPS = 4
_KEYS = 64  # largest number of keys in a tile of the kernels that multiply matrices
_PROGRAMS = 264  # number of programs that fill a device: two for each multiprocessor of an H200
_MOST_ROWS = 4096  # a kernel adds up at most this many parts of the weight's gradient; more parts are added by PyTorch


class Tiles(NamedTuple):
    """Tile sizes of the kernels; benchmarks try others."""

    queries: int = 8  # number of queries in the registers of a thread
    keys: int = 2
    lanes: int = 8  # number of lanes that share the hidden units of a pair
    rows: int = 2  # number of queries that a thread of the gradient kernel processes at a time
    quads: int = 4  # number of groups of four keys that a thread of the gradient kernel holds
    columns: int = 128  # number of value columns in a tile


DEFAULT = Tiles()


def _fitting(tiles: Tiles, keys: int, size: int) -> Tiles:
    """Return smaller tiles if there are few keys, which would leave most threads of larger tiles idle."""
    if tiles != DEFAULT or keys > 32:
        return tiles
    if keys > 16:
        return tiles._replace(rows=4, quads=2)
    return tiles._replace(rows=8, quads=1, keys=1, lanes=16 if keys <= 8 and size > 32 else 8)


def _up(n: int, step: int) -> int:
    return -(-n // step)


def _contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _allocator(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the fastest function that allocates a contiguous tensor like x."""
    return torch.empty_like if x.is_contiguous() else _contiguous


class Recipe:
    """Everything that the launches of one kind of call share: sizes in tiles, constants, and the compiled kernels.

    Calls of one kind agree in the shapes, strides and alignment of all operands.
    """

    def __init__(self, inputs: Inputs, tiles: Tiles) -> None:
        query, key, value, weight = inputs.query, inputs.key, inputs.value, inputs.weight
        (b, h, q, f), (_, g, k, _), e = query.shape, key.shape, value.shape[3]
        tiles = _fitting(tiles, k, f)
        queries, keys = min(tiles.queries, triton.next_power_of_2(q)), min(_KEYS, max(16, triton.next_power_of_2(k)))
        width, wide = tiles.keys * _WARPS * (32 // tiles.lanes), 4 * tiles.quads * _WARPS
        step = max(keys, width, wide)
        q_pad, k_pad = _up(q, queries) * queries, _up(k, step) * step
        self.numbers = h, g, q, k, q_pad, k_pad  # sizes, in the order of the kernels' arguments
        self.f, self.e = f, e
        self.room, self.shape, self.rows, self.pairs = (b * h, q_pad, k_pad), (b, h, q, e), (b, h, q), (b, h, q, k)
        self.parts = _up(k, wide)  # number of parts of the query's gradient, one for each tile of keys
        self.pair_steps = query.stride(), (*key.stride(),), (inputs.weight_step,)
        self.value_steps = value.stride()
        self.allocators = tuple(_allocator(x) for x in (query, key, value, weight))
        # The working memory of the backward pass holds dS, then the parts of the weight's gradient, then the parts of
        # the query's gradient.
        shared = weight.dim() == 1  # whether all heads share one weight
        self.weight_parts, self.weight_size = (b * self.parts * h, f) if shared else (b * self.parts, h * f)
        self.weight_at = b * h * q_pad * k_pad
        self.query_at = self.weight_at + _up(b * self.parts * h * f, 64) * 64
        self.numel = self.query_at + (query.numel() * self.parts if self.parts > 1 else 0)
        sums = self.weight_size if self.weight_parts <= _MOST_ROWS else 0
        chunks = _up(sums, stored_gradient.WEIGHT_COLUMNS.value)
        chunks += _up(query.numel(), stored_gradient.QUERY_COLUMNS.value) if self.parts > 1 else 0
        self.sums = b * g, self.query_at, self.parts, query.numel(), self.weight_at, self.weight_parts, sums
        self.compiled: dict[Any, Any] = {}
        # In float32, a matrix product holds two parts of each operand: with more columns, registers would spill.
        most = tiles.columns // 2 if query.dtype == torch.float32 else tiles.columns
        rows, columns = 32 if q > 16 else 16, min(most, max(16, triton.next_power_of_2(e)))
        tall, narrow = 64 if q > 32 else rows, min(most // 2, columns)
        # tiles of dS have fewer rows if there would be too few programs to fill the device
        few = 16 if b * h * (k_pad // keys) * _up(q, rows) < _PROGRAMS else rows
        pairwise = {"EXACT": not inputs.native or query.dtype == torch.float32, "NATIVE": inputs.native}
        product = {"NATIVE": inputs.native, "PRECISION": inputs.precision}
        by_keys, by_values = _up(k, keys), _up(e, narrow)
        self.plans: dict[str, tuple[Any, tuple[int, int, int], dict[str, Any], Block]] = {
            "scores": (
                stored_scores.pair_scores, (b * h * (k_pad // width), q_pad // queries, 1),
                {**pairwise, "VECTOR": _aligned(inputs), "QI": queries, "KJ": tiles.keys, "LF": tiles.lanes,
                 "WARPS": _WARPS}, Block(queries, width),
            ),
            "values": (
                stored_scores.weighted_values, (b * h, _up(q, rows), _up(e, columns)),
                {**product, "BM": rows, "BN": keys, "BE": columns}, Block(rows, keys, stages=2),
            ),
            "dS": (
                stored_gradient.score_gradient, (b * h * (k_pad // keys), _up(q_pad, few), 1),
                {**product, "BM": few, "BN": keys, "BE": columns if few < 32 else narrow}, Block(few, keys),
            ),
            "features": (
                stored_gradient.feature_gradients, (b * g * self.parts, _up(f, 32), 1),
                {**pairwise, "QB": min(tiles.rows, queries), "KQ": tiles.quads, "WARPS": _WARPS},
                Block(tiles.rows, 32, registers=128),  # with 128 registers, four programs fit a multiprocessor
            ),
            "dV": (
                stored_gradient.value_gradient, (b * g + _up(chunks, by_keys * by_values), by_keys, by_values),
                {**product, "BM": tall, "BN": keys, "BE": narrow}, Block(tall, keys, stages=2),
            ),
        }  # fmt: skip

    def launch(self, name: str, *args: Any, kind: Any = None) -> None:
        """Launch one of the kernels; a cached choice bypasses Triton's dispatcher, which costs 0.1 ms.

        `kind` is a cache key of the properties that select the compiled kernel and may differ between the calls that
        share this object.
        """
        found = self.compiled.get((name, kind))
        if found is not None:
            run, grid, constants = found
            run(grid, *args, *constants)
            return
        kernel, grid, constants, block = self.plans[name]
        compiled = kernel[grid](*args, **constants, **block.options)
        if isinstance(kernel, triton.runtime.JITFunction):  # Triton's interpreter returns no compiled kernel
            if len(self.compiled) >= _MANY_KINDS:  # every new layout of a gradient adds cache entries
                self.compiled.clear()
            self.compiled[name, kind] = launcher(compiled, args), grid, tuple(constants.values())

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, pairs: Pairs, weights: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return output (b, h, q, e), log-sum-exp (b, h, q), stored scores, and attention weights (b, h, q, k).

        Without `weights`, the last result is None.
        """
        scores = self.pair_scores(query, key, weight, pairs)
        output, lse = value.new_empty(self.shape), scores.new_empty(self.rows)
        found = query.new_empty(self.pairs) if weights else None
        self.launch("values", scores, value, *self.value_steps, pairs, output, lse, found, *self.numbers, self.e,
                    kind=weights)  # fmt: skip
        return output, lse, scores, found

    def pair_scores(self, query: Tensor, key: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return the scores of all pairs in base 2 (b * h, q, k), padded to whole tiles."""
        scores = query.new_empty(self.room, dtype=torch.float32)
        q_steps, k_steps, w_step = self.pair_steps
        self.launch("scores", query, *q_steps, key, *k_steps, weight, *w_step, pairs, scores, *self.numbers, self.f)
        return scores

    def feature_gradients(
        self, query: Tensor, key: Tensor, weight: Tensor, pairs: Pairs, work: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of query and key. `work` begins with dS, whose padding is 0.

        If the query's gradient has several parts, they are stored in `work`, and the returned tensor is uninitialised.
        """
        to_query, to_key = self.allocators[0](query), self.allocators[1](key)
        q_steps, k_steps, w_step = self.pair_steps
        whole = to_query if self.parts == 1 else None
        self.launch("features", query, *q_steps, key, *k_steps, weight, *w_step, pairs, work, self.query_at,
                    self.weight_at, whole, to_key, *self.numbers, self.f)  # fmt: skip
        return to_query, to_key

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        pairs: Pairs,
        output: Tensor,
        lse: Tensor,
        scores: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None = None,
        grad_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of query, key, value and weight, and the working memory, which begins with dS."""
        work, to_value, to_weight = scores.new_empty(self.numel), self.allocators[2](value), self.allocators[3](weight)
        steps = grad.stride()
        kind = steps, grad.data_ptr() & 15, grad_lse is None, grad_weights is None
        self.launch("dS", scores, value, *self.value_steps, grad, *steps, output, lse, grad_lse, grad_weights, pairs,
                    work, *self.numbers, self.e, kind=kind)  # fmt: skip
        to_query, to_key = self.feature_gradients(query, key, weight, pairs, work)
        parts = None if self.parts == 1 else to_query
        self.launch("dV", scores, grad, *steps, lse, pairs, to_value, work, parts, to_weight, *self.sums,
                    *self.numbers, self.e, kind=kind)  # fmt: skip
        if self.weight_parts > _MOST_ROWS:
            to_weight = self.weight_sum(work).to(weight.dtype).view(weight.shape)
        return to_query, to_key, to_value, to_weight, work

    def weight_sum(self, work: Tensor) -> Tensor:
        """Return the weight's gradient in float32, as one row: the sum of its parts in `work`."""
        stop = self.weight_at + self.weight_parts * self.weight_size
        return work[self.weight_at : stop].view(self.weight_parts, self.weight_size).sum(0)

    def query_sum(self, work: Tensor, query: Tensor) -> Tensor:
        """Return the query's gradient, the sum of its parts in `work`."""
        return work[self.query_at :].view(self.parts, *query.shape).sum(0).to(query.dtype)


_recipes: dict[Any, Recipe] = {}
_MANY = 4096
_MANY_KINDS = 64


def recipe(inputs: Inputs, pairs: Pairs, tiles: Tiles = DEFAULT) -> Recipe:
    """Return the `Recipe` of a call, which is created once for all calls with equal shapes, strides and alignment."""
    key = inputs.traits, None if pairs is EVERY else trait(pairs), inputs.query.device, tiles
    found = _recipes.get(key)
    if found is None:
        if len(_recipes) >= _MANY:  # every new sequence length adds cache entries
            _recipes.clear()
        found = _recipes[key] = Recipe(inputs, tiles)
    return found


def _aligned(inputs: Inputs) -> bool:
    """Return whether four features of any row can be loaded at once."""

    def fits(x: Tensor) -> bool:
        *steps, last = x.stride()
        return last == 1 and not any(n % 4 for n in steps) and x.data_ptr() % (4 * x.element_size()) == 0

    return inputs.query.shape[3] % 4 == 0 and fits(inputs.query) and fits(inputs.key) and fits(inputs.weight)


def forward(inputs: Inputs, pairs: Pairs, tiles: Tiles = DEFAULT) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (b, h, q, e), log-sum-exp (b, h, q), and the stored scores for the backward pass."""
    plan = recipe(inputs, pairs, tiles)
    return plan.forward(inputs.query, inputs.key, inputs.value, inputs.weight, pairs)[:3]


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
    tiles: Tiles = DEFAULT,
) -> Gradients:
    """Compute all gradients if the forward pass's scores are not available: the scores are computed again."""
    plan = recipe(inputs, pairs, tiles)
    four = inputs.query, inputs.key, inputs.value, inputs.weight
    scores = plan.pair_scores(inputs.query, inputs.key, inputs.weight, pairs)
    return gradients(plan, four, pairs, output, lse, scores, grad_output, grad_lse, bias, table)


def gradients(
    plan: Recipe,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    pairs: Pairs,
    output: Tensor,
    lse: Tensor,
    scores: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
) -> Gradients:
    """Return the gradients of query, key, value, weight and, unless they are None, of `bias` and `table`."""
    change = None if grad_lse is None else grad_lse.float().contiguous()
    *grads, work = plan.backward(*operands, pairs, output, lse, scores, grad_output, change)
    heads, _, n_q, n_k, q_pad, k_pad = plan.numbers
    grad_bias, grad_table = None, None
    if bias is not None:
        slab = work[: plan.weight_at].view(-1, heads, q_pad, k_pad)
        grad_bias = slab[:, :, :n_q, :n_k].sum_to_size(bias.shape).to(bias.dtype)
    if table is not None:
        wide = bias_gradient.by_distance(work, None, plan.room, (n_q, n_k), 0, table)
        grad_table = wide.view(-1, heads, table.shape[1]).sum(0).to(table.dtype)
    return Gradients(*grads, grad_bias, grad_table)
