"""`tlt bench rollout`: the worth of speculation on the shipped pair, against our own engine
without it in the same run.

Two servers, of strict and of fast numerics, which share a GPU; arms take turns within each round,
so that a machine's moods fall on all alike. Three workloads: `tail` (one batch of 64, run to its
end: the batch shrinks to one), `few` (two running all the time, as the longest responses of a batch
do) and `full` (64 running all the time). Speed-ups are medians over rounds of the arm's rate over
the faster of the two plain servers' rate in the same round. `--http` is the same for any policies,
workloads and seeds, without fast numerics.

    tlt bench rollout --quick
    tlt bench rollout --http --device cuda --model DIR --drafter DIR --json rollout-http.json
    tlt bench rollout --http --workload 512 --workload "full 64" --policy goodput --policy off
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tlt_server.bench import rollout_http
from tlt_server.bench.columns import ROLLOUT
from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.rollout_http import RolloutRun, play, shortened
from tlt_server.bench.settings import fingerprint_of, heading, serve_flags, served, settings_of
from tlt_server.bench.tables import show
from tlt_server.errors import StartupError
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, parse_strategy

RUNNING = 64  # at most, on every device
FEW = 2  # running requests of the workload `few`
ROUNDS = 5
MODEL_LEN, GPU_KV_MB = 4096, 16384  # each of the two servers


class Arm(NamedTuple):
    policy: SetPolicy
    numerics: str = "strict"


def fixed(name: str) -> Arm:
    return Arm(SetPolicy("fixed", parse_strategy(name)))


PLAIN = {"off": Arm(SetPolicy("off")), "off, fast": Arm(SetPolicy("off"), "fast")}
ADAPTIVE = {"beg": Arm(SetPolicy("beg")), "goodput": Arm(SetPolicy("goodput"))}
CHAIN = {**PLAIN, "eagle": fixed("eagle:7x1x8")}
ARMS = {
    "cpu": {**CHAIN, "history": fixed("history:7x1x8"), **ADAPTIVE},
    "cuda": {**CHAIN, "eagle tree": fixed("eagle:7x4x32"), **ADAPTIVE},
}
Seen = dict[tuple[str, str], list[RolloutRun]]  # runs by workload and arm


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON; 0 when every arm gave the tokens of `off`, else 1 (fast
    numerics may differ).
    """
    if args.http:
        return rollout_http.run(args)
    check(args)
    args.max_running = RUNNING
    settings, console = settings_of(args, max_running=RUNNING), wide_console()
    flags = serve_flags(args, MODEL_LEN)
    flags += ["--kv-memory-mb", str(GPU_KV_MB)] if args.device == "cuda" else []
    rounds, arms = 1 if args.quick else ROUNDS, ARMS[args.device]
    workloads = workloads_of(settings.model, quick=args.quick, seed=args.seed)
    seen: Seen = {}
    with (
        served(console, [*flags, "--numerics", "strict"]) as strict,
        served(console, [*flags, "--numerics", "fast", "--drafter", "none"]) as fast,
        steps(console, rounds * len(arms) * len(workloads), "warm up") as step,
    ):
        servers = {"strict": strict, "fast": fast}
        for server in servers.values():
            play(*server, SetPolicy("off"), workloads["full"].requests[:16], RUNNING)
        for _, (workload, work), (name, arm) in product(
            range(rounds), workloads.items(), arms.items()
        ):
            found = play(*servers[arm.numerics], arm.policy, work.requests, work.running)
            seen.setdefault((workload, name), []).append(found)
            step(f"{workload}: {name}")
        about = heading(args, "rollout", settings, fingerprint_of(strict[1]))
    differing = sum(
        own.digest != plain.digest
        for (workload, name), runs in seen.items()
        if arms[name].numerics == "strict"
        for own, plain in zip(runs, seen[workload, "off"], strict=True)
    )
    rows = {f"{workload}/{name}": figures(seen, workload, name) for workload, name in seen}
    title = "tlt bench rollout: medians; speed-up against the faster of the two plain servers"
    show(console, title, ROLLOUT, ({"name": name, **row} for name, row in rows.items()))
    about |= {"rounds": rounds, "threads": settings.threads, **rows}
    finish(args, about | {"responses_differing": differing})
    return 1 if differing else 0


def check(args: argparse.Namespace) -> None:
    """Raise `StartupError` for flags that need --http."""
    for flag in ("workload", "policy", "seeds", "penalties"):
        if getattr(args, flag):
            raise StartupError(f"--{flag} is for rollouts of any policies: add --http")
    if args.tensor_parallel > 1:
        raise StartupError(
            f"--tensor-parallel is {args.tensor_parallel}; the server in fast numerics that arms "
            "are compared with has one rank: add --http"
        )
    if args.numerics != "strict":
        raise StartupError(
            "--numerics is fast; a rollout is timed in both strict and fast numerics: "
            "leave the flag out"
        )


class Requests(NamedTuple):
    requests: list[GenerateRequest]
    running: int  # at once; 0: all, in one batch


def workloads_of(model: Path, *, quick: bool, seed: int) -> dict[str, Requests]:
    from tlt_server.demo.workload import problems_as_requests

    problems = partial(problems_as_requests, model, group=8)
    steady = problems(RUNNING if quick else 5 * RUNNING, seed=seed + 100)
    batch = problems(RUNNING, seed=seed, max_tokens=256 if quick else 2000)
    alone = problems(4 if quick else 32, seed=seed + 200, max_tokens=2000)
    return {
        "tail": Requests(batch, 0),
        "few": Requests(alone, FEW),
        "full": Requests([shortened(r, 48 if quick else 96) for r in steady], RUNNING),
    }


def figures(seen: Seen, workload: str, name: str) -> dict[str, Any]:
    """Return the medians of an arm over a workload, and the shares of all rounds' time."""
    runs = seen[workload, name]
    plain = zip(*(seen[workload, each] for each in PLAIN), strict=True)
    ratios = [
        run.rate / max(each.rate for each in both) for run, both in zip(runs, plain, strict=True)
    ]
    median = statistics.median
    tokens, passes = median(run.tokens for run in runs), median(run.passes for run in runs)
    kinds = sorted({kind for run in runs for kind in run.counted["step_s"]})
    spent = {kind: sum(run.counted["step_s"].get(kind, 0.0) for run in runs) for kind in kinds}
    whole = sum(spent.values())
    return {
        "wall_s": round(median(run.seconds for run in runs), 3),
        "passes": passes,
        "tokens": tokens,
        "tokens_per_pass": round(tokens / passes, 3),
        "accept_length": round(median(run.accept_length for run in runs), 3),
        "speedup": round(median(ratios), 3),
        "share_of_time": {kind: round(s / whole, 3) for kind, s in spent.items() if s},
    }
