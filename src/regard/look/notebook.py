"""The display in a notebook: a page in a separate frame, whose height follows the page."""

import sys
from html import escape

_TALLEST = 2400  # largest height in pixels; a higher page scrolls inside its frame

# The frame is sandboxed, so the notebook cannot measure the page: a script in the page reports its height.
_REPORT = """<script>
const report = () => parent.postMessage({ regardHeight: document.documentElement.offsetHeight }, "*");
new ResizeObserver(report).observe(document.body);
</script>"""

# Notebooks remove or ignore this script if they do not trust the file: the frame then keeps its initial height.
_FIT = f"""<script>
(() => {{
  const frame = document.currentScript?.previousElementSibling;
  if (frame) addEventListener("message", (event) => {{
    const height = event.source === frame.contentWindow && event.data?.regardHeight;
    if (height > 0) frame.style.height = `${{Math.min(height + 2, {_TALLEST})}}px`;
  }});
}})();
</script>"""


class Displayed:
    """HTML that a notebook displays. `IPython.display.HTML` would warn about the frame in it."""

    def __init__(self, html: str) -> None:
        self._html = html

    def _repr_html_(self) -> str:
        return self._html


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook: a shell in a terminal displays no HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def framed(page: str, *, height: int) -> str:
    """Return a page in a frame, which separates its style from the notebook's; `height` is the initial one in pixels.

    >>> framed("<body>a</body>", height=200).count("<iframe")
    1
    """
    body, end = page.rsplit("</body>", 1)
    inside = escape(f"{body}{_REPORT}</body>{end}")
    style = f"width:100%;height:{min(height, _TALLEST)}px;border:0"
    sandbox = 'sandbox="allow-scripts allow-downloads" allow="clipboard-write"'
    return f'<iframe srcdoc="{inside}" style="{style}" {sandbox}></iframe>{_FIT}'


class Drawing(str):
    """An SVG drawing as text, which a notebook displays as the drawing."""

    def _repr_html_(self) -> str:
        return str(self)


class Document(str):
    """An HTML page around a drawing as text, which a notebook displays as the drawing."""

    def _repr_html_(self) -> str:
        return self[self.index("<svg") : self.index("</svg>") + len("</svg>")]
