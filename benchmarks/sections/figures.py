"""A bench's result, and the sentences that several sections share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Figures = dict[str, Any]


def model(figures: Figures) -> str:
    shape = figures["shape"]
    running = f", at most {figures['max_running']} running" if figures["max_running"] else ""
    width = figures.get("tensor_parallel", 1)
    ranks = f", over {width} ranks" if width > 1 else ""
    return (
        f"{shape['layers']} layers of {shape['hidden']}, {figures['dtype']}, "
        f"drafter {figures['drafter']}{ranks}{running}."
    )


def in_the_file(figures: Figures) -> Iterator[str]:
    yield f"{len(figures['rows'])} rows, in the file only."
