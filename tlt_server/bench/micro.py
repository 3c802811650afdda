"""Benches of single kernels on a GPU: a table of cases, one loop that times them, one writer.

Every figure is the time of a call inside a CUDA graph of many calls. A case's tensors are made when
its turn comes and dropped after it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tlt_server.bench.graph_time import microseconds, require_gpu
from tlt_server.bench.record import finish

READ_BYTES_PER_S = 4.3e12  # what a copy reaches on an H200
Call = Callable[[], object]


class TimedCalls(NamedTuple):
    """A run, and the number of calls in it whose mean time is the figure."""

    run: Call
    calls: int


class Case(NamedTuple):
    """A row of figures."""

    named: Mapping[str, object]
    timed: Mapping[str, TimedCalls]  # by the name of the figure, in microseconds
    known: Mapping[str, float] = {}  # figures that need no clock, such as a floor


def floor_us(moved_bytes: float) -> float:
    return moved_bytes / READ_BYTES_PER_S * 1e6


def each(calls: Sequence[Call], count: int) -> TimedCalls:
    """Return a run of `count` calls, which take turns: the same call on different tensors."""

    def run() -> None:
        for call in itertools.islice(itertools.cycle(calls), count):
            call()

    return TimedCalls(run, count)


def row_of(case: Case, clock: Callable[[Call], float] = microseconds) -> dict[str, Any]:
    """Time a case."""
    figures = {name: clock(timed.run) / timed.calls for name, timed in case.timed.items()}
    figures |= case.known
    return {**case.named, **{name: round(value, 2) for name, value in figures.items()}}


def say(row: Mapping[str, object]) -> None:
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def measure(args: argparse.Namespace, bench: str, cases: Iterable[Case], **about: object) -> int:
    """Time all cases, print a line of each, and write them; `about` describes the bench."""
    require_gpu()
    rows = []
    for case in cases:
        rows.append(row_of(case))
        say(rows[-1])
        del case  # the next one allocates its own tensors
    finish(args, {"bench": bench, **about, "rows": rows}, on_gpu=True)
    return 0
