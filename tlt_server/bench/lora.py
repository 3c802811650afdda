"""`tlt bench lora`: the cost of LoRA adapters, in the time of a step.

On one engine per rank, batches without adapters and batches of two adapters take turns; the
median of the rounds' ratios counts. Adapters add random matrices to all of qkv, o, gate, up and
down, and drafts are accepted less often where they change the output, so speculation is judged by
the time of a cycle.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from tlt_server.bench.adapters import load_adapters, write_adapters
from tlt_server.bench.engines import LoadedOnce, release
from tlt_server.bench.exact_plan import ADAPTERS
from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.settings import heading, own, settings_of
from tlt_server.bench.steps import in_turns, random_requests, ratio
from tlt_server.bench.tables import LORA, show
from tlt_server.engine.loop import Engine
from tlt_server.engine.start.assembly import assemble
from tlt_server.speculation.drafters import networked
from tlt_server.wire.records import OFF, GenerateRequest, Strategy

PROMPT, NEW, QUICK_NEW = 128, 1024, 256  # tokens
STEPS = 100  # timed per batch and round
ROUNDS = 5
STRATEGIES = (OFF, Strategy("eagle", 7, 1, 8))


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
    batches = args.batch or args.batches[args.quick]
    new = QUICK_NEW if args.quick else NEW
    sizes = {"max_running": max(batches), "max_loras": len(ADAPTERS) - 1}
    base = settings_of(args, PROMPT + 2 * new, policy="off", **sizes)
    strategies = [own(each, base) for each in STRATEGIES] if networked(base.drafters) else [OFF]
    source, console, rows = LoadedOnce(strategies), wide_console(), list[dict[str, Any]]()
    with steps(console, len(args.rank) * (1 + len(batches) * len(strategies))) as step:
        for rank in args.rank:
            step(f"load, rank {rank}")
            with TemporaryDirectory(prefix="tlt-lora-") as root:
                write_adapters(Path(base.model), Path(root), rank)
                settings = replace(base, weight_root=Path(root), max_lora_rank=rank)
                engine, _ = assemble(settings, make_device=source.device)
                load_adapters(engine)
            for strategy, batch in product(strategies, batches):
                step(f"rank {rank}, {strategy.name}, batch {batch}")
                requests = random_requests(batch, PROMPT, new, seed=args.seed + batch)
                compared = against_none(engine, requests, strategy)
                named = {"rank": rank, "strategy": strategy.name, "batch": batch}
                rows.append({**named, **compared})
            del engine
            release()
    figures = heading(args, "lora", base) | {"prompt": PROMPT, "new": new, "rows": rows}
    show(console, "tlt bench lora", LORA, rows)
    finish(args, figures)
    return 0


def against_none(
    engine: Engine, requests: list[GenerateRequest], strategy: Strategy
) -> dict[str, float]:
    """Return the median times of a step without and with adapters [ms], and their ratio."""
    adapted = [
        msgspec.structs.replace(request, lora=ADAPTERS[1:][i % (len(ADAPTERS) - 1)])
        for i, request in enumerate(requests)
    ]
    ways = {"plain": requests, "adapted": adapted}
    found = in_turns(engine, ways, strategy, ROUNDS, max_steps=STEPS)
    return {
        **{
            f"{way}_ms": statistics.median(t.step_ms for t in times) for way, times in found.items()
        },
        "ratio": ratio(found["adapted"], found["plain"], lambda timed: timed.step_ms),
    }
