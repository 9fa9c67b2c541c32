"""Capture of hand-written attention: a softmax whose result is multiplied by values.

The result of every softmax is tracked through operations that change its shape, its precision or a few of its elements,
up to the product with the values. The factor of that product is recorded as the weights; if dropout was applied to it,
the weights before dropout are recorded.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.look.attention_records import Given
from regard.look.capture import score_matrices
from regard.look.capture.captured_call import DROPOUT, Call, Done, Function, Handler, Recorder, four_axes
from regard.look.capture.score_matrices import Scores
from regard.look.recomputed_weights import copy_if_lent

Kind = TypeVar("Kind")

_LATE = "dropout was applied in place: these are the weights after it"


@dataclass(frozen=True, eq=False)
class Tag:
    """Properties of a tensor of attention weights that is tracked to its product with the values.

    `clean` are the weights before dropout, in the tensor's shape; None if no dropout was applied.
    """

    clean: Tensor | None = None
    late: bool = False  # whether dropout was applied in place, so that the weights before dropout are lost
    scores: Scores | None = None  # the scores from which the weights were computed, if they are known
    # `product` has the attention weights if the tagged tensor is the product weights * values before its sum over the
    # keys.
    product: Tensor | None = None


class Tags(Generic[Kind]):
    """A mapping from tensors to their tags; the tag of a tensor is removed when the tensor is freed."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[weakref.ref[Tensor], Kind]] = {}

    def __bool__(self) -> bool:
        return bool(self._tags)

    def put(self, tensor: Tensor, tag: Kind) -> None:
        key = id(tensor)
        self._tags[key] = (weakref.ref(tensor, lambda _: self._tags.pop(key, None)), tag)

    def get(self, tensor: object) -> Kind | None:
        entry = self._tags.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None


SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax}
DROP = {torch.dropout, F.dropout, torch.dropout_, F.alpha_dropout, F.feature_alpha_dropout}
# `SAME` are operations that change only the shape, the precision or a few elements: if their first argument has
# attention weights, their result has attention weights too.
SAME = {
    *(Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.cpu),
    *(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten),
    *(torch.flatten, Tensor.unflatten, torch.unflatten, Tensor.view_as, Tensor.expand, Tensor.expand_as),
    *(Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.swapaxes, torch.swapaxes),
    *(Tensor.movedim, torch.movedim, Tensor.t, torch.t),
    *(Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze, Tensor.__getitem__, Tensor.narrow),
    *(Tensor.masked_fill, torch.masked_fill, Tensor.masked_fill_, torch.nan_to_num, Tensor.nan_to_num),
    *(Tensor.repeat_interleave, torch.repeat_interleave, Tensor.repeat, Tensor.detach),
}
# The functions with which the attributes `mT` and `T` of a tensor arrive in `__torch_function__`.
SAME |= {vars(torch._C.TensorBase)[name].__get__ for name in ("mT", "T")}
PRODUCT = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm}
SCALED = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__, torch.multiply}
DIVIDED = {torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, torch.true_divide}
SUM = {torch.sum, Tensor.sum}


def seen_same(recorder: Recorder, tags: Tags[Tag], done: Done) -> None:
    """Tag the result of an operation in `SAME` like its argument, and apply it to the weights before dropout too."""
    function, args, kwargs, result = done
    tag = tags.get(args[0]) if args else None
    if tag is not None and isinstance(result, Tensor):
        clean = tag.clean
        scores = tag.scores if function in score_matrices.ROUNDED else None
        clean = None if clean is None else function(clean, *args[1:], **kwargs).detach()
        tags.put(result, Tag(clean, tag.late, scores))


def seen_dropout(recorder: Recorder, tags: Tags[Tag], done: Done) -> None:
    """Tag the result of a dropout with the weights before dropout."""
    _, args, kwargs, result = done
    before = args[0] if args else kwargs.get("input")
    tag = tags.get(before)
    if tag is not None and isinstance(before, Tensor):
        active = _drops(*args[1:], **kwargs)
        late = active and result.data_ptr() == before.data_ptr()
        clean = tag.clean if tag.clean is not None else before.detach() if active and not late else None
        tags.put(result, Tag(clean, tag.late or late, None if late else tag.scores))


def _drops(p: float = 0.5, train: bool = True, *_: Any, training: bool | None = None, **__: Any) -> bool:
    return p > 0 and (train if training is None else training)


def seen_scaled(recorder: Recorder, tags: Tags[Tag], done: Done) -> None:
    """Tag the result of an elementwise product or quotient of weights.

    Weights times a number or a head mask are weights. Weights times values are a product that is summed later.
    """
    function, args, _, result = done
    if not isinstance(result, Tensor) or len(args) < 2:
        return
    first, second = args[:2]
    tag, other = (tags.get(first), second) if tags.get(first) is not None else (tags.get(second), first)
    if tag is None:
        return
    weights = first if other is second else second
    if result.shape == weights.shape and not (isinstance(other, Tensor) and weights.shape[-1] == 1 < other.numel()):
        clean = tag.clean
        tags.put(result, Tag(None if clean is None else (function(clean, other) if other is second else clean)))
    elif isinstance(other, Tensor):
        # An example is weights (batch, keys, 1) * values (batch, keys, features), which the model later sums over keys.
        wide = weights if tag.clean is None else tag.clean
        tags.put(result, Tag(product=wide.detach()))


def seen_sum(recorder: Recorder, tags: Tags[Tag], done: Done) -> None:
    """Record attention that is written as an elementwise product weights * values and its sum over the keys."""
    _, args, kwargs, _ = done
    tag = tags.get(args[0]) if args else None
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if tag is None or tag.product is None or not isinstance(dim, int):
        return
    weights, summed = tag.product, args[0]
    while weights.ndim < summed.ndim:
        weights = weights[None]
    dim %= summed.ndim
    if weights.shape[dim] != summed.shape[dim] or weights.shape[-1] not in (1, summed.shape[-1]):
        return
    if dim != summed.ndim - 1 and weights.shape[-1] == 1:
        # The weights have the shape (…, keys, …, 1). The axis of keys becomes the last one; all other axes count
        # sequences of one query.
        rows = weights.movedim(dim, -1).reshape(-1, 1, 1, weights.shape[dim])
        recorder.record(Call("softmax", Given(rows), None, None, note="a sum of products: the check cannot apply"))


def seen_product(recorder: Recorder, tags: Tags[Tag], done: Done) -> None:
    """Record attention that is written as a matrix product weights @ value, or valueᵀ @ weightsᵀ."""
    _, args, _, result = done
    if len(args) < 2:
        return
    left, right = args[:2]
    tag, turned = tags.get(left), False
    if tag is None:
        tag, turned = tags.get(right), True
    if tag is None or (turned and min(left.ndim, right.ndim) < 2):
        return
    weights = (right if turned else left) if tag.clean is None else tag.clean
    if turned:
        _record(recorder, weights.mT, left.mT, result, lambda output: output.mT, _note(tag))
    elif weights.ndim == 1:
        _record(recorder, weights[None], right, result, lambda output: output[None], _note(tag))
    else:
        _record(recorder, weights, right, result, lambda output: output, _note(tag), tag.scores)


def _note(tag: Tag) -> str | None:
    return DROPOUT if tag.clean is not None else _LATE if tag.late else None


def _record(
    recorder: Recorder,
    weights: Tensor,
    value: Tensor,
    output: Tensor,
    form: Callable[[Tensor], Tensor],
    note: str | None,
    scores: Scores | None = None,
) -> None:
    """Record a call with weights (…, queries, keys) and values (…, keys, features).

    `form` reshapes the output of the call to (…, queries, features).
    """
    heads = recorder.heads(weights.shape[0]) if weights.ndim == 3 else None
    if value.ndim < 2:
        recorder.record(Call("softmax", Given(copy_if_lent(four_axes(weights, heads))), None, None))
        return
    lead = torch.broadcast_shapes(weights.shape[:-2], value.shape[:-2])
    weights, value = (four_axes(t.expand(*lead, *t.shape[-2:]), heads) for t in (weights, value))
    source = score_matrices.source(scores, weights.detach(), value, heads) if scores is not None else None
    recorder.record(
        Call(
            "softmax",
            Given(copy_if_lent(weights)) if source is None else source,
            value,
            output,
            note=note,
            checkable=note != DROPOUT,
            view=lambda output: four_axes(form(output), heads),
        )
    )


def seen_einsum(recorder: Recorder, tags: Tags[Tag], done: Done) -> None:
    """Record attention that is written as an einsum of weights and values."""
    _, args, _, result = done
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if len(operands) != 2 or not isinstance(args[0], str):
        return
    index = 0 if tags.get(operands[0]) is not None else 1
    tag = tags.get(operands[index])
    equation = args[0].replace(" ", "")
    if tag is None or "->" not in equation or "." in equation:
        return
    terms, out = equation.split("->")
    names = terms.split(",")
    mine, other = names[index], names[1 - index]
    keys = [name for name in mine if name in other and name not in out]
    queries = [name for name in mine if name in out and name not in other]
    lead = [name for name in out if name in mine and name in other]
    features = [name for name in other if name in out and name not in mine]
    if len(keys) != 1 or len(queries) > 1 or len(features) != 1 or len(lead) + len(queries) + 1 != len(mine):
        return
    weights = operands[index] if tag.clean is None else tag.clean
    ordered = weights.permute([mine.index(name) for name in (*lead, *queries, *keys)])
    rest = [name for name in other if name not in (*lead, *keys, *features)]
    if rest:
        return
    value = operands[1 - index].permute([other.index(name) for name in (*lead, *keys, *features)])
    order = [out.index(name) for name in (*lead, *queries, *features)]

    def form(output: Tensor) -> Tensor:
        return output.permute(order) if queries else output.permute(order).unsqueeze(-2)

    _record(recorder, ordered if queries else ordered.unsqueeze(-2), value, result, form, _note(tag))


def handlers(tags: Tags[Tag]) -> dict[Function, Handler]:
    """Return the handler of each torch function that hand-written attention may use; all handlers share `tags`."""

    lines: Tags[Scores] = Tags()

    def after(note: Callable[..., None] | None) -> Handler:
        def handle(recorder: Recorder, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            scored = lines.get(args[0]) if lines and args else None
            result = function(*args, **kwargs)
            if tags or scored is not None or function in score_matrices.PRODUCT:
                done = Done(function, args, kwargs, result)
                with recorder.safely():
                    follow(done, scored)
                    if tags and note is not None:
                        note(recorder, tags, done)
            return result

        return handle

    def follow(done: Done, scored: Scores | None) -> None:
        following = score_matrices.first(done) if scored is None else score_matrices.next_of(scored, done)
        if following is not None and isinstance(done.result, Tensor):
            lines.put(done.result, following)

    def first(recorder: Recorder, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        scored = lines.get(args[0]) if lines and args else None
        result: Tensor = function(*args, **kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        tags.put(result, Tag(scores=scored if dim in (-1, result.ndim - 1) else None))
        return result

    return {
        **dict.fromkeys(score_matrices.FUNCTIONS, after(None)),
        **dict.fromkeys(SOFTMAX, first),
        **dict.fromkeys(SAME, after(seen_same)),
        **dict.fromkeys(DROP, after(seen_dropout)),
        **dict.fromkeys(SCALED | DIVIDED, after(seen_scaled)),
        **dict.fromkeys(PRODUCT, after(seen_product)),
        **dict.fromkeys(SUM, after(seen_sum)),
        torch.einsum: after(seen_einsum),
    }
