"""`tlt bench rollout --replicas n`: rollouts through the gateway of a fleet, against one of its
replicas alone.

A workload is a batch of requests, the same for both (`1024`), or a number of requests that each
replica has running all the time (`full 256`). The gateway's processor time is counted meanwhile.
Then the same streamed requests are sent to the gateway and to a replica, for the time to the first
token, and many streams run at once, for the gaps between their tokens. With `--kill` a replica is
killed while they run once more: its streams are those that go on last.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from typing import Any, NamedTuple

import msgspec
import uvloop

from tlt_client.wire import Choice, EventParser, ItemResult, Token
from tlt_server.bench.clients import processor_s
from tlt_server.bench.fleets.live import LiveFleet, differing, live
from tlt_server.bench.goodput import percentile
from tlt_server.bench.load import Answer, Connections
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

    @property
    def rate(self) -> float:
        return sum(len(choice.token_ids) for choice in self.choices) / self.seconds


class Stream(NamedTuple):
    choice: Choice
    came: list[tuple[float, int]]  # time.perf_counter() of each event, and the tokens with it


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
    with live(console, args, longest) as fleet, steps(console, len(plan) + 2, "warm up") as step:
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
        streamed = gaps(fleet, requests, kill=args.kill)
    summary = said | figures(ran) | streamed
    for unequal in ("tokens_differing", "logprobs_differing"):
        summary[unequal] = figures(ran)[unequal] + streamed[unequal]
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


def figures(ran: dict[tuple[str, str], list[tuple[Ran, Ran]]]) -> dict[str, Any]:
    """Return a row per workload and policy: medians over the seeds, and what differs."""
    rows, tokens, logprobs = [], 0, 0
    for (workload, policy), pairs in ran.items():
        for one, fleet in pairs:
            unequal = differing(one.choices, fleet.choices[: len(one.choices)])
            tokens, logprobs = tokens + unequal[0], logprobs + unequal[1]
        median = statistics.median
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
    calm, _ = uvloop.run(streamed(fleet, requests))
    seconds = time.perf_counter() - began_s
    unequal = [differing(one, [stream.choice for stream in calm])]
    found: dict[str, Any] = {"streams": len(requests), "longest_gap_ms": longest_gap_ms(calm, 0.0)}
    if kill:
        fleet.client.clear_cache()
        streams, killed = uvloop.run(streamed(fleet, requests, KILL_AT * seconds))
        unequal.append(differing(one, [stream.choice for stream in streams]))
        found |= _resumed(fleet, requests, streams, killed)
    found["tokens_differing"], found["logprobs_differing"] = map(sum, zip(*unequal, strict=True))
    return found


async def streamed(
    fleet: LiveFleet, requests: list[GenerateRequest], kill_s: float = 0.0
) -> tuple[list[Stream], dict[str, Any]]:
    """Return the streams, and when a replica was killed with how many of them."""
    connections = Connections(fleet.gateway.url, answer_s=600, key=fleet.key)
    killed: dict[str, Any] = {}
    await connections.open(len(requests))
    bodies = [body([request], stream=True) for request in requests]
    asked = asyncio.gather(*(connections.asked("/generate", each) for each in bodies))
    if kill_s:
        await asyncio.sleep(kill_s)
        found = (await asyncio.to_thread(fleet.replicas)).values()
        victim = max(found, key=lambda each: each.running)
        others = [each.url for each in found if each is not victim]
        await asyncio.to_thread(fleet.kill, victim.name)
        killed = {"at_s": time.perf_counter(), "streams": victim.running, "others": others}
        await asyncio.to_thread(fleet.until, lambda now: now[victim.name].state != "ready")
        await asyncio.to_thread(fleet.until, lambda now: now[victim.name].state == "ready")
        killed["routed_again_s"] = round(time.perf_counter() - killed["at_s"], 2)
    answers = await asked
    connections.close()
    return [_stream(answer) for answer in answers], killed


def _stream(answer: Answer) -> Stream:
    """Return the choice of a streamed answer, and when its tokens came."""
    parser, came, text = EventParser(), list[tuple[float, int]](), ""
    choice: Choice | None = None
    for chunk in answer.chunks:
        *lines, text = (text + chunk.data.decode()).split("\n")
        for line in lines:
            event = parser.feed(line)
            if isinstance(event, Token):
                before = came[-1][1] if came else 0
                came.append((chunk.at_s, before + len(event.token_ids)))
            elif isinstance(event, ItemResult) and event.choices:
                choice = event.choices[0]
    assert choice is not None, answer.body[-300:]
    return Stream(choice, came)


def longest_gap_ms(streams: list[Stream], since_s: float) -> float:
    """Return the longest gap between tokens that ended after a moment, in ms."""
    pairs = (pair for stream in streams for pair in itertools.pairwise(stream.came))
    return round(1000 * max((b - a for (a, _), (b, _) in pairs if b > since_s), default=0.0), 1)


def _resumed(
    fleet: LiveFleet, requests: list[GenerateRequest], streams: list[Stream], killed: dict[str, Any]
) -> dict[str, Any]:
    """Return when the lost streams went on, and the gaps of the others."""
    at_s = killed["at_s"]

    def next_s(i: int) -> float:
        return next((s - at_s for s, _ in streams[i].came if s > at_s), 0.0)

    order = sorted(range(len(streams)), key=next_s, reverse=True)
    lost, others = order[: killed["streams"]], order[killed["streams"] :]
    again = []
    for i in lost:
        known = max((n for s, n in streams[i].came if s <= at_s), default=0)
        told = [*requests[i].token_ids, *streams[i].choice.token_ids[:known]]
        again.append(shortened(msgspec.structs.replace(requests[i], token_ids=told), 1))
    fleet.client.clear_cache()
    read_s, _ = answered(killed["others"][0], again, 0, key=fleet.key)
    waits = [next_s(i) for i in lost]
    return {
        "streams_lost": len(lost),
        "read_again_s": round(read_s, 3),
        "resumed_s": round(max(waits, default=0.0), 3),
        "resumed_p50_s": round(statistics.median(waits), 3) if waits else None,
        "beyond_reading_s": round(max(waits, default=0.0) - read_s, 3),
        "others_longest_gap_ms": longest_gap_ms([streams[i] for i in others], at_s),
        "routed_again_s": killed["routed_again_s"],
    }
