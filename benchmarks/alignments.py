"""Alignment error rates of the word links from a trained translation model's attention weights.

    python benchmarks/alignments.py RUN [REVERSED]

RUN is a run of `regard train translation` whose test part has gold links. Each printed line has the error rates of one
layer: of the mean weights over its heads, and of each head. "predicted" are the weights of the step that predicts a
word, "read" those of the next step, whose input is the word; "posterior" are the weights of "predicted" after a
correction by the likelihood of the word given each source position alone. REVERSED is a run in the other translation
direction on the same folder: the links of the two runs are combined, each from the weights with its lowest error rate
on the gold links.
"""

import sys
from dataclasses import replace
from pathlib import Path

from regard.data.text.alignment import Link, alignment_error_rate, joined_links
from regard.tasks.loading import material_of
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.material import Example
from regard.tasks.translation.predictor import Translator
from regard.tasks.translation.scoring import WeightChoice, word_links
from regard.tasks.translation.task import TRANSLATION
from regard.train.run_directory import Run

All = list[set[Link]]


def links_of(run: Path) -> tuple[list[Example], dict[WeightChoice, All]]:
    """Return the examples of a run that have gold links, and the word links that each choice of attention weights
    predicts.
    """
    opened = Run.open(run)
    config = TranslationConfig.model_validate(opened.config())
    loaded = Translator.load(opened)
    translator = replace(loaded, settings=loaded.settings.model_copy(update={"posterior": True}))
    examples = [one for one in material_of(TRANSLATION, config, opened, loaded.coder).test if one.links or one.possible]
    if not examples:
        sys.exit(f"{run}: its test part has no gold links")
    return examples, word_links(translator, examples, [translator.coder.read_words(one.source) for one in examples])


def rate(examples: list[Example], links: All) -> float:
    """Return the alignment error rate of the links in per cent."""
    return 100 * alignment_error_rate(links, [one.links for one in examples], [one.possible for one in examples])


def show(run: Path) -> tuple[list[Example], All]:
    """Print every alignment error rate of a run; return the examples, and the links with the lowest error rate."""
    examples, alignments = links_of(run)
    rates = {key: rate(examples, links) for key, links in alignments.items()}
    for when in ("predicted", "read", "posterior"):
        for layer in sorted({key.layer for key in rates if key.when == when}):
            together = rates[WeightChoice(layer, None, when)]
            heads = [rates[key] for key in rates if (key.layer, key.when) == (layer, when) and key.head is not None]
            single = "  heads " + " ".join(f"{one:.1f}" for one in heads) if heads else ""
            print(f"{run.name} {when} layer {layer + 1}: {together:.1f}{single}")
    best = min(rates, key=lambda key: rates[key])
    print(f"{run.name} best: {rates[best]:.1f} ({best.when}, layer {best.layer + 1}, head {best.head})")
    return examples, alignments[best]


def main(runs: list[Path]) -> None:
    """Print the error rates of each run, and of the combined links if there are two runs."""
    examples, forward = show(runs[0])
    if len(runs) == 1:
        return
    _, backward = show(runs[1])
    turned = [{(source, target) for target, source in links} for links in backward]
    for way in ("intersection", "union", "grow"):
        pairs = zip(forward, turned, strict=True)
        print(f"both, {way}: {rate(examples, [joined_links(one, other, way=way) for one, other in pairs]):.1f}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main([Path(one) for one in sys.argv[1:]])
