"""The gateway of a fleet: the frontend of a server, on replicas in place of an engine process."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_DGRAM, socket
from typing import Any

from tlt_server.build import Footing, admission, serve_with
from tlt_server.config import ResolvedConfig
from tlt_server.errors import EngineFailed
from tlt_server.fleet.drafter import FleetDrafter
from tlt_server.fleet.launchers.plan import FleetPlan
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.fleet_file import FleetFile
from tlt_server.frontend.link.idling import SLOWER, IdleReplicas
from tlt_server.frontend.link.launching import Launcher
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.moving import Mover
from tlt_server.frontend.link.operating import FleetOperations
from tlt_server.frontend.link.remote import RemoteLink
from tlt_server.frontend.link.starting import ProgressLines
from tlt_server.frontend.service import Service
from tlt_server.metrics import Metrics
from tlt_server.wire.link import Attach, largest_event


def serve_fleet(plan: FleetPlan, launcher: Launcher) -> int:
    """Serve as a gateway until SIGTERM or SIGINT (drains, returns 0) or until every replica refuses
    it (returns 1). `StartupError` if the launcher can start none.
    """
    return serve_with(plan.config.resolved(), partial(gateway, launcher, plan))


def gateway(
    launcher: Launcher,
    plan: FleetPlan,
    config: ResolvedConfig,
    directory: Path,
    metrics: Metrics,
    progress: ProgressLines,
) -> Footing:
    """Return what the frontend of a gateway stands on."""
    loop = asyncio.get_running_loop()
    file = FleetFile(
        config.state_dir or directory, lambda error: loop.call_soon_threadsafe(fleet.end, error)
    )
    url = own_url(config)
    largest = largest_event(config.max_model_len, config.max_logprobs)

    def attach() -> Attach:
        return Attach(
            fleet=file.record.fleet, epoch=file.record.epoch, gateway=url, take_over=plan.take_over
        )

    async def connect(fleet: Fleet, member: Member) -> None:
        how: dict[str, Any] = {"key": plan.key, "tls": plan.tls, "largest": largest}
        await RemoteLink(member.address.link, attach, fleet, member, **how).run()

    fleet = Fleet(admission(config), metrics, launcher, connect, file, url=url, key=plan.key)
    placer, client = fleet.replicas.placer, fleet.client
    mover = Mover(placer, balance=plan.rebalance, consolidate=plan.consolidate)
    operations = FleetOperations(fleet, mover)
    client.replica.start.checked.set()  # the port opens before there is a replica

    async def run(service: Service) -> EngineFailed:
        drafter = FleetDrafter(service.session, fleet, plan)
        idle = IdleReplicas(fleet, plan.sleep_idle, SLOWER + plan.consolidate)
        works = [operations.run()]
        works += [drafter.run()] if config.drafter_training != "off" else []
        works += [idle.run()] if plan.sleep_idle else []
        tasks = [asyncio.create_task(work) for work in works]
        try:
            error = await fleet.run()
            progress.gave_up(error.message)
            return error
        finally:
            for task in tasks:
                task.cancel()

    return Footing(client, run)


def own_url(config: ResolvedConfig) -> str:
    """Return the address by which replicas reach this gateway. Where it listens on all addresses,
    that is the one by which this host reaches others.
    """
    host = config.host
    if host in ("0.0.0.0", "::"):
        family, far = (AF_INET, "192.0.2.1") if host == "0.0.0.0" else (AF_INET6, "2001:db8::1")
        with contextlib.suppress(OSError), socket(family, SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # sends nothing, only asks for a route
            host = probe.getsockname()[0]
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"
