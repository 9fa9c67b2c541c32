"""What tasks share that write words one after another: the loss of a text, and the search for one."""

from typing import Any

import torch
from torch import Tensor

from regard.data.text.vocabulary import Vocabulary
from regard.decode.beam import beam
from regard.decode.captured import Captures
from regard.decode.greedy import greedy
from regard.decode.penalties import Gnmt
from regard.decode.records import Hypothesis
from regard.models.frame import EncoderDecoder
from regard.models.memory import Decoded
from regard.nn.cross_entropy import linear_cross_entropy
from regard.tasks.task import Outcome

PAD, BOS, EOS = Vocabulary.pad, Vocabulary.bos, Vocabulary.eos
NEVER = (PAD, BOS, Vocabulary.unknown)  # what no text is to have


def word_outcome(
    network: Any, decoded: Decoded, target: Tensor, *, keys: Tensor | None, smoothing: float, attention: bool
) -> Outcome:
    """The loss of what a model wrote against the target (b, t), −100 where there is none.

    With `attention` also the weights, and of hard attention the choices: each is rewarded with the log-probability of
    its own word. `keys` (b, k) says which keys are real; None: all are.
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
        reward = scores.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    # Masked and not picked out: a CUDA graph has no shapes that depend on the data.
    return Outcome(summed.loss, summed.count, weights, mask, decoded.log_prob, reward, real)


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
    """For each row of the state its best texts of `minimum` to `limit` (b,) tokens; a width of 1 is greedy."""
    given: dict[str, Any] = {"start": torch.full_like(limit, BOS), "stop": EOS, "limit": limit, "minimum": minimum}
    given |= {"never": never, "captures": captures}
    if width == 1:
        return [[one] for one in greedy(decoder.step, state, **given)]
    return beam(decoder.step, state, width=width, n_best=n_best, length_penalty=Gnmt(length_penalty), **given)
