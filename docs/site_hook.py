"""Hooks of `mkdocs build`, named in mkdocs.yml: they change links and the order of pages for the site.

The pages are read in the repository too, where a link may lead to any of its files. The site has the pages only: a link
that leaves docs/ becomes its text and the path of the file.
"""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def title(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ").replace("`", "")


def on_config(config: Any) -> Any:
    """The generated pages of docs/reference/ stand under "Reference", in the order of their names."""
    pages = [page.relative_to(DOCS).as_posix() for page in sorted((DOCS / "reference").glob("*.md"))]
    for section in config.nav:
        if "Reference" in section:
            section["Reference"] = [*section["Reference"], *pages]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = (DOCS / page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(DOCS) and not target.is_dir():
            return link[0]
        return f"{link[1]} (`{target.relative_to(DOCS.parent)}` in the repository)"

    return LINK.sub(shown, markdown)
