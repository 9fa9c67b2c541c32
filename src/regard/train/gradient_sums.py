"""Gradients summed over all workers: during the backward pass by DDP or FSDP2 (in shards), or all at once after it."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.train.cuda_graph_gradients import Captured
from regard.train.distributed import Workers
from regard.train.updates import LossFunction

BUCKET = 25 * 2**20  # bytes of gradients that DDP sums in one message (a bucket)


@dataclass(frozen=True, eq=False)
class Uncounted:
    """A batch with weight 0, for a worker that gets no rows because a batch has fewer rows than there are workers.

    The model still runs on this batch, so that the same parameters have gradients on every worker.
    """

    batch: Any


class Step(nn.Module):
    """A module that computes the loss of a batch; DDP and FSDP2 wrap this module instead of the model.

    The loss function may therefore call any method of the model, not only its `forward`.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> tuple[Tensor, int | Tensor]:
        result = self.loss(self.model, batch)
        return result.total, result.count


class GradientSums:
    """Sums the gradients of all workers, and stores the sums in the parameters' `grad` on every worker.

    The first update sums all gradients at once, after the backward pass. If it gives every parameter a gradient, DDP
    does not search the graph for unused parameters in later updates; otherwise it does. Later updates use DDP, with two
    exceptions that continue to sum all gradients at once: gradients that fit one message of DDP, because there is no
    communication to overlap with computation and DDP would copy each gradient separately; and CUDA graphs, whose
    gradients have fixed addresses. With `sharded`, FSDP2 has wrapped `step` already and sums the gradients itself.
    """

    def __init__(
        self,
        workers: Workers,
        step: Step,
        precision: torch.dtype,
        device: torch.device,
        *,
        sharded: bool = False,
        captured: Captured | None = None,
    ) -> None:
        self._workers, self._step, self._device = workers, step, device
        self._precision, self._sharded, self._captured = precision, sharded, captured
        self._wrapped: Any = None
        self._versions = self._buffer_versions()

    def of(self, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the total loss of each batch of this worker, and the number of its summands, such as tokens.

        After the last batch, the parameters hold the gradients summed over all workers.
        """
        waiting: list[Any] = []
        for batch in batches:
            if waiting:
                yield self._differentiated(waiting.pop(), last=False)
            waiting.append(batch)
        if waiting:
            yield self._differentiated(waiting.pop(), last=True)
            if self._wrapped is None and not self._sharded and self._workers.size > 1:
                self._sum_at_once()
                if self._can_overlap():
                    self._wrapped = self._ddp()
            self._average_buffers()

    def _can_overlap(self) -> bool:
        """Return whether DDP can sum some gradients while others are still computed.

        It can if the gradients need several messages and are not computed by CUDA graphs.
        """
        gradients = [p.grad for p in self._step.parameters() if p.grad is not None]
        return self._captured is None and sum(gradient.nbytes for gradient in gradients) > BUCKET

    def _differentiated(self, batch: Any, *, last: bool) -> tuple[Tensor, Tensor]:
        counts = not isinstance(batch, Uncounted)
        batch = batch if counts else batch.batch
        if self._captured is not None and counts:
            return self._captured(batch)
        wrapped: Any = self._wrapped
        run: Callable[[Any], Any] = self._step if wrapped is None else wrapped
        with nullcontext() if last or wrapped is None else wrapped.no_sync():
            with torch.autocast(self._device.type, self._precision, enabled=self._precision != torch.float32):
                total, count = run(batch)
            if total.ndim:
                raise ValueError(f"loss must give a total of one number; got shape {tuple(total.shape)}")
            # DDP and FSDP2 divide gradients by the number of workers, but the sum is needed, so the loss is multiplied
            # by the number of workers.
            averaged = self._sharded or wrapped is not None
            weight = (self._workers.size if averaged else 1) * counts
            (total if weight == 1 else total * weight).backward()
        total, count = total.detach(), torch.as_tensor(count, device=self._device)
        return (total, count) if counts else (total * 0.0, count * 0)

    def _ddp(self) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        unused = any(p.requires_grad and p.grad is None for p in self._step.parameters())
        known = inspect.signature(DistributedDataParallel).parameters
        # Older versions of torch call the argument forward_sync_buffers `broadcast_buffers`.
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False, "find_unused_parameters": unused, "gradient_as_bucket_view": True}
        return DistributedDataParallel(self._step, **options)

    @torch.no_grad()
    def _sum_at_once(self) -> None:
        held = [(p, p.grad) for p in self._step.parameters() if p.grad is not None]
        if not held:
            return
        flat = self._workers.reduce(torch.cat([gradient.reshape(-1) for _, gradient in held]))
        parts = [
            part.view_as(gradient)
            for part, (_, gradient) in zip(flat.split([g.numel() for _, g in held]), held, strict=True)
        ]
        # CUDA graphs write gradients to tensors at fixed addresses: the sums are copied into these tensors
        if self._captured is not None:
            torch._foreach_copy_([gradient for _, gradient in held], parts)
            return
        for (parameter, _), part in zip(held, parts, strict=True):
            parameter.grad = part

    def _buffer_versions(self) -> list[int]:
        return [buffer._version for buffer in self._step.buffers()]

    @torch.no_grad()
    def _average_buffers(self) -> None:
        """Replace buffers that this update changed, such as a moving baseline, by their mean over the workers."""
        before, self._versions = self._versions, self._buffer_versions()
        both = zip(before, self._versions, self._step.buffers(), strict=True)
        changed = [buffer for old, new, buffer in both if old != new and buffer.is_floating_point()]
        if changed and self._workers.size > 1:
            flat = self._workers.reduce(torch.cat([buffer.reshape(-1) for buffer in changed])) / self._workers.size
            for buffer, part in zip(changed, flat.split([buffer.numel() for buffer in changed]), strict=True):
                buffer.copy_(part.view_as(buffer))
            self._versions = self._buffer_versions()
