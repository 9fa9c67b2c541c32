"""BLEU of several runs by the length of the source sentence, as a table and a drawing.

regard train translation --preset tiny --out runs/additive
regard train translation --preset tiny --set attention=none --set model.size=170 --out runs/none
python benchmarks/lengths.py runs/additive runs/none --out docs/images/lengths.svg
"""

import argparse
import html
import json
from pathlib import Path

COLORS = ("#1f5fbf", "#b3541e", "#4d7c3a", "#7a4fa3")
WIDTH, HEIGHT, LEFT, TOP = 560, 320, 48, 40


def points(run: Path) -> list[tuple[str, float]]:
    """Return pairs (range of source lengths in words, BLEU); the range of lengths beyond the training lengths comes
    last.
    """
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    parts = [*result["metrics"]["by_length"], *result.get("longer", {}).get("metrics", {}).get("by_length", [])]
    return [("–".join(map(str, part["words"])), part["bleu"]) for part in parts]


def drawing(curves: dict[str, list[tuple[str, float]]]) -> str:
    """Return the drawing, with one line for each run."""
    names = [name for name, _ in next(iter(curves.values()))]
    step = (WIDTH - LEFT - 120) / max(1, len(names) - 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - 48) * (1 - value / 100)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' "
        "font-family='system-ui, sans-serif' font-size='13'>",
        "<rect width='100%' height='100%' rx='8' fill='#ffffff'/>",
        f"<text x='{LEFT}' y='24' font-weight='600'>BLEU by words of the source</text>",
    ]
    for value in (0, 25, 50, 75, 100):
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - 120}' y1='{y(value)}' y2='{y(value)}' stroke='#e3e6ea'/>")
        parts.append(f"<text x='{LEFT - 8}' y='{y(value) + 4}' text-anchor='end' fill='#5b6470'>{value}</text>")
    for place, name in enumerate(names):
        parts.append(
            f"<text x='{LEFT + step * place}' y='{HEIGHT - 22}' text-anchor='middle'>{html.escape(name)}</text>"
        )
    for (name, line), color in zip(curves.items(), COLORS, strict=False):
        path = " ".join(f"{LEFT + step * place:.1f},{y(value):.1f}" for place, (_, value) in enumerate(line))
        parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='2.5'/>")
        end = line[-1][1]
        parts.append(f"<text x='{WIDTH - 112}' y='{y(end) + 4:.1f}' fill='{color}'>{html.escape(name)}</text>")
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    curves = {run.name: points(run) for run in chosen.runs}
    names = [name for name, _ in next(iter(curves.values()))]
    print(f"| words | {' | '.join(names)} |\n|---|{'--:|' * len(names)}")
    for name, line in curves.items():
        print(f"| {name} | {' | '.join(f'{value:.1f}' for _, value in line)} |")
    if chosen.out is not None:
        chosen.out.write_text(drawing(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
