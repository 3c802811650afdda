"""The launcher `static`: replicas that others start, at addresses, in a file of addresses that is
read again when it changes, or at all addresses of a DNS name, such as a headless service.
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
from tlt_server.fleet.launchers.plan import LaunchPlan
from tlt_server.frontend.http.keys import LOOK_S, Watched
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.settings.addresses import is_loopback

RESOLVE_S = 5.0
MAX_ADDRESSES = 1024
EVERY = ("0.0.0.0", "::")  # hosts of a server that listens on all addresses of its machine
FORM = "an address is HOST:PORT, with the replica's --link-port"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9a-fA-F:.]{2,45}\]"
_ADDRESS = re.compile(rf"({_HOST}):([0-9]{{1,5}})", re.ASCII)

log = structlog.get_logger()


class Static:
    def __init__(self, plan: LaunchPlan) -> None:
        ports = (plan.config.port, plan.config.grpc_port, plan.config.probe_port)
        self._own = plan.config.host, {port for port in ports if port}
        kind, _, rest = plan.addresses.partition(":")
        self._name = _split(rest, "--addresses") if kind == "dns" else None
        self._resolved: list[str] = []
        self._resolves = True
        self._every_s, files = RESOLVE_S if self._name else LOOK_S, [Path(rest)]
        if kind == "file":
            self._listed = Watched("addresses", files, lambda: self._read(files[0]))
        elif self._name is None:
            listed = [part.strip() for part in plan.addresses.split(",") if part.strip()]
            self._listed = Watched("addresses", [], lambda: self._checked(listed, "--addresses"))

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        known: list[str] | None = None
        while True:
            addresses = await self._resolve(*self._name) if self._name else self._listed()
            if addresses != known:
                known = addresses
                found([ReplicaAddress(address, address) for address in addresses])
            await asyncio.sleep(self._every_s)

    def check(self, more: int = 0) -> NoReturn:
        raise Conflict(
            "the launcher static starts and ends no server; start or end it yourself, and change "
            "what --addresses names; drain a replica before its server ends"
        )

    async def start(self, name: str = "") -> NoReturn:
        self.check()

    stop = restart = start

    async def _resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of the name; those of before while it cannot be resolved."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if self._resolves:
                log.warning("name_not_resolved", name=host, reason=error.strerror)
            self._resolves = False
            return self._resolved
        hosts = sorted({str(address[0]) for *_, address in found})
        self._resolves = True
        self._resolved = [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]
        return self._resolved

    def _read(self, file: Path) -> list[str]:
        try:
            lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(
                f"cannot read --addresses {file}: {type(error).__name__}; name a text file with "
                "an address per line"
            ) from None
        return self._checked([line for line in lines if line and line[0] != "#"], str(file))

    def _checked(self, addresses: list[str], source: str) -> list[str]:
        if not 0 < len(addresses) <= MAX_ADDRESSES:
            raise StartupError(
                f"{source} names {len(addresses)} replicas; name 1 to {MAX_ADDRESSES}: {FORM}"
            )
        split = [_split(address, source) for address in addresses]
        for at, (address, (host, port)) in enumerate(zip(addresses, split, strict=True)):
            if (host, port) in split[:at]:
                raise StartupError(f"{source} names {address} twice; name each replica once")
            mine, ports = self._own
            if port in ports and (
                host == mine or (is_loopback(host) and (is_loopback(mine) or mine in EVERY))
            ):
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
