"""Orders that last until they are revoked, over restarts of the engine too: pauses and sleeps, the
policy, and the versions of the weights. Each epoch gets them, or is compared with them.

`in_flight` says what happens to earlier requests (`commands.Pause`), `refuse` whether new requests
get a 503 or wait. They are always refused while anything sleeps.

Nothing is locked. The engine runs commands in the order in which they are sent, and its answers
determine the state, one after another, even if the caller has left. An unanswered pause only
affects new requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple, Never

import msgspec
import structlog

from tlt_server.errors import Conflict, EngineFailed, TltError, Unavailable, from_code
from tlt_server.frontend.link.answers import Answers, Changes
from tlt_server.wire.commands import (
    ClearCache,
    Command,
    ControlCommand,
    InFlight,
    Memory,
    Pause,
    Resume,
    SetPolicy,
    Sleep,
    WakeUp,
)
from tlt_server.wire.events import ControlReport, EngineInfo, WeightReport

RETRY_S = 1
PUSH_S = 10  # about the time of a push
ROLES = ("target", "drafter")
ASLEEP = "the engine sleeps ({} given back); wake it with POST /engine/wake"
PAUSED = "generation is paused and takes no new request; send it again after POST /engine/resume"
HALTED = "generation is paused, so no token is made now; ask again after POST /engine/resume"

log = structlog.get_logger()


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
        """Return the commands that a new epoch of the engine, or a further one, gets first."""
        commands: list[ControlCommand] = []
        state = self._state
        for asked in self._asked.values():
            state = asked.after(state)
        if state.paused:
            commands.append(Pause(self._command_id()))
        if state.asleep:
            commands.append(Sleep(self._command_id(), sorted(state.asleep)))
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

    async def carry_out(self, command: ControlCommand) -> None:
        """Run a command of a gateway, under an id of this server."""
        await self._do(_Asked(msgspec.structs.replace(command, id=self._command_id())))

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


class WantedVersions:
    """The expected weight versions, and which of them are lost. Nothing is generated while another
    version is live instead.

    A new epoch of the engine may have other weights than the one before: without a state directory
    those of the model directory, with one those that could be restored. The engine client passes on
    each epoch's report; a commit of the lost role ends the wait.
    """

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}  # role -> the version, and why it is lost
        self._wanted: dict[str, str] = {}
        self.own: set[str] = set()  # drafters that the server has trained, so no caller wants them

    def begin(self, info: EngineInfo, *, unanswered: bool) -> None:
        """Record the versions of a new epoch. `unanswered`: weight commands were open when the
        previous epoch ended, so only a spool knows which version became live.
        """
        held = {"target": info.weight_version, "drafter": info.drafter_version}
        trusted = info.spooled and unanswered
        missing = (
            {}
            if trusted
            else {
                role: version
                for role, version in self._wanted.items()
                if version not in (held[role], *self.own)
            }
        )
        self.lost = {
            role: f"the weight version {version!r} of the {role} is lost: the engine was restarted "
            f"and holds {held[role]!r}"
            + ("" if info.spooled else "; --state-dir keeps versions over a restart")
            for role, version in missing.items()
        }
        self.lost |= info.lost
        self._wanted |= {role: held[role] for role in ROLES if role not in self.lost}

    def reported(self, report: WeightReport) -> None:
        """Record the result of a push. One that finds its version live counts like a committed one,
        and so does a name for what is live: only a gateway, which compares the content, gives one
        while a version is lost, see `check_name`. A quarantined version is lost too.
        """
        self.lost |= report.state.quarantined
        if report.role == "adapter":
            return  # requests name the adapters that they want
        if report.result in ("committed", "named", "rolled_back", "unchanged"):
            live = {"target": report.state.target, "drafter": report.state.drafter}
            for role in ROLES if report.role in ("all", "") else (report.role,):
                if report.result != "unchanged" or live[role] == report.version:
                    self._wanted[role] = live[role]
                    self.lost.pop(role, None)

    def check_name(self) -> None:
        """Raise `Conflict` while the target is lost: the weights that are live instead must not get
        its name.
        """
        if "target" in self.lost:
            raise Conflict(f"the live weights cannot be named: {self.reason}")

    @property
    def reason(self) -> str:
        """The reason why nothing is generated, with the remedy; empty if nothing is lost."""
        return (
            f"{'; '.join(self.lost.values())}. Push that version, or another (POST /update_weights)"
            if self.lost
            else ""
        )

    def check(self) -> None:
        """Raise `Unavailable` while a version is lost."""
        if self.lost:
            raise Unavailable(f"nothing is generated: {self.reason}", retry_after_s=PUSH_S)


class PolicyState:
    """The active policy and the one in preparation, by the engine's answers. Each epoch prepares
    the active one again, then the pending one. A policy whose preparation was interrupted by two
    deaths in a row may be their cause, and is dropped.
    """

    def __init__(self, command_id: Callable[[], str], send: Callable[[Command], bool]) -> None:
        """`send`: returns whether there is an engine to take the command."""
        self._command_id, self._send = command_id, send
        self.answers = Answers[ControlReport](self._sent)
        self._asked: dict[str, SetPolicy] = {}  # sent and without an answer, the newest last
        self._kept: SetPolicy | None = None  # the last active one, of any epoch
        self._next: SetPolicy | None = None  # to be sent once the active one is set again
        self._suspect: SetPolicy | None = None  # the last one being prepared at a death
        self.in_force: SetPolicy | None = None  # None: the one that the engine was started with
        self.prepared = ""  # what the active policy found prepared

    @property
    def preparing(self) -> SetPolicy | None:
        """Return the policy in preparation, or waiting for it."""
        return self._next or self._newest

    @property
    def _newest(self) -> SetPolicy | None:
        return next(reversed(self._asked.values()), None)

    async def ask(self, policy: SetPolicy, patience_s: float) -> None:
        """Return when the policy is active, or after `patience_s`. Raises the engine's error."""
        command = msgspec.structs.replace(policy, id=self._command_id())
        answer = asyncio.ensure_future(self.answers.ask(command))
        answer.add_done_callback(_take_error)
        done, _ = await asyncio.wait({answer}, timeout=patience_s)
        if done and (report := answer.result()).error is not None:
            raise from_code(*report.error)

    def answered(self, report: ControlReport) -> bool:
        """Apply the answer to a policy, even if its caller has left. Return False for other
        answers.
        """
        command = self._asked.pop(report.id, None)
        if command is None:
            return False
        if _equal(command, self._suspect) and not _equal(command, self._newest):
            self._suspect = None
        if report.error is None:
            self.in_force, self.prepared, self._kept = command, report.detail, command
        elif command.id not in self.answers:
            log.warning("policy_refused", policy=command.name, message=report.error[1])
        self.answers.settle(report)
        if self._next is not None and not self._asked:
            command, self._next = self._next, None
            self._give(command)
        return True

    def died(self, reason: str) -> None:
        """End every wait, and keep the policies for the next epoch."""
        command, again, dropped = self._newest, self._suspect, ""
        self._asked = {}
        if command is not None:
            self._suspect = command
            if _equal(command, again):
                self._suspect, dropped = None, command.name
                log.error("policy_dropped", policy=command.name, reason=reason)
            if _equal(command, self._kept):
                self._kept = None if dropped else self._kept
            elif not dropped:
                self._next = command
        self.answers.fail(lambda: _cut_off(reason, dropped))

    def begin(self, prepared: str) -> None:
        """Begin an epoch, which starts with the configured policy: send the one that was active,
        then the pending one.
        """
        self.in_force, self.prepared, self._asked = None, prepared, {}
        first = self._kept or self._next
        if self._kept is None:
            self._next = None
        if first is not None:
            self._give(first)

    def _sent(self, command: Command) -> bool:
        """Send a policy, or keep it until the active one is prepared, whose preparation it would
        end. A newer one replaces it.
        """
        assert isinstance(command, SetPolicy)
        again = self._kept is not None and self.in_force is None and self._kept.id in self._asked
        if not again:
            sent = self._give(command)
            if not sent:
                del self._asked[command.id]
            return sent
        if self._next is not None:
            error = Conflict(
                f"policy {self._next.name} had not been prepared when another was set; see GET "
                "/strategy"
            )
            self.answers.settle(ControlReport(self._next.id, (error.code, error.message)))
        self._next = command
        return True

    def _give(self, command: SetPolicy) -> bool:
        self._asked[command.id] = command
        return self._send(command)


def _equal(command: SetPolicy, other: SetPolicy | None) -> bool:
    """Return True if both ask for the same policy."""
    return other is not None and command == msgspec.structs.replace(other, id=command.id)


def _cut_off(reason: str, dropped: str) -> EngineFailed:
    then = "GET /strategy says which policy is active once the engine is back"
    if dropped:
        then = (
            f"policy {dropped} was being prepared at 2 deaths of the engine and is dropped; {then}"
        )
    return EngineFailed(f"{reason}; {then}")


def _take_error(answer: asyncio.Future[ControlReport]) -> None:
    """Let the error of an answer without a caller end without a warning."""
    if not answer.cancelled():
        answer.exception()


def revoking(given: Collection[Any], standing: Collection[Any]) -> list[ControlCommand]:
    """Return the commands that undo those `given` that stand no longer."""
    paused = any(isinstance(each, Pause) for each in standing)
    asleep = {kind for each in standing if isinstance(each, Sleep) for kind in each.memory}
    undo: list[ControlCommand] = []
    for command in given:
        if isinstance(command, Pause) and not paused:
            undo.append(Resume(""))
        if isinstance(command, Sleep) and (awake := {*command.memory} - asleep):
            undo.append(WakeUp("", sorted(awake)))
    return undo
