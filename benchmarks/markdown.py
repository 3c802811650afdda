"""Tables, numbers and links of the generated page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RESULTS_FOLDER = "../benchmarks/results"  # from docs/


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(
        f"|{'|'.join(str(cell) for cell in row)}|"
        for row in (headings, ["---"] * len(headings), *rows)
    )


def number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2f}"


def link(file: str) -> str:
    return f"[{file}]({RESULTS_FOLDER}/{file})"
