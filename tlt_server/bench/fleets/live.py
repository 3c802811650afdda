"""A real fleet of a bench's own: a gateway, and replicas that share the GPUs or the processors of
this machine. A replica asked by its own address is the one server that a fleet is compared with.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console

from tlt_client import Client
from tlt_client.wire import Choice, ReplicaStatus
from tlt_server.bench.settings import serve_flags, served
from tlt_server.demo.server import ServerProcess
from tlt_server.errors import StartupError
from tlt_server.settings.server import available_processors

READY_S, POLL_S = 300.0, 0.05


class LiveFleet(NamedTuple):
    gateway: ServerProcess
    client: Client
    directory: Path
    key: str

    def replicas(self) -> dict[str, ReplicaStatus]:
        return {replica.name: replica for replica in self.client.fleet().replicas}

    def until(self, reached: Callable[[dict[str, ReplicaStatus]], bool]) -> float:
        """Wait for a state of the replicas; return the seconds."""
        began_s = time.perf_counter()
        while not reached(replicas := self.replicas()):
            if time.perf_counter() - began_s > READY_S:
                raise StartupError(f"the replicas are still {replicas} after {READY_S:g} s")
            time.sleep(POLL_S)
        return time.perf_counter() - began_s

    def all_ready(self) -> float:
        return self.until(lambda found: all(each.state == "ready" for each in found.values()))

    def kill(self, name: str) -> None:
        """End a replica's server without grace; its engine ends with it."""
        words = (b"serve", str(self.directory / "replicas" / name).encode())
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if all(word in command for word in words):
                return os.kill(int(process.name), signal.SIGKILL)
        raise StartupError(f"there is no process of the replica {name} to kill")


@contextmanager
def live(
    console: Console, args: argparse.Namespace, longest: int, more: Sequence[str] = ()
) -> Iterator[LiveFleet]:
    """Start a fleet of `args.replicas` and wait until all are ready. longest: see `settings_of`."""
    if args.device == "cpu" and args.threads is None:
        args.threads = max(1, available_processors() // args.replicas)

    with TemporaryDirectory(prefix="tlt-fleet-") as folder:
        directory, key = Path(folder).resolve() / "state", secrets.token_urlsafe()
        keys = directory.with_name("keys")
        keys.write_text(f"{key} scopes=data,push-weights,operate name=bench\n")
        own = ("--replicas", str(args.replicas), "--state-dir", str(directory), "--")
        flags = (*own, *serve_flags(args, longest), "--api-key-file", str(keys), *more)
        with served(console, flags, 600, key, ("fleet", "serve")) as (gateway, client):
            fleet = LiveFleet(gateway, client, directory, key)
            fleet.all_ready()
            yield fleet


def differing(some: Sequence[Choice], others: Sequence[Choice]) -> tuple[int, int]:
    """Return how many tokens, and how many log-probs, of two lists of choices differ."""

    def count(one: Sequence[float], other: Sequence[float]) -> int:
        unequal = sum(a != b for a, b in zip(one, other, strict=False))
        return unequal + abs(len(one) - len(other))

    pairs = [*zip(some, others, strict=True)]
    return (
        sum(count(a.token_ids, b.token_ids) for a, b in pairs),
        sum(count(a.logprobs, b.logprobs) for a, b in pairs),
    )
