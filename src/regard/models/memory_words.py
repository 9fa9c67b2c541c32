"""Memories whose keys or values are word embeddings, or sums of word embeddings and the encoder's states."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.models.memory import Memory

Content = Literal["states", "words", "both"]
CONTENTS: tuple[Content, ...] = ("states", "words", "both")


def check_content(**named: str) -> None:
    """Raise a `ValueError` if the requested content of keys or values is not one of `CONTENTS`."""
    for name, content in named.items():
        if content not in CONTENTS:
            raise ValueError(f"{name} must be one of {', '.join(CONTENTS)}, got {content!r}")


def with_words(memory: Memory, words: Float[Tensor, "b k m"], *, keys: Content, values: Content) -> Memory:
    """Return a memory whose keys and values are as requested: states, word embeddings, or the sum of both.

    `words` (b, k, m) are the embeddings, of the same size as the states in `memory.keys`.

    >>> states, words = torch.zeros(1, 2, 3), torch.ones(1, 2, 3)
    >>> memory = with_words(Memory(states, states, None, states[:, 0]), words, keys="states", values="words")
    >>> memory.keys is states, memory.values.sum()
    (True, tensor(6.))
    """
    # keys and values at padded positions must be zeros, so the embeddings at these positions are set to zero
    if memory.mask is not None:
        words = torch.where(memory.mask.unsqueeze(-1), words, 0)
    contents = {"states": memory.keys, "words": words}
    if "both" in (keys, values):
        contents["both"] = memory.keys + words
    return replace(memory, keys=contents[keys], values=contents[values])
