"""The tables that `tlt drafter evaluate` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from tlt_server.bench.tables import show


def _saved(name: str) -> str:
    value, low, high = (f"{{against_first[{name}][{i}]:+.1%}}" for i in range(3))
    return f"{value} ({low} to {high})"


DRAFTER = {"drafter": "{name}"}
CYCLES = DRAFTER | {
    "cycles": "{cycles}",
    "accept length": "{accept_length:.3f}",
    "coverage": "{coverage:.2%}",
    "ms/cycle": "{ms_per_cycle:.3f}",
    "ms/token": "{ms_per_token:.3f}",
    "cycles saved": _saved("cycles_saved"),
    "time saved": _saved("time_saved"),
}


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print the report of an evaluation."""
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
    names = _short([row["drafter"] for row in report["rows"]])
    rows = [{**row, "name": name} for row, name in zip(report["rows"], names, strict=True)]
    show(console, f"{report['responses']} responses, {report['strategy']}", CYCLES, rows)
    depth = max(len(row["accepted_at_depth"]) for row in rows)
    _print(
        console,
        "share of cycles that accept at least this many drafts",
        [str(d + 1) for d in range(depth)],
        rows,
        lambda row: [f"{share:.3f}" for share in row["accepted_at_depth"]],
    )
    _print(
        console,
        "accept length by tenths of the responses, up to this many tokens",
        [f"{10 * (i + 1)} %: {most}" for i, (most, _) in enumerate(rows[0]["by_length"])],
        rows,
        lambda row: [f"{found:.2f}" for _, found in row["by_length"]],
    )
    kinds = [*rows[0].get("by_kind", ())]
    _print(
        console,
        "accept length by kind",
        kinds,
        rows,
        lambda row: [
            f"{row['by_kind'][kind]:.3f}" if kind in row["by_kind"] else "" for kind in kinds
        ],
    )


def _print(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    cells: Callable[[Mapping[str, Any]], list[str]],
) -> None:
    """Print a table with a column for each heading, if there is any."""
    columns = {heading: f"{{cells[{i}]}}" for i, heading in enumerate(headings)}
    none = [""] * len(headings)
    if headings:
        show(
            console, title, DRAFTER | columns, [{**row, "cells": cells(row) + none} for row in rows]
        )


def _short(labels: Sequence[str]) -> list[str]:
    """Return the last parts of paths that tell them apart."""
    parts = [label.rstrip("/").split("/") for label in labels]
    for count in range(1, max(map(len, parts), default=1) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == len(set(labels)):
            return short
    return list(labels)
