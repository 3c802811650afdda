"""`tlt bench rollout`: the worth of speculation on the shipped pair, against our own engine
without it in the same run.

Two engine processes, strict and fast numerics, which share a GPU; arms take turns within each
round, so that a machine's moods fall on all alike. Three workloads: `tail` (one batch of 64, run to
its end: the batch shrinks to one), `few` (two running all the time, as the longest responses of a
batch do) and `full` (64 running all the time). Speed-ups are medians over rounds of the arm's rate
over the faster of the two plain engines' rate in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tlt_server.bench import rollout_http
from tlt_server.bench.columns import ROLLOUT
from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.settings import at_most_what_it_takes, described, settings_of
from tlt_server.bench.tables import show
from tlt_server.bench.workloads import renamed, shortened
from tlt_server.engine.child import EngineChild
from tlt_server.errors import StartupError
from tlt_server.wire.commands import SetPolicy, Submit
from tlt_server.wire.events import Outputs
from tlt_server.wire.records import Cycle, GenerateRequest, Strategy

EAGLE = Strategy("eagle", 7, 1, 8)
TREE = Strategy("eagle", 7, 4, 32)
HISTORY = Strategy("history", 7, 1, 8)
RUNNING = 64  # at most, on every device
FEW = 2  # running requests of the workload `few`
ROUNDS = 5
WITH_PROMPTS = "with prompts"


class Arm(NamedTuple):
    numerics: str
    policy: SetPolicy


PLAIN = {"off": Arm("strict", SetPolicy("off")), "off, fast": Arm("fast", SetPolicy("off"))}
ADAPTIVE = {name: Arm("strict", SetPolicy(name)) for name in ("beg", "goodput")}
ARMS = {
    "cpu": {
        **PLAIN,
        "eagle": Arm("strict", SetPolicy("fixed", EAGLE)),
        "history": Arm("strict", SetPolicy("fixed", HISTORY)),
        **ADAPTIVE,
    },
    "cuda": {
        **PLAIN,
        "eagle": Arm("strict", SetPolicy("fixed", EAGLE)),
        "eagle tree": Arm("strict", SetPolicy("fixed", TREE)),
        **ADAPTIVE,
    },
}
GPU_KV_MB, GPU_MODEL_LEN = 16384, 4096  # each of the two engines


class Figures(NamedTuple):
    """One arm over one workload, once."""

    seconds: float
    tokens: int
    passes: int
    accept_length: float  # tokens per request and cycle, over cycles that drafted
    time: dict[str, float]  # seconds of steps by strategy; of those that read prompts, together

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON; 0 when every arm gave the tokens of `off`, else 1 (fast
    numerics may differ).
    """
    if args.http:
        return rollout_http.run(args)
    check(args)
    base = replace(settings_of(args), max_running=RUNNING, policy="goodput")
    if args.device == "cuda":
        longest = at_most_what_it_takes(base.model, GPU_MODEL_LEN)
        base = replace(base, kv_memory_mb=GPU_KV_MB, max_model_len=longest)
    rounds, arms = 1 if args.quick else ROUNDS, ARMS[args.device]
    workloads = workloads_of(base.model, quick=args.quick, seed=args.seed)
    seen: dict[tuple[str, str], list[Figures]] = {}
    differing = 0
    console = wide_console()
    with (
        EngineChild(base) as strict,
        EngineChild(replace(base, numerics="fast", drafter="none", policy="off")) as fast,
        steps(console, rounds * len(arms) * len(workloads), "warm up") as step,
    ):
        engines = {"strict": strict, "fast": fast}
        for engine in engines.values():
            rollout(engine, renamed(workloads["full"].requests[:16], "warm"), RUNNING)
        for turn, (workload, work) in product(range(rounds), workloads.items()):
            expected: dict[str, list[int]] = {}
            for name, arm in arms.items():
                engines[arm.numerics].adopt(arm.policy)
                requests = renamed(work.requests, f"{turn}{name}")
                tokens, figures = rollout(engines[arm.numerics], requests, work.running)
                seen.setdefault((workload, name), []).append(figures)
                if arm.numerics == "strict":
                    expected = expected or tokens
                    differing += sum(tokens[i] != expected[i] for i in tokens)
                step(f"{workload}: {name}")
    named = {"threads": base.threads, **described(base, strict.info.fingerprint)}
    return report(console, seen, differing, named, args)


def check(args: argparse.Namespace) -> None:
    """`StartupError` where flags ask for what is timed over HTTP only."""
    for flag in ("workload", "policy", "seeds", "penalties"):
        if getattr(args, flag):
            raise StartupError(f"--{flag} is for rollouts against a server: add --http")
    if args.tensor_parallel > 1:
        raise StartupError(
            f"--tensor-parallel is {args.tensor_parallel}; the engine in fast numerics that arms "
            "are compared with has one rank: add --http"
        )
    if args.numerics != "strict":
        raise StartupError(
            "--numerics is fast; a rollout is timed in both strict and fast numerics: "
            "leave the flag out"
        )


class EngineWorkload(NamedTuple):
    requests: list[GenerateRequest]
    running: int  # at once


def workloads_of(model: Path, *, quick: bool, seed: int) -> dict[str, EngineWorkload]:
    from tlt_server.demo.workload import problems_as_requests

    problems = partial(problems_as_requests, model, group=8)
    steady = problems(RUNNING if quick else 5 * RUNNING, seed=seed + 100)
    batch = problems(RUNNING, seed=seed, max_tokens=256 if quick else 2000)
    alone = problems(4 if quick else 32, seed=seed + 200, max_tokens=2000)
    return {
        "tail": EngineWorkload(batch, RUNNING),
        "few": EngineWorkload(alone, FEW),
        "full": EngineWorkload([shortened(r, 48 if quick else 96) for r in steady], RUNNING),
    }


def rollout(
    engine: EngineChild, requests: list[GenerateRequest], running: int
) -> tuple[dict[str, list[int]], Figures]:
    """Run requests, at most `running` at once. Return the tokens by request (without the turn's
    name) and the figures; wall time on this side of the sockets.
    """
    tokens: dict[str, list[int]] = {r.id.split("/")[0]: [] for r in requests}
    cycles: list[Cycle] = []
    open_ids, waiting = {r.id for r in requests}, requests[running:]
    started = time.perf_counter()
    engine.send(Submit(requests[:running]))
    for event in engine.events():
        if not isinstance(event, Outputs):
            continue
        if event.cycle:
            cycles.append(event.cycle)
        for output in event.outputs:
            assert output.error is None, f"{output.id}: {output.error}"
            tokens[output.id.split("/")[0]] += output.token_ids
            if output.finish_reason:
                open_ids.discard(output.id)
                if waiting:
                    engine.send(Submit([waiting.pop(0)]))
        if not open_ids:
            break
    return tokens, figures_of(cycles, time.perf_counter() - started)


def figures_of(cycles: list[Cycle], seconds: float) -> Figures:
    drafted = [c for c in cycles if c.drafted]
    by_strategy: dict[str, float] = defaultdict(float)
    for c in cycles:
        by_strategy[WITH_PROMPTS if c.context.prefill_rows else c.strategy.name] += c.step_s
    return Figures(
        seconds=seconds,
        tokens=sum(c.emitted for c in cycles),
        passes=len(cycles),
        accept_length=sum(c.emitted for c in drafted)
        / max(1, sum(c.context.decoding for c in drafted)),
        time=by_strategy,
    )


def speedup(seen: dict[tuple[str, str], list[Figures]], workload: str, name: str) -> float:
    """Median over rounds of the arm's rate over the faster plain engine's."""
    found = seen[workload, name]
    plain = [max(seen[workload, p][i].rate for p in PLAIN) for i in range(len(found))]
    return statistics.median(f.rate / p for f, p in zip(found, plain, strict=True))


def shares(found: list[Figures]) -> dict[str, float]:
    """Return each strategy's share of all rounds' time, the largest first."""
    seconds = {
        name: sum(f.time.get(name, 0.0) for f in found)
        for name in {name: 0 for f in found for name in f.time}
    }
    return {
        name: round(seconds[name] / sum(seconds.values()), 3)
        for name in sorted(seconds, key=lambda name: -seconds[name])
    }


def report(
    console: Console,
    seen: dict[tuple[str, str], list[Figures]],
    differing: int,
    settings: dict[str, object],
    args: argparse.Namespace,
) -> int:
    summary: dict[str, Any] = {
        "bench": "rollout",
        "quick": bool(args.quick),
        "rounds": len(seen["tail", "off"]),
        **settings,
    }
    for (workload, name), found in seen.items():
        median = {
            field: statistics.median(getattr(f, field) for f in found)
            for field in ("seconds", "passes", "tokens", "accept_length")
        }
        ratio = speedup(seen, workload, name)
        summary[f"{workload}/{name}"] = {
            "wall_s": round(median["seconds"], 3),
            "passes": median["passes"],
            "tokens": median["tokens"],
            "tokens_per_pass": round(median["tokens"] / median["passes"], 3),
            "accept_length": round(median["accept_length"], 3),
            "speedup": round(ratio, 3),
            "share_of_time": shares(found),
        }
    summary["responses_differing"] = differing
    rows = [{"name": name, **row} for name, row in summary.items() if "/" in name]
    title = "tlt bench rollout: medians; speed-up against the faster of the two plain engines"
    show(console, title, ROLLOUT, rows)
    finish(args, summary)
    return 1 if differing else 0
