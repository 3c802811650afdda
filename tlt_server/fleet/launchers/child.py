"""Replicas that a launcher starts: a task keeps each of them running.

Each is a child of the gateway (`local`) or of an actor (`ray`): `tlt serve`, started again with
growing pauses whenever it ends. Its lines on stderr are passed on with the replica's name; one of
them says where its link listens. It ends with the process that started it, and a server that has
outlived its own is ended before the next one starts in its directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import structlog

from tlt_kernels.parents import bound
from tlt_server.errors import Conflict, NotFound, StartupError
from tlt_server.fleet.launchers.plan import KEY
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.supervisor import Backoff
from tlt_server.process.faults import exit_of
from tlt_server.process.private import private_directory

COMMAND: Sequence[str] = (sys.executable, "-P", "-m", "tlt_server", "serve")
LISTENING = re.compile(r"tlt: listening on (\S+) for a gateway")
READY = "tlt: ready at "
LINE_BYTES = 2**20
LINES_S = 5.0  # until the last line has come through the pipe
WINDOW_S = 300.0  # in which ends count for the pause
END_S, POLL_S = 30.0, 0.05  # until a killed server has left: a driver may take seconds
USER_ERROR = 2  # status of a server whose settings, files or device cannot be used

Change = Callable[..., None]  # takes the fields of a replica's address that have changed
Live = Callable[[Change], Coroutine[Any, Any, str]]  # runs it once, and returns how it ended

log = structlog.get_logger()


class StartedReplicas:
    def __init__(
        self,
        number: int,
        live: Callable[[str, Change], Coroutine[Any, Any, str]],
        lacking: Callable[[int], str],
    ) -> None:
        """`live`: runs the replica of a name once. `lacking(n)`: what n replicas need and is not
        there; empty: they fit.
        """
        if fault := lacking(number):
            raise StartupError(fault)
        self._number, self._live, self._lacking = number, live, lacking
        self._addresses: dict[str, ReplicaAddress] = {}
        self._tasks: dict[str, asyncio.Task[NoReturn]] = {}
        self._leaving: set[str] = set()  # those that are being ended for good
        self._ends = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by name; the next order waits

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        self._found = found
        try:
            async with asyncio.TaskGroup() as self._group:
                for number in range(self._number):
                    self._begin(f"r{number}", proven=False)
                await asyncio.Event().wait()
        except ExceptionGroup as refused:
            raise refused.exceptions[0] from None

    def check(self, more: int = 0) -> None:
        staying = len(self._addresses) - len(self._leaving)
        if more > 0 and (fault := self._lacking(staying + more)):
            raise Conflict(fault)

    async def start(self) -> str:
        """Start a replica under the first free number, which is below the replicas that fit; if all
        are taken, in the place of one that is being ended, after its end.
        """
        self.check(1)
        if self._leaving and self._lacking(len(self._addresses) + 1):
            return self._leaving.pop()  # `stop` starts it
        name = next(name for n in count() if (name := f"r{n}") not in self._addresses)
        self._begin(name)
        return name

    async def stop(self, name: str) -> None:
        async with self._ends[name]:
            if name in self._tasks:
                self._leaving.add(name)
            await self._end(name)
            del self._addresses[name]
            self._found([*self._addresses.values()])
            if name not in self._leaving:  # `start` wants it
                self._begin(name)
            self._leaving.discard(name)

    async def restart(self, name: str) -> None:
        async with self._ends[name]:
            await self._end(name)
            self._begin(name)

    def _begin(self, name: str, *, proven: bool = True) -> None:
        change = partial(self._change, name)
        change(fault="it starts")
        keeping = kept(name, partial(self._live, name), change, proven=proven)
        self._tasks[name] = self._group.create_task(keeping, context=Context())  # outlives an order

    async def _end(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is None:
            raise NotFound(f"no replica {name!r} runs; GET /fleet lists those that do")
        task.cancel()
        await asyncio.wait({task})
        self._change(name, link="", fault="it was ended")

    def _change(self, name: str, **fields: str) -> None:
        before = self._addresses.get(name)
        address = (before or ReplicaAddress(name, ""))._replace(**fields)
        if address != before:
            self._addresses[name] = address
            self._found([*self._addresses.values()])


async def kept(name: str, live: Live, change: Change, *, proven: bool) -> NoReturn:
    """Keep a replica running until cancelled. `StartupError` if its first start reports one, unless
    it is `proven`: others run with the same flags.
    """
    backoff = Backoff(sys.maxsize, WINDOW_S)
    while True:
        try:
            fault = await live(change)
        except StartupError as error:
            fault = error.message
            if not proven:
                raise StartupError(f"replica {name}: {fault}") from None
        except Exception as error:  # such as a failed call to Ray: a fault of this replica alone
            fault = f"it could not be started: {type(error).__name__}: {error}"
        proven = True
        pause_s = backoff.death(time.monotonic()) or 0.0
        log.warning("replica_ended", replica=name, reason=fault, pause_s=pause_s)
        change(link="", fault=f"{fault} | started again in {pause_s:g} s")
        await asyncio.sleep(pause_s)


class Child(NamedTuple):
    """A replica's server, and what it is started with."""

    name: str
    flags: Sequence[str]
    variables: Mapping[str, str]  # settings, the key, and its GPUs
    directory: Path | None  # its state directory; None: it keeps nothing
    stop_s: float  # until it has drained; then it is killed
    host: str = ""
    place: str = ""

    @property
    def environment(self) -> dict[str, str]:
        others = {name: os.environ[name] for name in os.environ if not name.startswith("TLT_")}
        return {**others, **self.variables}

    @property
    def command(self) -> list[str]:
        where = ("--host", self.host, "--port", "0", "--link-port", "0", "--api-key-variable", KEY)
        state = ("--state-dir", str(self.directory)) if self.directory is not None else ()
        return bound([*COMMAND, *self.flags, *where, *state])

    async def live(self, change: Change, say: Callable[[str], None]) -> str:
        """Run the server until it ends, and return how. If cancelled, end it. `StartupError`: it
        reports a user's error, and was not ready before.
        """
        last, ready = "it printed nothing", False

        def heard(line: str) -> None:
            nonlocal last, ready
            if not line.startswith("{"):  # a log line says little about an end
                last = line.removeprefix("tlt: ")
            ready = ready or line.startswith(READY)
            if found := LISTENING.match(line):
                change(link=found[1], place=self.place, fault="")
            say(named(self.name, line))

        status = await self._run(heard)
        ended = f"its server {exit_of(status)}: {last}"
        if status == USER_ERROR and not ready:
            raise StartupError(ended)
        return ended

    async def _run(self, heard: Callable[[str], None]) -> int:
        if self.directory is not None:
            private_directory(self.directory, parents=True, exist_ok=True)
            await asyncio.to_thread(end_servers, self.directory)
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            env=self.environment,
            limit=LINE_BYTES,
            start_new_session=True,
        )
        assert process.stderr is not None
        reading = asyncio.create_task(_read(process.stderr, heard))
        try:
            return await process.wait()
        finally:
            await _end(process, self.stop_s)
            await asyncio.wait({reading}, timeout=LINES_S)
            reading.cancel()


async def _end(process: Process, stop_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        try:
            process.terminate()
            async with asyncio.timeout(stop_s):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            process.kill()
    await process.wait()


async def _read(stream: asyncio.StreamReader, heard: Callable[[str], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line above the limit, which is dropped
            continue
        if not line:
            return
        heard(line.decode(errors="replace").rstrip("\n"))


def named(name: str, line: str) -> str:
    """Return a log line with the replica's name: a field of a JSON line, else before it."""
    if line.startswith('{"'):
        return f'{{"replica":"{name}",{line[1:]}'
    return f"{name} | {line}"


def servers_of(directory: Path) -> list[int]:
    """Return the processes of this machine that serve with this state directory."""
    words, found = os.fsencode(f"\0--state-dir\0{directory}\0"), []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if words in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def end_servers(directory: Path) -> None:
    """End servers that have outlived what started them: they keep GPUs and ports. `StartupError` if
    one stays.
    """
    deadline_s = time.monotonic() + END_S
    while left := servers_of(directory):
        if time.monotonic() > deadline_s:
            raise StartupError(
                f"process {left[0]} serves from {directory} and does not end; end it, or name "
                "another --state-dir"
            )
        for pid in left:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
