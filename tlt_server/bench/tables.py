"""Tables of benches: rows of figures under headings, each with a format.

The terminal and docs/performance.md use the same records.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Columns = Mapping[str, str]  # heading -> format of a row's fields, e.g. "{step_ms:.3f}"
Row = Mapping[str, Any]


def number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2f}"


class _Formatter(string.Formatter):
    """Formats with one more conversion: `!n`, a number with as many digits as it needs."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return number(value) if conversion == "n" else super().convert_field(value, conversion)


def cells(columns: Columns, row: Row) -> list[str]:
    """Return a row's cells; empty for a missing field or None."""
    formatter, found = _Formatter(), []
    for form in columns.values():
        try:
            found.append(formatter.vformat(form, (), row))
        except (KeyError, TypeError):
            found.append("")
    return found


def show(console: Console, title: str, columns: Columns, rows: Iterable[Row]) -> None:
    """Print a table with right-aligned numbers."""
    lines = [cells(columns, row) for row in rows]
    table = Table(title=title)
    for at, heading in enumerate(columns):
        numbers = all(line[at][:1] in "0123456789+-" for line in lines)
        table.add_column(heading, justify="right" if numbers else "left")
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)
