"""`tlt bench fleet`: rollouts over simulated replicas, by ways of placing their requests.

The gateway's own placing and moving choose where each request runs; replicas take the times that
were measured of a 7B target on an H200, so a minute takes a moment and no GPU. Lengths are drawn
with a long tail, or those of a record. Figures are means over the seeds.

    tlt bench fleet --replicas 64 --requests 4096
    tlt bench fleet --replicas 8 --requests 512 --json fleet.json
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from tlt_server.bench.fleets.policies import SPREAD, RolloutFigures, long_tailed, policies, recorded
from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.tables import FLEET, show
from tlt_server.errors import StartupError
from tlt_server.speculation.recorded import RolloutRecord

SLOWER = (0.02, 0.05, 0.1)  # bounds of consolidation


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
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
                else long_tailed(args.requests, seed, longest=args.longest)
            )
            for name, simulate in policies(workload, args.replicas, SLOWER).items():
                step(f"{name}, seed {seed}")
                found.setdefault(name, []).append(simulate())
    rows = [
        {
            "replicas": args.replicas,
            "each": args.requests // args.replicas,
            "policy": name,
            **figures(each, found[SPREAD]),
        }
        for name, each in found.items()
    ]
    show(console, "tlt bench fleet: simulated", FLEET, rows)
    finish(args, {"bench": "fleet", "seeds": [*args.seeds], "rows": rows})
    return 0


def figures(runs: list[RolloutFigures], spread: list[RolloutFigures]) -> dict[str, Any]:
    """Return means over the seeds."""
    mean = statistics.mean
    ratios = (run.seconds / other.seconds for run, other in zip(runs, spread, strict=True))
    return {
        "seconds": round(mean(run.seconds for run in runs), 2),
        "relative": round(mean(ratios), 4),
        "tokens_per_s": round(mean(run.tokens / run.seconds for run in runs)),
        "read_again": round(mean(run.read_again for run in runs)),
        "moves": round(mean(run.moves for run in runs)),
        "free_percent": round(100 * mean(run.free for run in runs), 2),
    }
