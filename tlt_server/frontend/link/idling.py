"""Memory of idle replicas, which is given back until they are wanted again (`--sleep-idle`).

A replica that was empty for a while sleeps, and nothing is placed there. All that sleep are woken
as soon as others are crowded or none is left for a sequence, and before an order to all. Waking is
like joining: a replica first gets what was ordered meanwhile. It then stays awake for a while, so
that replicas do not fall asleep in turn.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Never

import msgspec
import structlog

from tlt_server.errors import TltError, from_code
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.members import FleetReplicas, Member
from tlt_server.frontend.link.moving import token_s
from tlt_server.wire.commands import ControlCommand, Memory, Sleep, WakeUp

LOOK_S = 1.0
AWAKE_S = 30.0  # least time from a waking to the next sleep
SLOWER = 0.5
MEMORY: list[Memory] = ["weights", "kv_cache"]

log = structlog.get_logger()


class IdleReplicas:
    def __init__(
        self,
        client: EngineClient,
        fleet: Fleet,
        replicas: FleetReplicas,
        after_s: float,
        slower: float = SLOWER,
        works: Callable[[], Collection[str]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`after_s`: how long a replica must be empty. `slower`: by how much a token may take
        longer than if all were awake. `works`: names of replicas with other work.
        """
        self._client, self._fleet, self._replicas = client, fleet, replicas
        self._after_s, self._slower, self._works = after_s, slower, works
        self._clock = clock
        self._empty_s: dict[str, float] = {}  # since when a replica is empty
        self._woken_s: dict[str, float] = {}  # when it was last woken, or did not want to sleep
        self._turn = asyncio.Lock()
        self._wanted = asyncio.Event()
        fleet.rouse, replicas.wanted = self.wake, self._wanted.set

    async def run(self) -> Never:
        """Put replicas to sleep and wake them, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wanted.wait()
            self._wanted.clear()
            with self._client.faults.containing("the sleep of idle replicas"):
                await self.look()

    async def look(self) -> None:
        """Wake all replicas if they are wanted; else put those to sleep that are idle."""
        now_s, members = self._clock(), self._fleet.members
        empty = [name for name, each in members.items() if self._is_empty(each)]
        self._empty_s = {name: self._empty_s.get(name, now_s) for name in empty}
        if self._client.pauses.paused or self._client.pauses.asleep:
            return
        if self._fleet.asleep and self._is_wanted():
            await self.wake()
        elif not self._fleet.ordering:
            due = (
                members[name]
                for name in {*empty} - {*self._works()}
                if now_s - self._empty_s[name] >= self._after_s
                and now_s - self._woken_s.get(name, -math.inf) >= AWAKE_S
            )
            await asyncio.gather(*map(self._rest, due))

    def _is_empty(self, member: Member) -> bool:
        gauges = member.gauges
        busy = gauges.get("running", 0.0) + gauges.get("waiting", 0.0)
        open_here = self._client.sequences.at(member)
        return member.state == "ready" and not busy and not open_here

    def _is_wanted(self) -> bool:
        loads = [self._replicas.placer.loads[name] for name in self._replicas.ready]
        part = len(loads) / (len(loads) + len(self._fleet.asleep))
        return (not loads and len(self._client) > 0) or any(
            load.sequences > load.places
            or token_s(load, load.sequences, load.tokens)
            > (1.0 + self._slower) * token_s(load, load.sequences * part, load.tokens * part)
            for load in loads
        )

    async def wake(self) -> None:
        """Wake all replicas that sleep; one that does not wake is lost, and joins again."""
        async with self._turn:
            await asyncio.gather(*map(self._wake, self._fleet.asleep))

    async def _wake(self, member: Member) -> None:
        self._woken_s[member.name] = self._clock()
        try:
            await self._ask(member, WakeUp("", MEMORY))
            await self._fleet.catch_up(member)
        except TltError as error:
            if member.runs:
                self._fleet.lost(member, f"it does not wake: {error.message}")

    async def _rest(self, member: Member) -> None:
        """Have a replica sleep. Nothing is placed there from here on."""
        name = member.name
        async with self._turn:
            if name not in self._replicas.ready or not self._is_empty(member):
                return  # a waking came in between
            member.state = "asleep"
            del self._replicas.ready[name]
            try:
                await self._ask(member, Sleep("", MEMORY))
                log.info("replica_sleeps", name=name)
            except TltError as error:
                log.warning("replica_does_not_sleep", name=name, reason=error.message)
                self._woken_s[name] = self._clock()
                if member.runs:
                    self._fleet.use(member)

    async def _ask(self, member: Member, command: ControlCommand) -> None:
        id = self._client.command_id()
        report = await member.ask(msgspec.structs.replace(command, id=id))
        if report.error is not None:
            raise from_code(*report.error)
