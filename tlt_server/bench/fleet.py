"""`tlt bench fleet`: rollouts over simulated replicas, by ways of placing their requests.

The gateway's own placing and moving choose where each request runs; replicas take the times that
were measured of a 7B target on an H200, so a minute takes a moment and no GPU. Lengths are drawn
with a long tail, or those of a record. Figures are means over the seeds.

With --faults, the gateway's own code and that of its servers, from a submission to the engine's
commands, runs over simulated engines and networks: servers crash, stop, are cut off, restart, get
damaged weights, come and go at every phase of a push, and gateways restart or are replaced. Every
request must end once, with each of its tokens once.

    tlt bench fleet --replicas 64 --requests 4096
    tlt bench fleet --faults 10000 --json faults.json
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from typing import Any

from tlt_server.bench.fleets.faults import KINDS, PHASES, judged_all
from tlt_server.bench.fleets.policies import (
    HASH,
    SPREAD,
    TOGETHER,
    RolloutFigures,
    long_tailed,
    policies,
    recorded,
)
from tlt_server.bench.record import finish, progress_bar, save, steps, wide_console
from tlt_server.bench.tables import FLEET, show
from tlt_server.errors import StartupError
from tlt_server.speculation.recorded import RolloutRecord

FIRST_SEED = 1000  # tests have the seeds before
PART = 50  # schedules of a process at a time; the file is written again after them
SPAWN = get_context("spawn")
SLOWER = (0.05, 0.1, 0.15)  # bounds of consolidation


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON. Return 1 if a schedule of faults has broken a rule."""
    if args.faults:
        return run_faults(args)
    if args.requests < args.replicas:
        raise StartupError(
            f"requests is {args.requests}; it must be at least the number of replicas, "
            f"{args.replicas}"
        )
    console = wide_console()
    found: dict[str, list[RolloutFigures]] = {}
    record = RolloutRecord.load(args.record) if args.record else None
    names = policies(long_tailed(args.replicas, 0), args.replicas, SLOWER)
    with steps(console, len(names) * len(args.seeds), "draw") as step:
        for seed in args.seeds:
            workload = (
                recorded(record.responses.output_len_N, args.requests, seed)
                if record
                else long_tailed(args.requests, seed, args.longest)
            )
            for name, simulate in policies(workload, args.replicas, SLOWER).items():
                step(f"{name}, seed {seed}")
                found.setdefault(name, []).append(simulate())
    rows = [
        {
            "replicas": args.replicas,
            "each": args.requests // args.replicas,
            "policy": name,
            **figures(each, found),
        }
        for name, each in found.items()
    ]
    show(console, "tlt bench fleet: simulated", FLEET, rows)
    finish(args, {"bench": "fleet", "seeds": [*args.seeds], "rows": rows}, on_gpu=False)
    return 0


def run_faults(args: argparse.Namespace) -> int:
    console = wide_console()
    covered, errors, wrong = Counter[tuple[str, str]](), Counter[str](), dict[int, list[str]]()
    figures: dict[str, Any] = {"bench": "fleet-faults", "first_seed": FIRST_SEED}
    seeds = range(FIRST_SEED, FIRST_SEED + args.faults)
    parts = [seeds[at : at + PART] for at in range(0, args.faults, PART)]
    with progress_bar(console) as progress, ProcessPoolExecutor(mp_context=SPAWN) as pool:
        task = progress.add_task("faults", total=args.faults)
        for judged in chain.from_iterable(pool.map(judged_all, parts)):
            covered.update(judged.faults)
            errors.update(judged.errors)
            if judged.wrong:
                wrong[judged.seed] = judged.wrong
                console.print(f"seed {judged.seed}: {'; '.join(judged.wrong[:3])}", markup=False)
            progress.update(task, advance=1)
            done = judged.seed + 1 - FIRST_SEED
            rows = [
                {"fault": kind, **{phase: covered[kind, phase] for phase in PHASES}}
                for kind in KINDS
            ]
            figures |= {"schedules": done, "violations": len(wrong), "errors": errors, "rows": rows}
            if done % PART == 0:
                save(args, figures, on_gpu=False)
    columns = {"fault": "{fault}", **{phase: f"{{{phase}}}" for phase in PHASES}}
    show(console, "tlt bench fleet: faults by the phase of a push", columns, rows)
    finish(args, figures, on_gpu=False)
    return 1 if wrong else 0


def figures(runs: list[RolloutFigures], every: dict[str, list[RolloutFigures]]) -> dict[str, Any]:
    """Return means over the seeds; makespans also over those of other policies."""
    mean = statistics.mean

    def over(policy: str) -> float:
        pairs = zip(runs, every[policy], strict=True)
        return round(mean(run.seconds / other.seconds for run, other in pairs), 4)

    return {
        "seconds": round(mean(run.seconds for run in runs), 2),
        "relative": over(SPREAD),
        "over_hash": over(HASH),
        "over_groups": over(TOGETHER),
        "tokens_per_s": round(mean(run.tokens / run.seconds for run in runs)),
        "read_again": round(mean(run.read_again for run in runs)),
        "moves": round(mean(run.moves for run in runs)),
        "free_percent": round(100 * mean(run.free for run in runs), 2),
    }
