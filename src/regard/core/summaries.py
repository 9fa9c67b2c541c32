"""Requested weights and summaries of softmax by Triton kernels on CUDA, at about the cost of a forward pass.

On the CPU the received weights and the entropy are computed from the log-sum-exp that the forward pass returns.
`recompute` computes the same results for every score, normaliser and device; it is the specification.
"""

import math
from typing import Any

import torch
from torch import Tensor

from regard.core.backends.kernel_arguments import bias_arguments, by_pairs, mask_arguments, narrowed, pairs_of
from regard.core.backends.result import Both, Direct, WithRequest
from regard.core.nonfinite import zero_masked_keys
from regard.core.problem import HALF, Problem
from regard.core.requests import Entropy, Full, LogSumExp, Received, Request, Top, TopWeights, returned
from regard.core.scores import Dot, ScaledDot
from regard.core.transforms import transformed
from regard.kernels.availability import TRITON
from regard.kernels.weight_sums import weight_sums

_SIZE = 256  # the largest size of queries and keys, because whole tiles are held in registers and shared memory
_COUNT = 32  # the largest number of weights per query that the kernel for `top` computes
_WRITTEN = 128  # the largest size of queries for which the kernel for all weights is faster than `plain_form`
_FEW = 2**22  # up to this number of query-key pairs, `plain_form` returns all weights in less time than the kernel
_PROGRAMS = 65_535  # the largest number of thread blocks on the second axis of a CUDA kernel launch


def serves(problem: Problem) -> bool:
    """Return whether the Triton kernels can compute the requested weights or summary."""
    if problem.device.type != "cuda" or not TRITON or torch.compiler.is_compiling() or transformed():
        return False
    if not isinstance(problem.request, (Entropy, Full, LogSumExp, Received, TopWeights)) or problem.empty:
        return False
    if not problem.normalize.is_softmax or problem.score.why_no_product() is not None:
        return False
    if problem.query.dtype not in (*HALF, torch.float32) or max(problem.query.shape[-1], problem.key.shape[-1]) > _SIZE:
        return False
    if isinstance(problem.request, Full) and problem.differentiated:
        return False
    if isinstance(problem.request, TopWeights) and problem.learned and torch.is_grad_enabled():
        return False
    if isinstance(problem.request, TopWeights) and problem.request.count > _COUNT:
        return False
    return by_pairs(problem) and math.prod(problem.shape[:-2]) <= _PROGRAMS


def writes(problem: Problem) -> bool:
    """Return whether all weights are requested and a kernel that writes them is faster than `plain_form`.

    This kernel runs after the kernel that computes the output; `plain_form` computes weights and output together.
    """
    if not isinstance(problem.request, Full) or problem.dropout > 0.0 or problem.query.dtype not in HALF:
        return False
    return problem.query.shape[-1] <= _WRITTEN and math.prod(problem.shape) > _FEW and serves(problem)


def weights(problem: Problem, lse: Tensor | None = None) -> Tensor | Top:
    """Return the requested weights in the queries' dtype, or the requested summary in float32.

    `lse` (…, h, q) is the log-sum-exp of each row of scores, if it is already computed.
    """
    from regard.kernels.triton import score_tiles as kernels  # imported here: the module imports Triton

    # The kernels replace the score of a masked key, even NaN. The backward pass would multiply with the key itself, so
    # masked keys must be zeros in the backward pass.
    problem = zero_masked_keys(problem) if problem.differentiated else problem
    product, lead = problem.score.as_product(problem.query, problem.key), problem.shape[:-2]
    assert product is not None  # `serves` has checked that the score is a dot product of vectors
    query, key = (t.reshape(-1, *t.shape[-3:]) for t in (product.query, product.key))
    query, key = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    if problem.query.ndim == 4:
        pairs = pairs_of(problem)(problem.mask, problem.bias, problem.device)
    else:
        pairs = _pairs(problem, (*query.shape[:3], key.shape[2]))
    lse = None if lse is None else lse.detach().reshape(query.shape[:3]).float().contiguous()
    requested = _requested(kernels.Scored(query, key, pairs, product.scale), problem.request, lse)
    if isinstance(requested, Top):
        return Top(*(t.reshape(*lead, *t.shape[-2:]) for t in requested))
    return requested.reshape(*lead, *requested.shape[2:])


def _requested(scored: Any, request: Request | None, lse: Tensor | None) -> Tensor | Top:
    """Return the requested weights (b, h, q, k) or their summary, such as the entropy of each query.

    `lse` (b, h, q) in float32 is the log-sum-exp of each row, if it is already computed.
    """
    from regard.kernels.triton import full_weights, largest_weights  # imported here: the modules import Triton
    from regard.kernels.triton import weight_summaries as kernels

    if isinstance(request, Full):
        return full_weights.full_weights(scored, lse)
    if isinstance(request, TopWeights):
        lse = kernels.log_sum_exp(scored)[0] if lse is None else lse
        return Top(*largest_weights.top(scored, lse, min(request.count, scored.key.shape[2])))
    kinds = ((Entropy, "entropy"), (Received, "received"), (LogSumExp, "logsumexp"))
    kind = next(name for record, name in kinds if isinstance(request, record))
    return kernels.summary(scored, lse, kind)


def with_request(problem: Problem, run: Direct | None, both: Both | None) -> WithRequest | None:
    """Return a function that computes output and weights of calls equal to `problem` but for tensors' values.

    The result is None if the kernels do not support these calls. `run` computes the output of such a call. `both`
    computes its output and log-sum-exp, and returns (None, None) if no kernel computes the log-sum-exp.
    """
    tensors = (problem.query, problem.key, problem.value)
    if (run is None and both is None) or problem.query.ndim != 4 or any(t.stride(-1) != 1 for t in tensors):
        return None
    if problem.differentiated or type(problem.score) not in (Dot, ScaledDot) or not serves(problem):
        return None
    from regard.kernels.triton.score_tiles import Scored  # imported here: the module imports Triton

    score, exact = problem.score, problem.query.dtype
    scale = score.factor(problem.query.shape[-1]) if isinstance(score, ScaledDot) else 1.0
    pairs = pairs_of(problem)

    def computed(
        query: Tensor, key: Tensor, value: Tensor, score: Any, mask: Any, bias: Any, request: Request | None
    ) -> tuple[Tensor, Tensor | Top | None, None] | None:
        if query.device.index != torch.cuda.current_device():
            return None
        output, lse = (None, None) if both is None else both(query, key, value)
        if output is None and run is not None:
            output = run(query, key, value, score, mask, bias)
        if output is None:
            return None
        lse = None if lse is None else lse.detach().float().contiguous()
        requested = _requested(Scored(query, key, pairs(mask, bias, query.device), scale), request, lse)
        return output, returned(requested, request, exact), None

    return computed


def sums_serve(problem: Problem) -> bool:
    """Return whether the requested summary can be computed on the CPU from the log-sum-exp of each row."""
    if problem.device.type != "cpu" or not isinstance(problem.request, (Entropy, Received)) or problem.empty:
        return False
    if problem.differentiated or torch.compiler.is_compiling() or transformed():
        return False
    if not problem.normalize.is_softmax or problem.score.why_no_product() is not None or problem.bias is not None:
        return False
    rules = problem.mask_rules
    return rules is not None and not rules.segments and not rules.dense


def sums(problem: Problem, lse: Tensor) -> Tensor:
    """Compute the requested entropy or received weights on the CPU from the log-sum-exp (…, h, q) of finite inputs."""
    product, rules = problem.score.as_product(problem.query, problem.key), problem.mask_rules
    assert product is not None  # `sums_serve` has checked that the score is a dot product of vectors
    assert rules is not None
    lead, keys = problem.shape[:-2], problem.shape[-1]
    query, key = (t.detach().to(problem.dtype) for t in (product.query, product.key))
    query, key = (t.reshape(-1, *t.shape[-2:]) for t in (query * product.scale, problem.repeat(key)))
    lengths = [keys] * query.shape[0]
    if rules.lengths is not None:
        lengths = rules.lengths.clamp(0, keys).expand(lead).flatten().tolist()
    entropy, lse = isinstance(problem.request, Entropy), lse.detach().reshape(query.shape[:2])
    return weight_sums(query, key, lse, rules.low, rules.high, lengths, entropy).reshape(*lead, -1)


def _pairs(problem: Problem, shape: tuple[int, ...]) -> Any:
    """Return mask and bias as arguments of the kernels that compute scores of `shape`."""
    from regard.kernels.triton.additive.operator import kernel_pairs

    lead = problem.query.shape[:-3]
    arguments: dict[str, Any] = {
        "mask": None,
        "lengths": None,
        "query_ids": None,
        "key_ids": None,
        **mask_arguments(problem, lead),
    }
    numbers = bias_arguments(problem.bias, problem.shape, lead)
    (low, high), table = arguments.pop("band"), numbers.get("relative")
    arguments = narrowed(arguments, shape[-1])
    table = None if table is None else table.contiguous()
    return kernel_pairs(shape, low=low, high=high, **arguments, bias=numbers.get("bias"), table=table)
