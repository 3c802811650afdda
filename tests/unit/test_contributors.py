"""The newcomer's exercise: for each change the table of docs/contributors.md names the files to
open, the name to look for in them, and the test; all of them exist.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributors.md"
EXERCISE = (
    "add a route",
    "add a drafter",
    "change the queue's limit",
    "add a metric",
    "add a setting",
    "add a weight channel",
    "add an error",
    "change who runs when",
    "add a kernel",
    "add a model family",
)


class Change(NamedTuple):
    files: list[tuple[str, list[str]]]  # path, the names that stand in it
    test: str


def table(markdown: str) -> dict[str, Change]:
    section = markdown.split("## Which file to open")[1].split("\n## ")[0]
    rows = re.findall(r"^\|((?:add|change) [^|]+)\|([^|]+)\|`([^`]+)`\|$", section, re.M)
    return {wish: Change(files(where), test) for wish, where, test in rows}


def files(cell: str) -> list[tuple[str, list[str]]]:
    found = re.findall(r"`([\w./-]+/[\w.-]+\.\w+)`(?: \(((?:`\w+`(?:, )?)+)\))?", cell)
    return [(path, re.findall(r"\w+", names)) for path, names in found]


def wrong(change: Change) -> list[str]:
    """List the files of a row that are missing, and names that do not stand in their file."""
    found = [] if (ROOT / change.test).is_file() else [f"{change.test} is not there"]
    for path, names in change.files:
        if not (ROOT / path).is_file():
            found.append(f"{path} is not there")
            continue
        text = (ROOT / path).read_text()
        found += [f"{path} has no {n}" for n in names if not re.search(rf"\b{n}\b", text)]
    return found


CHANGES = table(PAGE.read_text())


@pytest.mark.parametrize("wish", EXERCISE)
def test_contributors_page_names_the_file_for_every_task(wish: str) -> None:
    change = CHANGES[wish]
    assert change.files and any(names for _, names in change.files)
    code = [path for path, _ in change.files if not path.startswith("docs/")]
    assert 1 <= len(code) <= 2, "one or two files to open"


def test_contributors_page_names_existing_files_and_tests() -> None:
    assert len(CHANGES) >= 20
    assert {wish: wrong(change) for wish, change in CHANGES.items() if wrong(change)} == {}


def test_stale_row_of_the_contributors_page_is_found() -> None:
    stale = table(
        "## Which file to open\n\n"
        "|add a route|`tlt_server/gone.py` (`X`), `tlt_server/errors.py` (`Gone`)|`tests/no.py`|\n"
    )
    assert wrong(stale["add a route"]) == [
        "tests/no.py is not there",
        "tlt_server/gone.py is not there",
        "tlt_server/errors.py has no Gone",
    ]
