"""The figures to reach, from `goals.json`, and the measured figure for each: the newest of the
goals' machine and shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

GOALS = Path(__file__).with_name("goals.json")
LEAVES = "--reduction-leaves"  # named where runs with other leaves are compared


class Result(NamedTuple):
    """One file of `benchmarks/results`."""

    name: str  # file name
    entry: dict[str, Any]

    @property
    def figures(self) -> dict[str, Any]:
        return dict(self.entry["figures"])

    @property
    def bench(self) -> str:
        return str(self.figures["bench"])


class Found(NamedTuple):
    value: float
    name: str  # file name
    commit: str


def results(directory: Path) -> list[Result]:
    """Return every result, oldest first."""
    read = [
        Result(path.name, json.loads(path.read_text())) for path in sorted(directory.glob("*.json"))
    ]
    return sorted(read, key=lambda result: str(result.entry["date"]))


def goals() -> dict[str, Any]:
    return dict(json.loads(GOALS.read_text()))


def comparable(
    found: Iterable[Result], wanted: Mapping[str, Any], other: Mapping[str, Any] | None = None
) -> list[Result]:
    """Return full runs on the goals' machine, with the goals' shapes and kind of engine (if the
    results state them) and with default reduction segments. `other`: properties in which the engine
    differs.
    """
    other = other or {}
    engine = {key: value for key, value in wanted["engine"].items() if key not in other}
    return [
        result
        for result in found
        if wanted["machine"] in result.entry["machine"]
        and not result.figures.get("quick")
        and LEAVES not in result.entry["command"]
        and ("shape" in result.figures or not wanted["shape"])
        and agree(result.figures.get("shape", {}), wanted["shape"])
        and agree(result.figures, engine)
        and matches(result.figures, other)
    ]


def agree(said: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(said.get(key, value) == value for key, value in wanted.items())


def matches(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Return True if the row has these values; a list in `where` allows any of its values."""
    return all(
        key in row and (row[key] in value if isinstance(value, list) else row[key] == value)
        for key, value in where.items()
    )


def answer(goal: Mapping[str, Any], found: Iterable[Result]) -> Found | None:
    """Return the goal's figure in the newest result that has it."""
    answers = [
        Found(_taken(goal, values) * goal.get("scale", 1), result.name, result.entry["commit"])
        for result in found
        if result.bench == goal["bench"]
        and matches(_whole(result.figures), goal.get("run", {}))
        and (values := list(_values(goal, result.figures)))
    ]
    return answers[-1] if answers else None


def _whole(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's own fields and those of its first row, which is timed again at the end."""
    rows = figures.get("rows") or [{}]
    return {**rows[0], **figures}


def _values(goal: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[float]:
    for row in rows_of(figures, goal["of"]) if "of" in goal else (figures,):
        if matches(row, goal.get("where", {})) and goal["field"] in row:
            yield row[goal["field"]]


def rows_of(figures: Mapping[str, Any], of: str) -> list[Mapping[str, Any]]:
    """Return a table's rows; the rows of a table by name get their `name` as a field."""
    rows = figures.get(of, ())
    if isinstance(rows, Mapping):
        return [{"name": name, **row} for name, row in rows.items()]
    return list(rows)


def _taken(goal: Mapping[str, Any], values: list[float]) -> float:
    return max(values) if goal.get("take") == "max" else values[0]


def verdict(goal: Mapping[str, Any], value: float) -> str:
    """Compare the value with the goal."""
    sign = -1 if goal.get("higher") else 1
    if sign * value <= sign * goal["stretch"]:
        return "stretch reached"
    return "reached" if sign * value <= sign * goal["must"] else "short"
