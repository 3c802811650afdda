"""`tlt serve` as a separate process on a free loopback port, during a `with` block.

Used by the demo, by benches and by the end-to-end tests. The process sees no `TLT_*` variable of
this one, and no Ctrl-C: its caller stops it; if the caller is killed, the system does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from tlt_kernels.parents import bound
from tlt_server.errors import StartupError
from tlt_server.process.faults import exit_of

COMMAND = (sys.executable, "-P", "-m", "tlt_server")
POLL_S = 0.05
LINES_S = 10.0  # until the last line has come through the pipe
STOP_S = 20.0  # after SIGTERM; then it is killed, and its engine leaves with it


class ServerProcess:
    """A context manager that starts the server, waits for its ready line and stops it at the end.
    `StartupError` gives the reason for a failed start. `on_line` gets each line of the start-up
    report. `verb`: of the command.
    """

    def __init__(
        self,
        *flags: str,
        on_line: Callable[[str], None] = lambda line: None,
        verb: Sequence[str] = ("serve",),
    ) -> None:
        self._flags, self._on_line, self._verb = flags, on_line, verb
        self.lines: list[str] = []
        self.url = self.grpc_address = ""
        self._ready = threading.Event()

    def __enter__(self) -> ServerProcess:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("TLT_")
        }
        self.process = subprocess.Popen(
            bound([*COMMAND, *self._verb, "--port", "0", *self._flags]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Ask the server to drain and exit; return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(LINES_S)
        return self.process.returncode

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.match(r"tlt: listening on (\S+) for gRPC", line):
                self.grpc_address = found[1]
            if found := re.match(r"tlt: listening on (\S+);", line):
                self.url = found[1]
            self._on_line(line.rstrip("\n"))
            if line.startswith("tlt: ready at "):
                self._ready.set()

    def _await_ready(self) -> None:
        while not self._ready.wait(POLL_S):
            self._check_alive()

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            self._reader.join(LINES_S)
            said = (
                [line.removeprefix("tlt: ") for line in self.lines if line.startswith("tlt: ")]
                or self.lines
                or ["it said nothing"]
            )
            raise StartupError(f"the server {exit_of(self.process.returncode)}: {said[-1]}")
