"""Profiles a GPU during a few steps, by torch's profiler: its idle time, and the slowest kernels.

A kernel may be resident while it waits for the previous one. Time shared by several kernels counts
once, for the one that began first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SHOWN = 40  # kernels: all there are
Event = tuple[str, float, float]  # name, start and end in microseconds


class DeviceTime(NamedTuple):
    """Time of the profiled steps; milliseconds are per step."""

    steps: int
    span_ms: float  # from the first kernel's start to the last one's end
    busy_ms: float  # some kernel or copy runs
    kernels: int  # launches per step
    longest: list[
        tuple[str, float]
    ]  # kernels that take most, with the milliseconds that count for them

    @property
    def idle_percent(self) -> float:
        return 100 * (1 - self.busy_ms / self.span_ms)

    def figures(self) -> dict[str, object]:
        return {
            "profiled_steps": self.steps,
            "profiled_step_ms": round(self.span_ms, 4),
            "gpu_idle_percent": round(self.idle_percent, 3),
            "kernels_per_step": self.kernels,
            "longest_kernels_ms": [[name, round(ms, 4)] for name, ms in self.longest],
        }


def on_device(profiled: Any) -> list[Event]:
    """Return the GPU events of torch's profile."""
    import torch

    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]


def counted(events: list[Event]) -> list[tuple[str, float]]:
    """Return names in order of start, with the microseconds that count for each."""
    found, reached = [], 0.0
    for name, start, end in sorted(events, key=lambda event: event[1:]):
        found.append((name, max(0.0, end - max(start, reached))))
        reached = max(reached, end)
    return found


def device_time(events: list[Event], steps: int) -> DeviceTime:
    by_name: dict[str, float] = {}
    for name, micros in counted(events):
        by_name[name] = by_name.get(name, 0.0) + micros
    first, reached = min(start for _, start, _ in events), max(end for _, _, end in events)
    per_step = 1e3 * steps
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:SHOWN]
    return DeviceTime(
        steps,
        (reached - first) / per_step,
        sum(by_name.values()) / per_step,
        len(events) // steps,
        [(name[:80], micros / per_step) for name, micros in longest],
    )
