"""`regard demo --stages`: the attention of one translated word, computed step by step and then by the library."""

import io
import math
import sys
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

import regard
from regard.core.normalizers import Normalizer
from regard.core.scores import Score
from regard.look import heatmap

SOURCE = ["Tom", "chases", "Jerry"]
TARGET = ["汤姆", "追逐", "杰瑞"]
TITLE = "Tom chases Jerry → 汤姆 追逐 杰瑞"


def tell(out: Path) -> None:
    """Print the worked example to standard output, and write the picture and the page of its attention into `out`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal whose encoding has no Chinese characters shows ? instead of raising an error.
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    console.width = min(console.width, 88)

    hidden = torch.tensor([[5, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    query = torch.tensor([[10, 5, 10]], dtype=torch.float64)
    # The first query is the one in docs/stages.md; the other two were chosen for this demonstration.
    queries = torch.cat([query, torch.tensor([[0, 5, 10], [4, 20, 0]], dtype=torch.float64)])

    _question(console, query, hidden)
    scores = _stage_1(console, query, hidden)
    weights = _stage_2(console, scores)
    _stage_3(console, scores, weights, hidden)
    _one_call(console, query, hidden)
    _mechanisms(console, query, hidden)
    alignment = _frame(console, queries, hidden)
    _picture(console, alignment, out)
    _next(console, out)


def _question(console: Console, query: Tensor, hidden: Tensor) -> None:
    console.print(f"\n[bold]{TITLE}[/]")
    _say(
        console,
        "A translator has read the English words and kept a hidden state for each: its memory. It is about to write "
        "汤姆, and what it needs stands in its query. Attention finds the answer in three stages.",
    )
    table = _table("", "vector")
    table.add_row("query for 汤姆", _vector(query[0]))
    for word, state in zip(SOURCE, hidden, strict=True):
        table.add_row(f"state of {word}", _vector(state))
    _show(console, table)


def _stage_1(console: Console, query: Tensor, hidden: Tensor) -> Tensor:
    _heading(console, "Stage 1 · Scores", "how well does each word answer the query?")
    scores = regard.Dot()(query, hidden)[0]
    table = _table("word", "query × state, element by element", "score = sum")
    for word, products, score in zip(SOURCE, query * hidden, scores, strict=True):
        table.add_row(word, _vector(products), f"{score:g}")
    _show(console, table)
    return scores


def _stage_2(console: Console, scores: Tensor) -> Tensor:
    _heading(console, "Stage 2 · Weights", "softmax: positive, and together 1")
    softmax = regard.Softmax()
    table = _table("", *SOURCE)
    for name, divisor in (("1", 1.0), ("√3", math.sqrt(3)), ("10", 10.0), ("30", 30.0)):
        table.add_row(f"softmax(scores / {name})", *map(_number, softmax(scores / divisor)))
    _show(console, table)
    _say(
        console,
        "The divisor is a temperature: at 1 the best word takes all, and the larger it is, the more is left for the "
        "others. Scaled attention divides by √d, here √3, because a sum of d products spreads as √d does.",
    )
    _say(
        console,
        "Some expositions of this example print the weights 3.15, 0.3 and 0.75. No softmax of 60, 15, 15 gives them: "
        "weights add up to 1 (these to 4.2), and equal scores get equal weights.",
    )
    return softmax(scores / math.sqrt(3))


def _stage_3(console: Console, scores: Tensor, weights: Tensor, hidden: Tensor) -> None:
    _heading(console, "Stage 3 · Context", "the sum of the states, each times its weight")
    table = _table("word", "weight", "× state", "=")
    for word, weight, state in zip(SOURCE, weights, hidden, strict=True):
        table.add_row(word, _number(weight), _vector(state), _vector(weight * state))
    table.add_section()
    table.add_row("context", _number(weights.sum()), "", _vector(weights @ hidden), style="bold")
    _show(console, table)
    warm = _vector(regard.Softmax()(scores / 30) @ hidden)
    _say(console, f"The context is Tom's state, all but 1e-11 of it. At temperature 30 it would be a blend: {warm}.")


def _one_call(console: Console, query: Tensor, hidden: Tensor) -> None:
    _heading(console, "The three stages in one call")
    context, weights = _attend(query, hidden)
    plan = regard.explain(query, hidden, hidden, weights=regard.full())
    _say(console, "attended = regard.attention(query, hidden, hidden, weights=regard.full())", style="cyan")
    _show(
        console,
        _pairs(
            ("attended.weights", ", ".join(map(_number, weights[0]))),
            ("attended.output", _vector(context[0])),
            ("computed by", f"the {plan.backend} backend, as regard.explain(…) tells"),
        ),
    )


def _mechanisms(console: Console, query: Tensor, hidden: Tensor) -> None:
    _heading(console, "Other mechanisms", "the same call with another score or normaliser")
    scores = {
        "Dot()": regard.Dot(),
        "ScaledDot()": regard.ScaledDot(),
        "Cosine()": regard.Cosine(),
        "Cosine(scale=10)": regard.Cosine(scale=10.0),
    }
    normalizers = {
        "Softmax()": regard.Softmax(),
        "Sparsemax()": regard.Sparsemax(),
        "Entmax()": regard.Entmax(),
    }
    table = _table("", *normalizers)
    for name, score in scores.items():
        rows = (_attend(query, hidden, score=score, normalize=normalize)[1][0] for normalize in normalizers.values())
        table.add_row(name, *("  ".join("0   " if weight == 0 else f"{weight:.2f}" for weight in row) for row in rows))
    _show(console, table)
    _say(
        console,
        "Each cell has the weights of Tom, chases and Jerry; 0 is an exact zero, 0.00 a small number. Cosine compares "
        "directions alone: the length of Tom's state no longer counts, and the weights stay nearly even until a scale "
        "spreads them. Sparsemax and entmax drop what is far behind.",
    )


def _frame(console: Console, queries: Tensor, hidden: Tensor) -> Tensor:
    _heading(console, "With and without attention", "the encoder-decoder frame")
    contexts, alignment = _attend(queries, hidden)
    summary = _vector(hidden.mean(0), decimals=2)
    table = _table("output", "query", "without: C", "with: C_i", "looks at")
    for word, query, context, row in zip(TARGET, queries, contexts, alignment, strict=True):
        best = int(row.argmax())
        table.add_row(word, _vector(query), summary, _vector(context, decimals=2), f"{SOURCE[best]} {row[best]:.2f}")
    _show(console, table)
    _say(
        console,
        "Without attention, y_i = G(C, y_<i): every word is written from one summary C of the source (here the mean "
        "of its states). With it, y_i = G(C_i, y_<i) and C_i = Σ_j a_ij h_j: each word reads for itself. The query "
        "for 汤姆 comes with the example; those for 追逐 and 杰瑞 are ours.",
    )
    return alignment


def _picture(console: Console, alignment: Tensor, out: Path) -> None:
    _heading(console, "The alignment", "row: the word written; column: the word it looks at")
    drawing = heatmap.terminal(alignment, TARGET, SOURCE, color=console.color_system is not None, highest=1.0)
    _show(console, Text.from_ansi(drawing))
    out.mkdir(parents=True, exist_ok=True)
    caption = "Each row is a word of the translation, each column a word of the source; a row adds up to 1."
    files = {
        "tom-and-jerry.svg": heatmap.svg(alignment, TARGET, SOURCE, title=TITLE, highest=1.0),
        "tom-and-jerry.html": heatmap.html(alignment, TARGET, SOURCE, title=TITLE, caption=caption, highest=1.0),
    }
    console.print()
    for name, content in files.items():
        (out / name).write_text(content, encoding="utf-8")
        console.print(Text(f"  wrote {out / name}"), soft_wrap=True)


def _next(console: Console, out: Path) -> None:
    _heading(console, "Try next")
    _show(
        console,
        _pairs(
            ("open the page", str(out / "tom-and-jerry.html")),
            ("hide the future", "regard.attention(q, k, v, mask=regard.causal())"),
            ("ask for little", "regard.attention(q, k, v, weights=regard.top(8))"),
            ("know what runs", "regard.explain(q, k, v, mask=regard.window(256, 0))"),
        ),
    )


def _attend(
    query: Tensor,
    hidden: Tensor,
    score: Score = regard.ScaledDot(),
    normalize: Normalizer = regard.Softmax(),
) -> tuple[Tensor, Tensor]:
    attended = regard.attention(query, hidden, hidden, score=score, normalize=normalize, weights=regard.full())
    # This assertion is for type checkers: only some requests of weights, such as full(), return a tensor.
    assert isinstance(attended.weights, Tensor)
    return attended.output, attended.weights


def _heading(console: Console, name: str, meaning: str = "") -> None:
    console.print(f"\n[bold blue]{name}[/]" + (f"  [dim]{meaning}[/]" if meaning else ""))


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Padding(Text(text, style=style), (1, 0, 0, 2), expand=False))


def _show(console: Console, thing: Table | Text) -> None:
    console.print(Padding(thing, (1, 0, 0, 2), expand=False))


def _table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header, no_wrap=True)
    return table


def _pairs(*pairs: tuple[str, str]) -> Table:
    table = Table.grid("", "", padding=(0, 3))
    for name, value in pairs:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _vector(values: Tensor, decimals: int = 3) -> str:
    digits = 0 if bool((values == values.round()).all()) else decimals
    return "[" + ", ".join(f"{value:.{digits}f}" for value in values.tolist()) + "]"


def _number(weight: Tensor) -> str:
    """Return a weight as text: three decimals, or scientific notation below 0.0005; only an exact zero is "0"."""
    value = float(weight)
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.0005 else f"{value:.1e}"
