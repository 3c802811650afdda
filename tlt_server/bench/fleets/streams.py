"""Streams through the gateway of a real fleet, and faults meanwhile: a replica is killed, one is
stopped, and a gateway is killed and started again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import uvloop
from rich.console import Console

from tlt_client.wire import Choice, EventParser, ItemResult, Token
from tlt_server.bench.fleets.live import LiveFleet
from tlt_server.bench.load import Answer, Connections
from tlt_server.bench.rollout import answered, body, shortened
from tlt_server.bench.settings import served
from tlt_server.wire.records import GenerateRequest


class Stream(NamedTuple):
    choice: Choice
    came: list[tuple[float, int]]  # time.perf_counter() of each event, and the tokens with it


class Silence(NamedTuple):
    """The longest time without a token in a stream."""

    until_s: float
    seconds: float
    tokens: int  # before it


class Kill(NamedTuple):
    at_s: float  # time.perf_counter()
    survivor: str  # URL of a replica
    routed_again_s: float


async def streamed(fleet: LiveFleet, requests: list[GenerateRequest]) -> list[Stream]:
    connections = Connections(fleet.gateway.url, answer_s=600, key=fleet.key)
    await connections.open(len(requests))
    bodies = [body([request], stream=True) for request in requests]
    answers = await asyncio.gather(*(connections.asked("/generate", each) for each in bodies))
    connections.close()
    return [_stream(answer) for answer in answers]


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
    seconds = max((silence(stream, since_s).seconds for stream in streams), default=0.0)
    return round(1000 * seconds, 1)


def silence(stream: Stream, since_s: float) -> Silence:
    """Return the longest of the silences that ended after a moment."""
    pairs = [(b, b - a, known) for (a, known), (b, _) in pairwise(stream.came) if b > since_s]
    return Silence(*max(pairs, key=lambda each: each[1], default=(since_s, 0.0, 0)))


def killed(
    fleet: LiveFleet, requests: list[GenerateRequest], after_s: float
) -> tuple[list[Stream], dict[str, Any]]:
    """Stream all requests and kill the busiest replica meanwhile; return the streams, when those
    that it had went on, and the gaps of the others.
    """
    lost = fleet.metric("tlt_moves_total", reason="lost")
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill, fleet, after_s)
        streams = uvloop.run(streamed(fleet, requests))
        kill = killing.result()
    count = round(fleet.metric("tlt_moves_total", reason="lost") - lost)
    return streams, resumed(fleet, requests, streams, kill, count)


def _kill(fleet: LiveFleet, after_s: float) -> Kill:
    time.sleep(after_s)
    found = fleet.replicas().values()
    victim = max(found, key=lambda each: each.running)
    survivor = next(each.url for each in found if each is not victim)
    at_s = fleet.kill(victim.name)
    fleet.until(lambda now: now[victim.name].state != "ready")
    fleet.until(lambda now: now[victim.name].state == "ready")
    return Kill(at_s, survivor, round(time.perf_counter() - at_s, 2))


def resumed(
    fleet: LiveFleet, requests: list[GenerateRequest], streams: list[Stream], kill: Kill, count: int
) -> dict[str, Any]:
    """Return the times from the kill to the next token of the lost streams, which are those that
    were silent for longest, and how much longer that is than reading their tokens again takes.
    """
    silences = [silence(stream, kill.at_s) for stream in streams]
    order = sorted(range(len(streams)), key=lambda i: silences[i].seconds, reverse=True)
    lost, others = order[:count], [streams[i] for i in order[count:]]
    texts = [
        [*requests[i].token_ids, *streams[i].choice.token_ids[: silences[i].tokens]] for i in lost
    ]
    again = [
        shortened(msgspec.structs.replace(requests[i], token_ids=text), 1)
        for i, text in zip(lost, texts, strict=True)
    ]
    fleet.client.clear_cache()
    read_s, _ = answered(kill.survivor, again, 0, key=fleet.key)
    token_s = read_s / max(1, sum(map(len, texts)))
    waits = [silences[i].until_s - kill.at_s for i in lost]
    beyond = [wait - len(text) * token_s for wait, text in zip(waits, texts, strict=True)]
    return {
        "streams_lost": len(lost),
        "read_again_s": round(read_s, 3),
        "resumed_p50_s": _middle(waits),
        "resumed_s": round(max(waits, default=0.0), 3),
        "beyond_reading_p50_s": _middle(beyond),
        "beyond_reading_s": round(max(beyond, default=0.0), 3),
        "others_longest_gap_ms": longest_gap_ms(others, kill.at_s),
        "routed_again_s": kill.routed_again_s,
    }


def _middle(seconds: list[float]) -> float | None:
    return round(statistics.median(seconds), 3) if seconds else None


def stopped_s(fleet: LiveFleet) -> float:
    """Stop a replica's server, and return the seconds until the gateway has taken it out."""
    name = [*fleet.replicas()][-1]
    process = fleet.process(name)
    os.kill(process, signal.SIGSTOP)
    try:
        noticed_s = fleet.until(lambda now: now[name].state != "ready")
    finally:
        os.kill(process, signal.SIGCONT)
    fleet.all_ready()
    return round(noticed_s, 2)


def restarted_s(console: Console, fleet: LiveFleet, request: GenerateRequest) -> float:
    """Return the seconds from the start of a gateway that was killed to the first token through it.
    Its replicas are those of the bench's fleet, whose own gateway is stopped meanwhile, as its end
    would be theirs.
    """
    links = ",".join(each.address for each in fleet.replicas().values())
    own = ["--launcher", "static", "--addresses", links, "--take-over"]
    own += ["--link-key-file", str(fleet.directory / "fleet.key")]
    os.kill(fleet.gateway.process.pid, signal.SIGSTOP)
    try:
        with TemporaryDirectory(prefix="tlt-gateway-") as folder:
            words = [*own, "--state-dir", str(Path(folder).resolve()), "--", *fleet.flags]
            for _ in range(2):
                began_s = time.perf_counter()
                with served(console, words, 600, fleet.key, ("fleet", "serve")) as (gateway, _):
                    connections = Connections(gateway.url, answer_s=60, key=fleet.key)
                    asked = connections.asked("/generate", body([request], stream=True))
                    answer = uvloop.run(asked)
                    gateway.process.kill()
    finally:
        os.kill(fleet.gateway.process.pid, signal.SIGCONT)
    return round(answer.chunks[0].at_s - began_s, 2)
