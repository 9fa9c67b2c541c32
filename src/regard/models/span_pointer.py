"""A decoder that points at the answer to a question: the first and the last word of a span of the passage."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core import sharding
from regard.core.attended import Attended
from regard.core.attention import AnyScore, attention
from regard.core.normalizers import Normalizer, Softmax
from regard.core.problem import check_normalizer
from regard.core.requests import Request, Top
from regard.core.scores import Additive, Dot
from regard.models.memory import Memory
from regard.models.speech.pyramidal_encoder import BothWays
from regard.nn.attention import Attention, pairs, without_head
from regard.nn.projection import OwnedScore, settled

# The initial gain of α, the linear map before the alignment's scores. With this gain, a passage word gives nearly all
# of its weight to the same word of the question, for word vectors of variance 0.09.
_KEY_GAIN = 3.0


@dataclass(frozen=True, eq=False)
class Pointed:
    """The scores of each passage word as the first and as the last word of the answer; very low at padding.

    `weights` are attention weights of passage words over question words, in the requested form; in full they are
    (b, n, k). `matching` are attention weights of passage words over passage words, in full (b, n, n). `log_prob`
    (b, n) is the log-probability of the question words that hard attention sampled.
    """

    start_logits: Float[Tensor, "b n"]
    end_logits: Float[Tensor, "b n"]
    weights: Tensor | Top | None = None
    matching: Tensor | Top | None = None
    log_prob: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Spans:
    """The best span of each passage: its first and its last word, both inclusive, and its score."""

    start: Int[Tensor, "b"]
    end: Int[Tensor, "b"]
    score: Float[Tensor, "b"]


class SpanPointer(nn.Module):
    """Finds the answer to a question in a passage, in four stages: align, gate, match, point.

    - Align: passage words are queries, and question words are keys and values: a_ij ∝ exp⟨α(p_i), α(q_j)⟩ with α(x) =
      relu(W x), and c_i = Σ_j a_ij q_j is the part of the question relevant to word i (Chen et al. 2017, section 3.2).
      `score` may be another score, by its name or as a record, and `normalize` another normaliser. With `key_size`, α
      is applied to the keys of the two memories, of that size, such as word vectors. Then the initial W is so large
      that equal keys attend to each other from the first step; untrained states would give uniform weights.
    - Gate: v = BiGRU(g ⊙ [p; c]) with the gate g = σ(W_g [p; c]) (R-Net, Wang et al. 2017, section 3.2). With
      `products`, [p; c] is replaced by [p; c; p ⊙ c], as in BiDAF (Seo et al. 2017, section 2), because a sum cannot
      express whether p and c agree.
    - Match: each v_i attends to all v_j, followed by another gate and BiGRU (R-Net, section 3.3). `matching` is the
      name of a score, a record or function, or None to omit this stage. With `hops`, the stage is repeated with
      separate parameters, so that information can pass through several words; the returned weights are those of the
      last hop.
    - Point: s_j = w · tanh(W_h h_j + W_r r) scores the first word, where r is the context of a learned query over the
      question. The last word is scored in the same way with r' = GRU(r, Σ_j softmax(s)_j h_j) (R-Net, section 3.4;
      Vinyals et al. 2015).

    With "mean" as `score` or `matching`, that stage uses the mean over its keys for every word instead of attention,
    for an ablation of equal depth. The alignment processes all passage words in one call, not step by step as R-Net
    does.

    >>> pointer = SpanPointer(8, size=4)
    >>> passage = Memory(torch.randn(2, 7, 8), torch.randn(2, 7, 8), None, torch.randn(2, 8))
    >>> question = Memory(torch.randn(2, 3, 8), torch.randn(2, 3, 8), None, torch.randn(2, 8))
    >>> pointer(passage, question).start_logits.shape
    torch.Size([2, 7])
    """

    def __init__(
        self,
        memory_size: int,
        *,
        question_size: int | None = None,
        key_size: int | None = None,
        size: int = 64,
        score: str | AnyScore = Dot(),
        normalize: Normalizer = Softmax(),
        matching: str | AnyScore | None = "additive",
        hops: int = 1,
        products: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if products and question_size not in (None, memory_size):
            raise ValueError(f"products need passage and question of one size, got {memory_size} and {question_size}")
        if hops < 1:
            raise ValueError(f"hops must be at least 1, got {hops}")
        question_size = memory_size if question_size is None else question_size
        self.memory_size, self.question_size, self.size = memory_size, question_size, size
        mean = score == "mean"
        self.normalize = check_normalizer(normalize)
        self.score = None if mean else OwnedScore(score, size)
        self.align_passage = None if mean else nn.Linear(key_size or memory_size, size)
        # Passage and question share one linear map α (Chen et al.) if their sizes are equal or `key_size` is given.
        shared = mean or key_size is not None or question_size == memory_size
        self.align_question = None if shared else nn.Linear(question_size, size)
        self.key_size, self.products = key_size, products
        if key_size is not None and self.align_passage is not None:
            nn.init.orthogonal_(self.align_passage.weight, gain=_KEY_GAIN)
        self.aligned = _GatedReader(memory_size + question_size + (memory_size if products else 0), size)
        self.matching = None if matching is None else _matching(matching, size)
        self.matched = None if matching is None else _GatedReader(4 * size, size)
        self.further = nn.ModuleList(
            nn.ModuleDict({"matching": _matching(matching, size), "matched": _GatedReader(4 * size, size)})
            for _ in range(0 if matching is None else hops - 1)
        )
        self.ask = nn.Parameter(torch.empty(question_size).normal_(std=question_size**-0.5))
        self.summarize = Attention(question_size, score="additive", hidden_size=size)
        self.point = _Pointer(2 * size, question_size, size)
        self.advance = nn.GRUCell(2 * size, question_size)
        self.dropout = dropout

    def forward(self, passage: Memory, question: Memory, *, weights: Request | None = None) -> Pointed:
        """Return scores of the first and last word of each answer.

        `weights` requests the attention weights of the stages "align" and "match".
        """
        sharding.refuse("a span pointer")
        words = self._dropped(_real(passage.values, passage.mask, self.memory_size, "passage"))
        question_words = self._dropped(_real(question.values, question.mask, self.question_size, "question"))
        alignment = self._align(
            self._keys(passage, words), self._keys(question, question_words), question_words, question.mask, weights
        )
        read = alignment.output.to(words.dtype)
        states = self.aligned(
            torch.cat([words, read, words * read] if self.products else [words, read], -1), passage.mask
        )
        matching = None
        for attend, read in self._hops():
            matched = attend(states, states, mask=passage.mask, weights=weights)
            states = read(torch.cat([states, matched.output.to(states.dtype)], -1), passage.mask)
            matching = matched.weights
        states = self._dropped(states)
        ask = self.ask.expand(len(question_words), 1, -1)
        about = self.summarize(ask, question_words, mask=question.mask).output.squeeze(1)
        start, read = self.point(about, states, passage.mask)
        end, _ = self.point(self.advance(read, about.to(read.dtype)), states, passage.mask)
        return Pointed(start, end, alignment.weights, matching, alignment.log_prob)

    def _hops(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield the attention layer and the gated BiGRU of each hop of self-matching."""
        if self.matching is not None and self.matched is not None:
            yield self.matching, self.matched
        for pair in self.further:
            assert isinstance(pair, nn.ModuleDict)
            yield pair["matching"], pair["matched"]

    def _keys(self, memory: Memory, values: Tensor) -> Tensor:
        """Return the vectors of a text that the alignment compares: keys if `key_size` is given, otherwise values."""
        return values if self.key_size is None else _real(memory.keys, memory.mask, self.key_size, "keys")

    def _align(
        self, words: Tensor, keys: Tensor, question_words: Tensor, mask: Tensor | None, weights: Request | None
    ) -> Attended:
        """Return for each passage word the weighted sum of question words (its context), and the attention weights."""
        if self.score is None or self.align_passage is None:
            return _Mean()(words, question_words, mask=mask)
        map_question = self.align_passage if self.align_question is None else self.align_question
        return without_head(
            attention(
                F.relu(self.align_passage(words)).unsqueeze(1),
                F.relu(map_question(keys)).unsqueeze(1),
                question_words.unsqueeze(1),
                score=self.score(),
                normalize=settled(self.normalize, self.training),
                mask=pairs(mask),
                weights=weights,
            )
        )

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def _matching(score: str | AnyScore | None, size: int) -> nn.Module:
    if score is None or score == "mean":
        return _Mean()
    return Attention(2 * size, score=score, hidden_size=size)


class _Mean(nn.Module):
    """A layer that replaces attention: it returns the mean of the memory for every query, and no weights."""

    def forward(
        self,
        query: Float[Tensor, "b q d"],
        memory: Float[Tensor, "b k m"],
        *,
        mask: Bool[Tensor, "b k"] | None = None,
        weights: Request | None = None,
    ) -> Attended:
        real = torch.ones_like(memory[..., :1]) if mask is None else mask.unsqueeze(-1).to(memory.dtype)
        mean = (memory * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        return Attended(mean.expand(-1, query.shape[1], -1))


class _GatedReader(nn.Module):
    """Computes BiGRU(σ(W x) ⊙ x), where the gate σ(W x) scales each feature of a word by its relevance."""

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(input_size, input_size, bias=False)
        self.read = BothWays(nn.GRU(input_size, size, batch_first=True), nn.GRU(input_size, size, batch_first=True))

    def forward(self, x: Float[Tensor, "b n i"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n two_d"]:
        return self.read(torch.sigmoid(self.gate(x)) * x, mask)


class _Pointer(nn.Module):
    """Computes additive scores of positions (Vinyals et al. 2015), and the mean of states weighted by their softmax."""

    def __init__(self, state_size: int, query_size: int, size: int) -> None:
        super().__init__()
        self.state = nn.Linear(state_size, size)
        self.query = nn.Linear(query_size, size, bias=False)
        self.weight = nn.Parameter(torch.empty(size).uniform_(-(size**-0.5), size**-0.5))

    def forward(
        self, query: Float[Tensor, "b d"], states: Float[Tensor, "b n e"], mask: Bool[Tensor, "b n"] | None
    ) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b e"]]:
        scores = Additive(self.weight)(self.query(query).unsqueeze(1), self.state(states)).squeeze(1)
        read = (Softmax()(scores, mask).unsqueeze(1).to(states.dtype) @ states).squeeze(1)
        if mask is None:
            return scores, read
        # Masked scores are half of the lowest finite float, so that the sum of a start and an end score is finite.
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min / 2), read


def best_span(start: Float[Tensor, "b n"], end: Float[Tensor, "b n"], *, longest: int) -> Spans:
    """Return the span from i to j with i ≤ j < i + longest and the largest start[i] + end[j].

    On a tie the first i wins, then the first j. For each i, the best j is the position of the maximum in a window of
    `end`, so the search takes O(n · longest) time without a loop in Python.

    >>> span = best_span(torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([[3.0, 2.0, 4.0]]), longest=2)
    >>> span.start, span.end, span.score
    (tensor([1]), tensor([2]), tensor([9.]))
    """
    if start.shape != end.shape or start.ndim != 2 or start.shape[1] == 0:
        raise ValueError(
            f"start and end must be (b, n) alike with n at least 1, got {tuple(start.shape)} and {tuple(end.shape)}"
        )
    if longest < 1:
        raise ValueError(f"longest must be at least 1, got {longest}")
    longest = min(longest, start.shape[1])
    start, end = (x if x.dtype == torch.float64 else x.float() for x in (start, end))
    # `unfold` returns a view of the padded scores, not a copy
    windows = F.pad(end, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    value, offset = windows.max(-1)
    score, first = (start + value).max(-1)
    return Spans(first, first + offset.gather(1, first.unsqueeze(-1)).squeeze(-1), score)


def _real(values: Tensor, mask: Tensor | None, size: int, name: str) -> Tensor:
    """Return the vectors of a text with padding set to zero; raise an error if their size is wrong."""
    if values.shape[-1] != size:
        raise ValueError(f"{name} has size {values.shape[-1]}, the pointer expects {size}")
    return values if mask is None else torch.where(mask.unsqueeze(-1), values, 0)
