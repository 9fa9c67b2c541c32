"""The encoder-decoder model: an encoder computes a memory, and a decoder attends to the memory."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.requests import Request
from regard.models.memory import Decoded, DecoderState, Memory, Step, pure


class EncoderDecoder(nn.Module):
    """An encoder and a decoder, connected by a `Memory` (Cho et al. 2014; Sutskever et al. 2014).

    The context is C = F(x_1..x_m), and the next token y_i = G(C, y_1..y_{i-1}). With attention, each step i has its own
    context C_i (Bahdanau et al. 2015). Any encoder `encoder(source, lengths) -> Memory` can be combined with any
    decoder that takes a `Memory`.

    >>> from regard.models.recurrent.decoder import RecurrentDecoder
    >>> from regard.models.recurrent.encoder import RecurrentEncoder
    >>> model = EncoderDecoder(RecurrentEncoder(11, 4), RecurrentDecoder(7, 4, memory_size=8))
    >>> decoded = model(torch.tensor([[3, 4, 5]]), torch.tensor([[1, 2]]))
    >>> model.logits(decoded.states).shape
    torch.Size([1, 2, 7])
    """

    encoder: Any  # any object that can be called as encoder(source, lengths) and returns a `Memory`
    decoder: Any

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(
        self,
        source: Tensor,
        prefix: Tensor,
        lengths: Tensor | None = None,
        *,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Decoded:
        """Return the decoder's states (b, t, d) for a whole prefix (b, t) of target tokens.

        The state of a token depends on the source, on this token and on the tokens before it.
        """
        memory: Memory = self.encoder(source, lengths)
        return self.decoder(memory, prefix, weights=weights, generator=generator)

    def logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """Return logits of the next token from the states that `forward` returns."""
        return self.decoder.logits(states)

    def start(self, source: Tensor, lengths: Tensor | None = None, *, limit: int | None = None) -> DecoderState:
        """Encode the source, and return the decoder's state before the first token.

        `limit` is the largest number of tokens that will be decoded.
        """
        memory: Memory = self.encoder(source, lengths)
        return self.decoder.start(memory, limit=limit)

    @pure
    def step(self, state: DecoderState, tokens: Tensor) -> Step:
        """Run one decoding step: return logits of the next token and the new state, given the last tokens (b,)."""
        return self.decoder.step(state, tokens)

    @property
    def output_weight(self) -> Float[Tensor, "v d"]:
        """Return the matrix that maps states to logits, for a loss that never materialises all logits."""
        return self.decoder.output_weight

    @property
    def output_bias(self) -> Float[Tensor, "v"] | None:
        """Return the bias that is added to the logits, or None."""
        return self.decoder.output_bias
