"""`tlt bench graphs`: the time in which an engine starts, and its CUDA graphs: their number, memory
and time to capture.

The engine is the default one of the device, so graphs are those that its policy can reach. Time to
ready counts from the start of this process, imports included. A Triton cache that lacked something
is called partly warm; the next run finds it warm. On a CPU only phases are reported.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.settings import heading, settings_of
from tlt_server.bench.tables import show


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
    before, console = compiled(), wide_console()
    settings = replace(settings_of(args), max_running=args.max_running or None)
    with steps(console, 5, "start") as step:
        from tlt_server.engine.start.assembly import assemble

        engine, info = assemble(settings, lambda name, seconds, detail: step(name))
        ready_s = since_start()
    pool: Any = getattr(engine.runner, "graphs", None)  # a CPU's runner has none
    graph_bytes = [*pool.bytes.values()] if pool is not None else []
    capture_s = sum(pool.seconds.values()) if pool is not None else 0.0
    figures = {
        **heading(
            args, "graphs", replace(settings, max_running=info.max_running), info.fingerprint
        ),
        "default": args.max_running == 0,
        "graphs": len(graph_bytes),
        "graph_bytes": sum(graph_bytes),
        "capture_s": round(capture_s, 3),
        "phases_s": {name: round(seconds, 3) for name, seconds in info.phases.items()},
        "ready_s": round(ready_s, 3),
        "triton_cache": "cold" if not before else "warm" if compiled() == before else "partly warm",
        "pages": info.pages,
        "policy": settings.policy,
    }
    console.print(f"ready after {ready_s:.1f} s, Triton cache {figures['triton_cache']}")
    captured = f"{len(graph_bytes)} graphs, {sum(graph_bytes) / 2**20:.0f} MiB"
    phases = {**info.phases, captured: capture_s}
    rows = [{"phase": name, "seconds": seconds} for name, seconds in phases.items()]
    show(console, "tlt bench graphs", {"phase": "{phase}", "seconds": "{seconds:.2f}"}, rows)
    finish(args, figures)
    return 0


def compiled() -> int:
    """Count the kernels that Triton has cached from earlier runs."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return len(list(cache.iterdir())) if cache.is_dir() else 0


def since_start() -> float:
    """Return the age of this process in seconds."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
