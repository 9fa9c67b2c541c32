"""Formulas as MathML, created when the documentation is built: a page needs no script and no network to display
them."""

import html
import re

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

# The elements that pymdownx.arithmatex creates: \( … \) in a span, \[ … \] in a div.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


class _Formulas(Postprocessor):
    def run(self, text: str) -> str:
        return _FORMULA.sub(_mathml, text)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    return convert(html.unescape(match[3]).strip(), display=display)


class Formulas(Extension):
    """Converts formulas to MathML; it runs after arithmatex has inserted its elements into the page."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.postprocessors.register(_Formulas(md), "mathml", -10)


def makeExtension(**options: object) -> Formulas:  # noqa: N802
    return Formulas(**options)
