"""`tlt bench frontend --replicas n`: share of a core that a gateway takes while n replicas decode.

The replicas are servers in one other process: real frontends and links over simulated engines,
with 256 requests at once each and the step times of a 7B target on an H200. Every request gets one
whole reply. HTTP is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Never

import uvloop

from tlt_server.bench.fleets.machine import FleetHistory, Machine
from tlt_server.bench.frontend import TOKENS, reply
from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.config import load
from tlt_server.demo.workload import TARGET
from tlt_server.frontend.generation.generation import Generations
from tlt_server.frontend.generation.requests import RequestBatch, RequestItem
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.auth import Gate
from tlt_server.frontend.http.logs import write_logs
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.fleet_file import FleetFile
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.remote import RemoteLink
from tlt_server.frontend.rpc.link import LinkServer
from tlt_server.metrics import Metrics
from tlt_server.wire.link import Attach
from tlt_server.wire.records import GenerateRequest, Sampling

RUNNING, PROMPT = 256, 128
FULL_RATE = 28_000  # tokens per second of such a replica (decode-gpu)


class Listed:
    """A launcher of replicas that run already."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._found = [ReplicaAddress(address, address) for address in addresses]

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> Never:
        found(self._found)
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    def __getattr__(self, order: str) -> Any:
        raise NotImplementedError(order)


def run(args: argparse.Namespace) -> int:
    """Print one line of JSON."""
    write_logs("warning", None)
    context = get_context("spawn")
    here, there = context.Pipe()
    servers = context.Process(target=_serve, args=(args.replicas, there), daemon=True)
    servers.start()
    rounds: list[tuple[float, float]] = []
    try:
        with TemporaryDirectory() as folder, steps(wide_console(), args.rounds) as begin:
            uvloop.run(_rounds(args.rounds, here.recv(), Path(folder), rounds, begin))
    finally:
        servers.terminate()
        servers.join()
    tokens = args.replicas * RUNNING * TOKENS
    figures: dict[str, Any] = {
        "bench": "fleet-frontend",
        "replicas": args.replicas,
        "tokens_per_s": round(statistics.median(tokens / seconds for seconds, _ in rounds)),
        "gateway_percent": round(statistics.median(100 * cpu / s for s, cpu in rounds), 1),
        "tokens_per_cpu_s": round(statistics.median(tokens / cpu for _, cpu in rounds)),
    }
    figures["full_rate"] = args.replicas * FULL_RATE
    figures["full_rate_percent"] = round(
        100 * figures["full_rate"] / figures["tokens_per_cpu_s"], 1
    )
    finish(args, figures, on_gpu=False)
    return 0


def _serve(count: int, addresses: Connection) -> None:
    write_logs("error", None)
    uvloop.run(_served(count, addresses))


async def _served(count: int, addresses: Connection) -> None:
    config = load({"model": TARGET, "port": 0, "link_port": 0})
    metrics, servers = Metrics(), list[LinkServer]()
    for number in range(count):
        machine = Machine(
            f"r{number}",
            FleetHistory(),
            lambda request: request.sampling.max_tokens,
            metrics,
            max_running=RUNNING,
            speculates=False,
        )
        servers.append(LinkServer(config, Gate(config, metrics), machine.attachments))
    addresses.send([await server.start() for server in servers])
    await asyncio.get_running_loop().create_future()


async def _rounds(
    count: int,
    addresses: Sequence[str],
    folder: Path,
    rounds: list[tuple[float, float]],
    begin: Callable[[str], None],
) -> None:
    """Add the seconds and the processor time of each round."""
    admission = Admission(max_queue=2**20, max_queue_tokens=2**40, max_page_forecast=1e9)
    metrics, file, text = Metrics(), FleetFile(folder), Text.load(TARGET)

    async def connect(fleet: Fleet, member: Member) -> None:
        record = file.record
        attach = Attach(fleet=record.fleet, epoch=record.epoch)
        await RemoteLink(member.address.link, lambda: attach, fleet, member).run()

    launcher: Any = Listed(addresses)
    fleet = Fleet(admission, metrics, launcher, connect, file, url="http://gateway")
    running = asyncio.create_task(fleet.run())
    while len(fleet.replicas.placer.loads) < len(addresses):  # noqa: ASYNC110 (the beginning)
        await asyncio.sleep(0.05)
    generations, sampling = Generations(fleet.client, text, metrics), Sampling(max_tokens=TOKENS)
    for turn in range(count):
        begin(f"round {turn}")
        deadline_s = time.monotonic() + 1e4
        requests = [
            GenerateRequest(
                id=f"{turn}-{i}.0", token_ids=[1] * PROMPT, sampling=sampling, seed=i, patient=True
            )
            for i in range(RUNNING * len(addresses))
        ]
        batches = [RequestBatch([RequestItem(r.id, [r])], False, deadline_s) for r in requests]
        made = [generations.items(batch) for batch in batches]
        began_s, spent_s = time.perf_counter(), time.process_time()
        sizes = await asyncio.gather(*(reply(generations, each, deadline_s) for each in made))
        rounds.append((time.perf_counter() - began_s, time.process_time() - spent_s))
        assert sum(sizes) > 4 * TOKENS * len(requests), f"{sum(sizes)} bytes of reply"
    running.cancel()
