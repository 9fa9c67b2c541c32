"""Dot-product attention on the CPU by compiled loops (`regard.kernels.dot_attention`).

The loops refuse calls in which a number is not finite. They find such a number while they compute; the next backend in
`dispatch` then computes the call. The loops evaluate softmax, sigmoid, sparsemax, entmax, hard attention (inference
only), dropout, lengths, bands, segments, mask tensors, a softcap, biases and requests of weights. Only for the request
`top(k)`, all weights are stored first, and the largest are then selected in torch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.core.backends import reference
from regard.core.backends.result import Direct, Result, WithRequest
from regard.core.biases import Alibi, Bias, DenseBias, Relative
from regard.core.mask_cache import stored
from regard.core.masks import And, Band, Dense, Mask, Padding, Segments
from regard.core.nonfinite import finite
from regard.core.normalizers import Entmax, Hard, Sigmoid, Softmax, Sparsemax
from regard.core.problem import Problem
from regard.core.requests import Entropy, Full, LogSumExp, Received, Request, Rows, Top, TopWeights, returned
from regard.core.scores import Bilinear, Cosine, Dot, ScaledDot, ScaledProduct, Score
from regard.core.spans import all_of
from regard.core.transforms import eager, resolved
from regard.kernels import dot_attention, dot_form
from regard.kernels.dot_form import NO_LIMITS, Form, Limits

NAME, KERNEL = "loops", "compiled loops"
_BLOCK = 32  # the number of queries whose scores the C code stores at a time (BLOCK there)
_IN_PLACE = 8  # for at most so many queries, the C code reads keys and values in place (FEW there)
# Numbers of keys up to which the loops are as fast as torch's kernels or operations: `_LONGEST` in general; `_SKIPPED`
# for few queries, and for causal masks and segments, because the loops skip masked blocks. `_WIDE` limits the number of
# entries of the keys (or values) of a head, because larger ones do not fit in the cache.
_LONGEST, _SKIPPED, _WIDE = 2048, 4096, 2**17
_FEW = 64  # up to this number of queries, the loops are as fast as torch for up to _SKIPPED keys
# Numbers of keys up to which the loops are as fast as torch in bfloat16 on a processor without AMX: `_HALF_LONGEST` for
# calls with gradients or a band as mask, `_HALF_FULL` for all other calls.
_HALF_LONGEST, _HALF_FULL = 512, 192
_OUTRUN = 16384  # number of keys up to which the loops are the fastest, if they multiply matrices faster than torch
_WIDEST = 256  # the largest size of a query or value vector that the loops accept
_TINY = 2**21  # number of multiplications in q kᵀ up to which overhead dominates the time of the backward pass
_STORED_ROWS = 512  # the largest number of queries for which the tensors of requested rows are stored with a `Route`
_LEARNED = 2**15  # keys × size of one head from which on torch's backward pass of several heads is faster
_SEEN = 16  # with fewer keys, torch's CPU kernels return 0, not NaN, for a query of NaN (see `sdpa.FEW`)
_LEAST_ALPHA = 1.05  # the smallest α of entmax: below it, powers 1 / (α − 1) above 20 lose digits in float32
_PAIRS = 2**26  # the largest number of entries of a mask tensor that is computed from a mask of another kind
_STORED = 2**23  # number of pairs of a query and a key up to which all weights are stored for top(k)
# What the compiled loops compute beside the output, for each class of request of weights.
_REQUESTS: dict[type, str] = {
    type(None): "nothing",
    Full: "weights",
    TopWeights: "weights",
    Received: "received",
    Entropy: "entropy",
    Rows: "rows",
    LogSumExp: "logsumexp",
}
_KINDS = (Band, Padding, Segments, Dense)


def refuses(problem: Problem) -> str | None:
    """Return the reason why the compiled loops cannot compute the call, or None."""
    query, tensors = problem.query, (problem.query, problem.key, problem.value)
    if not eager(tensors):
        return "compiled code reads the memory of plain tensors, and only in eager mode"
    if problem.gathered:
        return "each query has keys of its own"
    if query.dtype not in (torch.float32, torch.bfloat16) or any(t.dtype != query.dtype for t in tensors):
        return f"float32 and bfloat16 only, not {_names(tensors)}"
    if query.ndim > 4:
        return f"at most one batch axis, not {query.ndim - 3}"
    if problem.value.shape[-1] == 0:
        return "the values are vectors of size 0"
    if (largest := max(query.shape[-1], problem.value.shape[-1])) > _WIDEST:
        return f"vectors of at most {_WIDEST} numbers, not {largest}"
    if any(t.stride(-1) != 1 for t in tensors):
        return "the numbers of a query, key or value are not contiguous in memory"
    if type(problem.score) not in (Dot, ScaledDot, Cosine, Bilinear):
        return f"no loop for {problem.score.name} scores"
    if _normalizer(problem) is None:
        return f"no loop for {problem.normalize.name} with these options or gradients"
    if problem.dropout == 1.0:
        return "dropout removes every weight"
    if type(problem.request) not in _REQUESTS:
        return f"no loop for the request {type(problem.request).__name__}"
    if not _mask_fits(problem):
        return "the lengths or ids of the mask have a head axis or other leading axes than the query"
    if (reason := _no_bias(problem)) is not None:
        return reason
    return None if dot_attention.available() else "there is no C compiler"


def not_worth_it(problem: Problem) -> str | None:
    """Return the reason why another backend is faster, or None."""
    if isinstance(problem.request, TopWeights) and math.prod(problem.shape) > _STORED:
        return f"more than {_STORED:,} weights would be stored to select the largest"
    if problem.mask is not None and _rules(problem.mask)[1]:
        # Masks that the loops cannot evaluate as rules are converted to mask tensors, which is worthwhile where the
        # loops multiply matrices faster than torch.
        pairs = math.prod((*problem.mask.lead(), *problem.shape[-2:]))
        if not dot_attention.outruns_torch() or pairs > _PAIRS:
            return "the mask would be converted to a tensor of all pairs"
    return None if _short(problem) else "long sequences: torch's kernels or blocks are faster on this processor"


def gives_weights(problem: Problem) -> bool:
    """Return whether requested weights are computed together with the output."""
    return True


def working_bytes(problem: Problem) -> int:
    """Return the bytes of a block of scores and of copies of keys and values for each thread, of all weights for the
    request top(k), and of the gradients of all scores if the bias has a gradient."""
    pairs, (queries, keys) = math.prod(problem.shape), problem.shape[-2:]
    size, value_size = problem.query.shape[-1], problem.value.shape[-1]
    rows = min(_BLOCK, queries)
    of_thread = (rows + keys * (queries > _IN_PLACE)) * (size + value_size) + rows * keys
    whole = pairs * (isinstance(problem.request, TopWeights) + problem.bias_learned)
    return 4 * (torch.get_num_threads() * of_thread + whole)


def kernel(problem: Problem) -> str:
    """Return the name of the code that runs."""
    return KERNEL


def _names(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))


def _normalizer(problem: Problem) -> str | None:
    """Return the name of the normaliser in `dot_attention`; None if the loops cannot compute it."""
    normalize = problem.normalize
    if isinstance(normalize, Entmax):
        names = {1.0: "softmax", 1.5: "entmax", 2.0: "sparsemax"}
        return names.get(normalize.alpha, "power" if _LEAST_ALPHA <= normalize.alpha < 2.0 else None)
    if type(normalize) is Hard:  # the compiled loops support hard attention only without gradients, with sharpness 1
        plain = (
            problem.dropout == 0.0 and normalize.sharpness == 1.0 and not problem.sample and not problem.differentiated
        )
        return "hard" if plain and not isinstance(problem.request, Entropy) else None
    return normalize.name if type(normalize) in (Softmax, Sigmoid, Sparsemax) else None


def attend(problem: Problem) -> Result | None:
    """Compute one call by the compiled loops; None if they find a number that is not finite."""
    run = _prepared(problem)
    if run is None:
        return None
    tensors, request = (problem.query, problem.key, problem.value), problem.request
    made = run(*tensors, problem.score, problem.mask, problem.bias, request, problem.generator)
    if made is None or isinstance(made, Tensor):
        return None if made is None else Result(made)
    return Result(made.output, _requested(made, request), made.log_prob, made.index)


def _requested(made: dot_attention.Results, request: Request | None) -> Tensor | Top | None:
    """Return the requested weights, or their summary, in float32."""
    if isinstance(request, TopWeights) and made.requested is not None:
        return request.of(made.requested)
    return made.requested


def _short(problem: Problem) -> bool:
    """Return whether the compiled loops are likely to be the fastest backend for these sizes."""
    keys, score = problem.shape[-1], problem.score
    if dot_attention.outruns_torch():
        stored = isinstance(problem.request, Full | TopWeights) and problem.differentiated and keys > _HALF_LONGEST
        return keys <= _OUTRUN and not (stored and reference.in_bfloat16(problem))
    in_float32 = problem.query.dtype == torch.float32
    totals = isinstance(problem.request, LogSumExp) and problem.bias is None  # also returned by torch's fused kernel
    plain = (problem.request is None or totals) and problem.dropout == 0.0
    fused = problem.normalize.is_softmax and plain
    if in_float32 and not fused:  # torch has no fused kernel on a CPU for such a call
        return keys <= _OUTRUN
    if problem.differentiated and fused and not problem.masked:
        # torch's backward pass is faster for the smallest calls, which are dominated by overhead, and for several heads
        # with many keys, which are dominated by matrix products.
        dot = isinstance(score, Dot) or (isinstance(score, ScaledDot) and score.softcap is None)
        equal = problem.key.shape[-1] == problem.value.shape[-1] and in_float32
        size, heads = problem.key.shape[-1], math.prod(problem.shape[:-2])
        tiny = math.prod(problem.shape) * size < _TINY
        if dot and equal and keys >= _SEEN and (tiny or (heads > 1 and keys * size >= _LEARNED)):
            return False
    kinds = [type(part) for part in _parts(problem.mask)]
    if not in_float32 and not dot_attention.multiplies_bfloat16() and problem.shape[-2] > _FEW:
        return keys <= (_HALF_LONGEST if problem.differentiated or Band in kinds else _HALF_FULL)
    windowed = any(type(part) is Band and part.low is not None for part in _parts(problem.mask))
    wide = keys * max(problem.query.shape[-1], problem.value.shape[-1])
    if problem.shape[-2] <= _FEW or windowed or not in_float32:
        return keys <= _SKIPPED
    if Band in kinds or Segments in kinds:
        return keys <= _SKIPPED and wide <= 2 * _WIDE
    return keys <= _LONGEST and wide <= _WIDE


def _mask_fits(problem: Problem) -> bool:
    """Return whether the compiled loops can evaluate the mask."""
    if problem.mask is None:
        return True
    batch, (rules, _) = math.prod(problem.shape[:-3]), _rules(problem.mask)
    if Padding in rules and rules[Padding].lengths.shape not in ((batch,), (batch, 1)):
        return False
    if Segments in rules:
        for ids in (rules[Segments].query_ids, rules[Segments].key_ids):
            if ids.shape[:-1].numel() not in (1, batch) or (ids.ndim == 3 and ids.shape[1] > 1):
                return False
    return True


def _no_bias(problem: Problem) -> str | None:
    """Return the reason why the compiled loops cannot add the bias, or None."""
    bias = problem.bias
    if bias is None:
        return None
    if type(bias) not in (DenseBias, Alibi, Relative):
        return f"no loop for a bias of the class {type(bias).__name__}"
    if isinstance(bias, Alibi) and (problem.bias_learned or bias.slopes.shape != problem.query.shape[-3:-2]):
        return "slopes of ALiBi that have a gradient, or not one slope for each head"
    return "a bias in float64" if any(t.dtype == torch.float64 for t in bias.tensors()) else None


def _parts(mask: Any) -> tuple[Any, ...]:
    """Return the masks whose intersection (`&`) is the given mask."""
    if mask is None:
        return ()
    return (*_parts(mask.left), *_parts(mask.right)) if type(mask) is And else (mask,)


def _rules(mask: Any) -> tuple[dict[type, Any], list[Any]]:
    """Split a conjunction of masks: return a dict of those that the loops evaluate (type: mask), and a list of the
    others."""
    rules: dict[type, Any] = {}
    others = []
    for part in _parts(mask):
        if type(part) in _KINDS and type(part) not in rules:
            rules[type(part)] = part
        else:
            others.append(part)
    return rules, others


def direct(problem: Problem) -> Direct | None:
    """Return a function that computes calls equal to `problem` but for the tensors' values; None if the loops cannot.

    The returned function takes query, key and value as the caller passed them, and returns the output alone: it is for
    calls that request no weights.
    """
    return None if isinstance(problem.normalize, Hard) else _prepared(problem)


def with_request(problem: Problem) -> WithRequest | None:
    """Return a function that runs the compiled loops for a call with requested weights or hard attention, else None."""
    run = _prepared(problem) if problem.request is not None or isinstance(problem.normalize, Hard) else None
    if run is None:
        return None

    def computed(
        query: Tensor, key: Tensor, value: Tensor, score: object, mask: Any, bias: Any, request: Request | None
    ) -> tuple[Tensor, Tensor | Top | None, Tensor | None] | None:
        made = run(query, key, value, score, mask, bias, request)
        if made is None:
            return None
        return made.output, returned(_requested(made, request), request, query.dtype), made.log_prob

    return computed


def _prepared(problem: Problem) -> Callable[..., Any] | None:
    """Return a function that computes calls equal to `problem` but for the tensors' values; None if the loops cannot.

    The returned function returns the output; for calls that request weights or use hard attention, it returns
    `dot_attention.Results` instead.
    """
    score, learning = problem.score, problem.differentiated
    direct = isinstance(score, Dot | ScaledDot)  # whether the products are of the caller's own queries and keys
    product = None if direct else score.as_product(problem.query.detach(), problem.key.detach())
    query, key = (problem.query, problem.key) if product is None else (product.query, product.key)
    if query.stride(-1) != 1 or key.stride(-1) != 1:
        return None
    form = _form(problem, query, key, problem.value, product)
    rules, others = _rules(problem.mask)
    free = problem.bias is None and not others and set(rules) <= {Band}
    plain = problem.request is None and not isinstance(problem.normalize, Hard) and problem.dropout == 0.0
    if product is None and free and plain:
        return dot_attention.repeated(form, learning)
    limits, masked, strides = functools.partial(_limits, problem.shape), problem.masked, (query.stride(), key.stride())
    queries, dropping, run = problem.shape[-2], problem.dropout > 0.0, dot_attention.attention
    if problem.request is not None or isinstance(problem.normalize, Hard):
        run = dot_attention.with_request
    # The row numbers are a part of the signature, so the tensors of a `Rows` object are the same in all these calls.
    few = _rows(problem.request, queries) if queries <= _STORED_ROWS else None

    def computed(
        query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, request: Request | None, generator: Any
    ) -> Any:
        nonlocal form
        seed = _seed(generator) if dropping else 0
        restricted = NO_LIMITS if free else limits(mask, bias)
        if not form.complete:
            form = form.completed(restricted)
        rows = _rows(request, queries) if few is None else few
        return run(query, key, value, form, restricted, learning, *rows, seed=seed)

    if product is None:

        def attended(
            query: Tensor, key: Tensor, value: Tensor, _: object, mask: Any, bias: Any, request: Any = None,
            generator: Any = None,
        ) -> Any:  # fmt: skip
            return computed(query, key, value, mask, bias, request, generator)

        return attended

    def by_product(
        query: Tensor, key: Tensor, value: Tensor, score: Score, mask: Any, bias: Any, request: Any = None,
        generator: Any = None,
    ) -> Any:  # fmt: skip
        made = score.as_product(query, key)
        assert made is not None  # `refuses` accepts only scores that can be written as a dot product
        # The backward pass of `as_product` reads masked vectors too, so a masked NaN would reach the gradients.
        changed = [old for old, new in ((query, made.query), (key, made.key)) if new is not old]
        if learning and masked and not finite(*changed):
            return None
        if (made.query.stride(), made.key.stride()) != strides:
            return None
        return computed(made.query, made.key, value, mask, bias, request, generator)

    return by_product


def _rows(request: Request | None, queries: int) -> tuple[()] | tuple[dot_form.Rows]:
    """Return the requested rows as the last argument of the loops, or () if the call requests no single rows."""
    if not isinstance(request, Rows):
        return ()
    with torch.inference_mode(False):  # a tensor that is created in inference mode could not be saved for gradients
        return (dot_form.rows(request.positions(queries).cpu(), queries),)


def _form(problem: Problem, query: Tensor, key: Tensor, value: Tensor, product: ScaledProduct | None) -> Form:
    """Return what the C code must know of a call besides its tensors; `product` is the score as a dot product."""
    score, normalize, bias, band = problem.score, problem.normalize, problem.bias, _rules(problem.mask)[0].get(Band)
    scaled = isinstance(score, ScaledDot)
    return dot_form.form(
        query,
        key,
        value,
        scale=score.factor(query.shape[-1]) if scaled else product.scale if product else 1.0,
        softcap=(score.softcap or 0.0) if scaled else 0.0,
        shift=normalize.bias if isinstance(normalize, Sigmoid) else 0.0,
        normalizer=_normalizer(problem) or "softmax",
        band=(None, None) if band is None else (band.low, band.high),
        offset=bias.offset if isinstance(bias, Alibi) else 0,
        request=_REQUESTS[type(problem.request)],
        alpha=normalize.alpha if isinstance(normalize, Entmax) else 2.0,
        dropout=problem.dropout,
        checked=_checked(problem),
    )


def _checked(problem: Problem) -> bool:
    """Return whether gradients are computed, and a key or a query may be masked for all its partners.

    A band that contains the diagonal of a square of pairs masks no key for all queries, and no query for all keys.
    """
    if not problem.differentiated or not problem.masked:
        return False
    (queries, keys), (rules, others) = problem.shape[-2:], _rules(problem.mask)
    if problem.bias is not None or others or set(rules) != {Band} or queries != keys:
        return True
    band = rules[Band]
    return not (band.low or 0) <= 0 <= (band.high or 0)


def _seed(generator: torch.Generator | None) -> int:
    """Return a random seed for dropout, from `generator` or else from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def _limits(shape: tuple[int, ...], mask: Mask | Tensor | None, bias: Bias | Tensor | None) -> Limits:
    """Return the tensors of mask and bias in the layout of the loops; the bounds of a band mask are in the `Form`."""
    lengths = query_ids = key_ids = numbers = slopes = allowed = None
    rules, others = _rules(mask)
    if Padding in rules:
        lengths = _integers(rules[Padding].lengths)
    if Segments in rules:
        segments = rules[Segments]
        query_ids = key_ids = _integers(segments.query_ids).view(-1, shape[-2])
        if segments.key_ids is not segments.query_ids:
            key_ids = _integers(segments.key_ids).view(-1, shape[-1])
    if Dense in rules:
        allowed = _four_axes(rules[Dense].tensor)
    for part in others:
        pairs = _four_axes(part if isinstance(part, Tensor) else _pairs(part, shape))
        allowed = pairs if allowed is None else allowed & pairs
    if isinstance(bias, Alibi):
        slopes = resolved(bias.slopes).float().contiguous()
    elif isinstance(bias, Relative):
        spans = all_of(shape[-2]), all_of(shape[-1])
        numbers = stored(bias, bias.table.device, ("numbers", *spans), lambda: bias.values(*spans, torch.float32))
        numbers = _four_axes(numbers)
    elif bias is not None:
        numbers = _four_axes((bias if isinstance(bias, Tensor) else bias.tensor).float())  # pyrefly: ignore
    return Limits(lengths, query_ids, key_ids, numbers, slopes, allowed)


def _pairs(mask: Mask, shape: tuple[int, ...]) -> Tensor:
    """Return a bool tensor, true where the mask allows attention, that broadcasts to `shape`; it is cached with a mask
    that holds tensors."""
    device, spans = torch.device("cpu"), (all_of(shape[-2]), all_of(shape[-1]))
    return stored(mask, device, ("pairs", shape), lambda: mask.aligned(shape).allowed(*spans, device))


def _integers(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.int64 and tensor.is_contiguous() else tensor.long().contiguous()


def _four_axes(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 4 else tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
