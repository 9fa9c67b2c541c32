"""The model card: a page of markdown that describes a trained model, made from a dictionary."""

from collections.abc import Mapping, Sequence
from typing import Any


def model_card(card: Mapping[str, Any]) -> str:
    """Return a dictionary as markdown: `title` and `summary` first, then a section for each other key.

    A section shows a string as a paragraph, a dictionary as a table, and a list as a bulleted list. `tags` are written
    to the YAML front matter, which model hubs read.

    >>> print(model_card({"title": "Tiny", "summary": "A toy.", "Figures": {"bleu": 97.25}}))
    # Tiny
    <BLANKLINE>
    A toy.
    <BLANKLINE>
    ## Figures
    <BLANKLINE>
    | | |
    |---|---|
    | bleu | 97.25 |
    <BLANKLINE>
    """
    blocks = [f"# {card.get('title', 'A model')}"]
    if tags := card.get("tags"):
        blocks.insert(0, "\n".join(["---", "library_name: regard", "tags:", *(f"- {tag}" for tag in tags), "---"]))
    if summary := card.get("summary"):
        blocks.append(str(summary))
    for heading, value in card.items():
        if heading not in ("title", "summary", "tags"):
            blocks += [f"## {heading}", _block(value)]
    return "\n\n".join(blocks) + "\n"


def _block(value: Any) -> str:
    if isinstance(value, Mapping):
        rows = [f"| {_cell(key)} | {_cell(entry)} |" for key, entry in value.items()]
        return "\n".join(["| | |", "|---|---|", *rows])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(f"- {_cell(entry)}" for entry in value)
    return str(value)


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
