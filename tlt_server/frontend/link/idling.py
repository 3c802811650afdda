"""Memory of idle replicas, which is given back until they are wanted again (`--sleep-idle`).

A replica that was empty for a while sleeps, and nothing is placed there. All that sleep are woken
as soon as others are crowded or none is left for a sequence, and before an order to all. Waking is
like joining: a replica first gets what was ordered meanwhile. It then stays awake for a while, so
that replicas do not fall asleep in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Never

from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.moving import token_s

LOOK_S = 0.25
AWAKE_S = 30.0  # least time from a waking, or a sleep that was refused, to the next sleep
SLOWER = 0.5


class IdleReplicas:
    def __init__(
        self,
        fleet: Fleet,
        after_s: float,
        slower: float = SLOWER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`after_s`: how long a replica must be empty. `slower`: by how much a token may take
        longer than if all were awake.
        """
        self._fleet, self._client = fleet, fleet.client
        self._after_s, self._slower, self._clock = after_s, slower, clock

    async def run(self) -> Never:
        """Put replicas to sleep and wake them, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            with self._client.faults.containing("the sleep of idle replicas"):
                await self.look()

    async def look(self) -> None:
        """Wake all replicas if they are wanted; else put those to sleep that are idle."""
        now_s, members = self._clock(), self._fleet.members.values()
        for member in members:
            if member.asleep:
                member.asleep_s = now_s
            member.busy_s = min(member.busy_s, now_s) if _is_idle(member) else now_s
        if self._client.pauses.paused or self._client.pauses.asleep:
            return
        if self._fleet.replicas.asleep and self._is_wanted():
            await self._fleet.wake()
        elif not self._fleet.ordering:
            due = [
                member
                for member in members
                if now_s - member.busy_s >= self._after_s and now_s - member.asleep_s >= AWAKE_S
            ]
            for member in due:
                member.asleep_s = now_s
            await asyncio.gather(*map(self._fleet.sleep, due))

    def _is_wanted(self) -> bool:
        loads = self._fleet.replicas.placer.loads.values()
        part = len(loads) / (len(loads) + len(self._fleet.replicas.asleep))
        return (not loads and len(self._client) > 0) or any(
            load.sequences > load.places
            or token_s(load, load.sequences, load.tokens)
            > (1.0 + self._slower) * token_s(load, load.sequences * part, load.tokens * part)
            for load in loads
        )


def _is_idle(member: Member) -> bool:
    busy = member.gauges.get("running", 0.0) + member.gauges.get("waiting", 0.0)
    awake = member.state == "ready" and not member.asleep
    return awake and not (busy or member.sequences or member.trains)
