"""Replicas on a real Ray cluster of a head and two nodes. With a small program in place of
`tlt serve` an actor is killed, a node is removed, and a raylet is killed and left unreaped; with
real servers a rollout goes on over a killed actor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleets import busiest, ready
from tests.e2e.test_lifecycle import FAST_START
from tests.e2e.test_rollouts import (
    ITEMS,
    LONG,
    await_tokens,
    check_same,
    undisturbed,  # noqa: F401 (a fixture)
)
from tests.unit.test_launchers import Seen, all_linked, ended, plan, running
from tests.waiting import until
from tlt_client import Client, Reply
from tlt_server.__main__ import _parse
from tlt_server.demo.server import ServerProcess
from tlt_server.doctor.cluster import examine_cluster
from tlt_server.fleet.launchers import child
from tlt_server.fleet.launchers import ray as on_ray
from tlt_server.fleet.launchers.plan import FleetPlan

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="make test-long installs it"),
]

SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[sys.argv.index("--host") + 1], 0))
host, port = listener.getsockname()
print(f"tlt: listening on {host}:{port} for a gateway", file=sys.stderr, flush=True)
while True: listener.accept()[0].close()
"""
# The settings of docs/fleet.md, with which Ray notices a lost node within two seconds.
QUICK = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}


class StandIn(on_ray.ReplicaActor):
    """An actor with a small program in place of `tlt serve`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        child.COMMAND = (sys.executable, "-c", SERVER)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # read when Ray is imported
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(on_ray, "ReplicaActor", StandIn)
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=6, labels={"kind": "rollout"})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def owner(asked: FleetPlan, name: str) -> int:
    """Return the pid of the server that holds a replica's directory."""
    (server,) = child.servers_of(asked.directory(name))  # type: ignore[arg-type]
    return server


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def answers(link: str) -> bool:
    host, _, port = link.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60):
        return True


def test_replicas_on_ray_outlive_actors_nodes_and_raylets(cluster: Any, tmp_path: Path) -> None:
    asked = plan(tmp_path, 3, state_dir=tmp_path, ray_labels={"kind": "rollout"})._replace(
        replica_cpus=2
    )
    line = "doctor --launcher ray --replicas 6 --replica-cpus 2 --ray-labels kind=rollout"
    found = examine_cluster(asked.config, _parse(line.split()))
    assert [(each.status, each.found) for each in found] == [
        ("ok", "3 nodes with 12 CPUs, 0 GPUs"),
        ("ok", "6 replicas of 2 CPU fit on nodes that nothing else uses"),
        ("ok", "a lost node is noticed after about 1.5 s"),
    ]
    asyncio.run(outlive(cluster, asked))


def test_rollout_on_ray_over_a_killed_actor_is_that_of_one_server(
    cluster: Any,
    undisturbed: Reply,  # noqa: F811
    tmp_path: Path,
) -> None:
    own = ["--launcher", "ray", "--replicas", "2", "--replica-cpus", "2", "--state-dir", tmp_path]
    flags = *map(str, own), "--", *FAST_START, "--threads", "1"
    asked = plan(tmp_path, 2, state_dir=tmp_path)
    with (
        ServerProcess(*flags, verb=("fleet", "serve")) as fleet,
        Client(fleet.url, timeout_s=60) as client,
    ):
        ready(client)
        rollout = client.rollout(client.generate(ITEMS, sampling=LONG, detach=True).id)
        await_tokens(rollout, 300)
        os.kill(parent(owner(asked, busiest(client))), signal.SIGKILL)
        check_same(rollout.result(400), undisturbed)
        ready(client)
        last = [owner(asked, name) for name in ("r0", "r1")]
    for server in last:
        until(lambda server=server: ended(server))  # type: ignore[misc]


async def outlive(cluster: Any, asked: FleetPlan) -> None:
    async with running(on_ray.on_ray(asked)) as seen:
        await seen.until(lambda found: len(found) == 3 and all_linked(found))
        servers = {name: owner(asked, name) for name in ("r0", "r1", "r2")}

        await lose(seen, asked, "r0", lambda server: os.kill(parent(server), signal.SIGKILL))
        assert {name: owner(asked, name) for name in ("r1", "r2")} == {
            name: servers[name] for name in ("r1", "r2")
        }
        await lose(seen, asked, "r1", lambda server: remove(cluster, node_of(cluster, server)))
        cluster.add_node(num_cpus=6, labels={"kind": "rollout"})
        zombie = node_of(cluster, owner(asked, "r2"))
        await lose(seen, asked, "r2", lambda server: os.kill(raylet(zombie), signal.SIGKILL))
        assert state(raylet(zombie)) == "Z"  # Ray's own workers take it for alive
        last = {name: owner(asked, name) for name in ("r0", "r1", "r2")}
    for server in last.values():
        until(lambda server=server: ended(server))  # type: ignore[misc]


async def lose(seen: Seen, asked: FleetPlan, name: str, by: Callable[[int], None]) -> None:
    """Lose a replica, and wait until it is back at another address, without its old server."""
    (before,) = [each.link for each in seen.addresses if each.name == name]
    server = owner(asked, name)
    by(server)
    await seen.until(lambda found: all_linked(found) and found[name].link != before)
    assert ended(server) and owner(asked, name) != server
    assert all(answers(each.link) for each in seen.addresses)


def node_of(cluster: Any, server: int) -> Any:
    """Return the node on which a server's actor runs."""
    (node,) = [each for each in cluster.worker_nodes if raylet(each) == parent(parent(server))]
    return node


def remove(cluster: Any, node: Any) -> None:
    cluster.remove_node(node, allow_graceful=False)


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)
