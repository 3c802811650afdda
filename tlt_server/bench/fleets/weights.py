"""`tlt bench weights --replicas n`: pushes by disk to all replicas of a fleet, over a fleet of one.

Requests stream through the gateway meanwhile, for the gaps between their tokens; the time from the
first commit to the last is the one between the first tokens of the new version of any two streams.
At the end a replica is killed and its weights are deleted, so that it takes them from another one.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from tlt_server.bench.fleets.live import POLL_S, LiveFleet, live
from tlt_server.bench.fleets.streams import Stream, longest_gap_ms, streamed
from tlt_server.bench.record import finish, save, wide_console
from tlt_server.bench.rollout import Workload, requests_of, shortened
from tlt_server.bench.settings import shape_of
from tlt_server.bench.weights import random_checkpoint
from tlt_server.demo.workload import TARGET
from tlt_server.wire.records import GenerateRequest

STREAMS, TOKENS = 8, 512
SETTLE_S = 0.5  # streaming before a push


def run(args: argparse.Namespace) -> int:
    """Print one line of JSON."""
    args.drafter, args.dtype, args.threads, args.max_running = "none", None, None, STREAMS
    count = args.replicas
    with TemporaryDirectory(prefix="tlt-weights-") as folder:
        root = Path(folder)
        if args.model is None:
            args.model = random_checkpoint(root / "random", args.gib) if args.gib else TARGET
        shutil.copytree(args.model, root / "root" / "pushed")
        size = sum(file.stat().st_size for file in args.model.glob("*.safetensors"))
        figures: dict[str, Any] = {
            "bench": "fleet-weights",
            "shape": shape_of(args.model),
            "device": args.device,
            "replicas": count,
            "rounds": args.rounds,
            "bytes": size,
        }
        for args.replicas in (1, count):
            more = ("--weight-root", str(root / "root"), "--weight-channels", "disk")
            with live(wide_console(), args, TOKENS + 512, more) as fleet:
                side = "one" if args.replicas == 1 else "fleet"
                figures[side] = [_pushed(fleet, args)]
                if side == "fleet":
                    one_s, fleet_s = (figures[each][0]["push_s"] for each in ("one", "fleet"))
                    figures["over_one"] = round(fleet_s / one_s, 3)
                    save(args, figures)
                    seconds = _caught_up(fleet, f"r{count - 1}")
                    figures["catch_up_s"] = round(seconds, 3)
                    figures["catch_up_gb_per_s"] = round(size / seconds / 1e9, 3)
    finish(args, figures)
    return 0


def _pushed(fleet: LiveFleet, args: argparse.Namespace) -> dict[str, Any]:
    """Push to an idle fleet, then while requests stream."""
    requests = requests_of(args.model, Workload("", STREAMS, 0), 0, TOKENS)
    requests = [shortened(request, TOKENS) for request in requests]
    idle_s = [_push_s(fleet, f"idle-{turn}") for turn in range(args.rounds)]
    busy = [_busy(fleet, requests, f"busy-{turn}") for turn in range(args.rounds)]
    return {
        "push_s": round(statistics.median(idle_s), 4),
        "push_while_decoding_s": round(statistics.median(row[0] for row in busy), 4),
        "longest_gap_ms": max(row[1] for row in busy),
        "first_to_last_commit_ms": max(row[2] for row in busy),
    }


def _push_s(fleet: LiveFleet, version: str) -> float:
    began_s = time.perf_counter()
    fleet.client.update_weights("pushed", version)
    return time.perf_counter() - began_s


def _busy(
    fleet: LiveFleet, requests: list[GenerateRequest], version: str
) -> tuple[float, float, float]:
    """Return the seconds of a push, the longest gap meanwhile and the spread of the commits, in
    ms.
    """
    with ThreadPoolExecutor(1) as pool:
        pushing, streams, began_s = None, list[Stream](), time.perf_counter()
        while pushing is None or not pushing.done():
            pushing = pushing or pool.submit(_after, SETTLE_S, fleet, version)
            streams += uvloop.run(streamed(fleet, requests))
    firsts = [first for stream in streams if (first := _first_s(stream, version)) is not None]
    spread_s = max(firsts) - min(firsts) if firsts else 0.0
    return pushing.result(), longest_gap_ms(streams, began_s + SETTLE_S), round(1e3 * spread_s, 1)


def _after(seconds: float, fleet: LiveFleet, version: str) -> float:
    time.sleep(seconds)
    return _push_s(fleet, version)


def _first_s(stream: Stream, version: str) -> float | None:
    """Return when the first token of a new version came, of a stream that began before it."""
    for span in stream.choice.weight_versions[1:]:
        if span.version.partition("+")[0] == version:
            return next(at_s for at_s, known in stream.came if known > span.start)
    return None


def _caught_up(fleet: LiveFleet, name: str) -> float:
    """Have a replica start without weights of its own; return the seconds of its catching up, at
    least those between two looks.
    """
    fleet.kill(name)
    shutil.rmtree(fleet.directory / "replicas" / name / "weights")
    fleet.until(lambda found: found[name].state != "ready")
    fleet.until(lambda found: found[name].state in ("catching up", "ready"))
    return max(POLL_S, fleet.until(lambda found: found[name].state == "ready"))
