"""A fast training step of a Transformer: a loss without all logits, one compilation a kind of layer, a CUDA graph.

It needs nothing of the model but `decoder.output_weight`, and works with any `EncoderDecoder` of this package.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.models.frame import EncoderDecoder
from regard.models.transformer.token_input import TokenInput
from regard.nn.cross_entropy import linear_cross_entropy
from regard.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

_WARM = 3  # steps before a capture: lazy initialisation, compilation, the allocator


def sequence_loss(
    model: EncoderDecoder,
    source: Tensor,
    prefix: Int[Tensor, "b t"],
    target: Int[Tensor, "b t"],
    lengths: Int[Tensor, " b"] | None = None,
    *,
    smoothing: float = 0.0,
    ignore: int = -100,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of the target tokens, given the source and the tokens before each, without all logits at once.

    >>> from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder
    >>> model = EncoderDecoder(
    ...     TransformerEncoder(11, 8, layers=1, heads=2), TransformerDecoder(7, 8, layers=1, heads=2)
    ... )
    >>> loss = sequence_loss(model, torch.tensor([[3, 4]]), torch.tensor([[1, 5]]), torch.tensor([[5, 2]]))
    >>> loss.backward()
    """
    states = model(source, prefix, lengths).states
    loss, count = linear_cross_entropy(
        states, model.output_weight, target, bias=model.output_bias, smoothing=smoothing, ignore=ignore
    )
    return loss / count.clamp(min=1)


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compile every Transformer layer of a model in place, and the token embeddings.

    Equal layers share one compilation, so it takes seconds however many there are. Options are those of
    `torch.compile`. The little code between layers is not compiled.
    """
    for part in model.modules():
        if isinstance(part, (TransformerEncoderLayer, TransformerDecoderLayer, TokenInput)):
            part.compile(**options)


class CapturedStep:
    """A training step replayed as one CUDA graph: gradients, update and all, with one launch from the host.

    `loss(*batch)` returns a scalar; the optimizer must support graphs (`capturable=True`). A graph is
    captured at the first batch of each set of shapes, so there should be few lengths. Capturing leaves parameters
    and optimizer unchanged; the captured batch is then trained on once, as any other. The returned loss
    is overwritten by the next step. A learning rate that changes must be a tensor (`lr=torch.tensor(3e-4)`),
    filled in place. Without CUDA the step runs without a graph.

    >>> weight = nn.Parameter(torch.tensor([1.0]))
    >>> step = CapturedStep(torch.optim.SGD([weight], lr=0.1), lambda x: (weight * x).sum())
    >>> step(torch.tensor([2.0]))
    tensor(2.)
    >>> weight.item()
    0.8...
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], *, clip: float | None = None
    ) -> None:
        if clip is not None and clip <= 0:
            raise ValueError(f"clip is the largest norm of the gradient and must be positive, got {clip}")
        self.optimizer = optimizer
        self.loss = loss
        self.clip = clip
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._captured: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}
        self._pool: Any = None

    def __call__(self, *batch: Tensor) -> Float[Tensor, ""]:
        """Train on a batch; its loss, which the next step overwrites."""
        if not all(t.is_cuda for t in (*batch, *self.parameters)):
            return self._step(*batch)
        kind = tuple((tuple(t.shape), t.dtype) for t in batch)
        if kind not in self._captured:
            self._captured[kind] = self._capture(batch)
        graph, inputs, loss = self._captured[kind]
        for held, new in zip(inputs, batch, strict=True):
            held.copy_(new)
        graph.replay()
        return loss

    def _step(self, *batch: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*batch)
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        return loss.detach()

    def _capture(self, batch: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        inputs = [t.clone() for t in batch]
        before = self._copies()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self._step(*inputs)
            self._restore(before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            loss = self._step(*inputs)
        self._pool = graph.pool()
        return graph, inputs, loss

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and optimizer state, each with a copy."""
        remembered = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return [(t, t.detach().clone()) for t in (*self.parameters, *remembered)]

    @torch.no_grad()
    def _restore(self, before: list[tuple[Tensor, Tensor]]) -> None:
        """Undo the warm-up steps in place: state that the optimizer created in them is reset to zero."""
        known = {id(t): copy for t, copy in before}
        remembered = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        for tensor in (*self.parameters, *remembered):
            copy = known.get(id(tensor))
            tensor.zero_() if copy is None else tensor.copy_(copy)
