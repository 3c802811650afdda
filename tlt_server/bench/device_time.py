"""Where a GPU's time goes during a few steps, from torch's profiler: how long it idles, and which kernels take longest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from tlt_server.bench.steps import SETTLE, abort_all, whole_cycles
from tlt_server.engine.loop import Engine
from tlt_server.errors import EngineFailed
from tlt_server.records import GenerateRequest, Strategy

SHOWN = 12  # kernels


class DeviceTime(NamedTuple):
    """Of so many steps; milliseconds are per step."""

    steps: int
    span_ms: float  # from the first kernel's start to the last one's end
    busy_ms: float  # some kernel or copy runs
    kernels: int  # launches per step
    longest: list[tuple[str, float]]  # kernels that take most, with their milliseconds

    @property
    def idle_percent(self) -> float:
        return 100 * (1 - self.busy_ms / self.span_ms)

    def figures(self) -> dict[str, object]:
        return {"profiled_steps": self.steps, "profiled_step_ms": round(self.span_ms, 4), "gpu_idle_percent": round(self.idle_percent, 3),
                "kernels_per_step": self.kernels, "longest_kernels_ms": [[name, round(ms, 4)] for name, ms in self.longest]}


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def profile(engine: Engine, requests: list[GenerateRequest], strategy: Strategy, *, steps: int) -> DeviceTime:
    """So many whole-batch steps of these requests, which must last that long, on a GPU."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    cycles = whole_cycles(engine, requests, strategy)
    settled = sum(1 for _ in islice(cycles, SETTLE))
    with profiler(activities=[ProfilerActivity.CUDA]):
        torch.cuda.synchronize()  # what starting the profiler takes is no gap of ours
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        done = sum(1 for _ in islice(cycles, steps))
        torch.cuda.synchronize()
    abort_all(engine)
    events = [event for event in found.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]  # type: ignore[attr-defined]
    if settled < SETTLE or done < steps or not events:
        raise EngineFailed(f"the profiler saw {len(events)} events on the GPU in {done} of {steps} steps: the driver may forbid profiling")
    return device_time([(event.name, event.time_range.start, event.time_range.end) for event in events], done)


def device_time(events: list[tuple[str, float, float]], steps: int) -> DeviceTime:
    """From (name, start, end) in microseconds."""
    span = max(end for _, _, end in events) - min(start for _, start, _ in events)
    by_name: Counter[str] = Counter()
    for name, start, end in events:
        by_name[name] += end - start  # type: ignore[assignment]
    per_step = 1e3 * steps
    return DeviceTime(steps, span / per_step, busy((start, end) for _, start, end in events) / per_step, len(events) // steps,
                      [(name[:80], micros / per_step) for name, micros in by_name.most_common(SHOWN)])
