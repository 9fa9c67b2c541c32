"""Sizes of standalone pages with the attention weights of 12 layers of 12 heads, for increasing numbers of tokens.
Prints the table of docs/look.md.

python benchmarks/pages.py                        # size, seconds to write, worst error of a stored weight
python benchmarks/pages.py --open                 # and seconds until Chromium shows the first map (needs playwright)
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.look.viewer.page import page
from regard.look.viewer.page_data import pack

LAYERS, HEADS = 12, 12
BERTVIZ = {32: "6.4", 128: "104", 256: "421"}  # megabytes of bertviz's model view for 12 layers of 12 heads


def weights(layer: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Return random attention weights of a layer, with heads like those of trained encoders: local, to the previous
    token, to the first token, broad, sharp."""
    place = torch.arange(tokens)
    apart = (place[:, None] - place).abs().float()
    heads = []
    for head in range(HEADS):
        scores = torch.randn(tokens, tokens, generator=generator) * (0.5 + 3 * ((head * 5 + layer) % HEADS) / HEADS)
        kind = (head + layer) % 4
        if kind == 0:
            scores -= apart / 4
        elif kind == 1:
            scores[:, 0] += 6
        elif kind == 2:
            scores -= 3 * (apart != 1) * (place[:, None] > place)
        heads.append(scores.softmax(-1))
    return torch.stack(heads)


def trace_of(tokens: int) -> Trace:
    generator = torch.Generator().manual_seed(0)
    names = Labels("tokens", tuple(f"word{n % 97}" for n in range(tokens)))
    layers = {f"encoder.layer.{n}.attention.self": weights(n, tokens, generator) for n in range(LAYERS)}
    return Trace.from_weights(layers, title=f"{tokens} tokens", rows=names, columns=names)


def seconds_to_open(text: str) -> float:
    """Return seconds until the map of the first head is drawn, in a running browser."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        path.write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto("about:blank")
        start = time.perf_counter()
        tab.goto(path.as_uri(), wait_until="commit")
        tab.wait_for_selector('.picture[data-view="heatmap"]')
        seconds = time.perf_counter() - start
        browser.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 256, 1024])
    parser.add_argument("--open", action="store_true", help="open each page in Chromium")
    arguments = parser.parse_args()
    print("| tokens | regard, MB | bertviz, MB | seconds to write | largest error | seconds to open |")
    print("|---:|---:|---:|---:|---:|---:|")
    for tokens in arguments.tokens:
        trace = trace_of(tokens)
        start = time.perf_counter()
        text = page(trace, language="en")
        seconds = time.perf_counter() - start
        error = max(entry["pack"]["error"] for entry in pack(trace).about["records"])
        opened = f"{seconds_to_open(text):.2f}" if arguments.open else "–"
        size = len(text.encode()) / 1e6
        print(
            f"| {tokens:,} | {size:.2f} | {BERTVIZ.get(tokens, '–')} | {seconds:.1f} | {error:.1g} | {opened} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
