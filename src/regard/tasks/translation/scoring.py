"""Metrics of translations: BLEU, chrF, the alignment error rate and the faithfulness of attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.requests import full
from regard.data.text.alignment import Link, alignment_error_rate, links_from_weights
from regard.models.posterior import log_likelihood, posterior
from regard.tasks.inference import evaluating
from regard.tasks.translation.codec import Reading
from regard.tasks.translation.material import Example
from regard.tasks.translation.predictor import Translation, Translator

_AT_ONCE = 64  # number of examples whose word links are computed in one batch
# upper ends of the ranges of source lengths, in words, for which BLEU is reported separately
_BUCKETS = (5, 10, 15, 20, 25, 30, 40, 60)


@dataclass(frozen=True, eq=False)
class Judged:
    """Metrics of a translator on some examples, and its translations."""

    metrics: dict[str, Any]
    attention: dict[str, Any]
    translations: list[Translation]


def judge(
    translator: Translator, examples: Sequence[Example], *, tokenize: str = "auto", width: int | None = None
) -> Judged:
    """Return BLEU, chrF and exact matches of a translator, and alignment error rates if gold links are known."""
    sources = [translator.coder.read_words(example.source) for example in examples]
    translations = translator.search(sources, width=width, weights=False)
    texts, references = [one.text for one in translations], [example.reference for example in examples]
    metrics = text_figures(texts, references, tokenize)
    metrics["by_length"] = _by_length(examples, texts, metrics["tokenize"])
    gold = [place for place, example in enumerate(examples) if example.links or example.possible]
    attention: dict[str, Any] = {}
    if gold:
        attention = alignment(translator, [examples[place] for place in gold], [sources[place] for place in gold])
    return Judged(metrics, attention, translations)


def text_figures(texts: Sequence[str], references: Sequence[str], tokenize: str = "auto") -> dict[str, Any]:
    """Return BLEU, chrF, the fraction of texts that equal their references, and sacrebleu's tokeniser and signature."""
    import sacrebleu

    chosen = _tokenizer(references) if tokenize == "auto" else tokenize
    metric = sacrebleu.BLEU(tokenize=chosen, force=True)
    bleu = metric.corpus_score(list(texts), [list(references)])
    chrf = sacrebleu.CHRF().corpus_score(list(texts), [list(references)])
    exact = sum(text == reference for text, reference in zip(texts, references, strict=True)) / max(1, len(texts))
    return {
        "bleu": round(bleu.score, 3),
        "chrf": round(chrf.score, 3),
        "exact": round(exact, 4),
        "tokenize": chosen,
        "signature": str(metric.get_signature()),
    }


def _tokenizer(references: Sequence[str]) -> str:
    """Return the name of sacrebleu's tokeniser for these texts: "zh" for Chinese, else "13a", its default."""
    letters = "".join(references[:100])
    chinese = sum("一" <= letter <= "鿿" for letter in letters)
    return "zh" if chinese > len(letters) / 4 else "13a"


def _by_length(examples: Sequence[Example], texts: Sequence[str], tokenize: str) -> list[dict[str, Any]]:
    """Return BLEU for each range of source lengths in `_BUCKETS` that contains examples."""
    buckets = []
    for low, high in zip((0, *_BUCKETS), (*_BUCKETS, 10**9), strict=False):
        part = [place for place, example in enumerate(examples) if low < len(example.source) <= high]
        if part:
            figures = text_figures([texts[p] for p in part], [examples[p].reference for p in part], tokenize)
            upto = high if high < 10**9 else max(len(examples[p].source) for p in part)
            buckets.append({"words": [low + 1, upto], "sentences": len(part), "bleu": figures["bleu"]})
    return buckets


def alignment(translator: Translator, examples: Sequence[Example], sources: Sequence[Reading]) -> dict[str, Any]:
    """Return the alignment error rates of the attention weights, computed with the gold target as the decoder's input.

    The links of a target word come from the weights of the decoder step that predicts it, or of the next step, whose
    input it is: in the lower layers of a Transformer the next step may be better aligned, because its word is known
    (Chen et al. 2020). "aer" is the rate of the layer and the step with the lowest rate. The layer and the step are
    selected with the gold links, so that the rate is a lower bound. With the setting `decode.posterior`,
    "aer_posterior" is the rate of the predicting step's weights after their correction by the predicted word
    (`regard.models.posterior`).
    """
    by_choice = word_links(translator, examples, sources)
    if not by_choice:
        return {}  # a model without attention has no links
    sure, possible = [example.links for example in examples], [example.possible for example in examples]
    rates = {key: round(alignment_error_rate(links, sure, possible), 4) for key, links in by_choice.items()}
    whole = {key: rate for key, rate in rates.items() if key.head is None and key.when != "posterior"}
    layers = 1 + max(key.layer for key in whole)
    best = min(whole, key=lambda key: whole[key])
    figures: dict[str, Any] = {"aer": whole[best], "when": best.when}
    if layers > 1:
        by_layer = {name: [whole[WeightChoice(n, None, name)] for n in range(layers)] for name in ("predicted", "read")}
        figures |= {"layer": best.layer, "by_layer": by_layer}
    heads = {key: rate for key, rate in rates.items() if key.head is not None}
    if heads:
        sharpest = min(heads, key=lambda key: heads[key])
        figures["best_head"] = {"aer": heads[sharpest], **sharpest._asdict()}
    known = {key.layer: rate for key, rate in rates.items() if key.when == "posterior"}
    return figures | {"aer_posterior": min(known.values())} if known else figures


class WeightChoice(NamedTuple):
    """The attention weights from which the links of a target word are derived: a layer, a head, and a decoder step."""

    layer: int
    head: int | None  # index of a head; None means the mean over all heads
    # The decoder step: "predicted" is the step that predicts the word; "read" is the next step, whose input is the
    # word; "posterior" is the predicting step, with weights corrected by the predicted word.
    when: str


def word_links(
    translator: Translator, examples: Sequence[Example], sources: Sequence[Reading]
) -> dict[WeightChoice, list[set[Link]]]:
    """Return the word links of each example for every choice of weights; an empty dictionary without attention."""
    links: dict[WeightChoice, list[set[Link]]] = {}
    for first in range(0, len(examples), _AT_ONCE):
        part, read = examples[first : first + _AT_ONCE], sources[first : first + _AT_ONCE]
        targets = [translator.coder.target_words(example.target) for example in part]
        pairs = [(source.numbers, numbers) for source, (numbers, _) in zip(read, targets, strict=True)]
        owners = [(source.owners, words) for source, (_, words) in zip(read, targets, strict=True)]
        maps: dict[WeightChoice, Tensor] = {}
        for layer, weights in enumerate(layer_weights(translator, pairs)):
            for head in (None, *range(weights.shape[1] if weights.shape[1] > 1 else 0)):
                rows = weights.mean(1) if head is None else weights[:, head]
                maps |= {WeightChoice(layer, head, "predicted"): rows, WeightChoice(layer, head, "read"): rows[:, 1:]}
        if maps and translator.settings.posterior:
            likely = _likelihood(translator, pairs)
            before = [key for key in maps if key.head is None and key.when == "predicted"]
            maps |= {WeightChoice(key.layer, None, "posterior"): posterior(maps[key], likely) for key in before}
        for key, rows in maps.items():
            links.setdefault(key, []).extend(
                links_from_weights(one, source=s, target=t) for one, (s, t) in zip(rows, owners, strict=True)
            )
    return links


def layer_weights(translator: Translator, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """Return the weights (pairs, heads, target tokens, source tokens) of each layer for pairs of source and target.

    Sources and targets are token numbers. The list is empty for a model without attention.
    """
    model = translator.model
    batch = translator.batch(pairs)
    with evaluating(model):
        decoded = model(batch.source, batch.prefix, batch.source_lengths, weights=full())
    if decoded.weights is None:
        return []
    layers = decoded.weights if isinstance(decoded.weights, list) else [decoded.weights]
    return [(layer if layer.ndim == 4 else layer.unsqueeze(1)).float().cpu() for layer in layers]


def _likelihood(translator: Translator, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Return log p(y_i | y_<i, h_j alone), (b, t, s): of each target token i, given only source position j."""
    model = translator.model
    tables = []
    for pair in pairs:  # the pairs are computed one by one, because each source of s positions needs s decoder passes
        batch = translator.batch([pair])
        with evaluating(model):
            memory = model.encoder(batch.source, batch.source_lengths)
            tables.append(log_likelihood(model.decoder, memory, batch.prefix, batch.target)[0].cpu())
    whole = torch.zeros(len(tables), *(max(one.shape[axis] for one in tables) for axis in (0, 1)))
    for row, one in zip(whole, tables, strict=True):
        row[: one.shape[0], : one.shape[1]] = one
    return whole


def faithfulness(translator: Translator, translations: Sequence[Translation], *, seed: int = 1) -> dict[str, float]:
    """Return how much a target token's log-probability falls when its most attended source token is deleted.

    In the result, "attended" is the decrease if the most attended source token is deleted, and "random" the decrease if
    a random other source token is deleted; both numbers are means over the target tokens. For faithful attention
    weights, "attended" is much larger than "random".
    """
    drops: dict[str, list[float]] = {"attended": [], "random": []}
    source_of_chance = torch.Generator().manual_seed(seed)
    for one in translations:
        if one.weights is None or len(one.source.numbers) < 2 or not one.numbers:
            continue
        length = len(one.source.numbers)
        attended = one.weights[:, :length].argmax(-1)
        chance = torch.randint(length - 1, attended.shape, generator=source_of_chance)
        chance = chance + (chance >= attended)
        before = _log_probs(translator, [list(one.source.numbers)], one.numbers)[0]
        for name, deleted in (("attended", attended), ("random", chance)):
            changed = [[number for p, number in enumerate(one.source.numbers) if p != out] for out in deleted.tolist()]
            after = _log_probs(translator, changed, one.numbers)
            drops[name] += (before - after.diagonal()).tolist()
    if not drops["attended"]:
        return {}
    means = {name: sum(values) / len(values) for name, values in drops.items()}
    return {name: round(value, 4) for name, value in means.items()}


def _log_probs(translator: Translator, sources: Sequence[list[int]], numbers: Sequence[int]) -> Tensor:
    """Return the log-probabilities (n, t) of the t tokens of one target, given each of n sources, without dropout."""
    model = translator.model
    batch = translator.batch([(source, numbers) for source in sources])
    with evaluating(model):
        decoded = model(batch.source, batch.prefix, batch.source_lengths)
        scores = model.logits(decoded.states[:, : len(numbers)]).float().log_softmax(-1)
    return scores.gather(-1, batch.target[:, : len(numbers)].unsqueeze(-1)).squeeze(-1).cpu()
