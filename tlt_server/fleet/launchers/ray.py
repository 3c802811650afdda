"""The launcher `ray`: one placement group and one actor per replica on a Ray cluster. The actor
runs `tlt serve` as its child and starts it again; Ray starts the actor again, perhaps elsewhere.

Only flags, addresses and log lines pass through Ray. Ray fences nothing: a server whose raylet has
died may serve on, so the gateway alone decides whose tokens count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import structlog

from tlt_server.errors import StartupError
from tlt_server.fleet.launchers.child import Change, Child, StartedReplicas, kept
from tlt_server.fleet.launchers.plan import FleetPlan
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.settings.addresses import is_loopback

POLL_S = 0.5
OTHER_CPUS = 3  # processes next to the ranks: frontend, reading process, trainer

log = structlog.get_logger()


def on_ray(plan: FleetPlan) -> StartedReplicas:
    return StartedReplicas(plan.replicas or 0, (cluster := Cluster(plan)).live, cluster.lacking)


class ReplicaActor:
    """The actor on a node."""

    def __init__(self, child: Child) -> None:
        """`child`: what to start, without the node's own host and place."""
        from ray.util import get_node_ip_address

        host = get_node_ip_address()
        self._child = child._replace(host=host, place=f"node {host}")
        self._seen = ReplicaAddress(child.name, "", self._child.place, "it starts")
        self._task: asyncio.Task[NoReturn] | None = None

    async def look(self) -> tuple[str, ...]:
        """Return link, place and fault."""
        if self._task is None:
            live = partial(self._child.live, say=partial(print, file=sys.stderr, flush=True))
            serving = kept(self._child.name, live, self._change, proven=True)
            self._task = asyncio.create_task(serving)
            threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
        return self._seen[1:]

    def _change(self, **fields: str) -> None:
        self._seen = self._seen._replace(**fields)


def _end_with(raylet: int) -> None:
    """End this process, and so its server, when the raylet has ended. Ray's own check takes a
    raylet that was killed and not reaped for alive.
    """
    stat = Path(f"/proc/{raylet}/stat")
    with contextlib.suppress(OSError):  # it was reaped
        while os.getppid() == raylet and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(POLL_S)
    os._exit(1)


class Cluster:
    """The Ray cluster at RAY_ADDRESS, and replicas on it."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan, self._ray = plan, connected()
        self.nodes = [node for node in self._ray.nodes() if node["Alive"]]
        check_token(self.nodes)
        self.bundle = bundle_of(plan, self.nodes)
        self.fit = room(self.nodes, self.bundle, plan.ray_labels or {})
        self._flags = list(plan.flags)
        if "GPU" not in self.bundle and plan.config.threads is None:
            self._flags += ["--threads", str(self.bundle["CPU"])]

    def lacking(self, number: int) -> str:
        """Return what keeps every replica from being placed; a part of them may wait for nodes."""
        if self.fit < number:
            log.warning("replicas_wait_for_nodes", replicas=number, fit=self.fit, each=self.bundle)
        return "" if self.fit else self.lacking_node

    @property
    def lacking_node(self) -> str:
        where = f" and the labels {labels}" if (labels := self.plan.ray_labels) else ""
        return (
            f"a replica needs {self.each} of one node{where}, and no node of the Ray cluster has "
            "them; lower --tensor-parallel or --replica-cpus, correct --ray-labels, or add nodes"
        )

    @property
    def each(self) -> str:
        return " and ".join(f"{count} {kind}" for kind, count in self.bundle.items())

    async def live(self, name: str, change: Change) -> NoReturn:
        """Place an actor and follow it until cancelled; Ray restarts it."""
        actor, group = await asyncio.to_thread(self._place, name)
        change(fault=f"it waits for a node with {self.bundle}")
        try:
            while True:
                try:
                    answer = actor.look.remote().future()
                    link, place, fault = await asyncio.wrap_future(answer)
                    change(link=link, place=place, fault=fault)
                except Exception as error:  # the head may be away
                    change(link="", fault=f"Ray starts its actor again: {type(error).__name__}")
                await asyncio.sleep(POLL_S)
        finally:
            await asyncio.to_thread(self._remove, actor, group)

    def _place(self, name: str) -> tuple[Any, Any]:
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        plan, labels = self.plan, dict(self.plan.ray_labels or {})
        selectors = {"bundle_label_selector": [labels]} if labels else {}
        group = placement_group([self.bundle], strategy="STRICT_PACK", **selectors)
        actor = self._ray.remote(ReplicaActor).options(
            num_cpus=self.bundle["CPU"],
            num_gpus=self.bundle.get("GPU", 0),
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        )
        child = Child(name, self._flags, plan.variables(), plan.directory(name), plan.stop_s)
        return actor.remote(child), group

    def _remove(self, actor: Any, group: Any) -> None:
        try:
            self._ray.kill(actor)
            self._ray.util.remove_placement_group(group)
        except Exception as error:  # what asks for it must end, with or without Ray
            log.warning("actor_not_removed", reason=f"{type(error).__name__}: {error}")


def connected() -> Any:
    """Return the module `ray`, connected to a running cluster."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # replicas write equal lines
    try:
        import ray
    except ImportError:
        raise StartupError(
            "--launcher is ray, which is not installed; pip install 'tlt-server[fleet]', here and "
            "on every node"
        ) from None
    if not ray.is_initialized():
        try:
            address = os.environ.get("RAY_ADDRESS", "auto")
            ray.init(address, logging_level=logging.WARNING, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            said = " ".join(str(error).split())[:300]
            raise StartupError(
                f"no Ray cluster answers ({said}); start one (ray start --head), set RAY_ADDRESS "
                "to its head, and give this process its token"
            ) from None
    return ray


def check_token(nodes: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a cluster that other machines can reach and that asks for no token."""
    exposed = [node["NodeManagerAddress"] for node in nodes]
    exposed = [address for address in exposed if not is_loopback(address)]
    if exposed and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise StartupError(
            f"the Ray node {exposed[0]} can be reached by other machines, and RAY_AUTH_MODE is "
            f"{os.environ.get('RAY_AUTH_MODE') or 'not set'}; set RAY_AUTH_MODE=token on every "
            "node and here (ray get-auth-token --generate makes the token), or start Ray with "
            "--node-ip-address 127.0.0.1"
        )


def bundle_of(plan: FleetPlan, nodes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the resources of a replica: no GPU if its device is auto and there is none."""
    each = plan.gpus_each
    if plan.config.device is None and not any("GPU" in node["Resources"] for node in nodes):
        each = 0
    cpus = plan.replica_cpus or OTHER_CPUS + plan.config.tensor_parallel
    return {"CPU": cpus, "GPU": each} if each else {"CPU": cpus}


def room(
    nodes: Iterable[Mapping[str, Any]], bundle: Mapping[str, int], labels: Mapping[str, str]
) -> int:
    """Return how many replicas fit on all nodes, if nothing else uses them. Selectors with
    operators are taken to match.
    """
    return sum(
        min(int(node["Resources"].get(kind, 0) // count) for kind, count in bundle.items())
        for node in nodes
        if all(
            node["Labels"].get(name) == value for name, value in labels.items() if value.isalnum()
        )
    )
