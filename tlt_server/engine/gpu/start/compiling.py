"""Compiles kernels in parallel while the engine loads weights, so that the engine finds them in
Triton's cache.

The process `tlt_kernels.gpu.compiler` does the work. Nothing depends on it: the engine compiles
missing kernels when it launches them.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from tlt_kernels.gpu.variants import Variant
from tlt_server.process.machine import host_memory
from tlt_server.settings.server import available_processors

COMMAND = (sys.executable, "-P", "-m", "tlt_kernels.gpu.compiler")
WORKER_BYTES = 1 << 30  # host memory per worker
MAX_WORKERS = 32
SILENT_S = 120.0  # without a kernel done, the process is given up


def worker_count() -> int:
    """Return the number of processes that the machine's cores and memory allow."""
    return max(1, min(available_processors(), host_memory().available // WORKER_BYTES, MAX_WORKERS))


class Compiled(NamedTuple):
    """The result of a compiler that has ended."""

    done: int
    why: str  # not all are compiled; empty: all are
    new: int = 0  # compiled now, not found in a cache


class ParallelCompiler:
    def __init__(
        self,
        target: tuple[str, int, int],
        variants: Sequence[Variant] | None = None,
        *,
        workers: int | None = None,
        niceness: int = 0,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Start a process that compiles for `target` (backend, capability, threads of a warp).
        Without variants it initializes and waits for them. `niceness`: its minimum.
        """
        self._target, self._count = target, len(variants or ())
        file = None
        if variants is not None:
            file = tempfile.TemporaryFile()
            file.write(self._input(variants))
            file.seek(0)
        # Its libraries must start no threads, because it forks.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, str(workers or worker_count()), str(os.getpid()), str(niceness)],
            stdin=subprocess.PIPE if file is None else file,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # so that it is killed with its workers
        )

    def compile(self, variants: Sequence[Variant]) -> None:
        """Send the variants to a process that waits for them."""
        self._count = len(variants)
        stdin = self._process.stdin
        assert stdin is not None, "it was started with its variants"
        try:
            stdin.write(self._input(variants))
            stdin.close()
        except BrokenPipeError:
            pass  # it has ended, which `wait` reports

    def wait(self, on_progress: Callable[[int, int], None], silent_s: float = SILENT_S) -> int:
        """Wait for the end and return the number of compiled variants. Missing ones are reported in
        one line on stderr.
        """
        compiled, why, _ = self.end(on_progress, silent_s)
        if why:
            print(
                f"tlt: {self._count - compiled} of {self._count} kernels were not compiled ahead "
                f"({why}); the engine compiles them itself, which takes longer",
                file=sys.stderr,
            )
        return compiled

    def end(self, on_progress: Callable[[int, int], None], silent_s: float = SILENT_S) -> Compiled:
        """Wait for the end and return the compiled variants."""
        errors: dict[int, str] = {}
        new = 0
        for index, error, compiled in self._lines(silent_s):
            errors[index], new = error, new + compiled
            on_progress(len(errors), self._count)
        self.stop()
        self._process.wait()
        done = sum(not error for error in errors.values())
        if done == self._count:
            return Compiled(done, "", new)
        why = next(filter(None, errors.values()), f"status {self._process.returncode}")
        return Compiled(done, why[:200], new)

    def stop(self) -> None:
        """Kill the process and its workers; a wait for it then ends."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.killpg(self._process.pid, 9)

    def _lines(self, silent_s: float) -> Iterator[tuple[int, str, bool]]:
        """Yield the process's reports until it ends or is silent for too long."""
        stdout = self._process.stdout
        assert stdout is not None
        rest = b""
        with stdout:
            while select.select([stdout], [], [], silent_s)[0]:
                read = os.read(stdout.fileno(), 1 << 16)
                if not read:
                    self._process.wait()
                    return
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    index, error, compiled = json.loads(line)
                    yield index, error, compiled

    def _input(self, variants: Sequence[Variant]) -> bytes:
        return "\n".join([json.dumps(self._target), *map(json.dumps, variants)]).encode()
