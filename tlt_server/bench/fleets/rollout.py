"""`tlt bench rollout --replicas n`: rollouts through the gateway of a fleet, against one of its
replicas alone.

A workload is a batch of requests, the same for both (`1024`), or a number of requests that each
replica has running all the time (`full 256`). The gateway's processor time is counted meanwhile.
Then the same streamed requests are sent to the gateway and to a replica, for the time to the first
token, and many streams run at once, for the gaps between their tokens. With `--kill` a replica is
killed while they run once more, then one is stopped, and a gateway is killed and started again.
A batch is simulated too, with the responses' lengths and the step times of `replica`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import uvloop

from tlt_client.wire import Choice
from tlt_server.bench.clients import processor_s
from tlt_server.bench.fleets.live import LiveFleet, differing, live
from tlt_server.bench.fleets.policies import LongTail, simulated
from tlt_server.bench.fleets.streams import killed, longest_gap_ms, restarted_s, stopped_s, streamed
from tlt_server.bench.goodput import percentile
from tlt_server.bench.load import Connections
from tlt_server.bench.record import finish, save, steps, wide_console
from tlt_server.bench.replaying.names import policy_name
from tlt_server.bench.rollout import (
    DEFAULT,
    Workload,
    answered,
    body,
    requests_of,
    set_policy,
    shortened,
)
from tlt_server.bench.settings import fingerprint_of, heading, settings_of
from tlt_server.bench.tables import FLEET_ROLLOUT, show
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest

WORKLOADS = {"cpu": ("full 8", "64"), "cuda": ("full 256", "1024")}
SEEDS = (21, 22, 23)
STREAMS = {"cpu": (8, 192), "cuda": (64, 512)}  # at once, and tokens of each
QUICK = (8, 96)
FIRST_TOKENS = 200  # requests that time them
KILL_AT = 0.4  # share of the time for all streams
ONE = "r0"  # the replica that is asked alone


class Ran(NamedTuple):
    seconds: float
    gateway_s: float  # its processor time
    choices: list[Choice]
    simulated_s: float = 0.0

    @property
    def rate(self) -> float:
        return sum(len(choice.token_ids) for choice in self.choices) / self.seconds


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON; 0 when every token and log-prob is the one server's."""
    settings, console = settings_of(args), wide_console()
    names = args.workload or (("full 4", "16") if args.quick else WORKLOADS[args.device])
    workloads, seeds = [Workload.of(name) for name in names], args.seeds or SEEDS
    seeds, max_tokens = (seeds[:1], 96) if args.quick else (seeds, args.max_tokens)
    commands = args.policy or [SetPolicy("off"), SetPolicy(DEFAULT)]
    plan = [*itertools.product(seeds, workloads, commands)]
    ran: dict[tuple[str, str], list[tuple[Ran, Ran]]] = {}
    longest = max(max_tokens, max(*STREAMS[args.device])) + 256
    with (
        live(console, args, longest) as fleet,
        steps(console, len(plan) + 2 + bool(args.kill), "warm up") as step,
    ):
        said = heading(args, "fleet-rollout", settings, fingerprint_of(fleet.client))
        said |= {"replicas": args.replicas, "max_running": args.max_running}
        said |= {"seeds": seeds, "max_tokens": max_tokens, "pair": args.pair}
        warm = requests_of(settings.model, Workload.of("8"), 0, max_tokens)
        for replica in fleet.replicas().values():
            answered(replica.url, warm, 0, key=fleet.key)
        for turn, (seed, workload, command) in enumerate(plan):
            step(f"{workload.name}: {policy_name(command).replace(':', ' ')}")
            set_policy(fleet.client, command)
            larger = workload._replace(requests=workload.requests * args.replicas)
            sides = {ONE: workload, "": larger if workload.running else workload}
            found = {
                name: _ran(fleet, requests_of(settings.model, sides[name], seed, max_tokens), name)
                for name in [*sides][:: 1 if turn % 2 else -1]
            }
            if not workload.running:
                sent = requests_of(settings.model, workload, seed, max_tokens)
                found[""] = _simulated(args, sent, found[""], command)
            key = workload.name, policy_name(command)
            ran.setdefault(key, []).append((found[ONE], found[""]))
            save(args, said | figures(ran))
        count, tokens = QUICK if args.quick else STREAMS[args.device]
        batch = Workload("", count, 0)
        requests = [shortened(r, tokens) for r in requests_of(settings.model, batch, 7, tokens)]
        step("first tokens")
        set_policy(fleet.client, SetPolicy("off"))
        said |= first_tokens(fleet, requests, 20 if args.quick else FIRST_TOKENS)
        save(args, said | figures(ran))
        step("streams")
        streaming = gaps(fleet, requests, kill=args.kill)
        if args.kill:
            step("a stopped replica, and a gateway that starts again")
            streaming["noticed_s"] = stopped_s(fleet)
            streaming["gateway_again_s"] = restarted_s(console, fleet, requests[0])
    summary = said | figures(ran) | streaming
    for unequal in ("tokens_differing", "logprobs_differing"):
        summary[unequal] = figures(ran)[unequal] + streaming[unequal]
    title = f"tlt bench rollout: {args.replicas} replicas and a gateway, over one of them"
    show(console, title, FLEET_ROLLOUT, summary["rows"])
    finish(args, summary)
    return 1 if summary["tokens_differing"] or summary["logprobs_differing"] else 0


def _ran(fleet: LiveFleet, requests: list[GenerateRequest], replica: str) -> Ran:
    """Run a batch on this replica alone, or, for an empty name, through the gateway."""
    fleet.client.clear_cache()
    url = fleet.replicas()[replica].url if replica else fleet.gateway.url
    before_s = processor_s(fleet.gateway.process.pid)
    seconds, choices = answered(url, requests, 0, key=fleet.key)
    return Ran(seconds, processor_s(fleet.gateway.process.pid) - before_s, choices)


def _simulated(
    args: argparse.Namespace, requests: list[GenerateRequest], ran: Ran, command: SetPolicy
) -> Ran:
    """Add what the simulator says of a batch with these lengths on this many replicas."""
    pairs = zip(requests, ran.choices, strict=True)
    figures = simulated(
        LongTail(requests, {request.id: len(choice.token_ids) for request, choice in pairs}),
        args.replicas,
        max_running=args.max_running,
        speculates=command.policy != "off",
    )
    return ran._replace(simulated_s=figures.seconds)


def _accept_length(runs: Iterable[Ran]) -> float | None:
    """Return the tokens per step with drafts; None without such a step."""
    reports = [choice.sd for run in runs for choice in run.choices]
    steps = sum(report.draft_steps for report in reports)
    return round(1 + sum(report.accepted for report in reports) / steps, 3) if steps else None


def figures(ran: dict[tuple[str, str], list[tuple[Ran, Ran]]]) -> dict[str, Any]:
    """Return a row per workload and policy: medians over the seeds, and what differs."""
    rows, tokens, logprobs = [], 0, 0
    for (workload, policy), pairs in ran.items():
        for one, fleet in pairs:
            unequal = differing(one.choices, fleet.choices[: len(one.choices)])
            tokens, logprobs = tokens + unequal[0], logprobs + unequal[1]
        median = statistics.median
        simulated_s = [fleet.simulated_s for _, fleet in pairs if fleet.simulated_s]
        ratios = [fleet.seconds / fleet.simulated_s for _, fleet in pairs if fleet.simulated_s]
        rows.append(
            {
                "workload": workload,
                "policy": policy,
                "one_s": round(median(one.seconds for one, _ in pairs), 3),
                "fleet_s": round(median(fleet.seconds for _, fleet in pairs), 3),
                "one_tokens_per_s": round(median(one.rate for one, _ in pairs)),
                "fleet_tokens_per_s": round(median(fleet.rate for _, fleet in pairs)),
                "over_one": round(median(fleet.rate / one.rate for one, fleet in pairs), 3),
                "gateway_percent": round(
                    median(100 * fleet.gateway_s / fleet.seconds for _, fleet in pairs), 1
                ),
                "simulated_s": round(median(simulated_s), 3) if simulated_s else None,
                "over_simulated": round(median(ratios), 3) if ratios else None,
                "one_accept_length": _accept_length(one for one, _ in pairs),
                "fleet_accept_length": _accept_length(fleet for _, fleet in pairs),
                "runs_s": [[round(run.seconds, 3) for run in pair] for pair in pairs],
            }
        )
    return {"rows": rows, "tokens_differing": tokens, "logprobs_differing": logprobs}


def first_tokens(fleet: LiveFleet, requests: list[GenerateRequest], count: int) -> dict[str, float]:
    """Return milliseconds to the first token, of cached prompts, one request at a time."""
    urls = [replica.url for replica in fleet.replicas().values()]
    asked = [shortened(request, 4) for request in requests]
    for url in urls:
        answered(url, asked, 0, key=fleet.key)
    sides = {"direct": urls[0], "gateway": fleet.gateway.url}

    async def timed() -> dict[str, list[float]]:
        connections = {side: Connections(url, key=fleet.key) for side, url in sides.items()}
        took: dict[str, list[float]] = {side: [] for side in sides}
        for turn, request in enumerate(itertools.islice(itertools.cycle(asked), count)):
            for side in [*sides][:: 1 if turn % 2 else -1]:
                answer = await connections[side].asked("/generate", body([request], stream=True))
                took[side].append(1000 * (answer.chunks[0].at_s - answer.sent_s))
        return took

    took = uvloop.run(timed())
    found: dict[str, float] = {}
    for part in (50, 99):
        times = {side: percentile(each, part) for side, each in took.items()}
        found |= {f"{side}_first_token_p{part}_ms": ms for side, ms in times.items()}
        found[f"added_p{part}_ms"] = times["gateway"] - times["direct"]
    return {name: round(value, 3) for name, value in found.items()}


def gaps(fleet: LiveFleet, requests: list[GenerateRequest], *, kill: bool) -> dict[str, Any]:
    """Stream all requests at once, and again while the busiest replica is killed."""
    _, one = answered(fleet.replicas()[ONE].url, requests, 0, key=fleet.key)
    fleet.client.clear_cache()
    began_s = time.perf_counter()
    calm = uvloop.run(streamed(fleet, requests))
    seconds = time.perf_counter() - began_s
    unequal = [differing(one, [stream.choice for stream in calm])]
    found: dict[str, Any] = {"streams": len(requests), "longest_gap_ms": longest_gap_ms(calm, 0.0)}
    if kill:
        fleet.client.clear_cache()
        streams, figures = killed(fleet, requests, KILL_AT * seconds)
        unequal.append(differing(one, [stream.choice for stream in streams]))
        found |= figures
    found["tokens_differing"], found["logprobs_differing"] = map(sum, zip(*unequal, strict=True))
    return found
