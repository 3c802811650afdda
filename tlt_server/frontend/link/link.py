"""One life of the engine: sockets in a directory of its own, what comes out of them, and how it
ends.

Both sockets are bound here (`ipc://DIR/commands` PUSH, `ipc://DIR/events` PULL) and the engine
connects. As every life has its own directory, nothing that one life left in a socket can reach the
next. When `live` returns, the process is gone and reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import zmq
import zmq.asyncio

from tlt_server.begun import read_begun
from tlt_server.errors import EngineFailed, TltError, from_code
from tlt_server.records import (
    Command,
    Ending,
    Event,
    Failed,
    Heartbeat,
    Phase,
    Ready,
    Stop,
    decode_event,
    encode,
)

STOP_S = 5.0  # that an engine has to leave after Stop; then it is killed
LAST_WORDS_S = (
    0.05  # after the exit: what is still in the socket is heard, and says more than the status
)


class EngineProcess(Protocol):
    """As asyncio's `Process`."""

    def wait(self) -> Coroutine[Any, Any, int]: ...

    def kill(self) -> None: ...


class Death(NamedTuple):
    ending: Ending
    error: TltError
    begun: set[str]  # ids of the sequences that ran
    see: str = ""  # where standard error says more

    @property
    def told(self) -> str:
        """To whoever reads standard error; clients get the error's message alone."""
        return f"{self.error.message}; see {self.see}" if self.see else self.error.message


class EngineLink:
    def __init__(self, directory: Path, *, startup_timeout_s: float, hang_timeout_s: float) -> None:
        self._directory, self._startup_timeout_s, self._hang_timeout_s = (
            directory,
            startup_timeout_s,
            hang_timeout_s,
        )
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.PULL)
        self._commands = zmq.Context(io_threads=1).socket(
            zmq.PUSH
        )  # synchronous: a send never waits, so any code may abort
        for socket, name in ((self._events, "events"), (self._commands, "commands")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{directory / name}")
        self._heard = 0  # events
        self._ready = False
        self._phase = ""  # that start-up ended last

    def send(self, command: Command) -> bool:
        """Whether there is an engine that may take it."""
        try:
            self._commands.send(encode(command), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._commands.context.destroy(linger=0)

    async def live(self, process: EngineProcess, take: Callable[[Event], None]) -> Death:
        """Hand every event to `take` until the engine is gone. Cancelled, it asks the engine to
        stop, and waits.
        """
        exited = asyncio.create_task(process.wait())
        failed, silent = (
            asyncio.create_task(self._listen(take)),
            asyncio.create_task(self._silence()),
        )
        try:
            await asyncio.wait((exited, failed, silent), return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                await asyncio.wait((failed,), timeout=LAST_WORDS_S)
        except asyncio.CancelledError:
            if self._ready:  # before that it would not listen
                self.send(Stop(drain=False))
                await asyncio.wait((exited,), timeout=STOP_S)
            raise
        finally:
            if not exited.done():
                with contextlib.suppress(ProcessLookupError):  # it has just left
                    process.kill()
            status = await exited
            for task in (failed, silent):
                task.cancel()
        return self._death(status, failed, silent, read_begun(self._directory))

    def _death(
        self,
        status: int,
        failed: asyncio.Task[TltError],
        silent: asyncio.Task[TltError],
        begun: set[str],
    ) -> Death:
        if failed.done() and not failed.cancelled():
            return Death("failed", failed.result(), begun)
        if silent.done() and not silent.cancelled():
            return Death(
                "hung", silent.result(), begun, "" if self._ready else "its messages above"
            )
        how = (
            f"exited with status {status}"
            if status >= 0
            else f"was ended by {signal.Signals(-status).name}"
        )
        when = f" after the phase {self._phase!r}" if self._phase and not self._ready else ""
        where = (
            "its messages above"
            if status >= 0
            else "its messages above, and the system's log if memory was short"
        )
        return Death("exited", EngineFailed(f"the engine process {how}{when}"), begun, where)

    async def _listen(self, take: Callable[[Event], None]) -> TltError:
        """Until the engine says, or shows, that it cannot go on."""
        while True:
            message = await self._events.recv()
            self._heard += 1
            try:
                match event := decode_event(message):
                    case Failed(code, reason):
                        return from_code(code, reason)
                    case Heartbeat():
                        continue
                    case Phase():
                        self._phase = event.name
                    case Ready():
                        while not self._commands.poll(0, zmq.POLLOUT):  # noqa: ASYNC110 (a synchronous socket)
                            await asyncio.sleep(
                                0.001
                            )  # each socket connects in its own time; what is sent before is lost
                        self._ready = True
                take(event)
            except (
                Exception
            ) as error:  # an event that is lost would leave its request waiting for ever
                return EngineFailed(
                    f"an event of the engine could not be taken in: {type(error).__name__}: {error}"
                )

    async def _silence(self) -> TltError:
        """Until nothing was heard for too long, counted in turns of this loop: nobody is blamed
        when the loop itself was held up.
        """
        silent_s, heard = 0.0, self._heard
        while True:
            limit_s = self._hang_timeout_s if self._ready else self._startup_timeout_s
            tick_s = min(1.0, limit_s / 10)
            await asyncio.sleep(tick_s)
            if self._ready and heard != self._heard:
                silent_s, heard = 0.0, self._heard
            else:
                silent_s += tick_s
            if silent_s >= limit_s and not self._ready:
                return EngineFailed(
                    f"the engine was not ready within {limit_s:g} s (startup_timeout_s); raise it if a start may take that "
                    "long"
                )
            if silent_s >= limit_s:
                return EngineFailed(
                    f"the engine said nothing for {limit_s:g} s (hang_timeout_s) and was killed; raise it if a step may "
                    "take that long"
                )
