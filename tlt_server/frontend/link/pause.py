"""Pause and sleep as every dialect means them: what the engine is told, whether new requests are
refused, what a next life must know.

One word per idea: `in_flight` says what becomes of what was submitted before (`records.Pause`),
`refuse` whether new requests get a 503 or wait. While anything sleeps they are refused. Both hold
until they are taken back, over restarts of the engine, too.

Nothing is locked: the engine does commands in the order in which they are sent, and what holds is
what its answers say, one after another, whoever still waits for them. What is asked and not
answered yet counts only against new requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple, Never

from tlt_server.errors import TltError, Unavailable
from tlt_server.records import (
    ClearCache,
    ControlCommand,
    ControlReport,
    InFlight,
    Memory,
    Pause,
    Resume,
    Sleep,
    WakeUp,
)

RETRY_S = 1
ASLEEP = "the engine sleeps ({} given back); wake it with POST /engine/wake"
PAUSED = "generation is paused and takes no new request; send it again after POST /engine/resume"
HALTED = "generation is paused, so no token is made now; ask again after POST /engine/resume"


class _State(NamedTuple):
    paused: bool = False
    refusing: bool = False
    asleep: frozenset[Memory] = frozenset()


class _Asked(NamedTuple):
    command: ControlCommand
    refuse: bool = False

    def after(self, state: _State) -> _State:
        """What holds once it is done."""
        match self.command:
            case Pause():
                return state._replace(paused=True, refusing=self.refuse)
            case Resume():
                return state._replace(paused=False, refusing=False)
            case Sleep(_, memory):
                return state._replace(asleep=state.asleep | {*memory})
            case WakeUp(_, memory):
                return state._replace(asleep=state.asleep - {*memory})
            case ClearCache():
                return state


class PauseState:
    def __init__(
        self, command_id: Callable[[], str], ask: Callable[[ControlCommand], Awaitable[None]]
    ) -> None:
        """`ask` sends before it waits, returns when the engine has done it, and raises what it says
        against it.
        """
        self._command_id, self._ask = command_id, ask
        self._state = _State()  # of the engine, as its answers say
        self._asked: dict[str, _Asked] = {}  # and not answered, by id
        self._halting = (
            asyncio.Event()
        )  # the next pause or sleep is asked for; then there is a new one

    @property
    def paused(self) -> bool:
        return self._state.paused or any(
            isinstance(asked.command, Pause) for asked in self._asked.values()
        )

    @property
    def refusing(self) -> bool:
        return self._state.refusing or any(asked.refuse for asked in self._asked.values())

    @property
    def asleep(self) -> frozenset[Memory]:
        return self._state.asleep.union(
            *(
                asked.command.memory
                for asked in self._asked.values()
                if isinstance(asked.command, Sleep)
            )
        )

    def check(self) -> None:
        """`Unavailable` when new requests are refused."""
        if self.asleep:
            raise Unavailable(
                ASLEEP.format(" and ".join(sorted(self.asleep))), retry_after_s=RETRY_S
            )
        if self.refusing:
            raise Unavailable(PAUSED, retry_after_s=RETRY_S)

    def check_generating(self) -> None:
        """`Unavailable` when a request would get no token now, refused or not."""
        self.check()
        if self.paused:
            raise Unavailable(HALTED, retry_after_s=RETRY_S)

    async def until_halted(self) -> Never:
        """Raises as `check_generating` does, as soon as that does."""
        while True:
            self.check_generating()
            await self._halting.wait()

    def standing(self) -> list[ControlCommand]:
        """What a new life of the engine has to be told first."""
        commands: list[ControlCommand] = []
        if self._state.paused:
            commands.append(Pause(self._command_id()))
        if self._state.asleep:
            commands.append(Sleep(self._command_id(), sorted(self._state.asleep)))
        return commands

    def answered(self, report: ControlReport) -> None:
        """In the order in which the engine did it."""
        asked = self._asked.pop(report.id, None)
        if asked is not None and report.error is None:
            self._state = asked.after(self._state)

    def died(self) -> None:
        """The engine, and with it what it had not answered."""
        self._asked.clear()

    async def pause(self, in_flight: InFlight, *, refuse: bool, clear_cache: bool) -> None:
        """Done when the pause has begun: with `drain`, when everything has ended."""
        await self._do(_Asked(Pause(self._command_id(), in_flight, clear_cache), refuse))

    async def resume(self) -> None:
        await self._do(_Asked(Resume(self._command_id())))

    async def sleep(self, memory: Collection[Memory], in_flight: InFlight = "recompute") -> None:
        """Nothing keeps its KV: what does not end goes on from its tokens when all is awake."""
        await self._do(_Asked(Sleep(self._command_id(), sorted(memory), in_flight)))

    async def wake(self, memory: Collection[Memory]) -> None:
        await self._do(_Asked(WakeUp(self._command_id(), sorted(memory))))

    async def clear_cache(self, *, unless_held: bool) -> None:
        await self._do(_Asked(ClearCache(self._command_id(), unless_held)))

    async def _do(self, asked: _Asked) -> None:
        """A caller that goes away does not stop what it asked for."""
        self._asked[asked.command.id] = asked
        if isinstance(asked.command, Pause | Sleep):
            self._halting.set()
            self._halting = asyncio.Event()
        try:
            await self._ask(asked.command)
        except TltError:
            self._asked.pop(asked.command.id, None)  # if it was not even sent
            raise
