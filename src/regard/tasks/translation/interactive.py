"""The interactive translator of the studio: forced prefixes, alternative tokens, and deletion of source tokens."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.requests import full
from regard.decode.beam import beam
from regard.decode.penalties import Gnmt
from regard.tasks.hypotheses import Alternative, Answer, Hypothesis
from regard.tasks.translation.codec import PieceCoder, Reading, WordCoder
from regard.tasks.translation.predictor import BOS, END, EOS, PAD, Translator

_OTHERS = 8  # largest number of likely tokens that are listed at each position, including the chosen token
_LONGEST = 200  # the largest number of source tokens


@dataclass(frozen=True, eq=False)
class LiveTranslator:
    """A translator with the name of its run and the functions that the studio calls."""

    name: str
    translator: Translator

    @torch.no_grad()
    def translate(self, text: str, *, beams: int, forced: Sequence[str] = ()) -> Answer:
        """Return the `beams` best translations of a text among those that start with the `forced` tokens."""
        source = self._read(text)
        start = [self._number(token) for token in forced]
        targets = self._search(source, start, beams)
        labels = (*source.labels, END) if self.translator.end_mark else source.labels
        return Answer(labels, tuple(self._hypothesis(source, numbers) for numbers in targets))

    @torch.no_grad()
    def score(self, text: str, target: Sequence[str], place: int, kept: Bool[Tensor, "n k"]) -> Float[Tensor, "n"]:
        """Return p(target[place] | target[:place], source) once for each row of the mask `kept`.

        The source consists of the tokens of `text` for which the row of `kept` is True; all other tokens are deleted.
        """
        source, numbers = self._read(text), [self._number(token) for token in target]
        rows = [
            [number for number, here in zip(source.numbers, row, strict=False) if here] or [self._blank()]
            for row in kept.tolist()
        ]
        log_probs, _ = self._whole([(row, numbers) for row in rows])
        return log_probs[:, place, numbers[place]].exp().cpu()

    def _read(self, text: str) -> Reading:
        source = self.translator.coder.read(text)
        if not 1 <= len(source.numbers) <= _LONGEST:
            raise ValueError(f"a source has from 1 to {_LONGEST} tokens, got {len(source.numbers)}")
        return source

    def _search(self, source: Reading, start: list[int], beams: int) -> list[list[int]]:
        model, device = self.translator.model, self.translator.device
        batch = self.translator.batch([(source.numbers, ())])
        limit = max(1, 2 * len(source.numbers) + 10 - len(start))
        state: Any = model.start(batch.source, batch.source_lengths, limit=len(start) + limit + 1)
        prefix = [BOS, *start]
        for number in prefix[:-1]:
            state = model.step(state, torch.tensor([number], device=device)).state
        [hypotheses] = beam(
            model.step,
            state,
            start=torch.tensor(prefix[-1:], device=device),
            stop=EOS,
            limit=limit,
            width=beams,
            n_best=beams,
            length_penalty=Gnmt(self.translator.settings.length_penalty),
            never=(PAD, BOS),
        )
        return [[*start, *one.tokens] for one in hypotheses]

    def _hypothesis(self, source: Reading, numbers: list[int]) -> Hypothesis:
        log_probs, weights = self._whole([(source.numbers, numbers)])
        likely = log_probs[0].topk(min(_OTHERS, log_probs.shape[-1]))
        others = tuple(
            tuple(
                Alternative(self._label(int(number)), float(log_prob.exp()))
                for number, log_prob in zip(row, values, strict=True)
                if int(number) not in (PAD, BOS, EOS)
            )
            for row, values in zip(likely.indices[: len(numbers)], likely.values[: len(numbers)], strict=True)
        )
        total = log_probs[0].gather(-1, torch.tensor([[n] for n in (*numbers, EOS)], device=log_probs.device)).sum()
        tokens = tuple(self._label(number) for number in numbers)
        return Hypothesis(tokens, float(total), weights[0, : len(numbers)].cpu(), others)

    def _whole(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities (n, t + 1, v) and the attention weights (n, t + 1, s) for n given targets.

        Each of the n pairs is a source and a target, as token numbers. t and s are the numbers of tokens of the longest
        target and of the longest source, with its end mark; v is the vocabulary size.
        """
        batch, model = self.translator.batch(pairs), self.translator.model
        decoded = model(batch.source, batch.prefix, batch.source_lengths, weights=full())
        weights = decoded.weights
        if weights is None:
            weights = batch.source.new_zeros((*batch.prefix.shape, batch.source.shape[1]), dtype=torch.float32)
        elif isinstance(weights, list):
            weights = weights[-1].mean(1)
        return model.logits(decoded.states).float().log_softmax(-1), weights.float()

    def _label(self, number: int) -> str:
        coder = self.translator.coder
        if isinstance(coder, WordCoder):
            return "<unk>" if number == coder.goal.unknown else coder.goal.decode([number])[0]
        assert isinstance(coder, PieceCoder)
        return coder.codes.target.label(number)

    def _number(self, token: str) -> int:
        numbers = _numbers(self)
        if token not in numbers:
            raise ValueError(f"the model has no token {token[:40]!r}")
        return numbers[token]

    def _blank(self) -> int:
        coder = self.translator.coder
        return coder.source.unknown if isinstance(coder, WordCoder) else EOS


@functools.lru_cache(maxsize=8)
def _numbers(live: LiveTranslator) -> dict[str, int]:
    """Return a dictionary from labels to token numbers; if several tokens have one label, the first token's number."""
    numbers: dict[str, int] = {}
    for number in range(3, live.translator.coder.sizes[1]):
        numbers.setdefault(live._label(number), number)
    return numbers
