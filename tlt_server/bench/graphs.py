"""`tlt bench graphs`: what starting an engine takes, and its CUDA graphs: how many, how much
memory, how long to capture.

The engine is the default one of the device, so graphs are those that its policy can reach. Time to
ready counts from the start of this process, imports included. `--cold` begins with an empty Triton
cache; otherwise a cache that lacked something is called partly warm, and the next run finds it
warm. On a CPU there are no graphs, and the phases are reported alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.settings import described, settings_of
from tlt_server.bench.tables import show


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
    with tempfile.TemporaryDirectory(prefix="tlt-triton-") as cold:
        if args.cold:
            os.environ["TRITON_CACHE_DIR"] = cold  # before triton is imported
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    before = compiled()
    settings = replace(settings_of(args), max_running=args.max_running or None)
    console = wide_console()
    with steps(console, 5, "start") as step:
        from tlt_server.engine.start.assembly import assemble

        engine, info = assemble(settings, lambda name, seconds, detail: step(name))
        ready_s = since_start()
    pool: Any = getattr(engine.runner, "graphs", None)  # a CPU's runner has none
    cache = "cold" if not before else "warm" if compiled() == before else "partly warm"
    keys = list(pool.bytes) if pool is not None else []
    figures = {
        "bench": "graphs",
        "quick": bool(args.quick),
        **described(replace(settings, max_running=info.max_running), info.fingerprint),
        "default": args.max_running == 0,
        "graphs": len(keys),
        "graph_bytes": sum(pool.bytes[key] for key in keys),
        "capture_s": round(sum(pool.seconds[key] for key in keys), 3),
        "phases_s": {name: round(seconds, 3) for name, seconds in info.phases.items()},
        "ready_s": round(ready_s, 3),
        "triton_cache": cache,
        "pages": info.pages,
        "policy": settings.policy,
    }
    report(console, figures)
    if args.keys:
        figures["keys"] = [
            {"key": str(key), "bytes": pool.bytes[key], "seconds": round(pool.seconds[key], 4)}
            for key in keys
        ]
        columns = {"key": "{key}", "bytes": "{bytes}", "seconds": "{seconds:.3f}"}
        show(console, "graphs, in the order of capture", columns, figures["keys"])
    finish(args, figures, on_gpu=args.device == "cuda")
    return 0


def compiled() -> int:
    """Kernels that Triton keeps from runs before."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return len(list(cache.iterdir())) if cache.is_dir() else 0


def since_start() -> float:
    """Seconds that this process has been running."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def report(console: Console, figures: dict[str, Any]) -> None:
    console.print(f"ready after {figures['ready_s']:.1f} s, Triton cache {figures['triton_cache']}")
    captured = f"{figures['graphs']} graphs, {figures['graph_bytes'] / 2**20:.0f} MiB"
    phases = {**figures["phases_s"], captured: figures["capture_s"]}
    columns = {"phase": "{phase}", "seconds": "{seconds:.2f}"}
    rows = [{"phase": name, "seconds": seconds} for name, seconds in phases.items()]
    show(console, "tlt bench graphs", columns, rows)
