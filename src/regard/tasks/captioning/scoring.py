"""Metrics of captions (BLEU and exact match) and of their attention weights (pointing accuracy and faithfulness)."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from regard.tasks.captioning.codec import Words
from regard.tasks.captioning.config import CaptioningConfig
from regard.tasks.captioning.material import Example
from regard.tasks.captioning.predictor import Caption, CaptionPredictor
from regard.tasks.deletion_test import deletion
from regard.tasks.image_inputs import cell_of, points_at
from regard.tasks.task import Judged

ORDERS = 4
_EXPLAINED = 40  # number of captions whose faithfulness is measured
_READ = 64  # number of captions in a batch of `pointing`


def corpus_bleu(captions: Sequence[Words], references: Sequence[Sequence[Words]]) -> list[float]:
    """Return BLEU-1 to BLEU-4 of a corpus of captions, from 0 to 100 (Papineni et al. 2002).

    Each caption has one or more references. BLEU-n is the geometric mean of the clipped precisions of 1-grams to
    n-grams. The mean is multiplied by exp(1 − r/c) if the captions have fewer words, c, than the references whose
    lengths are closest to those of the captions, r. The precisions are not smoothed.

    >>> [round(one, 1) for one in corpus_bleu([("a", "red", "star")], [[("a", "red", "circle"), ("a", "star")]])]
    [100.0, 70.7, 0.0, 0.0]
    """
    right, total = [0] * ORDERS, [0] * ORDERS
    written = wanted = 0
    for caption, several in zip(captions, references, strict=True):
        written += len(caption)
        wanted += min((abs(len(one) - len(caption)), len(one)) for one in several)[1]
        for n in range(1, ORDERS + 1):
            most: Counter[Words] = Counter()
            for one in several:
                most |= _ngrams(one, n)
            mine = _ngrams(caption, n)
            right[n - 1] += (mine & most).total()
            total[n - 1] += mine.total()
    brevity = min(1.0, math.exp(1 - wanted / written)) if written else 0.0
    scores: list[float] = []
    logs = 0.0
    for n in range(ORDERS):
        logs += math.log(right[n] / total[n]) if right[n] else -math.inf
        scores.append(100 * brevity * math.exp(logs / (n + 1)))
    return scores


def _ngrams(words: Words, n: int) -> Counter[Words]:
    return Counter(words[first : first + n] for first in range(len(words) - n + 1))


def text_figures(captions: Sequence[Words], references: Sequence[Sequence[Words]]) -> dict[str, Any]:
    """Return the fraction of captions that equal a reference, and BLEU-1 to BLEU-4."""
    exact = sum(caption in several for caption, several in zip(captions, references, strict=True))
    figures: dict[str, Any] = {"exact": round(exact / max(1, len(captions)), 4)}
    for n, value in enumerate(corpus_bleu(captions, references), 1):
        figures[f"bleu{n}"] = round(value, 3)
    return figures


def sacrebleu_figures(captions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the BLEU that the library sacrebleu computes for these captions, with its signature."""
    import sacrebleu

    metric = sacrebleu.BLEU(lowercase=True, force=True)
    most = max(map(len, references), default=1)
    # sacrebleu needs the same number of references for every image. For an image with fewer references, the last one is
    # repeated, which does not change the BLEU score.
    padded = [[several[min(n, len(several) - 1)] for several in references] for n in range(most)]
    score = metric.corpus_score(list(captions), padded)
    return {"sacrebleu": round(score.score, 3), "signature": str(metric.get_signature())}


def judge(predictor: CaptionPredictor, examples: Sequence[Example], config: CaptioningConfig, explain: bool) -> Judged:
    """Return the metrics of the captions: BLEU, exact match, and pointing accuracy if gold regions are known.

    With `explain`, the faithfulness of the attention weights is also measured: the effect of deleting the most attended
    key.
    """
    images = predictor.images(examples)
    captions = predictor.search(images)
    references = [one.captions for one in examples]
    metrics = text_figures([one.words for one in captions], references)
    text = predictor.codec.text
    metrics |= sacrebleu_figures([one.text for one in captions], [[text(one) for one in ones] for ones in references])
    metrics["pictures"] = len(examples)
    attention = pointing(predictor, examples, images)
    lost = faithfulness(predictor, captions[:_EXPLAINED]) if explain else {}
    return Judged(metrics, attention, lost)


def pointing(predictor: CaptionPredictor, examples: Sequence[Example], images: Sequence[Any]) -> dict[str, Any]:
    """Return the fraction of words with gold image regions whose most attended cell has its centre in such a region.

    The attention weights are computed with the gold caption as the decoder's input.
    """
    size = (predictor.config.data.picture,) * 2
    hits: list[bool] = []
    known = [(one, image) for one, image in zip(examples, images, strict=True) if one.regions]
    for first in range(0, len(known), _READ):
        part = known[first : first + _READ]
        numbers = [predictor.codec.vocabulary.encode(one.captions[0]) for one, _ in part]
        weights = predictor.read([image for _, image in part], numbers)[1]
        if weights is None:
            return {}
        for (one, _), rows in zip(part, weights, strict=True):
            for regions, row in zip(one.regions, rows, strict=False):
                if regions is not None:
                    hits.append(points_at(cell_of(row), regions, grid=predictor.grid, size=size))
    return {"pointing": round(sum(hits) / len(hits), 4), "words": len(hits)} if hits else {}


def faithfulness(predictor: CaptionPredictor, captions: Sequence[Caption]) -> dict[str, float]:
    """Return how much a word's log-probability falls if its most attended image cell or a random cell is covered."""
    return deletion(
        (caption.weights[place], predictor.score_of(caption, place))
        for caption in captions
        if caption.weights is not None and caption.pixels is not None
        for place in range(len(caption.words))
    )
