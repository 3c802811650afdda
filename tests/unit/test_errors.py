"""The error tree and the page that tells clients what to do about each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlt_server.errors import StartupError, TltError

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def tree(cls: type[TltError]) -> Iterator[type[TltError]]:
    """Yield every class of error except those that end the process before it serves."""
    if not issubclass(cls, StartupError):
        yield cls
        for sub in cls.__subclasses__():
            yield from tree(sub)


def table() -> set[tuple[int, str]]:
    """Status and code of the rows under "When it does not work"."""
    section = PAGE.read_text().split("## When it does not work")[1]
    rows = re.findall(r"^\| ([\d, ]+) \| (`.*?`) \| \S", section, re.MULTILINE)
    return {
        (int(status), code)
        for statuses, codes in rows
        for status, code in paired(statuses.split(", "), re.findall(r"`(\w+)`", codes))
    }


def paired(statuses: list[str], codes: list[str]) -> list[tuple[str, str]]:
    """One status for all codes of a row, or one each."""
    return list(zip(statuses * len(codes) if len(statuses) == 1 else statuses, codes, strict=True))


@pytest.mark.parametrize("error", list(tree(TltError)), ids=lambda error: error.code)
def test_error_table_has_every_error_a_client_can_see(error: type[TltError]) -> None:
    assert (error.http_status, error.code) in table()


def test_error_table_has_no_unknown_error() -> None:
    assert table() == {(error.http_status, error.code) for error in tree(TltError)}
