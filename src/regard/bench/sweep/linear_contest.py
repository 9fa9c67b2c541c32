"""Linear and local attention compared with the same attention in torch operations, eager and sometimes compiled."""

from collections.abc import Callable

import regard
from regard.bench.sweep import plain_forms, tensors
from regard.bench.sweep.cases import Case
from regard.bench.sweep.contests import Call, Contender, Contest, Make, compiled, leaves, maker, room
from regard.bench.sweep.tensors import Tensors
from regard.core.local import local_attention

Form = Callable[[Case, Tensors], plain_forms.Tensor]


def contest(case: Case) -> Contest:
    """Return the contenders of a case of kind "linear" or "local"."""
    inputs = tensors.make(case)
    peers: dict[str, Make] = {}
    for name, (form, elements) in _forms(case).items():
        peers[name] = maker(inputs, lambda form=form, elements=elements: _called(case, inputs, form, elements))
        if case.compiled:
            peers[f"{name}, torch.compile"] = maker(
                inputs, lambda form=form, elements=elements: _called(case, inputs, form, elements, compile=True)
            )
    ours = Contender(_linear(case, inputs) if case.kind == "linear" else _local(case, inputs), leaves(inputs))
    return Contest(inputs, ours, peers, lambda some, rows: plain_forms.reference(case, some, rows))


def _forms(case: Case) -> dict[str, tuple[Form, int]]:
    """Return implementations in eager torch operations, each with the number of elements of its largest tensor."""
    tokens = case.batch * case.heads * case.queries
    if case.kind == "local":
        gathered = tokens * (2 * case.before + 1) * case.size
        return {"dense": (plain_forms.local_dense, case.pairs), "gathered": (plain_forms.local_gathered, gathered)}
    if case.mask == "causal":
        chunks = tokens * max(128, case.size * case.value_size // 64)
        return {"chunks": (plain_forms.linear_chunks, chunks), "all pairs": (plain_forms.linear_rows, case.pairs)}
    return {"eager": (plain_forms.linear, tokens * case.size)}


def _called(case: Case, inputs: Tensors, form: Form, elements: int, *, compile: bool = False) -> Call:
    room(case, elements)
    if not compile:
        return lambda: (form(case, inputs), None)
    fused = compiled(lambda inputs: (form(case, inputs), None))
    return lambda: fused(inputs)


def _linear(case: Case, inputs: Tensors) -> Call:
    features = regard.EluFeatures() if case.features == "elu" else regard.PerformerFeatures(inputs["projection"])
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    causal = case.mask == "causal"
    return lambda: (regard.linear_attention(query, key, value, features=features, causal=causal), None)


def _local(case: Case, inputs: Tensors) -> Call:
    query, key, value, centre = (inputs[name] for name in ("query", "key", "value", "centre"))
    return lambda: (local_attention(query, key, value, centre, reach=case.before).output, None)
