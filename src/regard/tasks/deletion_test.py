"""The faithfulness of attention: how deleting the most attended key changes an answer, compared with a random key."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# score(mask) returns the log-probability (n,) of the answer for each row of `mask` (n, k), in which False marks a
# deleted key.
Score = Callable[[Tensor], Tensor]


@torch.no_grad()
def deletion(answers: Iterable[tuple[Tensor, Score]], *, seed: int = 1) -> dict[str, float]:
    """Return how much the log-probability of the answers falls without the most attended key, and without a random one.

    Each answer is given as a pair of its attention weights (k,) and its score function (see `Score`); the result is the
    mean over the answers. For faithful weights, "attended" is much larger than "random". An answer with fewer than two
    keys is skipped; if all are, the result is empty.

    >>> deletion([(torch.tensor([0.2, 0.8]), lambda mask: mask[:, 1].float() - 1)])
    {'attended': 1.0, 'random': 0.0}
    """
    generator = torch.Generator().manual_seed(seed)
    lost: dict[str, list[float]] = {"attended": [], "random": []}
    for weights, score in answers:
        count = len(weights)
        if count < 2:
            continue
        most = int(weights.argmax())
        other = int(torch.randint(count - 1, (), generator=generator))
        other += other >= most
        mask = torch.ones(3, count, dtype=torch.bool)
        mask[1, most] = mask[2, other] = False
        whole, attended, random = score(mask).tolist()
        lost["attended"].append(whole - attended)
        lost["random"].append(whole - random)
    if not lost["attended"]:
        return {}
    return {name: round(sum(values) / len(values), 4) for name, values in lost.items()}
