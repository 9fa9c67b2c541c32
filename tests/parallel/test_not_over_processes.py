"""Models that need whole sequences, or decode token by token, refuse to run over a process group."""

from collections.abc import Callable

import pytest
import torch

import regard
from regard.core import sharding
from regard.core.local import local_attention
from regard.models import Memory, RecurrentDecoder, RecurrentEncoder, SpanPointer, SpeechEncoder, TransformerDecoder

STATES = torch.zeros(2, 5, 8)
MEMORY = Memory(STATES, STATES, None, torch.zeros(2, 8))
TOKENS = torch.zeros(2, 3, dtype=torch.long)
RECURRENT = RecurrentDecoder(11, 8, memory_size=8, attention=regard.nn.Attention(8, 8))
TRANSFORMER = TransformerDecoder(11, 8, layers=1, heads=2)
# States of decoders that were created outside of a parallel context.
STARTED = RECURRENT.start(MEMORY), TRANSFORMER.start(MEMORY)

CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "recurrent encoder": ("a recurrent encoder", lambda: RecurrentEncoder(11, 8)(TOKENS)),
    "recurrent decoder": ("a recurrent decoder", lambda: RECURRENT(MEMORY, TOKENS)),
    "first recurrent state": ("a recurrent decoder", lambda: RECURRENT.start(MEMORY)),
    "recurrent step": ("a recurrent decoder", lambda: RECURRENT.step(STARTED[0], TOKENS[:, 0])),
    "Transformer's first state": ("decoding token by token", lambda: TRANSFORMER.start(MEMORY)),
    "Transformer's step": ("decoding token by token", lambda: TRANSFORMER.step(STARTED[1], TOKENS[:, 0])),
    "pyramid": ("a pyramidal encoder", lambda: SpeechEncoder(8, 4, layers=1)(STATES)),
    "pointer": ("a span pointer", lambda: SpanPointer(8, size=8)(MEMORY, MEMORY)),
    "local": ("local attention", lambda: local_attention(*[STATES] * 3, torch.zeros(2, 5), reach=1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused(name, monkeypatch):
    what, call = CALLS[name]
    # This simulates a call inside of `regard.parallel.context`.
    monkeypatch.setattr(sharding, "current", object())
    with pytest.raises(NotImplementedError, match=f"^{what} is not computed over a process group"):
        call()
