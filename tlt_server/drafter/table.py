"""The tables that `tlt drafter evaluate` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Print the report of an evaluation."""
    rows = report["rows"]
    check = report["self_check"]
    if check is not None:
        console.print(
            f"self-check: {check['different']} of {check['cycles']} cycles differ from what the "
            "server accepted",
            highlight=False,
        )
        for said in check["first_differences"]:
            console.print(f"  {said}", highlight=False, markup=False)
        for reason, count in check["not_compared"].items():
            console.print(f"  {count} not compared: {reason}", highlight=False, markup=False)
    names = _short([row["drafter"] for row in rows])
    _print(
        console,
        f"{report['responses']} responses, {report['strategy']}",
        [
            "cycles",
            "accept length",
            "coverage",
            "ms/cycle",
            "ms/token",
            "cycles saved",
            "time saved",
        ],
        names,
        [
            [
                str(row["cycles"]),
                f"{row['accept_length']:.3f}",
                f"{row['coverage']:.2%}",
                _number(row["ms_per_cycle"]),
                _number(row["ms_per_token"]),
                _interval(row, "cycles_saved"),
                _interval(row, "time_saved"),
            ]
            for row in rows
        ],
    )
    depth = max((len(row["accepted_at_depth"]) for row in rows), default=0)
    _print(
        console,
        "share of cycles that accept at least this many drafts",
        [str(d + 1) for d in range(depth)],
        names,
        [[f"{share:.3f}" for share in row["accepted_at_depth"]] for row in rows],
    )
    if rows and rows[0]["by_length"]:
        _print(
            console,
            "accept length by tenths of the responses, up to this many tokens",
            [str(length) for length, _ in rows[0]["by_length"]],
            names,
            [[f"{found:.2f}" for _, found in row["by_length"]] for row in rows],
        )
    if rows and "by_kind" in rows[0]:
        kinds = list(rows[0]["by_kind"])
        _print(
            console,
            "accept length by kind",
            kinds,
            names,
            [[_number(row["by_kind"].get(kind)) for kind in kinds] for row in rows],
        )


def _print(
    console: Console,
    title: str,
    headings: Sequence[str],
    names: Iterable[str],
    cells: Iterable[Sequence[str]],
) -> None:
    table = Table(title=title)
    table.add_column("drafter")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in zip(names, cells, strict=True):
        table.add_row(Text(name), *row)
    console.print(table)


def _short(labels: Sequence[str]) -> list[str]:
    """Return the last parts of paths that tell them apart."""
    parts = [label.rstrip("/").split("/") for label in labels]
    for count in range(1, max(map(len, parts), default=1) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == len(set(labels)):
            return short
    return list(labels)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _interval(row: Mapping[str, Any], name: str) -> str:
    found = row.get("against_first", {}).get(name)
    if found is None:
        return ""
    value, low, high = found
    return f"{value:+.1%} ({low:+.1%} to {high:+.1%})"
