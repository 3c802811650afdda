"""A real fleet of a test's own: a gateway, and replicas on this machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import until
from tlt_client import Client
from tlt_client.wire import ReplicaStatus
from tlt_server.demo.server import ServerProcess


def fleet(state: Path, *flags: str, replicas: int = 2, own: Sequence[str] = ()) -> ServerProcess:
    """Return a fleet to start; `flags` are its replicas', `own` the gateway's."""
    own = ("--replicas", str(replicas), "--state-dir", str(state), *own)
    return ServerProcess(*own, "--", *flags, "--threads", "1", verb=("fleet", "serve"))


class Apart(ExitStack):
    """Replicas that others start, as on machines of their own, and a gateway that finds their
    addresses in a file.
    """

    def __init__(self, place: Path, replicas: int, *flags: str) -> None:
        super().__init__()
        self.place, self._flags, self._addresses = place, flags, place / "addresses"
        self._links: dict[str, str] = {}
        self.servers: dict[str, ServerProcess] = {}
        for number in range(replicas):
            self.start(f"r{number}")

    def start(self, name: str) -> None:
        """Start a replica, again if it has ended, and list its address."""
        own = ("--link-port", "0", "--state-dir", str(self.place / name), "--threads", "1")
        server = self.enter_context(ServerProcess(*self._flags, *own))
        [self._links[name]] = re.findall("listening on (.+) for a gateway", "\n".join(server.lines))
        self.servers[name] = server
        listed = self._addresses.with_suffix(".new")
        listed.write_text("\n".join(self._links.values()))
        listed.rename(self._addresses)

    def named(self, address: str) -> str:
        """Return the name of the replica at a link's address."""
        return next(name for name, link in self._links.items() if link == address)

    def gateway(self, *own: str) -> ServerProcess:
        """Return a gateway to start; a further one is the same fleet's."""
        where = ("--launcher", "static", "--addresses", f"file:{self._addresses}")
        where += ("--state-dir", str(self.place / "gateway"))
        return ServerProcess(*where, *own, "--", *self._flags, verb=("fleet", "serve"))


def replica_process(fleet: ServerProcess, name: str) -> int:
    """Return the process id of a replica, a child of the gateway."""
    children = Path(f"/proc/{fleet.process.pid}/task").glob("*/children")
    for pid in {pid for task in children for pid in task.read_text().split()}:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if any(word.endswith(f"replicas/{name}") for word in words):
            return int(pid)
    raise AssertionError(f"{name} does not run: {fleet.lines[-20:]}")


def ready(client: Client, replicas: int = 2) -> list[ReplicaStatus]:
    """Wait until that many are used, and return all."""
    until(lambda: sum(each.state == "ready" for each in client.fleet().replicas) == replicas)
    return client.fleet().replicas


def busiest(client: Client) -> str:
    """Return the name of the replica that runs the most sequences, once one runs any."""

    def found() -> ReplicaStatus:
        return max(client.fleet().replicas, key=lambda each: each.running)

    until(lambda: found().running > 0)
    return found().name


def moves(client: Client) -> Counter[str]:
    """Return how many sequences have moved, by reason."""
    samples = (
        sample
        for family in text_string_to_metric_families(client.metrics())
        for sample in family.samples
    )
    return Counter(
        {
            sample.labels["reason"]: int(sample.value)
            for sample in samples
            if sample.name == "tlt_moves_total"
        }
    )
