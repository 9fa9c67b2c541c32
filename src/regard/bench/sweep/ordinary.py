"""A list of ordinary calls at fixed sizes: `regard bench sweep --ordinary` measures this list in place of random calls.

Each call in the list was once slower than torch's operations for the same computation; the sweep shows whether a change
makes a call slow again.
"""

from dataclasses import replace
from typing import Any

from regard.bench.sweep.cases import Case


def ordinary(device: str) -> list[Case]:
    """Return the calls for a kind of device; sizes are smaller on a CPU.

    Each call comes without and then with gradients; the last four, which compare requested weights, only without.

    >>> cases = ordinary("cpu")
    >>> cases[0].call, cases[1].gradients
    ('regard.attention(query, key, value, score=regard.Additive(weight))', True)
    """
    half = "bfloat16" if device == "cuda" else "float32"
    cuda = device == "cuda"
    cases: list[Case] = []

    def add(size: int, value_size: int | None = None, *, gradients: bool | None = None, **fields: Any) -> None:
        sizes = {"kv_heads": fields.get("heads", 1), "keys": fields.get("queries"), "value_size": value_size or size}
        for both in (False, True) if gradients is None else (gradients,):
            options: dict[str, Any] = {"dtype": half, "compiled": True} | sizes | fields
            cases.append(replace(Case(None, len(cases), device, size=size, gradients=both), **options))

    additive: dict[str, Any] = {"score": "additive"}
    add(512, 1024, batch=32, queries=50, keys=60, **additive)  # the sizes of Bahdanau et al. 2015
    add(64, batch=64 if cuda else 8, heads=8, queries=128, **additive)
    add(96, 80, batch=2, heads=3, queries=1000 if cuda else 250, keys=777 if cuda else 190, dtype="float32", **additive)
    add(64, batch=4, heads=4, queries=200, **additive)
    long: dict[str, Any] = {"batch": 8 if cuda else 2, "heads": 16 if cuda else 4, "queries": 2048 if cuda else 512}
    for mask in ("padding", "documents"):
        for anew in (False, True):
            add(64, mask=mask, new_mask=anew, **long)
    add(64, mask="causal", bias="alibi", **long)
    add(64, score="cosine", **long)
    add(64, score="bilinear", **long)
    add(64, mask="causal", **long | {"kv_heads": 4 if cuda else 2})
    add(64, batch=256 if cuda else 16, heads=8, queries=64)
    linear: dict[str, Any] = {"kind": "linear", "batch": 2, "heads": 8, "queries": 16384 if cuda else 2048}
    for mask in ("none", "causal"):
        add(64, mask=mask, **linear)
    requested: dict[str, Any] = {"mask": "causal", "heads": 16 if cuda else 4, "queries": 16384 if cuda else 1024}
    for request in ("none", "top", "received", "entropy"):  # "none" does not return weights, for comparison
        add(128, request=request, gradients=False, **requested)
    return cases
