"""`python -m benchmarks.record_faults [--commit NAME] [--json FILE] -- FLAGS OF tlt serve`: kill
and stop ranks of a server's engine; measure when clients see the error and are served again.

One stream runs at each fault. The fault is noticed when that stream ends with its error. The server
is back when it has answered the same request, with the tokens that the stream began with.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.recording import RESULTS, Served
from tests.processes import engine, ranks
from tlt_client import Client, TltClientError
from tlt_client.wire import ItemResult, Token
from tlt_server.demo.server import ServerProcess
from tlt_server.errors import StartupError

RECORD = RESULTS / "faults-tp2-gpu.json"
BEFORE, LONG = 64, 4000  # tokens: before a fault, asked for
PROMPT = list(range(1, 17))
BACK_S = 300.0  # for the next engine to be ready
LOOK_S = 0.02


class Fault(NamedTuple):
    what: str
    rank: int
    signal: int


FAULTS = (
    Fault("killed", 1, signal.SIGKILL),
    Fault("killed", 0, signal.SIGKILL),
    Fault("stopped", 1, signal.SIGSTOP),
    Fault("stopped", 0, signal.SIGSTOP),
)


class Unexpected(Exception):
    """Something other than one typed error and the same tokens again."""


def main(arguments: Sequence[str]) -> int:
    """Return 0; 1 where a client was told anything else than it should be, 2 without a server."""
    served = Served.asked(arguments, __doc__, RECORD)
    try:
        rows = faults(served.flags, served.width)
    except StartupError as error:
        print(f"benchmarks.record_faults: {error}", file=sys.stderr)
        return 2
    except Unexpected as error:
        print(f"benchmarks.record_faults: {error}", file=sys.stderr)
        return 1
    on_gpu = served.device != "cpu" and torch.cuda.is_available()
    served.write("benchmarks.record_faults", "faults", rows, on_gpu=on_gpu)
    return 0


def faults(flags: Sequence[str], width: int) -> list[dict[str, Any]]:
    """Start one server and let each fault happen to it in turn."""
    rows = []
    with (
        ServerProcess(*flags, "--max-restarts", str(len(FAULTS))) as server,
        Client(server.url, timeout_s=BACK_S) as client,
    ):
        for number, fault in enumerate(each for each in FAULTS if each.rank < width):
            # A prompt that runs at two faults is refused as their cause, so each has its own.
            request = {"id": "one", "token_ids": [*PROMPT, 1 + number], "seed": 0}
            rows.append(happen(fault, request, server, client))
            print(rows[-1], flush=True)
    return rows


def happen(
    fault: Fault, request: dict[str, Any], server: ServerProcess, client: Client
) -> dict[str, Any]:
    """Return seconds from the signal until the stream's error, and until a new answer."""
    first = engine(server.process.pid)
    victim = [first, *ranks(first)][fault.rank]
    sampling = {"max_tokens": LONG, "ignore_eos": True}
    tokens: list[int] = []
    signalled_s = 0.0
    for event in client.stream([request], sampling=sampling):
        if isinstance(event, Token):
            tokens += event.token_ids
            if len(tokens) >= BEFORE and not signalled_s:
                os.kill(victim, fault.signal)
                signalled_s = time.monotonic()
        elif isinstance(event, ItemResult) and (
            not event.error or event.error.code != "engine_failed"
        ):
            raise Unexpected(f"the stream of {fault.what} rank {fault.rank} ended with {event}")
    if not signalled_s:
        raise Unexpected(f"the stream ended after {len(tokens)} tokens, before any fault")
    noticed_s = time.monotonic() - signalled_s
    again = _answer(client, request, signalled_s + BACK_S)
    if again != tokens[:BEFORE]:
        raise Unexpected(f"the tokens differ after {fault.what} rank {fault.rank}")
    back_s = time.monotonic() - signalled_s
    return {
        "fault": fault.what,
        "rank": fault.rank,
        "noticed_s": round(noticed_s, 3),
        "back_s": round(back_s, 2),
    }


def _answer(client: Client, request: dict[str, Any], until_s: float) -> list[int]:
    said: object = "nothing"
    while time.monotonic() < until_s:
        try:
            [result] = client.generate(
                [request], sampling={"max_tokens": BEFORE, "ignore_eos": True}
            ).results
            if result.choices:
                return result.choices[0].token_ids
            said = result.error
        except TltClientError as error:
            said = error
        time.sleep(LOOK_S)
    raise Unexpected(f"the server did not answer again in {BACK_S:g} s; it said: {said}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
