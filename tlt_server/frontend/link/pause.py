"""Pause and sleep for every dialect: the commands to the engine, whether new requests are refused,
and the state for the next epoch.

`in_flight` says what happens to earlier requests (`commands.Pause`), `refuse` whether new requests
get a 503 or wait. They are always refused while anything sleeps. Both last until they are revoked,
over restarts of the engine too.

Nothing is locked. The engine runs commands in the order in which they are sent, and its answers
determine the state, one after another, even if the caller has left. An unanswered command only
affects new requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple, Never

from tlt_server.errors import TltError, Unavailable
from tlt_server.frontend.link.answers import Changes
from tlt_server.wire.commands import (
    ClearCache,
    ControlCommand,
    InFlight,
    Memory,
    Pause,
    Resume,
    Sleep,
    WakeUp,
)
from tlt_server.wire.events import ControlReport

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
        """Return the state after the command."""
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
        self,
        command_id: Callable[[], str],
        ask: Callable[[ControlCommand], Awaitable[None]],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`ask`: sends a command before it waits, returns when the engine has executed it, and
        raises the engine's error. `changed`: called when an open command starts or ceases to count.
        """
        self._command_id, self._ask, self._changed = command_id, ask, changed
        self._state = _State()  # as the answers of the engine say
        self._asked: dict[str, _Asked] = {}  # commands that are not answered, by id
        self._halting = Changes()  # told by each pause and sleep

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
        """Raise `Unavailable` if new requests are refused."""
        if self.asleep:
            raise Unavailable(
                ASLEEP.format(" and ".join(sorted(self.asleep))), retry_after_s=RETRY_S
            )
        if self.refusing:
            raise Unavailable(PAUSED, retry_after_s=RETRY_S)

    def check_generating(self) -> None:
        """Raise `Unavailable` if a request would get no token now, refused or not."""
        self.check()
        if self.paused:
            raise Unavailable(HALTED, retry_after_s=RETRY_S)

    async def until_halted(self) -> Never:
        """Wait until `check_generating` raises, and raise its error."""
        while True:
            self.check_generating()
            await self._halting.next.wait()

    def standing(self) -> list[ControlCommand]:
        """Return the commands that a new epoch of the engine gets first."""
        commands: list[ControlCommand] = []
        if self._state.paused:
            commands.append(Pause(self._command_id()))
        if self._state.asleep:
            commands.append(Sleep(self._command_id(), sorted(self._state.asleep)))
        return commands

    def answered(self, report: ControlReport) -> None:
        """Apply the engine's answers, in the order in which it gave them."""
        asked = self._asked.pop(report.id, None)
        if asked is not None and report.error is None:
            self._state = asked.after(self._state)

    def died(self) -> None:
        """Forget the commands that the engine had not answered when it died."""
        self._asked.clear()

    async def pause(self, in_flight: InFlight, *, refuse: bool, clear_cache: bool) -> None:
        """Return when the pause is in effect; with `drain`, when everything has ended."""
        await self._do(_Asked(Pause(self._command_id(), in_flight, clear_cache), refuse))

    async def resume(self) -> None:
        await self._do(_Asked(Resume(self._command_id())))

    async def sleep(self, memory: Collection[Memory], in_flight: InFlight = "recompute") -> None:
        """Free the memory. No sequence keeps its KV: the surviving ones continue from their tokens
        when everything is awake.
        """
        await self._do(_Asked(Sleep(self._command_id(), sorted(memory), in_flight)))

    async def wake(self, memory: Collection[Memory]) -> None:
        await self._do(_Asked(WakeUp(self._command_id(), sorted(memory))))

    async def clear_cache(self, *, unless_held: bool) -> None:
        await self._do(_Asked(ClearCache(self._command_id(), unless_held)))

    async def _do(self, asked: _Asked) -> None:
        """Run a command. It continues even if the caller leaves."""
        self._asked[asked.command.id] = asked
        self._changed()
        if isinstance(asked.command, Pause | Sleep):
            self._halting.tell()
        try:
            await self._ask(asked.command)
        except TltError:
            self._asked.pop(asked.command.id, None)  # if it was never sent
            self._changed()
            raise
