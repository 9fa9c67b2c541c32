"""Metrics of transcripts: error rates, the timing of attention, and whether the least certain symbols are wrong."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from regard.tasks.deletion_test import deletion
from regard.tasks.speech.config import SpeechConfig
from regard.tasks.speech.material import Example
from regard.tasks.speech.predictor import SpeechPredictor, Transcript
from regard.tasks.task import Judged

NEAR = 0.05  # largest distance in seconds of an attention peak from the gold interval of its symbol
_EXPLAINED = 150  # number of symbols whose faithfulness is measured


def wrong_symbols(said: Sequence[str], written: Sequence[str]) -> tuple[int, list[bool]]:
    """Return the edit distance of a reference and a transcript, and whether each symbol of the transcript is wrong.

    A symbol is wrong if a shortest sequence of edits from the transcript to the reference replaces or deletes it.

    >>> wrong_symbols("one two three".split(), "one too three four".split())
    (2, [False, True, False, True])
    """
    rows = [list(range(len(written) + 1))]
    for i, one in enumerate(said, 1):
        row = [i]
        for j, other in enumerate(written, 1):
            row.append(min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (one != other)))
        rows.append(row)
    wrong = [True] * len(written)
    i, j = len(said), len(written)
    while i and j:
        if rows[i][j] == rows[i - 1][j - 1] + (said[i - 1] != written[j - 1]):
            i, j = i - 1, j - 1
            wrong[j] = said[i] != written[j]
        elif rows[i][j] == rows[i][j - 1] + 1:
            j -= 1
        else:
            i -= 1
    return rows[-1][-1], wrong


def error_rate(pairs: Sequence[tuple[Sequence[str], Sequence[str]]]) -> float:
    """Return the error rate of pairs of a reference and a transcript: edit distances per symbol of the references.

    >>> error_rate([("one two".split(), "one".split()), ("three four".split(), "three four".split())])
    0.25
    """
    edits = sum(wrong_symbols(said, written)[0] for said, written in pairs)
    return edits / max(1, sum(len(said) for said, _ in pairs))


def text_figures(transcripts: Sequence[Transcript], examples: Sequence[Example]) -> dict[str, Any]:
    """Return the word and character error rates, and the fraction of transcripts without an error."""
    texts = [(" ".join(one.words), transcript.text) for one, transcript in zip(examples, transcripts, strict=True)]
    return {
        "wer": round(error_rate([(said.split(), written.split()) for said, written in texts]), 4),
        "cer": round(error_rate(texts), 4),
        "exact": round(sum(said == written for said, written in texts) / max(1, len(texts)), 4),
    }


def judge(predictor: SpeechPredictor, examples: Sequence[Example], config: SpeechConfig, explain: bool) -> Judged:
    """Return the metrics of the transcripts: error rates, and the results of `pointing` and `doubted`.

    With `explain`, the faithfulness of the attention weights is also measured: the effect of deleting the most attended
    key.
    """
    transcripts = predictor.search([one.features(config) for one in examples])
    metrics = text_figures(transcripts, examples)
    metrics["recordings"] = len(examples)
    attention = pointing(predictor, examples) | doubted(predictor, transcripts, examples)
    lost = faithfulness(predictor, transcripts) if explain else {}
    return Judged(metrics, attention, lost)


def pointing(predictor: SpeechPredictor, examples: Sequence[Example]) -> dict[str, Any]:
    """Return the fraction of symbols whose attention peak is in their gold interval, or at most 50 ms before or after.

    The attention weights are computed with the gold transcript as the decoder's input. The result is empty if no gold
    intervals are known.
    """
    codec, step = predictor.codec, predictor.config.step
    known = [one for one in examples if one.gold(codec)]
    read = predictor.read(
        [one.features(predictor.config) for one in known], [codec.numbers(one.words) for one in known]
    )
    hits: list[bool] = []
    for one, (_, weights) in zip(known, read, strict=True):
        if weights is None:
            return {}
        peaks = ((weights.argmax(-1) + 0.5) * step).tolist()
        hits += [begin - NEAR <= peak <= end + NEAR for (begin, end), peak in zip(one.gold(codec), peaks, strict=False)]
    return {"within_50ms": round(sum(hits) / len(hits), 4), "symbols": len(hits)} if hits else {}


def doubted(
    predictor: SpeechPredictor, transcripts: Sequence[Transcript], examples: Sequence[Example]
) -> dict[str, Any]:
    """Return how often the least certain symbol of a transcript is wrong, and how often a random symbol is wrong.

    Both fractions are computed from the transcripts with at least one wrong symbol.
    """
    hits: list[bool] = []
    chance = 0.0
    for transcript, one in zip(transcripts, examples, strict=True):
        wrong = wrong_symbols(predictor.codec.symbols(one.words), transcript.symbols)[1]
        if any(wrong):
            hits.append(wrong[transcript.doubtful])
            chance += sum(wrong) / len(wrong)
    if not hits:
        return {}
    share = {"least_certain_wrong": sum(hits) / len(hits), "at_random_wrong": chance / len(hits)}
    return {name: round(value, 4) for name, value in share.items()} | {"with_errors": len(hits)}


def faithfulness(predictor: SpeechPredictor, transcripts: Sequence[Transcript]) -> dict[str, float]:
    """Return how much a symbol's log-probability falls if its most attended encoder step is silenced.

    In the result, "attended" is the decrease if the symbol's most attended encoder step is silenced, and "random" the
    decrease if a random other encoder step is silenced.
    """
    places = (
        (transcript.weights[place], predictor.score_of(transcript, place))
        for transcript in transcripts
        if transcript.weights is not None
        for place in range(len(transcript.symbols))
    )
    return deletion(islice(places, _EXPLAINED))
