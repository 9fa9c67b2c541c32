"""Links of the built site: linked files of the repository are copied into the site, and every link must be valid.

python tools/site_links.py site
"""

import posixpath
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r'(<a [^>]*?href=")([^"#?][^"]*|#[^"]*)(")')


def mend(site: Path) -> list[str]:
    """Copy files outside of the site that pages link to into `sources/`; return the broken links."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(site.rglob("*.html"))}
    anchors = {page: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for page, text in pages.items()}
    broken: list[str] = []
    for page, text in pages.items():
        if page.name == "404.html":
            continue

        def led(match: re.Match[str], page: Path = page) -> str:
            link, anchor = urldefrag(unquote(match[2]))
            if re.match(r"[a-z]+:|//", link):
                return match[0]
            inside = posixpath.normpath(posixpath.join(page.parent.relative_to(site).as_posix(), link)) if link else ""
            target = page if not link else site / inside
            target = target / "index.html" if target.is_dir() else target
            if inside.startswith("../") and (ROOT / inside.removeprefix("../")).is_file():
                name = inside.removeprefix("../")
                (site / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, site / "sources" / name)
                up = posixpath.relpath("sources/" + name, page.parent.relative_to(site).as_posix())
                return f"{match[1]}{up}{match[3]}"
            if not target.is_file() or (anchor and target in anchors and anchor not in anchors[target]):
                broken.append(f"{page.relative_to(site)}: {match[2]}")
            return match[0]

        page.write_text(_LINK.sub(led, text), encoding="utf-8")
    return broken


if __name__ == "__main__":
    missing = mend(Path(sys.argv[1]))
    print("\n".join(f"leads nowhere: {link}" for link in missing) or "every link leads somewhere")
    sys.exit(bool(missing))
