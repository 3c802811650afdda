"""`tlt bench exact --replicas n`: seeded requests through a fleet, against one of its replicas.

Each round pushes other weights by the next channel, asks one replica alone for the responses
without speculation, then sends the same requests to the gateway under the next strategy. Meanwhile
the replicas are drained one after the other, which moves what runs there, and the busiest one is
killed. Tokens and log-prob bits are compared.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tlt_client.channels.http import HttpSender
from tlt_client.errors import Conflict
from tlt_client.wire import Choice
from tlt_server.bench.engines import release
from tlt_server.bench.exact_plan import KINDS, PLANS, PUSHED, STARTED
from tlt_server.bench.exact_runs import write_pushed
from tlt_server.bench.fleets.live import LiveFleet, differing, live
from tlt_server.bench.record import finish, save, steps, wide_console
from tlt_server.bench.rollout import SENT, answered, sampled, set_policy
from tlt_server.bench.settings import fingerprint_of, heading, own, settings_of
from tlt_server.demo.workload import problems_as_requests
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest

POLL_S = 0.02


class Size(NamedTuple):
    rounds: int
    requests: int  # per round
    tokens: int  # per response


SIZES = {"cpu": Size(21, 100, 80), "cuda": Size(7, 72, 256)}
QUICK = Size(2, 12, 192)


def run(args: argparse.Namespace) -> int:
    """Print one line of JSON; 0 when no token and no log-prob differs."""
    settings, console = settings_of(args), wide_console()
    size = QUICK if args.quick else SIZES[args.device]
    arms = [*PLANS[args.device].arms.values()]
    counts, channels = Counter[str](), Counter[str]()
    args.max_running = max(2, size.requests // 2)
    with TemporaryDirectory(prefix="tlt-exact-") as folder:
        root = Path(folder)
        shutil.copytree(settings.model, root / STARTED)
        write_pushed(Path(settings.model), root, on_gpu=args.device == "cuda")
        release()
        more = ("--weight-root", folder, "--weight-channels", "disk,http")
        with (
            live(console, args, size.tokens + 512, more) as fleet,
            steps(console, size.rounds) as step,
        ):
            said = heading(args, "fleet-exact", settings, fingerprint_of(fleet.client))
            said |= {
                "replicas": args.replicas,
                "rounds": size.rounds,
                "strategies": min(size.rounds, len(arms)),
            }
            pushes: dict[str, Callable[[Path, str], Mapping[str, Any]]] = {
                "disk": fleet.client.update_weights,
                "http": HttpSender(fleet.client).push_directory,
            }
            for turn, (policy, strategy) in zip(range(size.rounds), cycle(arms), strict=False):
                channel, directory = ("disk", "http")[turn % 3 % 2], (PUSHED, STARTED)[turn % 2]
                pushes[channel](root / directory, f"{directory}-{turn}")
                channels[channel] += 1
                requests = _requests(settings.model, turn, size)
                set_policy(fleet.client, SetPolicy("off"))
                fleet.client.clear_cache()
                _, expected = answered(fleet.replicas()["r0"].url, requests, 0, key=fleet.key)
                set_policy(fleet.client, SetPolicy(policy, strategy and own(strategy, settings)))
                fleet.client.clear_cache()
                found = _disturbed(fleet, requests, counts)
                unequal = differing(expected, found)
                counts.update(requests=len(found), tokens=sum(len(c.token_ids) for c in found))
                counts.update(tokens_differing=unequal[0], logprobs_differing=unequal[1])
                fleet.all_ready()
                step(f"{turn}: {channel}, {sum(unequal)} differ")
                summary = said | {**counts, "pushes": {**channels}}
                save(args, summary)
    finish(args, summary)
    return 1 if counts["tokens_differing"] or counts["logprobs_differing"] else 0


def _requests(model: Path, turn: int, size: Size) -> list[GenerateRequest]:
    """Return a round's requests; they have the kinds in turns."""
    requests = problems_as_requests(model, size.requests, group=4, seed=100 * turn)
    kinds = [{name: kind[name] for name in SENT if name in kind} for kind in KINDS]
    return [
        sampled(each, **kinds[i % len(kinds)] | {"max_tokens": size.tokens, "ignore_eos": True})
        for i, each in enumerate(requests)
    ]


def _disturbed(
    fleet: LiveFleet, requests: list[GenerateRequest], counts: Counter[str]
) -> list[Choice]:
    """Return what the gateway answers while its replicas are drained and one is killed."""
    moves = sum(each.moves for each in fleet.replicas().values())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answered, fleet.gateway.url, requests, 0, key=fleet.key)
        for name in fleet.replicas():
            if _busy(fleet, running):
                with suppress(Conflict):  # the last one that is ready
                    fleet.client.drain_replica(name)
                    counts["drains"] += 1
                    fleet.client.resume_replica(name)
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
