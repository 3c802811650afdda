"""One epoch of the engine: one process, from its launch to its end, the sockets to it, and the
server's directory for them.

Both sockets are bound here (`ipc://DIR/commands` PUSH, `ipc://DIR/events` PULL) and the engine
connects. Every epoch has its own directory, so nothing left in one epoch's socket can reach the
next. When `run` returns, the process has ended and is reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog
import zmq
import zmq.asyncio

from tlt_server.errors import EngineFailed, TltError, from_code
from tlt_server.process.faults import exit_of
from tlt_server.process.private import DIRECTORY, private_file
from tlt_server.wire.commands import Command, Stop
from tlt_server.wire.events import Ending, Event, Failed, Heartbeat, Phase, Ready, decode_event
from tlt_server.wire.kept import read_started
from tlt_server.wire.records import encode

PREFIX, LOCK = "tlt-", "lock"

log = structlog.get_logger()


@contextlib.contextmanager
def own_directory() -> Iterator[Path]:
    """Yield a new directory of mode 0700, for sockets and started files, removed at the end. Remove
    those of dead servers first.

    A living server holds a lock on the file `lock` in it. The kernel releases the lock with the
    process, however that ends, so a free lock means that the directory's server is dead. Process
    ids would not show that, since containers share temporary directories and not ids.
    """
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        os.chmod(name, DIRECTORY)  # under any umask
        lock = private_file(Path(name) / "locking", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(Path(name) / "locking", Path(name) / LOCK)  # never there without its lock
            yield Path(name)
        finally:
            os.close(lock)


def sweep(temporary: Path) -> None:
    """Remove this user's directories whose lock is free. No link is followed."""
    for directory in temporary.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_dead(directory):
                shutil.rmtree(directory)
                log.info("directory_of_a_dead_server_removed", directory=str(directory))


def _is_dead(directory: Path) -> bool:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


STOP_S = 5.0  # time that an engine has to exit after Stop; then it is killed
STOPPED_S = 10.0  # time that an engine may be stopped, as by SIGSTOP
LAST_WORDS_S = (
    0.05  # after the exit, to read an error from the socket, which says more than a status
)


class EngineProcess(Protocol):
    """The methods of asyncio's `Process` that are used here."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> Coroutine[Any, Any, int]: ...

    def kill(self) -> None: ...


class Death(NamedTuple):
    ending: Ending
    error: TltError
    started: set[str]  # ids of the sequences that ran, and `OTHERS`
    see: str = ""  # the lines of standard error that say more

    @property
    def described(self) -> str:
        """The reason for readers of standard error; clients get only the error's message."""
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
        # a synchronous socket: a send never waits, so any code may abort
        self._commands = zmq.Context(io_threads=1).socket(zmq.PUSH)
        for socket, name in ((self._events, "events"), (self._commands, "commands")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{directory / name}")
        self._heard = 0  # number of events
        self._ready = False
        self._phase = ""  # the last phase of the start that has ended

    def send(self, command: Command) -> bool:
        """Send a command. Return False if there is no engine to take it."""
        try:
            self._commands.send(encode(command), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._commands.context.destroy(linger=0)

    async def run(self, process: EngineProcess, take: Callable[[Event], None]) -> Death:
        """Pass every event to `take` until the engine is gone. If cancelled, ask the engine to
        stop, and wait.
        """
        exited = asyncio.create_task(process.wait())
        failed, silent = (
            asyncio.create_task(self._listen(take)),
            asyncio.create_task(self._silence(process.pid)),
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
        return self._death(status, failed, silent, read_started(self._directory))

    def _death(
        self,
        status: int,
        failed: asyncio.Task[TltError],
        silent: asyncio.Task[TltError],
        started: set[str],
    ) -> Death:
        if failed.done() and not failed.cancelled():
            return Death("failed", failed.result(), started)
        if silent.done() and not silent.cancelled():
            return Death(
                "hung", silent.result(), started, "" if self._ready else "its messages above"
            )
        when = f" after the phase {self._phase!r}" if self._phase and not self._ready else ""
        where = (
            "its messages above"
            if status >= 0
            else "its messages above, and the system's log if memory was short"
        )
        error = EngineFailed(f"the engine process {exit_of(status)}{when}")
        return Death("exited", error, started, where)

    async def _listen(self, take: Callable[[Event], None]) -> TltError:
        """Take events until the engine reports a fatal error, and return that error."""
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
                        # each socket connects in its own time; what is sent before is lost
                        while not self._commands.poll(0, zmq.POLLOUT):  # noqa: ASYNC110 (synchronous)
                            await asyncio.sleep(0.001)
                        self._ready = True
                take(event)
                await asyncio.sleep(0)  # `recv` does not wait while there are more events
            except Exception as error:  # a lost event would leave its request waiting for ever
                return EngineFailed(
                    f"an event of the engine could not be read: {type(error).__name__}: {error}"
                )

    async def _silence(self, pid: int) -> TltError:
        """Wait until no event has arrived for too long, or the process is stopped, and return the
        error for that. Time is counted in turns of this loop, so a delayed loop blames no engine.
        """
        silent_s, stopped_s, heard = 0.0, 0.0, self._heard
        while True:
            limit_s = self._hang_timeout_s if self._ready else self._startup_timeout_s
            tick_s = min(1.0, limit_s / 10)
            await asyncio.sleep(tick_s)
            if self._ready and heard != self._heard:
                silent_s, heard = 0.0, self._heard
            else:
                silent_s += tick_s
            stopped_s = stopped_s + tick_s if _is_stopped(pid) else 0.0
            if stopped_s >= STOPPED_S:
                return EngineFailed(
                    f"the engine was stopped for {STOPPED_S:g} s, as by SIGSTOP, and was killed"
                )
            if silent_s >= limit_s and not self._ready:
                return EngineFailed(
                    f"the engine was not ready within {limit_s:g} s (startup_timeout_s); raise it "
                    "if a start may take that long"
                )
            if silent_s >= limit_s:
                return EngineFailed(
                    f"the engine said nothing for {limit_s:g} s (hang_timeout_s) and was killed; "
                    "raise it if a step may take that long"
                )


def _is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped a process; a debugger's stop does not count."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has just ended
        return False
    return said.rpartition(")")[2].split()[0] == "T"
