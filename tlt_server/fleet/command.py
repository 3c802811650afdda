"""The command `tlt fleet`: starts a gateway, or operates a running one through the client."""

from __future__ import annotations

import argparse
from importlib import import_module

from rich.console import Console

from tlt_client import Client
from tlt_server.fleet.launchers import LAUNCHERS
from tlt_server.fleet.settings import planned
from tlt_server.process.garbage import loading
from tlt_server.push.calling import call


def run(arguments: argparse.Namespace) -> int:
    if arguments.verb != "serve":
        return call(arguments, lambda client, console: _operate(client, arguments, console))
    plan = planned(arguments)
    launcher = LAUNCHERS.resolve(arguments.launcher)(plan)
    with loading():
        gateway = import_module("tlt_server.fleet.gateway")
    return int(gateway.serve_fleet(plan, launcher))


def _operate(client: Client, arguments: argparse.Namespace, console: Console) -> None:
    orders = {
        "drain": client.drain_replica,
        "resume": client.resume_replica,
        "restart": client.restart_replica,
    }
    if order := orders.get(arguments.verb):
        replica = order(arguments.name)
        console.print(f"{replica.name} is {replica.state}", markup=False)
        return
    scales = arguments.verb == "scale"
    replicas = (client.scale_fleet(arguments.replicas) if scales else client.fleet()).replicas
    for replica in replicas:
        versions = ", ".join(f"{role} {version!r}" for role, version in replica.versions.items())
        console.print(
            f"{replica.name:<8} {'asleep' if replica.asleep else replica.state:<12} "
            f"{replica.address or 'no address':<22} "
            f"{replica.running:>4} running {replica.waiting:>4} waiting {replica.moves:>5} moves  "
            f"{versions}{f' | {replica.fault}' if replica.fault else ''}",
            markup=False,
        )
    ready = sum(replica.state == "ready" for replica in replicas)
    console.print(f"{ready} of {len(replicas)} replicas are ready")
