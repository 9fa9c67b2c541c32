"""Additive attention without the hidden layer of all pairs in memory, and mostly without a tanh for each pair.

On the CPU, `blocked` computes any normaliser, mask and bias, with the score computed from exponentials of each query
and each key (the exponential form), which is compiled if there is a C compiler. Softmax under lengths, a causal mask or
no mask is one call of compiled code for up to 2²³ pairs; other small calls compute tanh by the logistic function (the
logistic form). On CUDA, Triton kernels compute softmax attention. For small and middle sizes the kernels store the
scores and compute a tanh for each pair and hidden unit; for large sizes they use the exponential form in float32, and a
sine series on the tensor cores in half precision.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.core import recompute
from regard.core.backends import blocked, decoding_step, reference
from regard.core.backends.kernel_arguments import beside_a_band, bias_arguments, mask_arguments, mask_pairs
from regard.core.backends.result import Direct, Result, WithRequest
from regard.core.biases import DenseBias, Rule
from regard.core.clauses import Clauses, clauses
from regard.core.mask_cache import stored
from regard.core.masks import Mask, Padding
from regard.core.problem import HALF, Problem
from regard.core.requests import Full, LogSumExp, Top, returned
from regard.core.scores import Additive
from regard.core.transforms import eager
from regard.kernels import availability
from regard.kernels.additive import exponential, logistic, native_attention, pair_loops
from regard.kernels.additive.small_calls import can_store, stores_scores
from regard.kernels.availability import TRITON

NAME = "additive"
# Pair-features are pairs of query and key times hidden units.
_WORTH = 2**20  # from _SOME up to this number of pair-features, `Logistic` is used instead of compiled loops
_STORED = 2**23  # the largest number of pairs in one call of compiled code, which stores their weights for training
_EVERY = native_attention.Visible(None, None)
_MANY = 2**24  # without a C compiler, `Exponential` is faster than `Logistic` from this number of pair-features on
_PLAIN = 2**26  # on CUDA, working memory up to which `reference` is faster than a second pass for requested weights
_SOME = 2**17  # from this number of pair-features on, the logistic function is faster than tanh


@dataclass(frozen=True, eq=False)
class Exponential(Additive):
    """The score w · tanh(q + k), computed from exponentials of each query and each key, with its own backward pass."""

    build: bool = False  # whether to compile the loops over pairs as C code

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return exponential.scores(query, key, self.weight.to(query.dtype), self.build)

    def floats(self, size: int) -> float:
        return 1.0  # the hidden layer is never stored, only one tensor of the size of the scores


@dataclass(frozen=True, eq=False)
class Logistic(Additive):
    """The score w · tanh(q + k), computed with the logistic function."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return logistic.scores(query, key, self.weight.to(query.dtype))


def refuses(problem: Problem) -> str | None:
    """Return the reason why this backend cannot compute the call, or None."""
    if problem.device.type == "cuda":
        return _kernels_refuse(problem)
    assert isinstance(problem.score, Additive)
    if problem.score.activation != "tanh":
        return f"{problem.score.activation} has no exponential form"
    return blocked.refuses(problem)


def _kernels_refuse(problem: Problem) -> str | None:
    """Return the reason why the Triton kernels cannot compute the call, or None."""
    if not TRITON:
        return "Triton is not installed"
    if not problem.normalize.is_softmax:
        return f"softmax only on CUDA, not {problem.normalize.name}"
    if problem.query.dtype not in (*HALF, torch.float32):
        return f"its kernels do not compute in {problem.query.dtype}"
    if problem.bias is not None and not isinstance(problem.bias, (DenseBias, Rule)):
        return "its kernels take a bias as a tensor or as a rule of distance"
    rules = problem.mask_rules
    if rules is None:
        return "the mask cannot be written as rules for kernels (see Mask.clauses)"
    if rules.by_head or len(rules.segments) > 1:
        return "its kernels take one length and one list of segments for all heads"
    return None


def not_worth_it(problem: Problem) -> str | None:
    """Return a reason if the reference implementation is as fast, else None."""
    if problem.device.type == "cuda":
        if _stores_weights(problem):
            return None
        requested = problem.request is not None and not isinstance(problem.request, LogSumExp)
        few = requested and reference.working_bytes(problem) <= _PLAIN
        return "small, and weights are requested: the plain form computes them with the output" if few else None
    least = _SOME if problem.dtype == torch.float32 and not torch.compiler.is_compiling() else _MANY
    if _features(problem) >= least or _native_serves(problem):
        return None
    return "small: the plain form is the fastest"


def working_bytes(problem: Problem) -> int:
    """Return the bytes of working memory: on the CPU of a block of scores, on CUDA of the features (exponentials or
    sines) of all queries and keys.

    Small calls on CUDA store the scores of all pairs, and no features.
    """
    if problem.device.type == "cpu":
        if _native_serves(problem):
            return (8 if problem.differentiated else 4 if problem.request else 0) * math.prod(problem.shape)
        by_blocks = not _whole(problem)
        problem = problem if _logistic_serves(problem) else _exponential(problem)
        return blocked.working_bytes(problem) if by_blocks else reference.working_bytes(problem)
    assert isinstance(problem.score, Additive)
    # Training also stores the gradients of the scores, and partial sums of the queries' gradients.
    if _stores_scores(problem) or _stores_weights(problem):
        return math.prod(problem.shape) * (8 + problem.query.shape[-1] // 16 if problem.differentiated else 4)
    columns = 32 if problem.query.dtype in HALF else 2  # features per hidden unit: sine and cosine of 16 harmonics
    return (problem.query.numel() + problem.key.numel()) * columns * problem.query.element_size()


def gives_weights(problem: Problem) -> bool:
    """Return whether requested weights are computed together with the output."""
    if isinstance(problem.request, LogSumExp):
        return True
    on_cpu = problem.device.type == "cpu"
    return _native_serves(problem) or _whole(problem) if on_cpu else _stores_weights(problem)


def kernel(problem: Problem) -> str:
    """Return the name of the code that runs: the formula for tanh on the CPU, or a Triton kernel on CUDA."""
    if problem.device.type == "cuda":
        return "triton decode" if _is_step(problem) else "triton additive"
    if _native_serves(problem):
        return pair_loops.form(*problem.shape[-2:])
    score = quicker(problem).score
    if isinstance(score, Exponential):  # if exponentials of the inputs overflow, this score computes tanh
        built = score.build and exponential.worth_building(problem.dtype, *problem.shape[-2:])
        return pair_loops.form(*problem.shape[-2:]) if built else "exponential"
    return "logistic" if isinstance(score, Logistic) else "tanh"


def attend(problem: Problem) -> Result:
    """Compute attention with tanh from the logistic function or from exponentials, or by the Triton kernels."""
    if problem.device.type == "cuda":
        return _by_kernels(problem)
    if _native_serves(problem):
        results = _native(problem)(problem.query, problem.key, problem.value, problem.score, problem.mask)
        if results is not None and problem.request is None:
            return Result(results)
        if results is not None and problem.request is not None:
            return Result(results[0], problem.request.of(results[1]))
    backend: Any = reference if _whole(problem) else blocked
    problem = quicker(problem)
    result = backend.attend(problem)
    if problem.request is None or result.weights is not None:
        return result
    return result._replace(weights=recompute.weights(problem, result.chosen))


def quicker(problem: Problem) -> Problem:
    """Return the problem on the CPU with its additive score replaced by a `Logistic` or an `Exponential` score.

    The problem is returned unchanged if `Logistic` is the fastest for its size, but is not exact enough for its inputs.
    """
    if not _logistic_serves(problem):
        return _exponential(problem)
    assert isinstance(problem.score, Additive)
    weight = problem.score.weight
    exact = logistic.exact_enough(problem.query, problem.key, weight)
    return replace(problem, score=Logistic(weight)) if exact else problem


def _features(problem: Problem) -> int:
    """Return the number of pair-features: pairs of query and key times hidden units."""
    return math.prod(problem.shape) * problem.query.shape[-1]


def _builds(problem: Problem) -> bool:
    """Return whether the loops over pairs are compiled.

    The result depends only on the size of the call, not on which code was compiled before, so that a resumed training
    run computes the same numbers.
    """
    if not eager((problem.query, problem.key)) or _SOME <= _features(problem) < _WORTH:
        return False
    return exponential.worth_building(problem.dtype, *problem.shape[-2:]) and pair_loops.available()


def _logistic_serves(problem: Problem) -> bool:
    """Return whether the `Logistic` score is the fastest implementation for the size of the call."""
    if torch.compiler.is_compiling() or problem.dtype != torch.float32 or not _SOME <= _features(problem) < _MANY:
        return False
    return not _builds(problem)


def _whole(problem: Problem) -> bool:
    """Return whether the scores of all pairs are computed at once, because loops over blocks take longer."""
    if problem.dtype != torch.float32:
        return False
    if _logistic_serves(problem):
        return blocked.not_worth_it(problem) is not None
    whole = isinstance(problem.request, Full) or blocked.not_worth_it(_exponential(problem)) is not None
    return whole and _builds(problem)


def _exponential(problem: Problem) -> Problem:
    assert isinstance(problem.score, Additive)
    return replace(problem, score=Exponential(problem.score.weight, build=_builds(problem)))


def direct(problem: Problem) -> Direct | None:
    """Return a function that only runs the kernel, for calls equal to `problem` but for the tensors' values; or None.

    The result is None if these calls need other operations too, such as copies of tensors. `problem` must hold the
    caller's own tensors, not views of them, and must not request weights.
    """
    if problem.device.type == "cpu":
        return _native(problem) if _native_serves(problem) else None
    if problem.device.type != "cuda" or problem.bias is not None or problem.dropout > 0.0:
        return None
    query, key, value = problem.query, problem.key, problem.value
    if query.ndim != 4 or value.shape[-1] == 0 or not query.dtype == key.dtype == value.dtype:
        return None
    assert isinstance(problem.score, Additive)
    weight = problem.score.weight
    if (weight.ndim == 2 and len(weight) != query.shape[1]) or weight.dtype == torch.float64:
        return None
    if _is_step(problem):
        return decoding_step.direct(problem, weight, 1.0)
    if _stores_scores(problem):
        return _direct_stored(problem)
    return None if problem.masked or problem.group > 1 else _direct_large


def _native_serves(problem: Problem) -> bool:
    """Return whether one call of compiled code computes attention: softmax on the CPU, unmasked, padded or causal."""
    query, value, shape = problem.query, problem.value, problem.shape
    assert isinstance(problem.score, Additive)
    if problem.bias is not None or problem.dropout > 0.0 or not problem.normalize.is_softmax or problem.group > 1:
        return False
    rules = problem.mask_rules
    if rules is None or rules.low is not None or rules.segments or rules.dense or rules.by_head:
        return False
    if query.ndim != 4 or value.shape[-1] == 0 or math.prod(shape) > _STORED or isinstance(problem.request, LogSumExp):
        return False
    weight = problem.score.weight
    if any(t.dtype not in (*HALF, torch.float32) for t in (query, problem.key, value, weight)):
        return False
    if problem.score.activation != "tanh" or problem.empty or not eager((query, problem.key, value, weight)):
        return False
    return pair_loops.available()


def with_request(problem: Problem) -> WithRequest | None:
    """Return a function that computes output and requested weights by compiled code on the CPU, else None."""
    if problem.request is None or problem.device.type != "cpu" or not _native_serves(problem):
        return None
    run = _native(problem)

    def computed(
        query: Tensor, key: Tensor, value: Tensor, score: Additive, mask: Any, _: object, request: Any
    ) -> tuple[Tensor, Tensor | Top | None, None] | None:
        results = run(query, key, value, score, mask)
        return None if results is None else (results[0], returned(request.of(results[1]), request, query.dtype), None)

    return computed


def _native(problem: Problem) -> Callable[..., Any]:
    """Return a function of query, key, value, score and mask that runs the compiled code.

    The function returns the output, or output and weights if `problem` requests weights; None if a number is not finite
    or too large.
    """
    shape, run = problem.shape, native_attention.with_weights if problem.request else native_attention.attention
    high = None if problem.mask_rules is None else problem.mask_rules.high

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Additive, mask: Any, *_: object) -> Any:
        visible, part = _EVERY, beside_a_band(mask)
        if type(part) is Padding and part.lengths.shape == shape[:1]:
            # Often a mask is built for one call: its lengths are copied, which takes less time than a search of the
            # cache. The compiled code returns None if one is out of range.
            lengths = part.lengths.to(torch.long, copy=True)
            visible = native_attention.Visible(lengths if shape[1] == 1 else lengths.repeat_interleave(shape[1]), high)
        elif mask is not None:
            build = lambda: _visible(clauses(mask.aligned(shape), *shape[-2:]), shape)  # noqa: E731
            visible = stored(mask, query.device, ("visible", shape), build)
        return run(query, key, value, score.weight, visible)

    return attended


def _visible(rules: Clauses | None, shape: tuple[int, ...]) -> native_attention.Visible:
    """Return the number of keys that padding leaves for each batch item and head, and the upper bound of the band."""
    assert rules is not None  # `_native_serves` has checked that kernels can evaluate the mask
    # The lengths are copied, because the caller may change the mask before the backward pass reads them.
    lengths = None if rules.lengths is None else rules.lengths.expand(shape[:2]).flatten().to(torch.long, copy=True)
    return native_attention.Visible(lengths, rules.high)


def _direct_stored(problem: Problem) -> Direct:
    """Return a function that only runs the CUDA kernel that stores the scores of all pairs.

    The kernel arguments of a mask are cached for the mask object.
    """
    from regard.kernels.triton.additive.operator import (  # imported here: the module imports Triton
        kernel_pairs,
        stored_call,
    )
    from regard.kernels.triton.additive.pairs import EVERY, Pairs
    from regard.kernels.triton.additive.plan import trait

    shape, batch, run = problem.shape, problem.shape[0], stored_call(problem.differentiated)
    fixed: tuple[Pairs, Any] | None = None  # kernel arguments of a mask that holds no tensors (a band)
    if problem.mask is not None and not problem.mask.tensors():
        pairs = mask_pairs(problem.mask, shape, problem.device)
        fixed = pairs, trait(pairs)

    def described(mask: Mask, device: torch.device) -> tuple[Pairs, Any]:
        pairs = mask_pairs(mask, shape, device)
        return pairs, trait(pairs)

    def attended(query: Tensor, key: Tensor, value: Tensor, score: Additive, mask: Any, *_: object) -> Tensor | None:
        device, weight = query.device, score.weight
        if device.index != availability.current_device() or weight.stride(-1) != 1:
            return None
        if mask is None:
            return run(query, key, value, weight, EVERY, None)
        if fixed is not None:
            return run(query, key, value, weight, *fixed)
        if type(mask) is Padding and not mask.plain:
            lengths = mask.lengths
            if lengths.shape == (batch,) and lengths.stride(0) == 1:
                kind = lengths.dtype, lengths.data_ptr() & 15
                return run(query, key, value, weight, Pairs(lengths=lengths), kind)
        if type(mask) is Tensor and mask.dtype == torch.bool and mask.ndim == 4:
            pairs = kernel_pairs(shape, None, None, None, None, None, mask, None, None)
            return run(query, key, value, weight, pairs, trait(pairs))
        if not isinstance(mask, Mask):
            return None
        known = stored(mask, device, ("additive", shape), lambda: described(mask, device))
        return run(query, key, value, weight, *known)

    return attended


def _direct_large(query: Tensor, key: Tensor, value: Tensor, score: Additive, *_: object) -> Tensor | None:
    """Return the output of a large call without a mask; None if its tensors are not on the current device."""
    from regard.kernels.additive.fused import additive_attention  # imported here: the module imports Triton

    if query.device.index != availability.current_device():
        return None
    return additive_attention(query, key, value, score.weight, activation=score.activation)[0]


def _is_step(problem: Problem) -> bool:
    return isinstance(problem.score, Additive) and problem.score.activation == "tanh" and decoding_step.serves(problem)


def _stores_scores(problem: Problem) -> bool:
    assert isinstance(problem.score, Additive)
    *lead, heads, queries, keys = problem.shape
    query = math.prod(lead), heads, queries, problem.query.shape[-1]
    key, columns = (1, problem.key.shape[-3], keys), problem.value.shape[-1]
    learning, activation = problem.differentiated, problem.score.activation
    return stores_scores(query, key, columns, problem.query.dtype, activation, "auto", learning)


def _stores_weights(problem: Problem) -> bool:
    """Return whether all weights are requested and the kernels that store scores return them with the output."""
    query, score = problem.query, problem.score
    if not isinstance(problem.request, Full) or not isinstance(score, Additive) or score.weight.dtype == torch.float64:
        return False
    if problem.bias is not None or problem.dropout > 0.0 or torch.compiler.is_compiling() or query.ndim != 4:
        return False
    if not query.dtype == problem.key.dtype == problem.value.dtype or problem.value.shape[-1] == 0:
        return False
    return score.activation == "tanh" and can_store(query.shape, problem.key.shape)


def _with_weights(problem: Problem, weight: Tensor) -> Result:
    from regard.kernels.triton.additive.operator import stored_weights  # imported here: the module imports Triton
    from regard.kernels.triton.additive.pairs import EVERY

    shape, device = problem.shape, problem.device
    pairs, mask = EVERY, problem.mask
    if mask is not None:
        pairs = stored(mask, device, ("weights", shape), lambda: mask_pairs(mask, shape, device))
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    return Result(*stored_weights(problem.query, problem.key, problem.value, weight, pairs))


def _by_kernels(problem: Problem) -> Result:
    from regard.kernels.additive.fused import additive_attention  # imported here: the module imports Triton

    assert isinstance(problem.score, Additive)
    lead, weight = problem.query.shape[:-3], problem.score.weight
    weight = weight.squeeze(0) if weight.ndim == 2 and len(weight) == 1 else weight
    if _stores_weights(problem):
        return _with_weights(problem, weight)
    if _is_step(problem):
        return Result(decoding_step.attend(problem, problem.query, problem.key, weight, 1.0))
    query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (problem.query, problem.key, problem.value))
    output, lse = additive_attention(
        query,
        key,
        value,
        weight,
        activation=problem.score.activation,
        dropout=problem.dropout,
        seed=blocked.seed(problem),
        **mask_arguments(problem, lead),
        **bias_arguments(problem.bias, problem.shape, lead),
    )
    lse = lse.reshape(*lead, *lse.shape[-2:])
    weights = lse if isinstance(problem.request, LogSumExp) else None
    return Result(output.reshape(*lead, *output.shape[-3:]), weights)
