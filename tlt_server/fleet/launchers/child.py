"""Replicas that a launcher starts: a task keeps each of them running.

Each is a child of the gateway (`local`) or of an actor (`ray`): `tlt serve`, started again with
growing pauses whenever it ends. Its lines on stderr are passed on with the replica's name; one of
them says where its link listens. It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from tlt_kernels.parents import bound
from tlt_server.errors import Conflict, NotFound, StartupError
from tlt_server.fleet.launchers.alone import alone
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
USER_ERROR = 2  # status of a server whose settings, files or device cannot be used


class KeepReplica(Protocol):
    """Keeps one replica running until cancelled, then ends it."""

    def __call__(
        self, name: str, change: Callable[[ReplicaAddress], None], *, proven: bool
    ) -> Coroutine[Any, Any, None]:
        """`change`: takes its address whenever that changes. `proven`: others run with the same
        flags, so a failed start is tried again instead of ending the fleet.
        """


class StartedReplicas:
    def __init__(self, number: int, keep: KeepReplica, lacking: Callable[[int], str]) -> None:
        """`lacking(n)`: what n replicas need and is not there; empty: they fit."""
        if fault := lacking(number):
            raise StartupError(fault)
        self._number, self._keep, self._lacking = number, keep, lacking
        self._found: Callable[[Sequence[ReplicaAddress]], None] = lambda addresses: None
        self._addresses: dict[str, ReplicaAddress] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        self._found = found
        self._refused = asyncio.get_running_loop().create_future()
        try:
            for number in range(self._number):
                self._begin(f"r{number}", proven=False)
            await self._refused
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values())

    def check(self, more: int = 0) -> None:
        if more > 0 and (fault := self._lacking(len(self._addresses) + more)):
            raise Conflict(fault)

    async def start(self) -> str:
        self.check(1)
        name = next(name for n in count() if (name := f"r{n}") not in self._addresses)
        self._begin(name)
        return name

    async def stop(self, name: str) -> None:
        await self._end(name)
        del self._addresses[name]
        self._found([*self._addresses.values()])

    async def restart(self, name: str) -> None:
        await self._end(name)
        self._begin(name)

    def _begin(self, name: str, *, proven: bool = True) -> None:
        self._change(ReplicaAddress(name, "", fault="it starts"))
        self._tasks[name] = asyncio.create_task(self._keep(name, self._change, proven=proven))
        self._tasks[name].add_done_callback(self._done)

    async def _end(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is None:
            raise NotFound(f"no replica {name!r} runs; GET /fleet lists those that do")
        task.cancel()
        await asyncio.wait({task})
        self._change(self._addresses[name]._replace(link="", fault="it was ended"))

    def _change(self, address: ReplicaAddress) -> None:
        self._addresses[address.name] = address
        self._found([*self._addresses.values()])

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self._refused.done():
            self._refused.set_exception(error)


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
        command = bound([*COMMAND, *self.flags, *where])
        if self.directory is None:
            return command
        return alone(self.directory, [*command, "--state-dir", str(self.directory)])


async def keep(
    child: Child,
    change: Callable[[ReplicaAddress], None],
    say: Callable[[str], None],
    *,
    proven: bool = False,
) -> NoReturn:
    """Keep the server running until cancelled, then end it. `StartupError` if its first process
    reports a user's error, unless the flags are `proven`.
    """
    backoff = Backoff(sys.maxsize, WINDOW_S)
    while True:
        said = ["it said nothing"]

        def heard(line: str, said: list[str] = said) -> None:
            nonlocal proven
            if not line.startswith("{"):  # a log line says little about an end
                said[:] = [line.removeprefix("tlt: ")]
            proven = proven or line.startswith(READY)
            if found := LISTENING.match(line):
                change(ReplicaAddress(child.name, found[1], child.place))
            say(named(child.name, line))

        try:
            status = await _live(child, heard)
            ended = f"{exit_of(status)}: {said[0]}"
        except OSError as error:
            status, ended = 1, f"could not be launched: {error.strerror or error}"
        if status == USER_ERROR and not proven:
            raise StartupError(f"the server of replica {child.name} {ended}")
        proven = True
        pause_s = backoff.death(time.monotonic()) or 0.0
        fault = f"its server {ended} | started again in {pause_s:g} s"
        say(named(child.name, f"tlt: {fault}"))
        change(ReplicaAddress(child.name, "", child.place, fault))
        await asyncio.sleep(pause_s)


async def _live(child: Child, heard: Callable[[str], None]) -> int:
    """Run one process to its end, and return its status. If cancelled, end it."""
    if child.directory is not None:
        private_directory(child.directory, parents=True, exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *child.command,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        env=child.environment,
        limit=LINE_BYTES,
        start_new_session=True,
    )
    assert process.stderr is not None
    reading = asyncio.create_task(_read(process.stderr, heard))
    try:
        return await process.wait()
    finally:
        await _end(process, child.stop_s)
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
