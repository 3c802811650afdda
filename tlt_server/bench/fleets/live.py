"""A real fleet of a bench's own: a gateway, and replicas that share the GPUs or the processors of
this machine. A replica asked by its own address is the one server that a fleet is compared with.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
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
from tlt_server.bench.load import samples
from tlt_server.bench.settings import serve_flags, served
from tlt_server.demo.server import ServerProcess
from tlt_server.errors import StartupError
from tlt_server.settings.server import available_processors
from tlt_server.wire.kept import CURRENT, WEIGHTS

READY_S, POLL_S = 300.0, 0.05


class LiveFleet(NamedTuple):
    gateway: ServerProcess
    client: Client
    directory: Path
    key: str
    flags: list[str]  # the replicas'

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

    def open_sequences(self) -> int:
        return int(self.metric("tlt_open_sequences"))

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric of the gateway."""
        found = (each for each in samples(self.client) if each.name == name)
        return next(each.value for each in found if labels.items() <= each.labels.items())

    def kill(self, name: str) -> float:
        """End a replica's server without grace, and its engine with it; return when, by
        time.perf_counter().
        """
        process, at_s = self.process(name), time.perf_counter()
        os.kill(process, signal.SIGKILL)
        return at_s

    def process(self, name: str) -> int:
        """Return the process of a replica's server."""
        words = (b"serve", str(self.directory / "replicas" / name).encode())
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if all(word in command for word in words):
                return int(process.name)
        raise StartupError(f"there is no process of the replica {name}")

    def forget_replaced(self) -> None:
        """Delete the weights that each replica keeps for a rollback."""
        for kept in self.directory.glob(f"replicas/*/{WEIGHTS}/{CURRENT}"):
            live = kept.read_text()
            for folder in kept.parent.iterdir():
                if folder.is_dir() and folder.name not in live:
                    shutil.rmtree(folder, ignore_errors=True)


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
        flags = [*serve_flags(args, longest), "--api-key-file", str(keys), *more]
        with served(console, (*own, *flags), 600, key, ("fleet", "serve")) as (gateway, client):
            fleet = LiveFleet(gateway, client, directory, key, flags)
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
