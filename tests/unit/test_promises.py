"""Each promise names a test that exists and that `make test` runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/promises.md").read_text()
ROWS = re.findall(r"^\|(.+?)\|`(tests/[\w/]+\.py)::(\w+)`\|", PAGE, re.MULTILINE)
ELSEWHERE = ("long", "soak", "gpu")  # markers of tests that `make test` leaves out


def left_out(decorated: ast.FunctionDef | ast.Module) -> bool:
    """Return whether a marker keeps the whole test, or the whole file, out of `make test`."""
    if isinstance(decorated, ast.FunctionDef):
        marks = decorated.decorator_list
    else:
        marks = [
            node.value
            for node in decorated.body
            if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
        ]
    return any(
        f"mark.{name}" == ast.unparse(mark)[-5 - len(name) :]
        for mark in marks
        for name in ELSEWHERE
    )


def test_every_promise_names_a_test() -> None:
    table = PAGE.split("|---|---|---|\n")[1]
    assert len(ROWS) == table.count("\n") >= 30


@pytest.mark.parametrize(("promise", "file", "name"), ROWS, ids=[row[2] for row in ROWS])
def test_named_test_runs_in_make_test(promise: str, file: str, name: str) -> None:
    module = ast.parse((ROOT / file).read_text())
    tests = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    assert name in tests, f"{promise}: {file} has no test {name}"
    assert not left_out(module) and not left_out(tests[name])


def test_left_out_markers_are_recognised() -> None:
    marked = ast.parse("@pytest.mark.long\ndef test_a(): ...\ndef test_b(): ...").body
    assert [left_out(node) for node in marked if isinstance(node, ast.FunctionDef)] == [True, False]
    assert left_out(ast.parse("pytestmark = pytest.mark.gpu"))
