"""`tlt bench interrupt`: the delay of requests by the spot trainer on the same device.

A real server records rollouts and trains its drafter. Requests for one token arrive at random
moments of training and evaluation; their delay is the time to that token, less the median time of
the same requests while the trainer is paused. Plain decoding is timed before the trainer has begun
and while it is paused within a step, with all its memory taken: the cost of a parked trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import uvloop

from tlt_client import Client
from tlt_client.errors import Conflict
from tlt_server.bench.goodput import percentile
from tlt_server.bench.load import Connections
from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.settings import fingerprint_of, heading, served, settings_of
from tlt_server.errors import StartupError
from tlt_server.wire.records import GenerateRequest

REQUESTS, IDLE_REQUESTS, TIMED = 500, 100, 10
QUICK = 10  # requests of each kind
PROBLEMS, GROUP, ANSWER = 256, 2, 200  # rollouts to train on
DECODED = 128  # tokens of a request that times decoding
WORKING = ("training", "evaluating")
WAIT_S = (0.2, 0.35)  # from the start of a stretch of work to the request
BEGIN_S, POLL_S = 180.0, 0.01
FEATURE_MB = 8192


class Felt(NamedTuple):
    """Seconds of requests, in the order of sending."""

    before: list[float]  # decoding, before the trainer has begun
    idle: list[float]  # one token, the trainer paused
    parked: list[float]  # decoding, the trainer parked
    interrupting: list[tuple[str, float]]  # state of the trainer, seconds to the first token

    def figures(self) -> dict[str, Any]:
        idle_s, before_s, parked_s = map(statistics.median, (self.idle, self.before, self.parked))
        delays = [(state, seconds - idle_s) for state, seconds in self.interrupting]
        in_training_s = [delay_s for state, delay_s in delays if state == "training"]
        return {
            "requests": len(delays),
            "states": {name: sum(state == name for state, _ in delays) for name in WORKING},
            "idle_ms": _milliseconds(self.idle),
            "delay_ms": _milliseconds([delay_s for _, delay_s in delays]),
            "training_delay_p99_ms": round(1e3 * percentile(in_training_s, 99), 2),
            "before_s": round(before_s, 4),
            "parked_s": round(parked_s, 4),
            "parked_slowdown_percent": round(100 * (parked_s / before_s - 1), 2),
        }


def run(args: argparse.Namespace) -> int:
    """Print the figures as one line of JSON."""
    from tlt_server.demo.workload import problems_as_requests

    settings, console = settings_of(args), wide_console()
    problems = PROBLEMS // 4 if args.quick else PROBLEMS
    requests = problems_as_requests(
        settings.model, problems * GROUP, group=GROUP, seed=args.seed, max_tokens=ANSWER
    )
    asked, idle, each = (QUICK,) * 3 if args.quick else (REQUESTS, IDLE_REQUESTS, TIMED)
    with TemporaryDirectory(prefix="tlt-interrupt-") as state:
        flags = [
            *("--model", str(settings.model), "--drafter", settings.drafter),
            *("--device", args.device, "--dtype", str(settings.dtype)),
            *("--threads", str(settings.threads), "--max-model-len", "1024"),
            *("--max-running", "64", "--state-dir", state, "--log-level", "warning"),
            *("--drafter-training", "idle", "--drafter-feature-mb", str(FEATURE_MB)),
        ]
        with (
            served(console, flags) as (server, client),
            steps(console, 2 * each + idle + asked, "decode") as step,
        ):
            probe = Probe(server.url, requests, args.seed, step)
            felt = interrupted(client, probe, asked, idle, each)
            trainer, fingerprint = client.drafter()["trainer"], fingerprint_of(client)
            probe.close()
    figures = heading(args, "interrupt", settings, fingerprint) | felt.figures()
    done = {"parkings": trainer["parkings"], "trained_steps": trainer["steps"]}
    finish(args, figures | done)
    return 0


def interrupted(client: Client, probe: Probe, asked: int, idle: int, each: int) -> Felt:
    """Time `each` decoding requests before training and alongside a parked trainer, `idle` ones
    while it is paused, and `asked` ones that interrupt it.
    """
    with plain(client):
        before_s = [probe.seconds(DECODED, "decode") for _ in range(each)]
    client.generate([probe.body(r, ANSWER) for r in probe.requests])
    until_working(client)
    client.pause_drafter_training()
    idle_s = [probe.seconds(1, "paused") for _ in range(idle)]
    with plain(client):
        parked_s = [probe.seconds(DECODED, "parked") for _ in range(each)]
    client.resume_drafter_training()
    interrupting = []
    for _ in range(asked):
        state = until_working(client)
        time.sleep(probe.draw.uniform(*WAIT_S))
        interrupting.append((state, probe.seconds(1, state)))
    return Felt(before_s, idle_s, parked_s, interrupting)


class Probe:
    """Sends one request at a time, each with a different prompt."""

    def __init__(
        self, url: str, requests: list[GenerateRequest], seed: int, step: Callable[[str], None]
    ) -> None:
        self.draw, self.requests, self._step = Random(seed), requests, step
        self._turns = cycle(requests)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._connections = Connections(url)

    def body(self, request: GenerateRequest, tokens: int) -> dict[str, Any]:
        sampling = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": tokens == DECODED}
        return {"token_ids": request.token_ids, "seed": request.seed, "sampling": sampling}

    def seconds(self, tokens: int, name: str) -> float:
        """Return the time of a whole answer of `tokens` tokens; the bar shows the name."""
        self._step(name)
        content = msgspec.json.encode({"requests": [self.body(next(self._turns), tokens)]})
        return self._runner.run(self._connections.asked("/generate", content)).seconds

    def close(self) -> None:
        self._connections.close()
        self._runner.close()


@contextmanager
def plain(client: Client) -> Iterator[None]:
    """Decode without speculation, so that every request takes the same number of steps."""
    client.set_strategy("off")
    yield
    client.set_strategy("goodput")


def until_working(client: Client) -> str:
    """Wait until the trainer works, ordering a round if necessary; return its state. `StartupError`
    if it does not start.
    """
    until_s = time.monotonic() + BEGIN_S
    while time.monotonic() < until_s:
        trainer = client.drafter()["trainer"]
        if trainer["state"] in WORKING:
            return str(trainer["state"])
        if trainer["state"] in ("paused", "failed"):
            raise StartupError(f"the trainer is {trainer['state']}: {trainer['reason']}")
        if trainer["state"] == "idle":
            with suppress(Conflict):  # it has begun meanwhile
                client.train_drafter()
        time.sleep(POLL_S)
    raise StartupError(f"the trainer did not begin within {BEGIN_S:g} s; it says: {trainer}")


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    parts = (50, 90, 99, 100)
    return {f"p{part}": round(1e3 * percentile(seconds, part), 2) for part in parts}
