"""AdamW with weight decay on matrices only, and its state as tensors named by parameter."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regard.train.sharded_tensors import local_part, part_of
from regard.train.train_settings import TrainSettings


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the trained parameters in two groups: matrices with weight decay, and all other parameters without it.

    Weight decay pulls parameters towards zero. For a matrix, small entries mean a simpler linear map. A gain or
    a bias has no reason to be near zero. An embedding has rows that most batches do not use: the embeddings of rare
    words would decay between their occurrences. An output matrix tied to an embedding counts as an embedding.

    >>> groups = parameter_groups(nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), 0.1)
    >>> [(group["weight_decay"], [tuple(p.shape) for p in group["params"]]) for group in groups]
    [(0.1, [(2, 3)]), (0.0, [(7, 3), (2,)])]
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decays = [parameter.ndim >= 2 and id(parameter) not in embeddings for parameter in learned]
    return [
        {"params": [p for p, decay in zip(learned, decays, strict=True) if decay], "weight_decay": weight_decay},
        {"params": [p for p, decay in zip(learned, decays, strict=True) if not decay], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019), with one fused update for all parameters."""
    groups = [group for group in parameter_groups(model, settings.weight_decay) if group["params"]]
    if not groups:
        raise ValueError("model has no parameter that learns: every one has requires_grad=False, or there is none")
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state as tensors with names such as `exp_avg/encoder.weight`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{key}/{names[id(parameter)]}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the optimiser's state from named tensors; its learning rate and weight decay do not change."""
    places = {id(p): place for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    learned = {name: p for name, p in model.named_parameters() if id(p) in places}
    state: dict[int, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        key, _, name = full.partition("/")
        if name not in learned:
            raise ValueError(f"the optimiser's state has {full!r}, but the model learns no parameter {name!r}")
        parameter = learned[name]
        own = part_of(tensor, parameter) if tensor.shape == parameter.shape else tensor
        state.setdefault(places[id(parameter)], {})[key] = own
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimiser state on this worker.

    Of a sharded tensor only the shard of this worker is counted.

    >>> model = nn.Linear(3, 5)
    >>> state_bytes(model, torch.optim.AdamW(model.parameters()))
    {'parameters': 80, 'gradients': 0, 'optimizer': 0}
    """
    tensors = {
        "parameters": list(model.parameters()),
        "gradients": [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
        "optimizer": [value for state in optimizer.state.values() for value in state.values()],
    }
    return {name: sum(local_part(value).nbytes for value in values) for name, values in tensors.items()}
