"""Attention rollout through all layers of a stack (Abnar & Zuidema 2020), and relevance by gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.look.attention_records import Record
from regard.look.layer_names import cross_attention, stacks


def rollout(records: Sequence[Record], *, batch: int = 0, residual: float = 0.5, gradients: bool = False) -> Tensor:
    """Return how much each input contributes to each output, (outputs, inputs), through layers of self-attention.

    The matrix of a layer is Â = (1 − r) · (mean of the weights A over the heads) + r · I, where r is `residual`, with
    rows normalised to sum 1. The rollout is the product of the layers' matrices (Abnar & Zuidema 2020, section 3). With
    `gradients` the result is R instead, which begins as R = I and is updated by each layer as R ← R + Ā R, where Ā is
    the mean of max(A · ∂L/∂A, 0) over the heads and L the loss (Chefer et al. 2021, eq. 5 and 6). Positions that the
    labels of the sequence mark as padding are excluded.

    >>> from regard.look.attention_records import Given
    >>> layer = Record("layer", "given", Given(torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])))
    >>> rollout([layer, layer])
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    if not records:
        raise ValueError("rollout needs at least one record")
    if not 0 <= residual < 1:
        raise ValueError(f"residual must be 0 or more and less than 1, got {residual}")
    layers = [record.sequence(batch) for record in records]
    size = layers[0].queries
    total = torch.eye(size)
    for record in layers:
        if (record.queries, record.keys) != (size, size):
            raise ValueError(
                f"rollout needs layers of one square size, {size} × {size}; {record.name!r} has {record.queries} × "
                f"{record.keys}: choose layers with of="
            )
        if gradients:
            total = total + record.relevance().mean(0) @ total
            continue
        layer = (1 - residual) * record.weights().mean(0) + residual * torch.eye(size)
        total = (layer / layer.sum(-1, keepdim=True).clamp_min(torch.finfo(layer.dtype).tiny)) @ total
    return total


def check_one_stack(chosen: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError unless the chosen records are the self-attention of one stack of layers, each layer once.

    `chosen` are the names of the chosen records, with repetitions, and `names` all names of the trace.
    """
    stack_of, crossing = stacks(chosen), cross_attention(names)
    groups = list(dict.fromkeys((stack_of.get(name, ""), name in crossing) for name in chosen))
    if len(groups) == 1 and not groups[0][1]:
        # If all chosen records have one name, the model applies one layer repeatedly, which is allowed.
        if 1 < len(set(chosen)) < len(chosen):
            raise ValueError(
                "rollout needs one pass through the layers, and the trace has several calls of them: choose one, as in "
                "regard.Trace(records=[record for record in trace if record.call == 0]).rollout()"
            )
        return
    alone = [name for name in dict.fromkeys(chosen) if name not in stack_of]
    others = {cross: ", ".join(repr(name) for name in alone if (name in crossing) == cross) for cross in (False, True)}
    described = [(repr(stack) if stack else others[cross]) + " (cross-attention)" * cross for stack, cross in groups]
    fits = [stack for stack, cross in groups if stack and not cross] or [name for name in alone if name not in crossing]
    fit = f": choose one with of=, such as of={fits[0]!r}" if fits else ""
    raise ValueError(f"rollout needs the self-attention of one stack of layers, got {', '.join(described)}{fit}")
