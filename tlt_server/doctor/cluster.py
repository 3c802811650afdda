"""Checks of a Ray cluster that is to run the replicas of a fleet. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from importlib import import_module

from tlt_server.config import Config
from tlt_server.doctor.checks import Finding, examine, fail, ok, warn
from tlt_server.fleet.launchers.plan import FleetPlan
from tlt_server.fleet.launchers.ray import Cluster

SLOW_S = 3.0  # until a lost node is noticed
QUICK = '{"health_check_period_ms": 500, "health_check_failure_threshold": 3}'


def examine_cluster(config: Config, arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield what the cluster has, what fits, and how soon it notices a lost node."""
    found: list[Cluster] = []

    def cluster() -> Finding:
        labels, cpus = arguments.ray_labels, arguments.replica_cpus
        found.append(Cluster(FleetPlan(config, ray_labels=labels, replica_cpus=cpus)))
        totals = {
            kind: int(sum(node["Resources"].get(kind, 0) for node in found[0].nodes))
            for kind in ("CPU", "GPU")
        }
        return ok(f"{len(found[0].nodes)} nodes with {totals['CPU']} CPUs, {totals['GPU']} GPUs")

    yield examine("ray cluster", cluster)
    if found:
        yield examine("ray replicas", partial(_replicas, found[0], arguments.replicas))
        yield examine("ray health check", _health_check)


def _replicas(cluster: Cluster, asked: int | None) -> Finding:
    fit = f"{cluster.fit} replicas of {cluster.each} fit"
    if cluster.fit >= (asked or 1):
        return ok(f"{fit} on nodes that nothing else uses")
    found, _, remedy = cluster.lacking_node.partition("; ")
    return fail(f"{fit}, {asked} are asked for" if cluster.fit else found, remedy)


def _health_check() -> Finding:
    try:
        limits = import_module("ray._raylet").Config
        period_s = limits.health_check_period_ms() / 1000
        noticed_s = period_s * limits.health_check_failure_threshold()
    except (ImportError, AttributeError):
        return warn("Ray does not tell its health check", f"start the head with {QUICK}")
    found = f"a lost node is noticed after about {noticed_s:g} s"
    if noticed_s <= SLOW_S:
        return ok(found)
    return warn(found, f"ray start --head --system-config '{QUICK}'")
