"""`tlt bench overload`: goodput of a real server when more is asked of it than it can do, against
its own peak in the same run.

The peak comes from a closed loop that keeps the server full and whose requests have all the time
they need. Then requests with a deadline arrive at random moments, whether the server keeps up or
not, at 1, 2 and 3 times the rate of the peak; goodput counts the tokens of those that met it. The
load comes from this process, the server is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop
from rich.console import Console

from tlt_client import Client
from tlt_server.bench.goodput import GoodputSize, LoadPhase, judge, percentile
from tlt_server.bench.load import ANSWER_S, Answer, Connections, closed_loop, open_loop, samples
from tlt_server.bench.record import finish, wide_console
from tlt_server.bench.settings import served
from tlt_server.bench.tables import OVERLOAD, show
from tlt_server.demo.server import ServerProcess
from tlt_server.errors import StartupError
from tlt_server.wire.records import GenerateRequest

FACTORS = (1, 2, 3)  # times the peak's rate
CLOSED = 96  # requests open at once: half as many again as run
MAX_TOKENS = 256
KV_MEMORY_MB = 256  # small, so that all of it has been touched before memory is compared
MIN_GOODPUT = 0.9  # part of the peak, at the highest rate
SHED_MS = 50.0  # 99th percentile
GROWTH = 0.05  # part of memory while the highest rate lasts, or GROWTH_MIB
GROWTH_MIB = 16.0


FULL = GoodputSize(ramp_s=8, window_s=28, timeout_s=15)
QUICK = GoodputSize(ramp_s=2, window_s=5, timeout_s=6)


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON. Return 1 when a request has not exactly one end or, in
    the full run, a bound is missed.
    """
    from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests

    model, size = args.model or TARGET, QUICK if args.quick else FULL
    flags = [
        *("--model", str(model), "--drafter", str(args.drafter or DRAFTER)),
        *("--kv-memory-mb", str(KV_MEMORY_MB), "--log-level", "warning"),
        *(["--threads", str(args.threads)] if args.threads else []),
    ]
    requests = problems_as_requests(model, 512, group=2, seed=args.seed, max_tokens=MAX_TOKENS)
    console = wide_console()
    factors = FACTORS[-1:] if args.quick else FACTORS
    with served(console, flags) as (server, client):
        phases = uvloop.run(_phases(server, requests, size, factors, args.seed, console.print))
        counts = _counts(client)
    return report(console, phases, counts, args)


async def _phases(
    server: ServerProcess,
    requests: list[GenerateRequest],
    size: GoodputSize,
    factors: tuple[int, ...],
    seed: int,
    say: Callable[[str], Any],
) -> dict[str, LoadPhase]:
    connections, serial = Connections(server.url), itertools.count(1)
    pids = (server.process.pid, _child(server.process.pid))
    seconds = size.ramp_s + size.window_s

    def ask(due_s: float, timeout_s: float = size.timeout_s) -> Coroutine[Any, Any, Answer]:
        number = next(serial)
        request = requests[number % len(requests)]
        body = {
            "requests": [{"token_ids": request.token_ids, "seed": number}],
            "timeout_s": timeout_s,
            "sampling": {"max_tokens": MAX_TOKENS},
        }
        return connections.post("/generate", msgspec.json.encode(body), due_s)

    async def phase(
        name: str, load: Coroutine[Any, Any, list[Answer]], timeout_s: float = size.timeout_s
    ) -> LoadPhase:
        say(f"{name}: {seconds:g} s of load, then its last answers")
        started_s, memory = time.perf_counter(), asyncio.create_task(_watch(pids))
        answers = await load
        memory.cancel()
        return judge(answers, started_s, size, timeout_s, await memory)

    peak = await phase(
        f"peak: {CLOSED} requests at a time",
        closed_loop(partial(ask, timeout_s=ANSWER_S), CLOSED, seconds),
        ANSWER_S,
    )
    if not peak.completed_s:
        raise StartupError(
            f"no request was completed in the {size.window_s:g} s of the peak; "
            "measure when this machine is less busy"
        )
    phases = {"peak": peak}
    for factor in factors:
        rate = factor * peak.per_s
        phases[f"{factor}x"] = await phase(
            f"{factor}x: {rate:.1f} requests per second",
            open_loop(ask, rate, seconds, seed + factor),
        )
    connections.close()
    return phases


async def _watch(pids: tuple[int, int]) -> list[tuple[float, float]]:
    seen = []
    try:
        while True:
            seen.append((_resident_mib(pids[0]), _resident_mib(pids[1])))
            await asyncio.sleep(1)
    except asyncio.CancelledError:
        return seen


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def _child(pid: int) -> int:
    """Return the pid of the server's engine."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        return next(int(child) for child in children if b"tlt_server.engine" in commands[child])
    except OSError:
        raise StartupError(
            "this bench reads the memory of its processes from /proc, which is missing; run it on "
            "Linux"
        ) from None


class Counts(NamedTuple):
    """The server's counts after all load."""

    open_sequences: float
    pages_held: float
    ended: dict[str, float]
    refused: dict[str, float]


def _counts(client: Client) -> Counts:
    give_up_s = time.monotonic() + 10
    while True:
        found = [*samples(client)]
        value = {sample.name: sample.value for sample in found}
        refused = [s for s in found if s.name == "tlt_requests_rejected_total"]
        counts = Counts(
            value["tlt_open_sequences"],
            value["tlt_pages"] - value["tlt_pages_free"],
            {s.labels["result"]: s.value for s in found if s.name == "tlt_sequences_total"},
            {s.labels["reason"]: s.value for s in refused},
        )
        if not (counts.open_sequences or counts.pages_held) or time.monotonic() > give_up_s:
            return counts
        time.sleep(0.1)


def report(
    console: Console, phases: dict[str, LoadPhase], counts: Counts, args: argparse.Namespace
) -> int:
    peak, last = phases["peak"], list(phases.values())[-1]
    found = {name: _figures(phase, peak) for name, phase in phases.items()}
    rows = [{"load": name, **figures} for name, figures in found.items()]
    title = "tlt bench overload: open-loop load against the peak of a closed loop"
    memory = {"frontend MiB": "{frontend_mib}", "engine MiB": "{engine_mib}"}
    show(console, title, {**OVERLOAD, **memory}, rows)
    sent = sum(sum(phase.ends.values()) for phase in phases.values())
    ended, refused = sum(counts.ended.values()), sum(counts.refused.values())
    exactly_once = (
        ended + refused == sent
        and not counts.open_sequences
        and not any("broken" in p.ends for p in phases.values())
    )
    growth = [max(0.0, last.memory_mib[-1][i] - last.memory_mib[0][i]) for i in range(2)]
    memory_kept = all(
        growth[i] <= max(GROWTH_MIB, GROWTH * last.memory_mib[0][i]) for i in range(2)
    )
    bounds = {
        f"goodput at {FACTORS[-1]}x is at least {MIN_GOODPUT:g} of the peak": last.goodput
        >= MIN_GOODPUT * peak.goodput,
        f"99 of 100 refusals within {SHED_MS:g} ms": percentile(last.shed_ms, 99) <= SHED_MS,
        f"memory grows by at most {GROWTH:.0%} or {GROWTH_MIB:g} MiB": memory_kept,
    }
    rules = {
        "every request has exactly one end": exactly_once,
        "every 429 is typed and says when to send again": not any(
            phase.untyped_sheds for phase in phases.values()
        ),
        "nothing is left open, no page is held": not counts.open_sequences
        and not counts.pages_held,
    }
    missed, faults = ([said for said, kept in each.items() if not kept] for each in (bounds, rules))
    for sentence in (*missed, *faults):
        console.print(f"MISSED: {sentence}")
    summary = {
        "bench": "overload",
        "quick": bool(args.quick),
        **found,
        "sent": sent,
        "ended": counts.ended,
        "refused": counts.refused,
        "open_sequences": counts.open_sequences,
        "pages_held": counts.pages_held,
        "exactly_one_end": exactly_once,
        "untyped_sheds": sum(phase.untyped_sheds for phase in phases.values()),
        "missed": missed + faults,
    }
    finish(args, summary)
    return 1 if faults or (missed and not args.quick) else 0


def _figures(phase: LoadPhase, peak: LoadPhase) -> dict[str, Any]:
    middle = len(phase.memory_mib) // 2
    memory = [phase.memory_mib[at] for at in (0, middle, -1)]
    return {
        "requests": sum(phase.ends.values()),
        "ends": phase.ends,
        "offered_per_s": round(phase.offered_per_s, 2),
        "goodput": round(phase.goodput, 1),
        "of_peak": round(phase.goodput / peak.goodput, 3) if peak.goodput else 0.0,
        "shed": round(phase.shed / sum(phase.ends.values()), 3),
        "late": phase.ends.get("late", 0),
        "completed_p50_s": round(statistics.median(phase.completed_s or [0.0]), 2),
        "completed_max_s": round(max(phase.completed_s, default=0.0), 2),
        "shed_p50_ms": round(percentile(phase.shed_ms, 50), 1),
        "shed_p99_ms": round(percentile(phase.shed_ms, 99), 1),
        "shed_max_ms": round(max(phase.shed_ms, default=0.0), 1),
        "load_lag_p99_ms": round(phase.lag_ms, 1),
        "frontend_mib": [round(frontend) for frontend, _ in memory],
        "engine_mib": [round(engine) for _, engine in memory],
    }
