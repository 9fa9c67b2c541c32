"""Shows the examples of docstrings as code in the documentation; Markdown would take `>>>` for nested quotations."""

from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Puts a fence around every paragraph that starts with `>>>`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(
                f"```pycon\n{paragraph}\n```" if paragraph.startswith(">>>") else paragraph for paragraph in paragraphs
            )
