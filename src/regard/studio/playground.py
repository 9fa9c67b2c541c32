"""The playground: attention in three stages, computed by `regard.attention` for the vectors set in the browser."""

import hashlib
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from regard.studio.limits import LIMITS, RefusedError

if TYPE_CHECKING:  # torch is imported only at the first request, so that the studio starts fast
    from torch import Tensor

    from regard.core.masks import Mask
    from regard.core.normalizers import Normalizer
    from regard.core.scores import Score

Number = Annotated[float, Field(ge=-1e4, le=1e4, allow_inf_nan=False)]
Vector = Annotated[list[Number], Field(min_length=1, max_length=LIMITS.size)]
Vectors = Annotated[list[Vector], Field(min_length=1, max_length=LIMITS.vectors)]


class Masking(BaseModel):
    """The settings of the mask in a request of the playground."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["none", "causal", "window", "padding"] = "none"
    before: Annotated[int, Field(ge=0, le=LIMITS.vectors)] = 1
    after: Annotated[int, Field(ge=0, le=LIMITS.vectors)] = 1
    length: Annotated[int, Field(ge=0, le=LIMITS.vectors)] = 1


class Question(BaseModel):
    """The body of a request: query, key and value vectors, and the settings of the attention."""

    model_config = ConfigDict(extra="forbid")
    query: Vectors
    key: Vectors
    value: Vectors | None = None
    score: Literal["dot", "scaled_dot", "cosine", "bilinear", "additive"] = "scaled_dot"
    normalize: Literal["softmax", "sparsemax", "entmax", "sigmoid", "hard"] = "softmax"
    temperature: Annotated[float, Field(ge=0.01, le=1000, allow_inf_nan=False)] = 1.0
    mask: Masking = Masking()
    heads: Annotated[int, Field(ge=1, le=LIMITS.size)] = 1


class Sentence(BaseModel):
    """The body of a request: words to be converted to vectors, and the size of the vectors."""

    model_config = ConfigDict(extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=LIMITS.text)]
    size: Annotated[int, Field(ge=2, le=LIMITS.size)] = 8


def answer(question: Question) -> dict[str, object]:
    """Return the scores, weights and output of each head, the mask, and the call as a Python program, for JSON."""
    import torch

    from regard.core.attention import attention, explain
    from regard.core.requests import full

    values = question.value or question.key
    size = _check(question, values)
    query, key, value = (_split(vectors, question.heads) for vectors in (question.query, question.key, values))
    score, parameters = _score(question, size // question.heads)
    if question.score == "additive":
        query, key = query @ parameters["W_q"], key @ parameters["W_k"]
    normalize, mask = _normalize(question), _mask(question)
    call = {"score": score, "normalize": normalize, "mask": mask}
    attended = attention(query, key, value, **call, weights=full())
    weights = attended.weights
    assert isinstance(weights, torch.Tensor)
    scores = score(query, key)
    shape = (len(question.query), len(question.key))
    allowed = torch.ones(shape, dtype=torch.bool)
    if mask is not None:
        # the first axis of the mask is for heads; it has size 1, because one mask applies to all heads
        scores_of = (1, *shape)
        allowed = mask.aligned(scores_of).allowed(range(shape[0]), range(shape[1]), query.device).expand(scores_of)[0]
    return {
        "scores": scores.tolist(),
        "allowed": allowed.tolist(),
        "weights": weights.tolist(),
        "sums": weights.sum(-1).tolist(),
        "output": attended.output.tolist(),
        "parameters": {name: tensor.tolist() for name, tensor in parameters.items()},
        "backend": explain(query, key, value, **call, weights=full()).backend,
        "code": _code(question, values, parameters),
    }


def embed(sentence: Sentence) -> dict[str, object]:
    """Return a vector for each word, computed from its letters: words with similar spelling get similar vectors.

    >>> embedded = embed(Sentence(text="Tom, 汤姆", size=2))
    >>> embedded["tokens"]
    ['Tom', ',', '汤', '姆']
    """
    tokens = re.findall(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+|[^\w\s]", sentence.text)
    if not 1 <= len(tokens) <= LIMITS.vectors:
        raise RefusedError(f"text must have from 1 to {LIMITS.vectors} words, got {len(tokens)}")
    return {"tokens": tokens, "vectors": [_letters(token.lower(), sentence.size) for token in tokens]}


def _letters(token: str, size: int) -> list[float]:
    """Return the sum of fixed random vectors of all letter n-grams up to three, scaled to length 2, with two
    decimals."""
    marked = f"^{token}$"
    runs = [marked[start : start + length] for length in (1, 2, 3) for start in range(len(marked) - length + 1)]
    total = [0.0] * size
    for run in runs:
        digest = hashlib.blake2b(run.encode(), digest_size=size).digest()
        total = [have + byte - 127.5 for have, byte in zip(total, digest, strict=True)]
    length = math.sqrt(sum(number * number for number in total)) or 1.0
    return [round(2 * number / length, 2) for number in total]


def _check(question: Question, values: list[list[float]]) -> int:
    """Check the sizes of all vectors and return the size of a query, or raise a `RefusedError`."""
    size = len(question.query[0])
    for name, vectors, expected in (
        ("query", question.query, size),
        ("key", question.key, size),
        ("value", values, len(values[0])),
    ):
        for at, vector in enumerate(vectors):
            if len(vector) != expected:
                raise RefusedError(f"{name}[{at}] must have {expected} numbers like the others, got {len(vector)}")
    if len(values) != len(question.key):
        raise RefusedError(f"value must have one vector for each of the {len(question.key)} keys, got {len(values)}")
    for name, length in (("query", size), ("value", len(values[0]))):
        if length % question.heads:
            raise RefusedError(f"heads must divide the size of a {name}, {length}, got {question.heads}")
    return size


def _split(vectors: list[list[float]], heads: int) -> "Tensor":
    """Return the vectors as a tensor (heads, vectors, size / heads): each head has its own part of every vector."""
    import torch

    tensor = torch.tensor(vectors)
    return tensor.reshape(len(vectors), heads, -1).transpose(0, 1)


def _score(question: Question, size: int) -> tuple["Score", dict[str, "Tensor"]]:
    """Return a score function, whose scores are divided by the temperature, and its parameters by name."""
    import torch

    from regard.core.scores import Additive, Bilinear, Cosine, Dot, ScaledDot

    cold = 1 / question.temperature
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul(5).round().div(10)

    match question.score:
        case "dot":
            return (Dot() if cold == 1 else ScaledDot(scale=cold)), {}
        case "scaled_dot":
            return (ScaledDot() if cold == 1 else ScaledDot(scale=cold / math.sqrt(size))), {}
        case "cosine":
            return Cosine(scale=cold), {}
        case "bilinear":
            weight = torch.eye(size) + noise(size, size)
            return Bilinear(weight * cold), {"W": weight}
        case "additive":
            parameters = {"W_q": noise(size, size), "W_k": noise(size, size), "w": torch.ones(size) + noise(size)}
            return Additive(parameters["w"] * cold), parameters


def _normalize(question: Question) -> "Normalizer":
    from regard.core.normalizers import Entmax, Hard, Sigmoid, Softmax, Sparsemax

    classes = {"softmax": Softmax, "sparsemax": Sparsemax, "entmax": Entmax, "sigmoid": Sigmoid, "hard": Hard}
    return classes[question.normalize]()


def _mask(question: Question) -> "Mask | None":
    from regard.core.masks import causal, padding, window

    mask = question.mask
    match mask.kind:
        case "causal":
            return causal()
        case "window":
            return window(mask.before, mask.after)
        case "padding":
            return padding(mask.length)
        case "none":
            return None


def _code(question: Question, values: list[list[float]], parameters: dict[str, "Tensor"]) -> str:
    """Return the attention call as a complete Python program with its vectors and the parameters of its score."""
    size, cold = len(question.query[0]) // question.heads, 1 / question.temperature
    scaled = {"dot": cold, "scaled_dot": cold / math.sqrt(size)}
    if question.score == "cosine":
        score = f"regard.Cosine(scale={cold:.9g})"
    elif question.score in scaled:
        plain = "regard.Dot()" if question.score == "dot" else "regard.ScaledDot()"
        score = plain if cold == 1 else f"regard.ScaledDot(scale={scaled[question.score]:.9g})"
    else:
        score = f"regard.{question.score.capitalize()}({'W' if question.score == 'bilinear' else 'w'}"
        score += ")" if cold == 1 else f" * {cold:.9g})"
    mask = {
        "none": None,
        "causal": "regard.causal()",
        "window": f"regard.window({question.mask.before}, {question.mask.after})",
        "padding": f"regard.padding({question.mask.length})",
    }[question.mask.kind]
    inputs = "query @ W_q, key @ W_k, value" if question.score == "additive" else "query, key, value"
    arguments = [inputs, f"score={score}", f"normalize=regard.{question.normalize.capitalize()}()"]
    arguments += [f"mask={mask}"] if mask else []
    lines = ["import torch", "import regard", "", _tensor("query", question.query), _tensor("key", question.key)]
    lines.append("value = key" if values == question.key else _tensor("value", values))
    if question.heads > 1:  # this code splits the vectors into one part for each head
        split = f".unflatten(-1, ({question.heads}, -1)).transpose(0, 1)"
        lines.append(f"query, key, value = (x{split} for x in (query, key, value))  # (heads, vectors, size)")
    lines += [_tensor(name, tensor.tolist()) for name, tensor in parameters.items()]
    call = ",\n    ".join([*arguments, "weights=regard.full()"])
    lines += ["attended = regard.attention(", f"    {call},", ")", "print(attended.weights)", "print(attended.output)"]
    return "\n".join(lines) + "\n"


def _tensor(name: str, numbers: list[Any]) -> str:
    """Return a tensor as Python code, with a line for each row of a matrix."""
    if not isinstance(numbers[0], list):
        return f"{name} = torch.tensor({_list(numbers)})"
    if len(numbers) == 1:
        return f"{name} = torch.tensor([{_list(numbers[0])}])"
    return f"{name} = torch.tensor([\n    " + ",\n    ".join(map(_list, numbers)) + ",\n])"


def _list(numbers: list[float]) -> str:
    """Return numbers as Python floats, with the fewest digits that give the same float32."""
    return "[" + ", ".join(repr(float(str(np.float32(number)))) for number in numbers) + "]"
