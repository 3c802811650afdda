"""Time that a GPU takes for the kernels which functions launch, by events. Small kernels are
captured as one CUDA graph and replayed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from tlt_server.errors import StartupError

WARMING = 2  # runs that are not counted
Name = TypeVar("Name", bound=Hashable)


def require_gpu(count: int = 1) -> None:
    """`StartupError` unless torch sees that many."""
    if not torch.cuda.is_available():
        raise StartupError(
            "torch finds no GPU; run this on a machine that has one (nvidia-smi lists it)"
        )
    if torch.cuda.device_count() < count:
        raise StartupError(
            f"torch sees {torch.cuda.device_count()} GPU; run this on a machine with {count} "
            "(CUDA_VISIBLE_DEVICES hides others)"
        )


def in_turns(runs: Mapping[Name, Callable[[], object]], repeats: int = 15) -> dict[Name, float]:
    """Return medians in ms. The runs take turns, so a GPU that slows down under load slows all."""
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


def captured(function: Callable[[], object]) -> Callable[[], None]:
    """Return its replay. It runs once uncaptured, so that nothing is compiled in the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            function()
    torch.cuda.synchronize()
    replay: Callable[[], None] = graph.replay
    return replay


def milliseconds(function: Callable[[], object], repeats: int = 15) -> float:
    return in_turns({"it": captured(function)}, repeats)["it"]


def microseconds(function: Callable[[], object], repeats: int = 15) -> float:
    return 1e3 * milliseconds(function, repeats)
