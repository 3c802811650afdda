"""`tlt bench exact --replicas n`: seeded requests through a fleet, against one server.

The server, which has ended when the fleet starts, gives the responses without speculation. Each
round pushes other weights to the fleet by the next channel and sends the same requests under the
next strategy. Meanwhile the replicas are drained one after the other, which moves every request
that has not ended, and the busiest one is killed. Tokens and log-prob bits are compared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from safetensors.torch import load_file

from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.http import HttpSender
from tlt_client.errors import Conflict
from tlt_client.wire import Choice
from tlt_server.bench.engines import release
from tlt_server.bench.exact_plan import KINDS, PLANS, PUSHED, STARTED
from tlt_server.bench.exact_runs import write_pushed
from tlt_server.bench.fleets.live import LiveFleet, differing, live
from tlt_server.bench.record import finish, save, steps, wide_console
from tlt_server.bench.rollout import SENT, answered, sampled, set_policy
from tlt_server.bench.settings import fingerprint_of, heading, own, serve_flags, served, settings_of
from tlt_server.demo.workload import problems_as_requests
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest

POLL_S = 0.02


class Size(NamedTuple):
    rounds: int
    requests: int  # per round
    tokens: int  # per response


SIZES = {"cpu": Size(21, 100, 80), "cuda": Size(4, 128, 256)}
QUICK = Size(2, 12, 192)
CHANNELS = {"cpu": ("disk", "http", "broadcast"), "cuda": ("disk", "http")}


def run(args: argparse.Namespace) -> int:
    """Print one line of JSON; 0 when no token and no log-prob differs."""
    settings, console = settings_of(args), wide_console()
    size = QUICK if args.quick else SIZES[args.device]
    arms = [*PLANS[args.device].arms.values()]
    counts, channels = Counter[str](), Counter[str]()
    args.max_running = max(2, size.requests // 2)
    rounds = [_requests(settings.model, turn, size) for turn in range(size.rounds)]
    with TemporaryDirectory(prefix="tlt-exact-") as folder:
        root = Path(folder)
        shutil.copytree(settings.model, root / STARTED, copy_function=_link)
        write_pushed(Path(settings.model), root, on_gpu=args.device == "cuda")
        release()
        named = ",".join(CHANNELS[args.device])
        more = ("--weight-root", folder, "--weight-channels", named)
        alone = (*serve_flags(args, size.tokens + 512), "--weight-root", folder)
        expected = _expected(console, [*alone, "--weight-channels", "disk"], root, rounds)
        with (
            live(console, args, size.tokens + 512, more) as fleet,
            steps(console, size.rounds) as step,
        ):
            said = heading(args, "fleet-exact", settings, fingerprint_of(fleet.client))
            said |= {"replicas": args.replicas, "strategies": min(size.rounds, len(arms))}
            for turn, (policy, strategy) in enumerate(islice(cycle(arms), size.rounds)):
                channel = CHANNELS[args.device][turn % len(CHANNELS[args.device])]
                _push(fleet, channel, root / _pushed(turn), f"{_pushed(turn)}-{turn}")
                channels[channel] += 1
                set_policy(fleet.client, SetPolicy(policy, strategy and own(strategy, settings)))
                fleet.client.clear_cache()
                found = _disturbed(fleet, rounds[turn], counts)
                unequal = differing(expected[turn], found)
                counts.update(
                    rounds=1, requests=len(found), tokens=sum(len(c.token_ids) for c in found)
                )
                counts.update(tokens_differing=unequal[0], logprobs_differing=unequal[1])
                fleet.all_ready()
                step(f"{turn}: {channel}, {sum(unequal)} differ")
                summary = said | {**counts, "pushes": {**channels}}
                save(args, summary)
    finish(args, summary)
    return 1 if counts["tokens_differing"] or counts["logprobs_differing"] else 0


def _link(file: str, to: str) -> None:
    """Link a file, which saves the space of a copy, or copy it to another file system."""
    try:
        os.link(Path(file).resolve(), to)
    except OSError:
        shutil.copy2(file, to)


def _pushed(turn: int) -> str:
    """Return the directory with the weights of a round."""
    return (PUSHED, STARTED)[turn % 2]


def _requests(model: Path, turn: int, size: Size) -> list[GenerateRequest]:
    """Return a round's requests; they have the kinds in turns."""
    requests = problems_as_requests(model, size.requests, group=4, seed=100 * turn)
    kinds = [{name: kind[name] for name in SENT if name in kind} for kind in KINDS]
    return [
        sampled(each, **kinds[i % len(kinds)] | {"max_tokens": size.tokens, "ignore_eos": True})
        for i, each in enumerate(requests)
    ]


def _expected(
    console: Console, flags: list[str], root: Path, rounds: list[list[GenerateRequest]]
) -> dict[int, list[Choice]]:
    """Return what a single server without speculation answers, by round."""
    found: dict[int, list[Choice]] = {}
    with served(console, flags, 600) as (server, client):
        set_policy(client, SetPolicy("off"))
        for directory in (STARTED, PUSHED):
            if directory == PUSHED:
                client.update_weights(root / PUSHED, PUSHED)
            for turn, requests in enumerate(rounds):
                if _pushed(turn) == directory:
                    _, found[turn] = answered(server.url, requests, 0)
    return found


def _push(fleet: LiveFleet, channel: str, directory: Path, version: str) -> None:
    """Push to all replicas, and delete the copies of what this replaces, which replicas keep for a
    rollback: those of a large model would fill the disk.
    """
    if channel == "disk":
        fleet.client.update_weights(directory, version)
    elif channel == "http":
        HttpSender(fleet.client).push_directory(directory, version)
    else:
        files = [load_file(file) for file in sorted(directory.glob("*.safetensors"))]
        with closing(BroadcastSender(fleet.client)) as sender:
            sender.push([pair for file in files for pair in file.items()], version)
    fleet.forget_replaced()


def _disturbed(
    fleet: LiveFleet, requests: list[GenerateRequest], counts: Counter[str]
) -> list[Choice]:
    """Return what the gateway answers while its replicas are drained and one is killed."""
    moves, left = sum(each.moves for each in fleet.replicas().values()), 0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answered, fleet.gateway.url, requests, 0, key=fleet.key)
        for name in fleet.replicas():
            left = 0
            if _busy(fleet, running):
                with suppress(Conflict):  # the last one that is ready
                    fleet.client.drain_replica(name)
                    counts["drains"] += 1
                    left = fleet.open_sequences()
                    fleet.client.resume_replica(name)
        # Each that is open now was at a replica that was drained, and nothing stayed there.
        counts["never_moved_at_most"] += len(requests) - left
        if _busy(fleet, running):
            name = max(fleet.replicas().values(), key=lambda each: each.running).name
            fleet.kill(name)
            counts["kills"] += 1
        _, found = running.result()
    counts["moves"] += sum(each.moves for each in fleet.replicas().values()) - moves
    return found


def _busy(fleet: LiveFleet, running: Future[Any]) -> bool:
    """Wait until sequences decode; return False if the requests have ended before."""
    while not running.done():
        if any(each.running for each in fleet.replicas().values()):
            return True
        time.sleep(POLL_S)
    return False
