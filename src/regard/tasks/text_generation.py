"""Functions for tasks that generate text: the loss of a text, and beam search."""

from typing import Any, Literal

import torch
from torch import Tensor

from regard.data.text.vocabulary import Vocabulary
from regard.decode.beam import beam
from regard.decode.graph_search import Captures
from regard.decode.greedy import greedy
from regard.decode.penalties import Gnmt
from regard.decode.records import Hypothesis
from regard.models.frame import EncoderDecoder
from regard.models.memory import Decoded
from regard.nn.cross_entropy import linear_cross_entropy
from regard.tasks.task import Outcome

PAD, BOS, EOS = Vocabulary.pad, Vocabulary.bos, Vocabulary.eos
Credit = Literal["word", "rest", "caption"]
NEVER = (PAD, BOS, Vocabulary.unknown)  # tokens that are never generated


def word_outcome(
    network: Any,
    decoded: Decoded,
    target: Tensor,
    *,
    keys: Tensor | None,
    smoothing: float,
    attention: bool,
    credit: Credit = "word",
) -> Outcome:
    """Return the cross-entropy of a model's output with the target token numbers (b, t), where −100 marks padding.

    If `attention` is true, the `Outcome` includes the attention weights and the samples of hard attention. The reward
    of a sampled key is the log-probability of the word that the decoder predicts with it (`credit="word"`), of this
    word and all later words (`"rest"`), or of the whole text (`"caption"`, Xu et al. 2015, section 4.1). `keys` (b, k)
    is True for keys that are not padding; None: no key is padding.
    """
    model: EncoderDecoder = getattr(network, "_orig_mod", network)
    summed = linear_cross_entropy(
        decoded.states, model.output_weight, target, bias=model.output_bias, smoothing=smoothing
    )
    if not attention:
        return Outcome(summed.loss, summed.count)
    layers = decoded.weights if isinstance(decoded.weights, list) else [decoded.weights]
    weights = [one for one in layers if one is not None]
    real = target >= 0
    mask = real.unsqueeze(-1) if keys is None else real.unsqueeze(-1) & keys.unsqueeze(1)
    if weights and weights[0].ndim == 4:
        mask = mask.unsqueeze(1)
    if decoded.log_prob is None:
        return Outcome(summed.loss, summed.count, weights, mask)
    with torch.no_grad():
        scores = model.logits(decoded.states).float().log_softmax(-1)
        own = scores.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        reward = credited(torch.where(real, own, 0), credit)
    # Padding is masked, not removed by indexing, because in a CUDA graph shapes cannot depend on the data.
    return Outcome(summed.loss, summed.count, weights, mask, decoded.log_prob, reward, real, target.clamp_min(0))


def credited(own: Tensor, credit: Credit) -> Tensor:
    """Return the reward (b, t) of each word's attention sample, given the log-probabilities (b, t) of the words.

    `credit` is "word" (the word's own log-probability), "rest" (the sum of the log-probabilities from this word on) or
    "caption" (the sum over the whole text).

    >>> own = torch.tensor([[-1.0, -2.0, -4.0]])
    >>> credited(own, "rest"), credited(own, "caption")
    (tensor([[-7., -6., -4.]]), tensor([[-7., -7., -7.]]))
    """
    if credit == "word":
        return own
    whole = own.sum(1, keepdim=True)
    return whole.expand_as(own) if credit == "caption" else whole - own.cumsum(1) + own


def hypotheses(
    decoder: Any,
    state: Any,
    limit: Tensor,
    *,
    width: int,
    n_best: int = 1,
    length_penalty: float,
    captures: Captures | None = None,
    never: tuple[int, ...] = (PAD, BOS),
    minimum: int = 0,
) -> list[list[Hypothesis]]:
    """Return the `n_best` texts for each batch row of the decoder's state, computed by beam search, best first.

    Texts have from `minimum` to `limit` (b,) tokens, and never contain a token in `never`. A `width` of 1 is greedy
    search.
    """
    options: dict[str, Any] = {"start": torch.full_like(limit, BOS), "stop": EOS, "limit": limit, "minimum": minimum}
    options |= {"never": never, "captures": captures}
    if width == 1:
        return [[one] for one in greedy(decoder.step, state, **options)]
    return beam(decoder.step, state, width=width, n_best=n_best, length_penalty=Gnmt(length_penalty), **options)
