"""A model whose parameters, gradients and optimiser state are divided among the workers (FSDP2)."""

import copy
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.train.distributed import Workers
from regard.train.gradient_sums import Step
from regard.train.sharded_tensors import whole
from regard.train.updates import LossFunction

# layers(model) returns the modules of a model whose shards are gathered one module at a time. The model must call each
# of these modules by `module(…)`, because FSDP2 gathers the parameters in the hooks of that call.
Layers = Callable[[nn.Module], Iterable[nn.Module]]


class Sharded:
    """A sharded copy of a model for training. Meanwhile the parameters of the unsharded model hold no memory, except
    inside `filled`.

    `step` is the module that computes the loss of a batch. Parameters that are in none of the `layers` are gathered
    when `step` is called.

    Decoding needs the unsharded model, because decoding calls arbitrary methods of a model, and the number of calls
    differs among the workers.
    """

    def __init__(self, plain: nn.Module, workers: Workers, layers: Layers, loss: LossFunction) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        device = next(plain.parameters()).device
        self.plain, self.model = plain, copy.deepcopy(plain)
        self.step = Step(self.model, loss)
        mesh = init_device_mesh(device.type, (workers.size,))
        for layer in layers(self.model):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.step, mesh=mesh)
        self._storages = {
            parameter.untyped_storage().data_ptr(): (parameter.untyped_storage(), parameter.untyped_storage().nbytes())
            for parameter in plain.parameters()
        }
        self.empty()

    def empty(self) -> None:
        """Free the parameters of the unsharded model."""
        for storage, _ in self._storages.values():
            storage.resize_(0)

    @torch.no_grad()
    def fill(self, other: Mapping[str, Tensor] | None = None) -> None:
        """Copy the gathered weights of the sharded model to the unsharded model; weights in `other` replace them."""
        for storage, size in self._storages.values():
            storage.resize_(size)
        wanted = {**self.model.state_dict(), **(other or {})}
        for name, value in [*self.plain.named_parameters(), *self.plain.named_buffers()]:
            if name in wanted:  # non-persistent buffers are not in the state dict, so they are not copied
                value.copy_(whole(wanted[name]))

    @contextmanager
    def filled(self, other: Mapping[str, Tensor] | None = None) -> Generator[nn.Module, None, None]:
        """A context that yields the unsharded model with all weights, whose memory is freed afterwards."""
        self.fill(other)
        try:
            yield self.plain
        finally:
            self.empty()
