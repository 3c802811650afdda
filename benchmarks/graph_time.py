"""How long a GPU takes for what a function launches, by itself: captured as one CUDA graph, replayed, timed by events."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping

import torch

WARMING = 2  # replays that are not counted


def require_gpu(program: str) -> None:
    if not torch.cuda.is_available():
        print(f"{program}: torch finds no GPU; run this on a machine that has one (nvidia-smi lists it)", file=sys.stderr)
        sys.exit(2)


def in_turns(functions: Mapping[str, Callable[[], object]], repeats: int = 15) -> dict[str, float]:
    """Medians of the replays in ms. They take turns, so that a GPU that slows down under load slows them all."""
    graphs = {name: _captured(function) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(WARMING + repeats):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values[WARMING:]) for name, values in times.items()}


def _captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """It runs once as it is, so that nothing is compiled inside the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            function()
    torch.cuda.synchronize()
    return graph


def milliseconds(function: Callable[[], object], repeats: int = 15) -> float:
    return in_turns({"it": function}, repeats)["it"]


def microseconds(function: Callable[[], object], repeats: int = 15) -> float:
    return 1e3 * milliseconds(function, repeats)
