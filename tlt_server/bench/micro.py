"""Benches of parts of a step on a GPU: times inside CUDA graphs, by events, and one writer.

Compared runs alternate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from tlt_server.bench.record import finish
from tlt_server.errors import StartupError

READ_BYTES_PER_S = 4.3e12  # a copy on an H200
WARMING = 2  # runs that are not counted
Name = TypeVar("Name", bound=Hashable)
Call = Callable[[], object]


def require_gpu(count: int = 1) -> None:
    """Raise `StartupError` unless torch sees that many GPUs."""
    if not torch.cuda.is_available():
        raise StartupError(
            "torch finds no GPU; run this on a machine that has one (nvidia-smi lists it)"
        )
    if torch.cuda.device_count() < count:
        raise StartupError(
            f"torch sees {torch.cuda.device_count()} GPU; run this on a machine with {count} "
            "(CUDA_VISIBLE_DEVICES hides others)"
        )


def in_turns(runs: Mapping[Name, Call], repeats: int = 15) -> dict[Name, float]:
    """Return medians in ms. The runs alternate, so a GPU that slows down under load slows all."""
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(WARMING + repeats):
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values[WARMING:]) for name, values in times.items()}


def captured(function: Call) -> Callable[[], None]:
    """Return the function's replay, which keeps what the function refers to. It runs once
    uncaptured, so that nothing is compiled in the capture.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            function()
    torch.cuda.synchronize()

    def replay(_kept: Call = function) -> None:
        graph.replay()

    return replay


def say(row: Mapping[str, object]) -> None:
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def measure(
    args: argparse.Namespace, bench: str, rows: Iterable[Mapping[str, Any]], **about: object
) -> int:
    """Print each row as soon as it is measured, and write all; `about` describes the bench.
    `StartupError` without a GPU.
    """
    require_gpu()
    found = []
    for row in rows:
        found.append(row)
        say(row)
    finish(args, {"bench": bench, **about, "rows": found}, on_gpu=True)
    return 0
