"""The launcher `static`: replicas that others start, at addresses, in a file of addresses that is
read again, or at all addresses of a DNS name, such as a headless service.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import structlog

from tlt_server.errors import Conflict, StartupError
from tlt_server.fleet.launchers.plan import FleetPlan
from tlt_server.frontend.link.launching import MAX_REPLICAS, ReplicaAddress
from tlt_server.settings.addresses import is_loopback

LOOK_S = 2.0
EVERY = ("0.0.0.0", "::")  # hosts of a server that listens on all addresses of its machine
FORM = "an address is HOST:PORT, with the replica's --link-port"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9a-fA-F:.]{2,45}\]"
_ADDRESS = re.compile(rf"({_HOST}):([0-9]{{1,5}})", re.ASCII)

log = structlog.get_logger()


class Static:
    def __init__(self, plan: FleetPlan) -> None:
        ports = (plan.config.port, plan.config.grpc_port, plan.config.probe_port)
        self._own = plan.config.host, {port for port in ports if port}
        given = plan.addresses or ""
        self._kind, _, self._rest = given.partition(":")
        if self._kind == "dns":
            self._name = _split(self._rest, "--addresses")
        else:
            self._listed = given.split(",")
            self._read()  # refuses them now

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        """Report the addresses, and again after each change. While they cannot be found, those of
        before count.
        """
        known: list[str] | None = None
        fault = ""
        while True:
            try:
                addresses = await self._resolve() if self._kind == "dns" else self._read()
                fault = ""
            except (OSError, StartupError) as error:
                addresses = known or []
                if fault != (fault := str(error)):
                    log.warning("addresses_not_found", reason=fault)
            if addresses != known:
                known = addresses
                found([ReplicaAddress(address, address) for address in addresses])
            await asyncio.sleep(LOOK_S)

    def check(self, more: int = 0) -> NoReturn:
        raise Conflict(
            "the launcher static starts and ends no server; start or end it yourself, and change "
            "what --addresses names; drain a replica before its server ends"
        )

    async def start(self, name: str = "") -> NoReturn:
        self.check()

    stop = restart = start

    async def _resolve(self) -> list[str]:
        host, port = self._name
        loop = asyncio.get_running_loop()
        answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        hosts = sorted({str(address[0]) for *_, address in answers})
        return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]

    def _read(self) -> list[str]:
        """Return the listed addresses. `StartupError` if one of them cannot be used."""
        source, lines = "--addresses", self._listed
        if self._kind == "file":
            source = self._rest
            try:
                lines = Path(source).read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise StartupError(
                    f"cannot read --addresses {source}: {type(error).__name__}; name a text file "
                    "with an address per line"
                ) from None
        addresses = [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
        if not 0 < len(addresses) <= MAX_REPLICAS:
            raise StartupError(
                f"{source} names {len(addresses)} replicas; name 1 to {MAX_REPLICAS}: {FORM}"
            )
        mine, ports = self._own
        seen = set[tuple[str, int]]()
        for address in addresses:
            host, port = _split(address, source)
            if (host, port) in seen:
                raise StartupError(f"{source} names {address} twice; name each replica once")
            seen.add((host, port))
            here = is_loopback(host) and (is_loopback(mine) or mine in EVERY)
            if port in ports and (host == mine or here):
                raise StartupError(
                    f"{source} names {address}, which is the gateway's own address; name the "
                    "replicas' links, and another --port for one of both"
                )
        return addresses


def _split(address: str, source: str) -> tuple[str, int]:
    parts = _ADDRESS.fullmatch(address)
    if parts is None or not 0 < int(parts[3]) < 65536:
        raise StartupError(f"{source} names {address[:80]!r}; {FORM}")
    return parts[1].strip("[]").lower(), int(parts[3])
