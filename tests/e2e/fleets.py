"""A real fleet of a test's own: a gateway, and replicas on this machine."""

from __future__ import annotations

from collections.abc import Sequence
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


def moves(client: Client, reason: str) -> float:
    """Return how many sequences have moved for that reason."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(client.metrics())
        for sample in family.samples
        if sample.name == "tlt_moves_total" and sample.labels["reason"] == reason
    )
