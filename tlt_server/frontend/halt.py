"""Pause and sleep as every dialect means them: what the engine is told, whether new requests are refused, what a next life must know.

One word per idea: `in_flight` says what becomes of what was submitted before (`records.Pause`), `refuse` whether new requests get a 503
or wait. While anything sleeps they are refused. Both hold until they are taken back, over restarts of the engine, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from tlt_server.errors import Unavailable
from tlt_server.records import ClearCache, ControlCommand, InFlight, Memory, Pause, Resume, Sleep, WakeUp

RETRY_S = 1
ASLEEP = "the engine sleeps ({} given back); wake it with POST /wake_up or /resume_memory_occupation"
PAUSED = "generation is paused and takes nothing new; send the request again after POST /resume"


class Halt:
    def __init__(self, command_id: Callable[[], str], ask: Callable[[ControlCommand], Awaitable[None]]) -> None:
        """`ask` returns when the engine has done it, and raises what it says against it."""
        self._command_id, self._ask = command_id, ask
        self.paused = self.refusing = False
        self.asleep: frozenset[Memory] = frozenset()

    def check(self) -> None:
        """`Unavailable` when new requests are refused."""
        if self.asleep:
            raise Unavailable(ASLEEP.format(" and ".join(sorted(self.asleep))), retry_after_s=RETRY_S)
        if self.refusing:
            raise Unavailable(PAUSED, retry_after_s=RETRY_S)

    def standing(self) -> list[ControlCommand]:
        """What a new life of the engine has to be told first."""
        commands: list[ControlCommand] = []
        if self.paused:
            commands.append(Pause(self._command_id()))
        if self.asleep:
            commands.append(Sleep(self._command_id(), sorted(self.asleep)))
        return commands

    async def pause(self, in_flight: InFlight, *, refuse: bool, clear_cache: bool) -> None:
        """Done when the pause has begun: with `drain`, when everything has ended."""
        before = self.paused, self.refusing
        self.paused, self.refusing = True, refuse
        try:
            await self._ask(Pause(self._command_id(), in_flight, clear_cache))
        except BaseException:
            self.paused, self.refusing = before
            raise

    async def resume(self) -> None:
        await self._ask(Resume(self._command_id()))
        self.paused = self.refusing = False

    async def sleep(self, memory: Collection[Memory], in_flight: InFlight = "recompute") -> None:
        """Nothing keeps its KV: what does not end goes on from its tokens when all is awake."""
        before, paused = self.asleep, self.paused
        self.asleep |= frozenset(memory)
        try:
            if in_flight != "recompute":
                await self.pause(in_flight, refuse=self.refusing, clear_cache=True)
            await self._ask(Sleep(self._command_id(), sorted(memory)))
        except BaseException:
            self.asleep = before
            raise
        finally:
            if in_flight != "recompute" and not paused:
                await self.resume()

    async def wake(self, memory: Collection[Memory]) -> None:
        await self._ask(WakeUp(self._command_id(), sorted(memory)))
        self.asleep -= frozenset(memory)

    async def clear_cache(self, *, when_idle: bool) -> None:
        await self._ask(ClearCache(self._command_id(), when_idle))
