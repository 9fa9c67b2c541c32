"""Documentation pages in which a command replaces a section between two HTML comments. The text outside of the two
comments is unchanged.
"""

import re
import tempfile
from pathlib import Path


def write_part(page: Path, name: str, body: str, *, title: str) -> Path:
    """Replace the text of section `name` of a page by `body`; a missing page or section is added.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_part(Path(folder) / "page.md", "cpu", "1 ms", title="Times")
    ...     print(write_part(page, "cpu", "2 ms", title="Times").read_text())
    # Times
    <BLANKLINE>
    <!-- cpu -->
    2 ms
    <!-- end -->
    <BLANKLINE>
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    mark = f"<!-- {name} -->"
    known = page.read_text(encoding="utf-8") if page.exists() else f"# {title}\n"
    part = f"{mark}\n{body.rstrip()}\n<!-- end -->\n"
    pattern = re.escape(mark) + r"\n.*?<!-- end -->\n"
    if re.search(pattern, known, re.DOTALL):
        known = re.sub(pattern, lambda _: part, known, flags=re.DOTALL)
    else:
        known += f"\n{part}"
    page.write_text(known, encoding="utf-8")
    return page


def try_writing(page: Path) -> None:
    """Raise OSError if the page cannot be written; its contents are unchanged."""
    page.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=page.parent):
        pass
    if page.exists():
        with page.open("r+b"):
            pass
