"""An engine process, and the parent's half of its sockets, for tests: it blocks where the frontend
does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from tlt_server.engine.settings import EngineSettings, encode_settings
from tlt_server.errors import EngineFailed, from_code
from tlt_server.models.environment import library_environment
from tlt_server.process.faults import exit_of
from tlt_server.wire.commands import Command, SetPolicy, Stop
from tlt_server.wire.events import (
    ControlReport,
    EngineInfo,
    Event,
    Failed,
    Phase,
    Ready,
    decode_event,
)
from tlt_server.wire.records import encode

POLL_MS = 200


def start_engine(settings: EngineSettings, directory: Path) -> subprocess.Popen[bytes]:
    """Start an engine that connects to the sockets `commands` and `events` in `directory` (bound by
    the caller, mode 0700).
    """
    environment = {**os.environ, **library_environment(settings.numerics)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tlt_server.engine.process", str(directory)],
        stdin=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    process.stdin.write(encode_settings(replace(settings, parent=os.getpid())))
    process.stdin.flush()
    return process


class EngineChild:
    """One engine process, started and ready; a context manager that ends it. Raises the engine's
    own error if that cannot start or dies.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tlt-")  # mode 0700
        self.directory = Path(self._directory.name)
        self._context = zmq.Context()
        self._commands, self._events = (
            self._context.socket(zmq.PUSH),
            self._context.socket(zmq.PULL),
        )
        self._commands.bind(f"ipc://{self._directory.name}/commands")
        self._events.bind(f"ipc://{self._directory.name}/events")
        self._process = start_engine(settings, self.directory)
        self.phases: list[Phase] = []
        try:
            self.info = self._ready()
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._end()
            raise

    def _ready(self) -> EngineInfo:
        for event in self.events():
            if isinstance(event, Ready):
                return event.info
            if isinstance(event, Phase):
                self.phases.append(event)
        raise AssertionError("events end with an error")

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._process.poll() is None:
            self.send(Stop(drain=False))
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._context.destroy(linger=0)
        self._directory.cleanup()

    def send(self, command: Command) -> None:
        self._commands.send(encode(command))

    def adopt(self, policy: SetPolicy) -> None:
        """Return when the policy is in force. Raises the engine's error."""
        self.send(msgspec.structs.replace(policy, id="policy"))
        for event in self.events():
            if isinstance(event, ControlReport):
                if event.error:
                    raise from_code(*event.error)
                return

    def events(self) -> Iterator[Event]:
        """Yield the events of the engine as they come, without end."""
        while True:
            if self._events.poll(POLL_MS):
                event = decode_event(self._events.recv())
                if isinstance(event, Failed):
                    raise from_code(event.code, event.message)
                yield event
            elif self._process.poll() is not None:
                raise EngineFailed(
                    f"the engine process {exit_of(self._process.returncode)}; "
                    "its last lines are on stderr"
                )
