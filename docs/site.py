"""MkDocs hook: the repository's top pages join the site; links to code become plain text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, name in PAGES.items():
        text = relocated((ROOT / source).read_text(), "")
        files.append(File.generated(config, name, content=text))
    files.remove(files.get_file_from_path("site.py"))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return markdown if page.file.src_uri in PAGES.values() else relocated(markdown, "docs")


def relocated(markdown: str, folder: str) -> str:
    """Turn links from a file in `folder` of the repository into links of the site."""

    def moved(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in PAGES:
            return f"[{text}]({PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        return f"`{text}`"

    return LINK.sub(moved, markdown)
