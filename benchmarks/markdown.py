"""Tables and links of the generated page, and the sentences that several sections share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tlt_server.bench.tables import Columns, Row, cells

Figures = dict[str, Any]
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


def model(figures: Figures) -> str:
    shape = figures["shape"]
    running = f", at most {figures['max_running']} running" if figures["max_running"] else ""
    width = figures.get("tensor_parallel", 1)
    ranks = f", over {width} ranks" if width > 1 else ""
    stored = ", FP8 weights" if figures.get("quantization") == "fp8" else ""
    return (
        f"{shape['layers']} layers of {shape['hidden']}, {figures['dtype']}{stored}, "
        f"drafter {figures['drafter']}{ranks}{running}."
    )


def in_the_file(figures: Figures) -> Iterator[str]:
    yield f"{len(figures['rows'])} rows, in the file only."
