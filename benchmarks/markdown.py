"""Tables and links of the generated page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tlt_server.bench.tables import Columns, Row, cells

RESULTS_FOLDER = "../benchmarks/results"  # from docs/


def lines(headings: Iterable[str], rows: Iterable[Sequence[object]]) -> str:
    headings = [*headings]
    return "\n".join(
        f"|{'|'.join(str(cell) for cell in row)}|"
        for row in (headings, ["---"] * len(headings), *rows)
    )


def table(columns: Columns, rows: Iterable[Row]) -> str:
    return lines(columns, (cells(columns, row) for row in rows))


def link(file: str) -> str:
    return f"[{file}]({RESULTS_FOLDER}/{file})"
