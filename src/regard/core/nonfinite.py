"""Non-finite values: NaN and Inf at masked keys and values must not reach the output, not even as 0 · NaN.

A matrix product cannot skip masked pairs. So non-finite keys and values are replaced by finite ones before the product,
and NaN or Inf is written afterwards to the output rows that attend to them. Keys that no query may attend are replaced
by zeros, which also excludes numbers whose products would overflow. Where possible, the keys that no query may attend
are computed from each rule of the mask (band, lengths, ids) alone, without evaluating pairs; otherwise from the pairs,
one block of rows at a time. On the CPU keys and values are inspected first, and replaced only if they hold NaN or Inf.
On a GPU inspecting them would be a synchronisation, so they are always replaced.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.core.biases import DenseBias
from regard.core.clauses import Clauses
from regard.core.custom import Custom
from regard.core.problem import HALF, Problem
from regard.core.spans import all_of, cut
from regard.kernels.availability import capturing

_ROWS = 512  # the largest number of rows of a mask that are evaluated at a time
_NUMBERS = 2**26  # the largest number of entries of mask and bias that are evaluated at a time


def needs_cleaning(problem: Problem) -> bool:
    """Return whether masked keys and values must be replaced, because a value is NaN, Inf, or near overflow.

    Near overflow means so large that products of such values overflow. Inspecting the data is a synchronisation on
    CUDA.
    """
    if problem.mask is None and problem.bias is None:
        return False
    if _unreadable(problem) or isinstance(problem.score, Custom):
        return True  # values cannot be inspected, or the user's score function may fail for non-finite values
    try:
        return not harmless(problem.query, problem.key, problem.value, problem.differentiated)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the values of tensors under vmap and of fake tensors cannot be read
        return True


def harmless(query: Tensor, key: Tensor, value: Tensor, differentiated: bool) -> bool:
    """Return whether all values are finite and none is so large that products of such values overflow."""
    dtype = torch.float32 if query.dtype in HALF else query.dtype
    limit = math.sqrt(torch.finfo(dtype).max) / 256
    if query.device.type != "cpu":  # one synchronisation copies the minima and maxima
        extremes = [
            end.to(dtype) for tensor in (query, key, value) if tensor.numel() for end in tensor.detach().aminmax()
        ]
        return not extremes or all(-limit < end < limit for end in torch.stack(extremes).tolist())
    if not (_largest(key) < limit and _largest(query) < limit):
        return False
    # In the forward pass `value` is only multiplied by weights, so its entries need only be finite, which is faster to
    # test.
    return _largest(value) < limit if differentiated else _finite(value)


def _unreadable(problem: Problem) -> bool:
    """Return whether values cannot be inspected, because the call is compiled or captured in a CUDA graph."""
    return torch.compiler.is_compiling() or capturing(problem.device)


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value of the tensor; NaN if it holds NaN."""
    if tensor.numel() == 0:
        return 0.0
    tensor = tensor.detach()
    # aminmax reads the tensor once, but for a non-contiguous float32 tensor, such as a part of a key cache, it is ten
    # times slower than amin and amax.
    low, high = tensor.aminmax() if tensor.is_contiguous() else (tensor.amin(), tensor.amax())
    least = low.item()
    return least if math.isnan(least) else max(-least, high.item())


def _finite(tensor: Tensor) -> bool:
    if tensor.dtype in HALF:  # sums of half-precision tensors are slow on the CPU
        return math.isfinite(_largest(tensor))
    # The sum is fast to compute, and non-finite if any entry is. It may also overflow although all entries are finite:
    # then the entries are tested one by one.
    return math.isfinite(tensor.detach().sum(dtype=torch.float32).item()) or bool(tensor.isfinite().all())


def all_finite(problem: Problem) -> bool:
    """Return whether query, key and value hold no NaN or Inf; False if values cannot be inspected."""
    try:
        return finite(problem.query, problem.key, problem.value)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the values of tensors under vmap and of fake tensors cannot be read
        return False


def finite(*tensors: Tensor) -> bool:
    """Return whether none of the tensors holds NaN or Inf."""
    return all(_finite(tensor) for tensor in tensors)


def cleaned(problem: Problem) -> tuple[Problem, Tensor | None]:
    """Return the problem with finite keys and values, and a tensor to add to its output, or None.

    The tensor to add holds NaN and Inf where a query attends to a value of NaN or Inf, and 0 elsewhere. Non-finite keys
    are recorded in `bad_keys` of the problem.
    """
    if problem.bad_keys is not None or 0 in problem.shape or not needs_cleaning(problem):
        return problem, None
    seen = seen_by_any(problem)
    custom = isinstance(problem.score, Custom)
    query: Tensor | float = 0.0
    key: Tensor | float = 0.0
    if custom:
        good = problem.key.isfinite().all(-1)
        key = _one_of(problem.key, good if seen is None else good & of_key_heads(problem, seen))
    problem = zeroed(problem, seen, key)
    finite_already = not _unreadable(problem) and all_finite(problem)
    if finite_already and not custom:
        return problem, None
    filled = _filled(problem)
    if custom:
        query = _one_of(problem.query, problem.query.isfinite().all(-1) & filled.squeeze(-1))
    # The query of a row without allowed keys must not affect any result, even if it is NaN.
    problem = replace(problem, query=torch.where(filled, problem.query, query))
    if finite_already:
        return problem, None
    bad = ~problem.key.isfinite().all(-1)
    finite = problem.value.isfinite()
    marks = _attended(problem)
    problem = replace(
        problem,
        key=torch.where(bad.unsqueeze(-1), key, problem.key),
        value=torch.where(finite, problem.value, 0),
        bad_keys=bad,
    )
    return problem, marks


def finite_keys(problem: Problem) -> Problem:
    """Return the problem with finite keys, for code that computes only weights; on a GPU no value is inspected.

    In the forward pass a masked score is replaced, even if it is NaN. So only gradients need finite keys, and finite
    queries in rows without allowed keys.
    """
    if problem.device.type == "cpu" or isinstance(problem.score, Custom) or torch.compiler.is_compiling():
        return cleaned(problem)[0]
    if not (problem.masked and problem.differentiated) or problem.bad_keys is not None or 0 in problem.shape:
        return problem
    key = problem.key.detach()
    bad = key @ key.new_zeros(key.shape[-1]) != 0  # 0 · NaN and 0 · Inf are NaN
    query = torch.where(_filled(problem), problem.query, 0)
    return replace(problem, query=query, key=torch.where(bad.unsqueeze(-1), 0, problem.key), bad_keys=bad)


def _one_of(rows: Tensor, good: Bool[Tensor, "... n"]) -> Tensor:
    """Return the first of the vectors `rows` for which `good` is True, (…, 1, size); zeros if there is none.

    This vector replaces non-finite vectors in the arguments of a user's score function. The function may be undefined
    for zeros, but must be defined for this vector, because the vector is one of its arguments anyway.
    """
    first = good.to(torch.uint8).argmax(-1, keepdim=True)
    row = rows.detach().gather(-2, first.unsqueeze(-1).expand(*first.shape, rows.shape[-1]))
    return torch.where(good.any(-1)[..., None, None], row, 0)


def _filled(problem: Problem) -> Bool[Tensor, "*lead h q 1"]:
    """Return which queries have at least one allowed key."""
    lead = problem.shape[:-2]
    return torch.cat([allowed.any(-1, keepdim=True).expand(*lead, -1, 1) for allowed in _blocks(problem)], -2)


def _blocks(problem: Problem) -> Iterator[Bool[Tensor, "... rows k"]]:
    """Yield the mask of one block of rows after another; a mask shared by all heads keeps a head axis of size 1."""
    queries, keys = problem.shape[-2:]
    for rows in cut(queries, _ROWS):
        allowed = problem.allowed(rows, all_of(keys))
        if allowed is None:  # without a mask, and with a bias that is never −inf (ALiBi), every pair may attend
            allowed = torch.ones(1, 1, dtype=torch.bool, device=problem.device)
        yield allowed.expand(*allowed.shape[:-2], rows.stop - rows.start, keys)


def _attended(problem: Problem) -> Tensor:
    """Return, in the shape of the output, ±inf or NaN where a query attends to a value that is not finite; else 0."""
    value = problem.repeat(problem.value.detach()).to(problem.dtype)
    marks: list[Tensor] = []
    for allowed in _blocks(problem):
        allowed = allowed.expand(*problem.shape[:-2], *allowed.shape[-2:])
        block = value.new_zeros(())
        for mark, marked in ((math.inf, value == math.inf), (-math.inf, value == -math.inf), (math.nan, value.isnan())):
            block = block + torch.where(allowed.to(value.dtype) @ marked.to(value.dtype) > 0, mark, 0.0)
        marks.append(block)
    return torch.cat(marks, -2)


def zero_masked_keys(problem: Problem) -> Problem:
    """Return the problem with zeros for the keys and values that no query may attend, for fused kernels on a GPU.

    On the CPU, where `needs_cleaning` inspects keys and values first, the problem is returned unchanged. On a GPU
    inspecting them would be a synchronisation, so masked keys and values are always replaced.
    """
    if _readable(problem) or 0 in problem.shape:
        return problem
    return zeroed(problem, seen_by_any(problem))


def zeroed(problem: Problem, seen: Bool[Tensor, "... k"] | None, key: Tensor | float = 0.0) -> Problem:
    """Return the problem with zeros for values, and `key` for keys, where `seen` is False; unchanged if `seen` is
    None."""
    if seen is None:
        return problem
    seen = of_key_heads(problem, seen).unsqueeze(-1)
    return replace(problem, key=torch.where(seen, problem.key, key), value=torch.where(seen, problem.value, 0))


def zeroed_with_row(problem: Problem, rules: Clauses | None) -> tuple[Problem, Tensor | None]:
    """Return the problem of `zero_masked_keys`, and its mask as a row (…, 1, 1, k) of 0 and −inf to add to the scores.

    In a sequence without allowed keys this mask row allows the first key, and that key, its value and the queries are
    zeros, so that output and gradients are zeros too. The row is None on the CPU, in compiled code, with a bias, and
    for masks that differ between queries or heads, or that mask no key.
    """
    if problem.device.type == "cpu" or torch.compiler.is_compiling() or problem.bias is not None or 0 in problem.shape:
        return zero_masked_keys(problem), None
    if rules is None or not rules.by_key or rules.by_head or any(t.shape[-3] > 1 for t in rules.dense):
        return zero_masked_keys(problem), None
    queries, keys = problem.shape[-2:]
    seen = seen_keys(rules, queries, keys, problem.device)
    if seen is None:
        return problem, None
    row = torch.where(seen, 0.0, -math.inf).to(problem.query.dtype)
    filled = seen.any(-1)
    row[..., 0].masked_fill_(~filled, 0.0)
    query = torch.where(filled[..., None, None], problem.query, 0)
    return replace(zeroed(problem, seen), query=query), row.unsqueeze(-2)


def of_key_heads(problem: Problem, seen: Bool[Tensor, "... k"]) -> Bool[Tensor, "... g n"]:
    """Return which keys of each key head may be attended by any of the query heads that share it."""
    seen = seen.expand(*problem.shape[:-2], problem.shape[-1])
    return seen.unflatten(-2, (-1, problem.group)).any(-2) if problem.group > 1 else seen


def seen_by_any(problem: Problem) -> Bool[Tensor, "... k"] | None:
    """Return which keys at least one query may attend, by mask and bias; None if all keys.

    The table of a `relative` bias is inspected only on the CPU. The bias masks a key for all queries only if it is −inf
    for each of them.
    """
    queries, keys = problem.shape[-2:]
    rules, bias = problem.mask_rules, problem.bias
    closing = bias is not None and bias.may_mask and (isinstance(bias, DenseBias) or _readable(problem))
    if rules is not None and rules.separate and not closing:
        return seen_keys(rules, queries, keys, problem.device)
    if problem.mask is None and isinstance(bias, DenseBias):
        return bias.tensor.detach().amax(-2).to(problem.dtype) != -math.inf
    seen: list[Tensor] = []
    for rows in cut(queries, max(16, _NUMBERS // (keys * max(1, problem.matrices)))):
        allowed = problem.allowed(rows, all_of(keys))
        if allowed is None:
            return None
        seen.append(allowed.any(-2))
    return functools.reduce(torch.logical_or, seen)


def seen_keys(rules: Clauses, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "... k"] | None:
    """Return which keys at least one query may attend, computed from each rule of the mask alone; None if all keys."""
    parts: list[Tensor] = []
    if rules.low is not None and rules.high is not None and rules.low > rules.high:
        return torch.zeros(keys, dtype=torch.bool, device=device)
    early = rules.low is not None and rules.low > 0
    late = rules.high is not None and queries - 1 + rules.high < keys - 1
    if early or late or rules.lengths is not None:
        position = torch.arange(keys, device=device)
        if rules.low is not None and early:
            parts.append(position >= rules.low)
        if rules.high is not None and late:
            parts.append(position <= queries - 1 + rules.high)
        if rules.lengths is not None:
            parts.append(position < rules.lengths[..., None])
    for query_ids, key_ids in rules.segments:
        # In packed self-attention (equal ids, and a band that includes j = i) each key is attended by its own query.
        if query_ids is not key_ids or (rules.low or 0) > 0 or (rules.high or 0) < 0:
            parts.append(_with_company(query_ids, key_ids, rules.low, rules.high))
    parts += [dense.any(-2) for dense in rules.dense]
    return functools.reduce(torch.logical_and, parts) if parts else None


def _with_company(
    query_ids: Int[Tensor, "... q"], key_ids: Int[Tensor, "... k"], low: int | None, high: int | None
) -> Bool[Tensor, "... k"]:
    """Return for which keys j there is a query i in the same segment with low ≤ j − i ≤ high."""
    queries, position = query_ids.shape[-1], torch.arange(key_ids.shape[-1], device=key_ids.device)
    lead = torch.broadcast_shapes(query_ids.shape[:-1], key_ids.shape[:-1])
    ordered, place = (t.expand(*lead, -1).contiguous() for t in query_ids.sort(stable=True))
    wanted = key_ids.expand(*lead, -1).contiguous()
    nearest = torch.searchsorted(ordered, wanted)  # for each key: index of the first query in the key's segment
    if high is not None:  # move to the segment's first query with i ≥ j − high
        least = (position - high).clamp(0, queries - 1)
        nearest = torch.searchsorted(torch.searchsorted(ordered, ordered) * queries + place, nearest * queries + least)
    nearest = nearest.clamp_max(queries - 1)
    distance = position - place.gather(-1, nearest)
    seen = ordered.gather(-1, nearest) == wanted
    seen = seen if low is None else seen & (distance >= low)
    return seen if high is None else seen & (distance <= high)


def _readable(problem: Problem) -> bool:
    """Return whether the values of the tensors can be inspected without a device synchronisation."""
    return problem.device.type == "cpu" and not torch.compiler.is_compiling()
