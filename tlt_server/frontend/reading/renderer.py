"""Runs templates of requests in separate processes.

One process keeps everything that a template needs loaded, and forks for each template. Each key
runs one at a time, and keys take turns, so no key blocks another. Without keys, templates run up to
the limit at once. The fork limits its own time and memory; exceeding them refuses only that
template.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec
import structlog

from tlt_server.errors import InvalidRequest, QueueFull, Unavailable
from tlt_server.frontend.reading.frames import Channel
from tlt_server.frontend.reading.jobs import Job, Slice, exchange

AT_ONCE = 4  # templates that run at once
AT_ONCE_KEY = 1  # templates of one key that run at once
MAX_WAITING_KEY = 64  # templates of one key
PROCESSOR_S = 2  # time of a core for one template
READ_BYTES_S = 2**22  # a slow core reads more of a conversation in a second
MEMORY_MB = 256  # in addition to 16 times the size of the conversation
HANGS_S = 120.0  # after which even the busiest machine would have run a template
START_S = 60.0  # until the process has imported what it needs
# -P: a module in the current directory is none of ours.
COMMAND = (sys.executable, "-P", "-m", "tlt_server.frontend.reading_process.templates")

log = structlog.get_logger()


class _Line:
    """The waiting templates of one key, or of all callers without keys."""

    def __init__(self, key: str) -> None:
        self.turns = asyncio.Semaphore(AT_ONCE_KEY if key else AT_ONCE)
        self.length = 0


class Renderer:
    """The processes that run templates of requests."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._lines: dict[str, _Line] = {}  # by key
        self._free = asyncio.Semaphore(AT_ONCE)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Id of the forking process; None without one."""
        return self._process.pid if self._process is not None else None

    async def render(self, key: str, slice: Slice, size: int) -> Any:
        """Return the text that a template makes from a conversation of `size` bytes.
        `InvalidRequest` if it fails, or takes too much time or memory.
        """
        async with self._turn(key), self._free:
            return await self._run(slice, size)

    def close(self) -> None:
        """End the process and all running templates. A later template starts another process."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()  # it is dying, so this does not take long
        self._control = self._process = None

    @contextlib.asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        line = self._lines.setdefault(key, _Line(key))
        if line.length >= MAX_WAITING_KEY:
            raise QueueFull(
                f"{line.length} requests of this key wait with a chat_template; the limit is "
                f"{MAX_WAITING_KEY}: send fewer at once, or again later",
                retry_after_s=1,
            )
        line.length += 1
        try:
            async with line.turns:
                yield
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[key]

    async def _run(self, slice: Slice, size: int) -> Any:
        channel = await Channel.over(self._fork())
        try:
            with await _begun(channel):
                job = Job("", [slice])
                try:
                    async with asyncio.timeout(HANGS_S + size / READ_BYTES_S):
                        await exchange(channel, job)
                except (TimeoutError, EOFError, OSError) as error:
                    if self._ended or isinstance(error, TimeoutError):
                        raise _gone() from None
                    raise _too_much() from None
                [text] = await job.done
                return text
        finally:
            channel.close()

    @property
    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _fork(self) -> socket.socket:
        """Return the socket of a new process for one template."""
        found = None if self._ended else self._asked()
        if found is None:
            self.close()
            self._control, self._process = self._launch()
            found = self._asked()
        if found is None:
            raise _gone()
        return found

    def _asked(self) -> socket.socket | None:
        """Request a fork. Return None if the process has ended, which `poll` may not show yet."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        return ours

    def _launch(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [*COMMAND, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=self._environment,
                )
            except OSError:  # no descriptor or no memory is left for a process
                ours.close()
                raise _gone() from None
        log.info("templates_process_started", pid=process.pid)
        return ours, process


async def _begun(channel: Channel) -> contextlib.AbstractContextManager[None]:
    """Wait until the fork has started, and return the context that ends it."""
    try:
        async with asyncio.timeout(START_S):
            pid = msgspec.msgpack.decode(await channel.receive())
            await channel.receive()
        return _killing(os.pidfd_open(pid))  # it waits for its template, so it is still there
    except (OSError, EOFError):  # a timeout, too
        raise _gone() from None


@contextlib.contextmanager
def _killing(process: int) -> Iterator[None]:
    """End the process of this descriptor after the block."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def _too_much() -> InvalidRequest:
    return InvalidRequest(
        f"chat_template takes more than {PROCESSOR_S} s of a core or {MEMORY_MB} MiB of memory, or "
        "nests too deep: simplify it"
    )


def _gone() -> Unavailable:
    return Unavailable(
        "the process that runs chat templates of requests has ended or hangs; send this one again",
        retry_after_s=1,
    )
