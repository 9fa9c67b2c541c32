"""A hand-written translator of thirty English words to Chinese, for the translation page when no run translates.

It is a decoder with attention. At each step, the score of a source word depends on whether the word is already
translated, and on the distance between its position in Chinese word order and the number of translated words.
`regard.attention` computes the weights, and the next word is one of the translations of the attended words.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core.attention import attention
from regard.core.normalizers import Normalizer, Softmax, Sparsemax
from regard.core.requests import full
from regard.core.scores import Dot
from regard.decode.beam import beam
from regard.decode.records import Hypothesis as SearchHypothesis
from regard.tasks.hypotheses import Alternative, Answer, Hypothesis

# For each English word: its Chinese translations, the best one first, and by how many positions the word moves in
# Chinese word order, which is time, subject, place, manner, verb, object.
WORDS: dict[str, tuple[tuple[str, ...], int]] = {
    "tom": (("汤姆",), 0), "jerry": (("杰瑞",), 0), "he": (("他",), 0), "she": (("她",), 0), "i": (("我",), 0),
    "cat": (("猫", "猫咪"), 0), "dog": (("狗", "小狗"), 0), "mouse": (("老鼠", "鼠标"), 0), "bird": (("鸟",), 0),
    "chases": (("追逐", "追"), 0), "chased": (("追逐", "追了"), 0), "sees": (("看见", "看到"), 0),
    "saw": (("看见了", "锯"), 0), "loves": (("爱", "喜欢"), 0), "eats": (("吃",), 0), "hears": (("听见", "听到"), 0),
    "big": (("大",), 0), "small": (("小",), 0), "red": (("红", "红色"), 0), "happy": (("快乐的", "高兴的"), 0),
    "fish": (("鱼",), 0), "cheese": (("奶酪", "芝士"), 0), "and": (("和", "以及"), 0), "not": (("不", "没有"), 0),
    "today": (("今天",), -20), "yesterday": (("昨天",), -20), "often": (("常常", "经常"), -1),
    "slowly": (("慢慢地", "缓缓"), -3), "again": (("又", "再"), -3), "the": ((), 0), "a": ((), 0),
}  # fmt: skip
STOP = "。"


def toys() -> "list[Toy]":
    """Return two toy translators for comparison, one with softmax and one with sparsemax."""
    return [Toy(), Toy("toy, sparsemax", Sparsemax(), 0.4)]


@dataclass(frozen=True, eq=False)
class _State:
    """The state of the decoder: for each hypothesis, how much of each source word is translated, from 0 to 1."""

    covered: Float[Tensor, "b k"]

    def reorder(self, index: Int[Tensor, "n"]) -> "_State":
        return _State(self.covered[index])


@dataclass(frozen=True, eq=False)
class Toy:
    """A hand-written translator without trained parameters, with the interface of a translation run."""

    name: str = "toy, softmax"
    normalize: Normalizer = Softmax()
    sharpness: float = 1.0

    def translate(self, text: str, *, beams: int, forced: Sequence[str] = ()) -> Answer:
        """Return the best `beams` translations that begin with the tokens `forced`."""
        source = re.findall(r"\w+|[^\w\s]", text)
        if not 1 <= len(source) <= 40:
            raise ValueError(f"the toy translates from 1 to 40 words, got {len(source)}")
        sentence = _Sentence(source, self)
        start, state = torch.tensor([sentence.stop]), _State(torch.zeros(1, len(source)))
        steps = []
        for token in [sentence.number(token) for token in forced]:
            steps.append(sentence.step(state, start))
            start, state = torch.tensor([token]), steps[-1].state
        hypotheses = beam(
            sentence.step, state, start=start, stop=sentence.stop, limit=2 * len(source), width=beams, n_best=beams
        )[0]
        return Answer(
            tuple(source),
            tuple(sentence.with_alternatives(list(forced), steps, hypothesis) for hypothesis in hypotheses),
        )

    def score(self, text: str, target: Sequence[str], place: int, kept: Bool[Tensor, "n k"]) -> Float[Tensor, "n"]:
        """Return the probability of word `place` of the translation `target`, for each mask of source words.

        A row of `kept` is one mask: True at the source words that the translator reads, False at words that are
        removed.
        """
        source = re.findall(r"\w+|[^\w\s]", text)
        known = {row: self._chance([word for word, there in zip(source, row, strict=True) if there], target, place)
                 for row in {tuple(row) for row in kept.tolist()}}  # fmt: skip
        return torch.tensor([known[tuple(row)] for row in kept.tolist()])

    def _chance(self, source: list[str], target: Sequence[str], place: int) -> float:
        if not source:
            return 0.0
        sentence = _Sentence(source, self)
        numbers = [sentence.number(token) for token in target[: place + 1]]
        start, state = torch.tensor([sentence.stop]), _State(torch.zeros(1, len(source)))
        for number in numbers[:-1]:
            output = sentence.step(state, start)
            start, state = torch.tensor([number]), output.state
        return float(sentence.step(state, start).logits[0].softmax(0)[numbers[-1]])


class _Sentence:
    """One source sentence, with its target vocabulary and the decoder's step function."""

    def __init__(self, source: list[str], toy: Toy) -> None:
        self.source, self.toy = source, toy
        choices = [WORDS.get(word.lower(), ((word,), 0)) for word in source]
        self.vocabulary = [STOP, *dict.fromkeys(w for words, _ in choices for w in words if w != STOP)]
        self.stop = 0
        lexicon = torch.full((len(source), len(self.vocabulary)), 1e-4)
        for place, (words, _) in enumerate(choices):
            for rank, target in enumerate(words):
                lexicon[place, self.vocabulary.index(target)] = (0.8, 0.17, 0.03)[min(rank, 2)]
        self.lexicon = lexicon / lexicon.sum(1, keepdim=True)
        self.silent = torch.tensor(
            [not words or word in ".!?。" for word, (words, _) in zip(source, choices, strict=True)]
        )
        wanted = sorted(range(len(source)), key=lambda j: (bool(self.silent[j]), j + choices[j][1]))
        self.rank = torch.empty(len(source)).scatter(0, torch.tensor(wanted), torch.arange(float(len(source))))

    def number(self, token: str) -> int:
        """Return the id of a target token; an unknown token is added to the vocabulary, without a source word."""
        if token == STOP:
            raise ValueError(f"a translation cannot be forced to end: {STOP!r} was among the forced tokens")
        if token not in self.vocabulary:
            self.vocabulary.append(token)
            self.lexicon = torch.cat([self.lexicon, torch.full((len(self.source), 1), 1e-4)], 1)
        return self.vocabulary.index(token)

    def step(self, state: _State, tokens: Int[Tensor, "b"]) -> SimpleNamespace:
        """Return logits and attention weights for the next token, and the state after the last tokens.

        In the new state, the source words of the last tokens are marked as translated.
        """
        covered = state.covered
        first = covered.sum(1) == 0
        if not bool((first & (tokens == self.stop)).all()):
            open_ = self.lexicon[:, tokens].T * (1 - covered).clamp_min(0.02) * (~self.silent)
            share = open_ / open_.sum(1, keepdim=True).clamp_min(1e-6)
            covered = torch.where((tokens == self.stop)[:, None], covered, (covered + share).clamp(max=1.0))
        done = covered.masked_fill(self.silent, 0).sum(1, keepdim=True)
        scores = self.toy.sharpness * (-1.4 * (self.rank - done).abs() - 4.0 * covered)
        query = torch.ones(len(tokens), 1, 1)
        memory = scores[:, :, None]
        weights = attention(query, memory, memory, score=Dot(), normalize=self.toy.normalize, weights=full()).weights
        assert isinstance(weights, Tensor)
        left = (~self.silent).sum() - done  # `left` is the number of source words that are not translated yet
        ending = torch.sigmoid(40 * (0.5 - left))
        speaking = weights[:, 0] * (~self.silent)
        words = (speaking / speaking.sum(1, keepdim=True).clamp_min(1e-6)) @ self.lexicon
        words = (words * (1 - ending)).clamp_min(1e-9)
        words[:, self.stop] = ending[:, 0].clamp_min(1e-20)
        return SimpleNamespace(logits=words.log(), state=_State(covered), weights=weights[:, 0])

    def with_alternatives(
        self, forced: list[str], steps: list[SimpleNamespace], hypothesis: SearchHypothesis
    ) -> Hypothesis:
        """Return a hypothesis of the beam search with its words, weights, and alternatives at each position."""
        numbers = [self.number(token) for token in forced]
        tokens = [*numbers, *hypothesis.tokens]
        start, state = torch.tensor([self.stop]), _State(torch.zeros(1, len(self.source)))
        log_prob = 0.0
        weights: list[Tensor] = []
        others: list[tuple[Alternative, ...]] = []
        for token in [*tokens, self.stop]:
            output = self.step(state, start)
            chances = output.logits[0].softmax(0)
            log_prob += float(chances[token].log())
            if token != self.stop:
                weights.append(output.weights[0])
                best = chances.topk(min(6, len(chances)))
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                others.append(tuple(Alternative(self.vocabulary[at], chance) for at, chance in pairs))
            start, state = torch.tensor([token]), output.state
        table = torch.stack(weights) if weights else torch.zeros(0, len(self.source))
        return Hypothesis(tuple(self.vocabulary[token] for token in tokens), log_prob, table, tuple(others))
