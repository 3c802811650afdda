"""The threat model: every statement of its page names a test, and every named test exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
NAME = re.compile(r"`(test_\w+)`")


def statements(page: str) -> list[str]:
    """Return the items of the page's lists, each on one line."""
    return [
        " ".join(item.split()) for item in re.findall(r"^- (.*(?:\n  .*)*)", page, re.MULTILINE)
    ]


def test_every_security_statement_names_existing_tests() -> None:
    found = statements(PAGE.read_text())
    assert len(found) > 30
    assert [item for item in found if not NAME.search(item)] == []
    tests = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert {name for item in found for name in NAME.findall(item)} - tests == set()


def test_statement_over_two_lines_counts_as_one() -> None:
    assert statements("- a\n  `test_b`\n- c\n\nd\n") == ["a `test_b`", "c"]
