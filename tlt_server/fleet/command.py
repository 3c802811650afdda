"""The command `tlt fleet`: starts a gateway, or operates a running one through the client."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

from rich.console import Console

from tlt_client import Client
from tlt_client.wire import ReplicaStatus
from tlt_server.fleet.launchers import LAUNCHERS
from tlt_server.fleet.settings import planned
from tlt_server.process.garbage import loading
from tlt_server.push.calling import call

Verb = Callable[[Client, argparse.Namespace, Console], None]


def run(arguments: argparse.Namespace) -> int:
    if arguments.verb == "serve":
        return _serve(arguments)
    verb = VERBS[arguments.verb]
    return call(arguments, lambda client, console: verb(client, arguments, console))


def _serve(arguments: argparse.Namespace) -> int:
    plan, options = planned(arguments)
    launcher = LAUNCHERS.resolve(arguments.launcher)(plan)
    with loading():
        gateway = import_module("tlt_server.fleet.gateway")
    return int(gateway.serve_fleet(plan.config.resolved(), launcher, options))


def _status(client: Client, arguments: argparse.Namespace, console: Console) -> None:
    for replica in (replicas := client.fleet().replicas):
        versions = ", ".join(f"{role} {version!r}" for role, version in replica.versions.items())
        console.print(
            f"{replica.name:<8} {replica.state:<12} {replica.address or 'no address':<22} "
            f"{replica.running:>4} running {replica.waiting:>4} waiting {replica.moves:>5} moves  "
            f"{versions}{f' | {replica.fault}' if replica.fault else ''}",
            markup=False,
        )
    ready = sum(replica.state == "ready" for replica in replicas)
    console.print(f"{ready} of {len(replicas)} replicas are ready")


def _scale(client: Client, arguments: argparse.Namespace, console: Console) -> None:
    client.scale_fleet(arguments.replicas)
    _status(client, arguments, console)


def _order(order: Callable[[Client, str], ReplicaStatus]) -> Verb:
    def give(client: Client, arguments: argparse.Namespace, console: Console) -> None:
        replica = order(client, arguments.name)
        console.print(f"{replica.name} is {replica.state}", markup=False)

    return give


VERBS: dict[str, Verb] = {
    "status": _status,
    "drain": _order(lambda client, name: client.drain_replica(name)),
    "resume": _order(lambda client, name: client.resume_replica(name)),
    "restart": _order(lambda client, name: client.restart_replica(name)),
    "scale": _scale,
}
