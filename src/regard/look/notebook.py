"""Display of a page in a notebook, in an iframe whose height follows the height of the page."""

import sys
from html import escape

_TALLEST = 2400  # largest height of the iframe in pixels; a higher page scrolls inside it

# The iframe is sandboxed, so the notebook cannot measure the page in it: a script in the page reports its height.
_REPORT = """<script>
const report = () => parent.postMessage({ regardHeight: document.documentElement.offsetHeight }, "*");
new ResizeObserver(report).observe(document.body);
</script>"""

# This script sets the iframe's height to the reported height of the page. A notebook that does not trust its file
# removes or ignores the script: the iframe then keeps its initial height.
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
    """HTML that a notebook displays; `IPython.display.HTML` is not used because it warns about iframes."""

    def __init__(self, html: str) -> None:
        self._html = html

    def _repr_html_(self) -> str:
        return self._html


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, not an IPython shell, which cannot display HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def framed(page: str, *, height: int) -> str:
    """Return HTML with the page in an iframe, which separates the page's style from the notebook's.

    `height` is the initial height of the iframe in pixels.

    >>> framed("<body>a</body>", height=200).count("<iframe")
    1
    """
    body, end = page.rsplit("</body>", 1)
    inside = escape(f"{body}{_REPORT}</body>{end}")
    style = f"width:100%;height:{min(height, _TALLEST)}px;border:0"
    sandbox = 'sandbox="allow-scripts allow-downloads" allow="clipboard-write"'
    return f'<iframe srcdoc="{inside}" style="{style}" {sandbox}></iframe>{_FIT}'


class Drawing(str):
    """A string with an SVG drawing; a notebook displays the drawing instead of the string."""

    def _repr_html_(self) -> str:
        return str(self)


class Document(str):
    """A string with an HTML page that contains an SVG drawing; a notebook displays only the drawing."""

    def _repr_html_(self) -> str:
        return self[self.index("<svg") : self.index("</svg>") + len("</svg>")]
