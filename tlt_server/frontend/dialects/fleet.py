"""Routes for the operators of a fleet: state, drain and restart of its replicas, their number, and
the targets that Prometheus scrapes. A server that is not a gateway answers 409.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import structlog
from msgspec import Meta, Struct

from tlt_client.wire import FleetStatus, ReplicaStatus
from tlt_server.errors import Conflict, NotFound
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import Strict, shown
from tlt_server.frontend.link.launching import MAX_REPLICAS
from tlt_server.frontend.link.operating import FleetOperations
from tlt_server.frontend.service import Service

ReplicaName = Annotated[str, "a name in GET /fleet"]
ReplicaOrder = Annotated[Literal["drain", "resume", "restart"], "what it should do"]
ROUTES = Routes(needs="operate", engine_fails=False)


class ScaleFields(Strict, frozen=True, kw_only=True):
    replicas: Annotated[int, "servers that the fleet should have", Meta(ge=1, le=MAX_REPLICAS)]


class ScrapeTarget(Struct, frozen=True):
    """An entry of Prometheus' HTTP service discovery."""

    targets: Annotated[list[str], "one replica: host and port of its HTTP server"]
    labels: Annotated[dict[str, str], "the replica's name, and the scheme to scrape it by"]


@ROUTES.get("/fleet", raises=(Conflict,))
async def replicas(service: Service) -> FleetStatus:
    """List the replicas of this gateway: state, versions, load, moves and the last fault."""
    return _state(_fleet(service))


@ROUTES.get("/fleet/targets", raises=(Conflict,))
async def targets(service: Service) -> list[ScrapeTarget]:
    """List the replicas' addresses for Prometheus (`http_sd_configs`). Scraping takes a key of the
    scope `operate` at each replica, which `tlt fleet serve ... -- --api-key-file KEYS` gives them.
    """
    found = [(each.name, urlsplit(each.url)) for each in _fleet(service).status() if each.url]
    return [
        ScrapeTarget([url.netloc], {"replica": name, "__scheme__": url.scheme})
        for name, url in found
    ]


@ROUTES.post("/fleet/replicas", raises=(Conflict,))
async def scale(service: Service, asked: ScaleFields) -> FleetStatus:
    """Change the number of replicas. Those that end are drained first; the reply does not wait for
    new ones to join.
    """
    fleet = _fleet(service)
    await fleet.scale(asked.replicas)
    return _state(fleet)


@ROUTES.post("/fleet/{name}/{order}", raises=(Conflict, NotFound))
async def command(service: Service, name: ReplicaName, order: ReplicaOrder) -> ReplicaStatus:
    """Order a replica to drain, to resume or to restart.

    `drain` moves its sequences to the others and places none there, and is a 409 for the last
    replica that is ready; `resume` places sequences there again; `restart` drains it and starts its
    server again, and is a 409 where the fleet starts no servers.
    """
    fleet = _fleet(service)
    structlog.contextvars.bind_contextvars(action=order, replica=_found(fleet, name).name)
    match order:
        case "drain":
            await fleet.drain(name)
        case "resume":
            fleet.resume(name)
        case "restart":
            await fleet.restart(name)
    return _found(fleet, name)


def _fleet(service: Service) -> FleetOperations:
    if service.engine.fleet is None:
        raise Conflict(
            "this server has no fleet; ask a gateway, which `tlt fleet serve` starts, or GET "
            "/server_info for this server alone"
        )
    fleet: FleetOperations = service.engine.fleet
    return fleet


def _state(fleet: FleetOperations) -> FleetStatus:
    return FleetStatus(sorted(fleet.status(), key=lambda each: each.name))


def _found(fleet: FleetOperations, name: str) -> ReplicaStatus:
    """Return the replica's status. `NotFound` if the fleet has none of this name."""
    for each in fleet.status():
        if each.name == name:
            return each
    raise NotFound(f"there is no replica {shown(name)}; GET /fleet lists them")
