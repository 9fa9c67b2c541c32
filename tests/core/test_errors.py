"""Every invalid argument raises an error that names it, when `attention` is called; empty inputs are valid."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

import regard
from cases import NORMALIZERS, PLACES, SCORES, TYPICAL_PATHS, attend
from regard.core.local import local_attention

QUERY, KEY, VALUE = torch.randn(2, 6, 5, 13), torch.randn(2, 3, 7, 13), torch.randn(2, 3, 7, 11)

# For each invalid call: the arguments that differ from a valid call, and parts of the expected message.
BAD_CALLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "lengths differ": ({"value": torch.randn(2, 3, 8, 11)}, ["key", "value", "7", "8"]),
    "sizes differ for dot": ({"query": torch.randn(2, 6, 5, 12), "score": regard.Dot()}, ["query", "key", "12", "13"]),
    "sizes differ for scaled dot": ({"query": torch.randn(2, 6, 5, 12)}, ["query", "key", "12", "13"]),
    "sizes differ for cosine": (
        {"query": torch.randn(2, 6, 5, 12), "score": regard.Cosine()}, ["query", "key", "12", "13"],
    ),
    "sizes differ for additive": (
        {"query": torch.randn(2, 6, 5, 12), "score": regard.Additive(torch.ones(13))}, ["query", "12", "13"],
    ),
    "additive weight of another size": ({"score": regard.Additive(torch.ones(17))}, ["weight", "17", "13"]),
    "additive weight of other heads": ({"score": regard.Additive(torch.ones(4, 13))}, ["weight", "4", "6"]),
    "bilinear weight of another query size": ({"score": regard.Bilinear(torch.ones(17, 13))}, ["weight", "17", "13"]),
    "bilinear weight of another key size": ({"score": regard.Bilinear(torch.ones(13, 17))}, ["weight", "17", "13"]),
    "bilinear weight of other heads": ({"score": regard.Bilinear(torch.ones(4, 13, 13))}, ["weight", "4", "6"]),
    "heads not a multiple": ({"query": torch.randn(2, 7, 5, 13)}, ["query", "key", "7", "3", "multiple"]),
    "key and value heads differ": ({"value": torch.randn(2, 2, 7, 11)}, ["key", "value", "3", "2"]),
    "batches do not broadcast": ({"query": torch.randn(4, 6, 5, 13)}, ["query", "key", "4", "2"]),
    "axes differ": ({"query": torch.randn(13)}, ["query", "13"]),
    "mixed dtypes": ({"key": KEY.double()}, ["query", "key", "float32", "float64"]),
    "mixed dtypes in value": ({"value": VALUE.double()}, ["value", "float32", "float64"]),
    "integer query": ({"query": torch.ones(2, 6, 5, 13, dtype=torch.long)}, ["query", "int64"]),
    "mixed devices": ({"key": KEY.to("meta")}, ["query", "key", "cpu", "meta"]),
    "integer mask": ({"mask": torch.ones(5, 7, dtype=torch.long)}, ["mask", "bool", "int64"]),
    "float mask": ({"mask": torch.zeros(5, 7)}, ["mask", "bool", "float32"]),
    "mask does not broadcast": ({"mask": torch.ones(5, 8, dtype=torch.bool)}, ["mask", "5, 8", "2, 6, 5, 7"]),
    "mask has more axes": (
        {"mask": torch.ones(3, 1, 1, 5, 7, dtype=torch.bool)}, ["mask", "3, 1, 1, 5, 7", "2, 6, 5, 7"],
    ),
    "combined mask does not broadcast": (
        {"mask": regard.causal() & torch.ones(5, 8, dtype=torch.bool)}, ["mask", "5, 8", "2, 6, 5, 7"],
    ),
    "mask is no mask": ({"mask": "causal"}, ["mask", "str"]),
    "padding of another batch": ({"mask": regard.padding(torch.tensor([1, 2, 3]))}, ["lengths", "3", "2, 6, 5, 7"]),
    "a length beyond the keys": ({"mask": regard.padding(torch.tensor([4, 8]))}, ["lengths of padding()", "7", "8"]),
    "a length beyond the keys in a list": ({"mask": regard.padding([8, 2])}, ["lengths of padding()", "7", "8"]),
    "one length beyond the keys": ({"mask": regard.padding(9)}, ["lengths of padding()", "7", "9"]),
    "a length beyond the keys in a combination": (
        {"mask": regard.causal() & ~regard.padding(torch.tensor([4, 8]))}, ["lengths of padding()", "7", "8"],
    ),
    "a negative length": ({"mask": regard.padding(torch.tensor([4, -3]))}, ["lengths of padding()", "negative", "-3"]),
    "segments of other keys": (
        {"mask": regard.segments(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))},
        ["key_ids", "8", "7"],
    ),
    "segments of other queries": (
        {"mask": regard.segments(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long))},
        ["query_ids", "4", "5"],
    ),
    "bias does not broadcast": ({"bias": torch.zeros(6, 5, 8)}, ["bias", "6, 5, 8", "2, 6, 5, 7"]),
    "bool bias": ({"bias": torch.ones(5, 7, dtype=torch.bool)}, ["bias", "bool"]),
    "slopes of other heads": ({"bias": regard.alibi(torch.ones(4))}, ["slopes", "4", "6"]),
    "table of other heads": ({"bias": regard.relative(torch.ones(4, 5))}, ["table", "4", "6"]),
    "negative dropout": ({"dropout": -0.1}, ["dropout", "-0.1", "0", "1"]),
    "dropout above one": ({"dropout": 1.5}, ["dropout", "1.5", "0", "1"]),
    "dropout NaN": ({"dropout": math.nan}, ["dropout", "nan"]),
    "unknown backend": ({"backend": "cuda"}, ["backend", "cuda", "reference", "sdpa", "blocked", "flex", "auto"]),
    "flex without a device": ({"backend": "flex"}, ["flex", "cuda"]),
    "sdpa for sparsemax": ({"backend": "sdpa", "normalize": regard.Sparsemax()}, ["sdpa", "Sparsemax"]),
    "sdpa for additive": ({"backend": "sdpa", "score": regard.Additive(torch.ones(13))}, ["sdpa", "Additive"]),
    "sdpa for softcap": ({"backend": "sdpa", "score": regard.ScaledDot(softcap=2.0)}, ["sdpa", "softcap"]),
    "sdpa for a function": ({"backend": "sdpa", "score": lambda q, k: q @ k.mT}, ["sdpa"]),
    "row too large": ({"weights": regard.rows([5])}, ["rows", "5"]),
    "weights by name": ({"weights": "full"}, ["weights", "str"]),
    "normaliser by name": ({"normalize": "softmax"}, ["normalize", "str"]),
    "a function of torch's for a normaliser": ({"normalize": torch.softmax}, ["normalize", "the function softmax"]),
    "backend misspelt": ({"backend": "spda"}, ["backend", "spda", "did you mean 'sdpa'?"]),
    "score by name": ({"score": "dot"}, ["score", "str", "'dot'"]),
    "a mask's function": ({"mask": regard.causal}, ["mask", "function", "causal(…)"]),
    "a request's function": ({"weights": regard.full}, ["weights", "function", "full(…)"]),
    "a row of keys for each sequence": (
        {"mask": torch.ones(2, 7, dtype=torch.bool)}, ["mask", "2, 7", "2, 6, 5, 7", "mask[:, None, None, :]"],
    ),
    "pairs of each sequence": (
        {"mask": torch.ones(2, 5, 7, dtype=torch.bool)}, ["mask", "2, 5, 7", "2, 6, 5, 7", "mask[:, None]"],
    ),
    "a row of keys that lost its heads": (
        {"mask": torch.ones(2, 1, 7, dtype=torch.bool)}, ["mask", "2, 1, 7", "2, 6, 5, 7", "mask[:, None]"],
    ),
    "a row of keys without heads": (
        {"query": QUERY[0], "key": KEY[0], "value": VALUE[0], "mask": torch.ones(6, 7, dtype=torch.bool)},
        ["mask", "6, 7", "6, 5, 7", "mask[:, None, :]"],
    ),
    "nested queries": (
        {"query": torch.nested.nested_tensor([torch.ones(2, 13), torch.ones(3, 13)], layout=torch.jagged)},
        ["query", "nested", "padding(lengths)"],
    ),
    "sparse keys": ({"key": KEY.to_sparse()}, ["key", "sparse_coo", "to_dense()"]),
    "dropout of another kind": ({"dropout": np.float32(0.1)}, ["dropout", "number", "float32", "float(…)"]),
    "float8": (
        {name: t.to(torch.float8_e4m3fn) for name, t in (("query", QUERY), ("key", KEY), ("value", VALUE))},
        ["query", "float8_e4m3fn", "16, 32 or 64 bits", "query.bfloat16()"],
    ),
    "float8 of equal shapes": (
        dict.fromkeys(("query", "key", "value"), QUERY.to(torch.float8_e5m2)), ["query", "float8_e5m2", "bfloat16()"],
    ),
    "complex keys": ({"key": KEY.to(torch.complex64)}, ["key", "float", "complex64"]),
    "complex scores": (
        {"score": lambda q, k: (q @ k.mT).to(torch.complex64)}, ["score", "float", "complex64", ".real or .abs()"],
    ),
    "a score that is a mask": ({"score": lambda q, k: q @ k.mT > 0}, ["score", "float", "bool", "mask="]),
    "score returns keys first": (
        {"score": lambda q, k: (q @ k.mT).mT}, ["(2, 6, 5, 7)", "(2, 6, 5, 13)", "(2, 6, 7, 13)", "got (2, 6, 7, 5)"],
    ),
    "score returns one for all keys": (
        {"score": lambda q, k: (q @ k.mT)[..., :1]}, ["(2, 6, 5, 7)", "(2, 6, 5, 13)", "got (2, 6, 5, 1)"],
    ),
    "score returns another batch": (
        {"score": lambda q, k: (q @ k.mT).expand(3, 2, 6, -1, -1)}, ["(2, 6, 5, 7)", "got (3, 2, 6, 5, 7)"],
    ),
    "score returns another shape": ({"score": lambda q, k: (q @ k.mT).sum(-1)}, ["score"]),
}  # fmt: skip


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("call", BAD_CALLS)
def test_a_bad_call_is_refused_by_name(call: str) -> None:
    changes, words = BAD_CALLS[call]
    with pytest.raises((ValueError, TypeError)) as refusal:
        regard.attention(**({"query": QUERY, "key": KEY, "value": VALUE} | changes))
    message = str(refusal.value).lower()
    assert not [word for word in words if word.lower() not in message], message


BAD_RECORDS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "window before": (lambda: regard.window(-1, 2), ["before", "-1"]),
    "window after": (lambda: regard.window(2, -3), ["after", "-3"]),
    "softcap 0": (lambda: regard.ScaledDot(softcap=0.0), ["softcap", "0"]),
    "softcap negative": (lambda: regard.ScaledDot(softcap=-2.0), ["softcap", "-2"]),
    "softcap NaN": (lambda: regard.ScaledDot(softcap=math.nan), ["softcap", "nan"]),
    "scale NaN": (lambda: regard.ScaledDot(scale=math.nan), ["scale", "nan"]),
    "cosine scale NaN": (lambda: regard.Cosine(scale=math.nan), ["scale", "nan"]),
    "alpha 0": (lambda: regard.Entmax(alpha=0.0), ["alpha", "0", "1"]),
    "alpha negative": (lambda: regard.Entmax(alpha=-1.0), ["alpha", "-1"]),
    "alpha below 1": (lambda: regard.Entmax(alpha=0.99), ["alpha", "0.99", "1"]),
    "alpha NaN": (lambda: regard.Entmax(alpha=math.nan), ["alpha", "nan"]),
    "estimator": (
        lambda: regard.Hard(estimator="guess"),
        ["estimator", "guess", "straight_through", "reinforce", "gumbel"],
    ),
    "share expected above 1": (lambda: regard.Hard(expected=1.5), ["expected", "between 0 and 1", "1.5"]),
    "expected rows of numbers": (lambda: regard.Hard(expected=torch.ones(2)), ["expected", "bool", "float32"]),
    "masked rewards of another shape": (
        lambda: regard.reinforce(torch.zeros(2), torch.zeros(2), mask=torch.ones(3, dtype=torch.bool)),
        ["mask", "(2,)", "(3,)"],
    ),
    "temperature 0": (lambda: regard.Hard(temperature=0.0), ["temperature", "0"]),
    "temperature negative": (lambda: regard.Hard(temperature=-1.0), ["temperature", "-1"]),
    "top of a part": (lambda: regard.top(1.5), ["k of top()", "int", "float"]),
    "a mask made dense": (lambda: regard.dense(regard.causal()), ["dense()", "got a mask", "mask="]),
    "a mask for a normaliser": (lambda: regard.Softmax()(torch.ones(3), regard.causal()), ["allowed", "bool", "Band"]),
    "floats for a normaliser": (lambda: regard.Entmax()(torch.ones(3), torch.ones(3)), ["allowed", "bool", "float32"]),
    "decay in words": (lambda: regard.reinforce(torch.ones(3), torch.ones(3), decay="x"), ["decay", "number", "str"]),
    "baseline in words": (
        lambda: regard.reinforce(torch.ones(3), torch.ones(3), baseline="x"),
        ["baseline", "number", "str"],
    ),
    "many baselines": (
        lambda: regard.reinforce(torch.ones(3), torch.ones(3), baseline=torch.zeros(3)),
        ["baseline", "one number", "3"],
    ),
    "rewards of another shape": (
        lambda: regard.reinforce(torch.ones(3, 2), torch.ones(2, 3)),
        ["reward", "(3,)", "(3, 2)", "(2, 3)"],
    ),
    "top 0": (lambda: regard.top(0), ["top", "0"]),
    "dense of floats": (lambda: regard.dense(torch.ones(5, 7)), ["bool", "float32"]),
    "masks joined by and": (lambda: regard.causal() and regard.window(2, 2), ["mask", "&"]),
    "masks joined by or": (lambda: regard.causal() or regard.window(2, 2), ["mask", "|"]),
    "a mask turned by not": (lambda: not regard.causal(), ["mask", "~"]),
    "negative lengths": (lambda: regard.padding([3, -1]), ["lengths", "-1"]),
    "slopes as words": (lambda: regard.alibi(["a"]), ["slopes", "list of numbers", "str"]),
    "slopes of no length": (lambda: regard.alibi([1.0, None]), ["slopes", "list of numbers", "NoneType"]),
    "ragged bias": (
        lambda: regard.attention(QUERY, KEY, VALUE, bias=[[0.0, 1.0], [0.0]]),
        ["bias", "list of numbers", "[2]", "[1]"],
    ),
    "a causal offset beyond int64": (lambda: regard.causal(-(2**70)), ["offset of causal()", "2⁶²", "-1180591620717"]),
    "an offset of a window beyond int64": (lambda: regard.window(1, 1, 2**64), ["offset of window()", "2⁶²", "184467"]),
    "an offset of alibi beyond int64": (lambda: regard.alibi([1.0], 2**63), ["offset of alibi()", "2⁶²", "922337"]),
    "an offset of relative beyond int64": (
        lambda: regard.relative(torch.ones(3), -(2**64)),
        ["offset of relative()", "2⁶²", "-184467"],
    ),
    "a negative length in a list": (lambda: regard.padding([2, -1]), ["lengths of padding()", "negative", "-1"]),
    "a length of linear attention": (
        lambda: regard.linear_attention(QUERY, KEY, VALUE, mask=regard.padding(torch.tensor([3, 8]))),
        ["lengths of padding()", "7", "8"],
    ),
    "a length of local attention": (
        lambda: local_attention(QUERY, QUERY, QUERY, torch.zeros(2, 6, 5), reach=2, lengths=torch.tensor([3, 6])),
        ["lengths of local_attention()", "5", "6"],
    ),
    "half an offset of alibi": (lambda: regard.alibi([1.0], offset=1.5), ["offset of alibi()", "int", "float"]),
    "offset of alibi in words": (lambda: regard.alibi([1.0], offset="a"), ["offset of alibi()", "int", "str"]),
    "half an offset of relative": (
        lambda: regard.relative(torch.ones(3), offset=0.5),
        ["offset of relative()", "int", "float"],
    ),
    "a tensor for an offset": (
        lambda: regard.relative(torch.ones(3), offset=torch.tensor([1])),
        ["offset of relative()", "int", "Tensor"],
    ),
    "complex rows": (lambda: regard.rows(torch.tensor([1j])), ["rows()", "positions", "complex64"]),
    "a slice of no step": (lambda: regard.rows(slice(None, None, 0)), ["rows()", "slice(None, None, 0)", "zero"]),
    "a slice of words": (lambda: regard.rows(slice("a", None)), ["rows()", "slice('a'", "integers"]),
    "activation in a list": (lambda: regard.Additive(torch.ones(13), ["tanh"]), ["activation", "tanh", "['tanh']"]),
    "slopes as a number": (lambda: regard.alibi(8), ["slopes", "list", "int"]),
    "features by name": (
        lambda: regard.linear_attention(QUERY, KEY, VALUE, features="elu"),
        ["features", "EluFeatures", "elu"],
    ),
    "the class of features": (
        lambda: regard.linear_attention(QUERY, KEY, VALUE, features=regard.EluFeatures),
        ["features", "EluFeatures(…)"],
    ),
    "lengths of floats": (lambda: regard.padding(torch.tensor([1.5])), ["lengths", "float32"]),
    "ids of floats": (lambda: regard.segments(torch.ones(5), torch.ones(7)), ["query_ids", "float32"]),
    "even table": (lambda: regard.relative(torch.ones(4)), ["table", "4"]),
    "bilinear weight of one axis": (lambda: regard.Bilinear(torch.ones(13)), ["weight", "13"]),
    "additive weight of three axes": (lambda: regard.Additive(torch.ones(2, 6, 13)), ["weight", "2, 6, 13"]),
}


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("record", BAD_RECORDS)
def test_a_bad_record_is_refused_by_name(record: str) -> None:
    make, words = BAD_RECORDS[record]
    with pytest.raises((ValueError, TypeError)) as refusal:
        make()
    message = str(refusal.value).lower()
    assert not [word for word in words if word.lower() not in message], message


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(("make", "count"), [(regard.alibi, 6), (lambda bias: bias, 7)], ids=["slopes", "bias"])
def test_tensors_in_a_list_keep_their_gradient(make: Callable[[object], object], count: int) -> None:
    numbers = [torch.rand((), requires_grad=True) for _ in range(count)]
    gradients = []
    for given in (numbers, torch.stack(numbers)):
        output = regard.attention(QUERY, KEY, VALUE, bias=make(given)).output
        gradients.append(torch.stack(torch.autograd.grad(output.square().sum(), numbers)))
    assert gradients[0].count_nonzero() == count
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_lengths_and_ids_may_be_unsigned(dtype: torch.dtype) -> None:
    lengths, query_ids, key_ids = torch.tensor([3, 7]), torch.arange(5) // 2, torch.arange(7) // 2
    mask = regard.padding(lengths) & regard.segments(query_ids, key_ids)
    same = regard.padding(lengths.to(dtype)) & regard.segments(query_ids.to(dtype), key_ids.to(dtype))
    found, expected = (regard.attention(QUERY, KEY, VALUE, mask=each).output for each in (same, mask))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the checks are off where FlexAttention compiles")
def test_shapes_are_checked_in_tests() -> None:
    """The run-time check of annotations is on: without it, shapes in `core` would not be checked."""
    with pytest.raises(jaxtyping.TypeCheckError):
        regard.Softmax()(torch.ones(3, dtype=torch.long))
    with pytest.raises(jaxtyping.TypeCheckError):
        regard.Additive(torch.ones(3))(torch.ones(5, 3), torch.ones(7, 4))


def test_everything_after_value_is_by_keyword() -> None:
    with pytest.raises(TypeError):
        regard.attention(QUERY, KEY, VALUE, regard.Dot())


# Tests of empty inputs, which are valid.

EMPTY = {
    "batch": {"batch": 0},
    "queries": {"queries": 0},
    "keys": {"keys": 0},
    "queries and keys": {"queries": 0, "keys": 0},
    "value size": {"value_size": 0},
    "size": {"size": 0},
}
REQUESTS = {
    "full": (regard.full(), lambda b, q, k: (b, 6, q, k)),
    "rows": (regard.rows(slice(0, 2)), lambda b, q, k: (b, 6, min(q, 2), k)),
    "received": (regard.received(), lambda b, q, k: (b, 6, k)),
    "entropy": (regard.entropy(), lambda b, q, k: (b, 6, q)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, regard.causal()], ids=["open", "causal"])
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("path", [*TYPICAL_PATHS, "auto/scaled/softmax"])
def test_empty_inputs_give_the_right_shape(path: str, empty: str, mask: object) -> None:
    inputs = [tensor.requires_grad_() for tensor in SCORES[path.split("/")[1]].inputs(**EMPTY[empty])]
    b, q, k = inputs[0].shape[0], inputs[0].shape[2], inputs[1].shape[2]
    for request, shape in REQUESTS.values():
        attended = attend(path, inputs, mask=mask, weights=request)
        assert attended.weights.shape == shape(b, q, k)
        assert attended.output.shape == (b, 6, q, inputs[2].shape[-1])
        if k == 0:
            assert torch.count_nonzero(attended.output) == torch.count_nonzero(attended.weights) == 0
        gradients = torch.autograd.grad(attended.output.sum() + attended.weights.sum(), inputs, materialize_grads=True)
        for gradient, tensor in zip(gradients, inputs, strict=True):
            assert gradient.shape == tensor.shape
            assert gradient.isfinite().all()
    top = attend(path, inputs, mask=mask, weights=regard.top(4)).weights
    assert top.values.shape == top.indices.shape == (b, 6, q, min(4, k))


@pytest.mark.parametrize("shape", [(0, 6, 600, 8), (2, 0, 600, 8)], ids=["batch", "heads"])
def test_nothing_in_a_window_gives_the_right_shape(shape: tuple[int, ...]) -> None:
    """Empty batches and heads: the sequences are long enough for `sdpa` to compute only the band of the window."""
    x = torch.randn(shape, requires_grad=True)
    output = regard.attention(x, x, x, mask=regard.window(10, 0), backend="sdpa").output
    assert output.shape == torch.autograd.grad(output.sum(), x)[0].shape == shape


@pytest.mark.slow
@pytest.mark.parametrize("normalize", NORMALIZERS)
def test_a_call_leaves_its_input_alone(normalize: str) -> None:
    """No backend modifies the tensors of a call in place."""
    for place in PLACES.values():
        inputs = SCORES["scaled"].inputs()
        before = [tensor.clone() for tensor in inputs]
        for backend in ("reference", "blocked", "auto"):
            attend(f"{backend}/scaled/{normalize}", inputs, mask=place.mask, bias=place.bias(torch.float64))
        for tensor, copy in zip(inputs, before, strict=True):
            assert torch.equal(tensor, copy)


NONE, SOME = torch.zeros(0, 3), torch.zeros(4, 3)
NOTHING = {
    "no queries beside NaN": (NONE, SOME / 0, SOME, {"mask": regard.padding(3)}),
    "no queries in segments": (NONE, SOME / 0, SOME, {"mask": regard.segments(torch.arange(0), torch.arange(4))}),
    "no queries, a dense mask": (NONE, SOME, SOME, {"mask": torch.ones(0, 4, dtype=torch.bool), "backend": "sdpa"}),
    "no queries, far keys": (NONE, SOME + 100, SOME, {"score": regard.Additive(torch.ones(3)), "backend": "additive"}),
    "no size, cosine": (SOME[:, :0], SOME[:, :0], SOME, {"score": regard.Cosine()}),
    "no size, blocked": (SOME[:, :0], SOME[:, :0], SOME, {"backend": "blocked"}),
    "no size, five axes": (*(SOME[:, :0].expand(2, 1, 1, 4, 0),) * 2, SOME.expand(2, 1, 1, 4, 3), {}),
    "no value size, five axes": (*(SOME.expand(2, 1, 1, 4, 3),) * 2, SOME[:, :0].expand(2, 1, 1, 4, 0), {}),
    "no size, NaN behind a mask": (SOME[:, :0], SOME[:, :0], SOME / 0, {"mask": regard.padding(0)}),
}


@pytest.mark.parametrize("call", NOTHING)
def test_where_there_is_nothing_there_is_a_shape(call: str) -> None:
    query, key, value, arguments = NOTHING[call]
    output = regard.attention(query, key, value, **arguments).output
    assert output.shape == (*query.shape[:-1], value.shape[-1])
    assert torch.count_nonzero(output) == 0


@pytest.mark.parametrize("normalize", NORMALIZERS)
def test_a_normaliser_of_no_keys(normalize: str) -> None:
    assert NORMALIZERS[normalize].record(torch.zeros(2, 0)).shape == (2, 0)


def test_a_mask_given_as_lengths_is_told_where_to_go() -> None:
    x = torch.randn(2, 3, 5, 8)
    with pytest.raises(ValueError, match=r"leading axes \(2, 5\).*mask\.bool\(\)\[:, None, None, :\]"):
        regard.attention(x, x, x, mask=regard.padding(torch.ones(2, 5).long()))


@pytest.mark.parametrize(("keys", "lengths"), [(3, [[1, 2, 3], [3, 2, 1]]), (1, [[1], [0]])], ids=["heads", "one key"])
def test_lengths_for_each_head_may_be_as_many_as_keys(keys: int, lengths: list[list[int]]) -> None:
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, keys, 8)
    weights = regard.attention(
        query, key, key, mask=regard.padding(torch.tensor(lengths)), weights=regard.full()
    ).weights
    allowed = torch.arange(keys) < torch.tensor(lengths)[..., None, None]
    assert torch.equal(weights > 0, allowed.expand_as(weights))


@pytest.mark.usefixtures("as_installed")
def test_whole_numbers_may_be_those_of_numpy() -> None:
    three = np.int64(3)
    masks = [(regard.causal(three), regard.causal(3)), (regard.window(three, three, three), regard.window(3, 3, 3))]
    for found, wanted in masks:
        assert found == wanted
    assert type(regard.top(three).count) is int
    assert regard.rows(three).positions(5).tolist() == [3]
    assert regard.top(three) == regard.top(3)


@pytest.mark.usefixtures("as_installed")
def test_numbers_go_where_the_queries_are() -> None:
    """Numbers in masks and biases become tensors on the queries' device, here `meta`, which every machine has."""
    x = torch.empty(2, 3, 4, 8, device="meta")
    masks = regard.padding([2, 4]) & (regard.segments([0, 0, 1, 1], torch.zeros(4, dtype=torch.long, device="meta")))
    for arguments in (
        {"mask": regard.padding(3)},
        {"mask": masks | ~regard.segments([0, 0, 1, 1], [0, 0, 0, 1])},
        {"bias": regard.alibi([0.5, 0.2, 0.1])},
        {"bias": regard.relative([0.5, 0.2, 0.1])},
        {"bias": [0.5, 0.2, 0.1, 0.0]},
    ):
        assert regard.explain(x, x, x, **arguments).flops > 0
    with pytest.raises(ValueError, match="mask is on cpu, query is on meta"):
        regard.explain(x, x, x, mask=regard.padding(torch.tensor([2, 4])))


@pytest.mark.usefixtures("as_installed")
def test_nested_tensors_of_the_old_kind_are_named_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that strided nested tensors are deprecated
        nested = torch.nested.nested_tensor([torch.ones(6, 2, 13), torch.ones(6, 3, 13)], layout=torch.strided)
    with pytest.raises(TypeError, match="query must be a plain tensor, got a nested one"):
        regard.attention(nested, KEY, VALUE)


@pytest.mark.parametrize("read", [lambda found: found[0], lambda found: [*found]], ids=["by number", "unpacked"])
def test_a_result_is_read_by_name(read: Callable[[regard.Attended], object]) -> None:
    with pytest.raises(TypeError, match=r"no tuple: .* by name, as in attended\.output"):
        read(regard.attention(QUERY, KEY, VALUE))
