"""Links of every markdown file lead to files and headings that exist; the docs site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Top pages and docs together, without the changelog and the rows of tables.
MAX_WORDS = 18_900
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not {".venv", "build", "node_modules"} & set(page.relative_to(ROOT).parts)
    and not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)


def without_code(markdown: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", markdown, flags=re.MULTILINE | re.DOTALL)


def anchors(markdown: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(text))
    targets += re.findall(r'(?:src|srcset)="([^"]+)"', text)
    found = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            found.append(f"{page.relative_to(ROOT)}: {target}")
    return found


def test_every_relative_link_has_a_target() -> None:
    assert len(PAGES) > 15
    assert [line for page in PAGES for line in broken(page)] == []


def test_link_check_finds_a_broken_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One\n\n[a](#one) [b](#two) [c](gone.md) [d](page.md#one) `[e](no.md)`\n")
    assert broken(page) == ["page.md: #two", "page.md: gone.md"]


@pytest.mark.slow
def test_documentation_site_builds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists() and (tmp_path / "architecture.html").exists()


def prose_words(markdown: str) -> int:
    """Count words as `wc -w` does. A table is looked up, not read."""
    return sum(len(line.split()) for line in markdown.splitlines() if not line.startswith("|"))


def test_total_length_of_the_docs_is_bounded() -> None:
    counted = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]
    words = {page.name: prose_words(page.read_text()) for page in counted}
    for grows_with_the_project in ("CHANGELOG.md", "performance.md"):  # a list, generated tables
        words.pop(grows_with_the_project)
    assert sum(words.values()) <= MAX_WORDS, sorted(words.items(), key=lambda item: -item[1])


def test_files_named_in_the_docs_exist() -> None:
    """Backticked paths from the repository's root name files or folders."""
    roots = "tests|tlt_server|kernels|clients|docs|examples|benchmarks|docker"
    named = {
        (page.name, path)
        for page in (*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"))
        for path in re.findall(rf"`((?:{roots})/[\w/.-]+)`", page.read_text())
    }
    outside = {"docker/secrets"}
    missing = sorted(f"{page}: {path}" for page, path in named if not (ROOT / path).exists())
    assert len(named) > 100
    assert [line for line in missing if line.partition(": ")[2] not in outside] == []


def test_documented_import_list_equals_the_contract() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Import direction")[1]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = {contract["id"]: contract.get("layers", ()) for contract in contracts["contracts"]}
    listed = re.findall(r"\w+", re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)[0])
    packages = [layer for layer in layers["layers"] if "tlt_server.errors" not in layer]
    contract = re.findall(r"(?:tlt_server\.)?(\w+)", " ".join(packages))
    assert [name for name in contract if name not in listed] == []
    rooms = re.findall(r"`(\w+)`", text.split("In the frontend: ")[1].split(". It")[0])
    assert rooms == list(layers["rooms"])
