"""The trainer process: takes finished sequences from the ring and keeps them.

Its settings are one line of JSON on standard input; it writes a `BufferReport` per line to standard
output whenever something has changed. It never touches the engine: killed or hung, sequences are
dropped and counted, and the next process goes on with the segment files.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from tlt_server.errors import StartupError, TltError
from tlt_server.events import BufferReport
from tlt_server.samples.captured import decode_captured
from tlt_server.samples.identity import identity_of, vocabulary_of
from tlt_server.samples.ring import RingConsumer
from tlt_server.samples.sample import decode_sample
from tlt_server.samples.segments import SegmentHeader
from tlt_server.trainer.buffer import BufferBounds, SampleBuffer
from tlt_server.trainer.state_store import StateStore

NICENESS = 10  # after frontend and engine
POLL_S = 0.05
REPORT_S = 1.0
VERSIONS = 8  # told apart in a report
MAX_REPORT = 2**20  # bytes of a report's line
BATCH = 256  # sequences taken between two looks at the parent


class TrainerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    ring: str
    model: str
    directory: str  # for segment files; empty: memory only
    tokens: int
    bytes: int
    parent: int  # process that started this one; the trainer ends with it
    feature_ring: str = ""  # empty: no features are captured
    feature_bytes: int = 0
    feature_staleness: int = 0  # versions


class Keeper:
    """Moves sequences from the ring to the buffer and reports on it."""

    def __init__(
        self, settings: TrainerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        model = Path(settings.model)
        header = SegmentHeader.of(identity_of(model), vocabulary_of(model))
        directory = Path(settings.directory) if settings.directory else None
        self.buffer = SampleBuffer(
            directory, header, BufferBounds(settings.tokens, settings.bytes), clock
        )
        self.states = StateStore(settings.feature_bytes, settings.feature_staleness)
        self._ring, self._clock = RingConsumer(Path(settings.ring)), clock
        self._feature_ring = (
            RingConsumer(Path(settings.feature_ring)) if settings.feature_ring else None
        )
        self._reported: BufferReport | None = None
        self._report_s = clock()

    def take(self) -> int:
        """Take what the rings have, a batch at most of each; return the larger count."""
        taken = self._drain(self._ring, lambda content: self.buffer.add(decode_sample(content)))
        if self._feature_ring is None:
            return taken
        captured = self._drain(
            self._feature_ring, lambda content: self.states.add(decode_captured(content))
        )
        return max(taken, captured)

    def _drain(self, ring: RingConsumer, keep: Callable[[bytes], object]) -> int:
        for taken in range(BATCH):
            content = ring.take()
            if content is None:
                return taken
            try:
                keep(content)
            except ValueError as error:
                self.buffer.refusals.add(f"an entry of a ring is no sequence: {error}")
        return BATCH

    def report(self) -> BufferReport | None:
        """Return what has changed; None where nothing has, or too little time has passed."""
        if self._reported is not None and self._clock() < self._report_s:
            return None
        buffer, refusals = self.buffer, self.buffer.refusals
        state = BufferReport(
            sequences=len(buffer),
            tokens=buffer.tokens,
            size=buffer.size,
            tokens_by_version=_newest(buffer.tokens_by_version()),
            refused=refusals.count,
            lost=self._ring.lost + (self._feature_ring.lost if self._feature_ring else 0),
            feature_tokens=self.states.tokens,
            feature_size=self.states.size,
            disk_error=buffer.disk_error,
        )
        self._report_s = self._clock() + REPORT_S
        if state == self._reported:
            return None
        self._reported = state
        return msgspec.structs.replace(state, refusals=refusals.take())


def _newest(tokens_by_version: dict[str, int]) -> dict[str, int]:
    """Return the newest versions, with all before them as `older`."""
    entries = [*tokens_by_version.items()]
    older = sum(tokens for _, tokens in entries[:-VERSIONS])
    return ({"older": older} if older else {}) | dict(entries[-VERSIONS:])


def main() -> int:
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, as for the engine
    try:
        settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrainerSettings)
        keeper = Keeper(settings)
    except (TltError, StartupError, ValueError) as error:
        print(f"tlt: the trainer cannot start: {error}", file=sys.stderr)
        return 2
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    while os.getppid() == settings.parent:
        busy = keeper.take() == BATCH
        if (report := keeper.report()) is not None:
            sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
            sys.stdout.buffer.flush()
        if not busy and stop.wait(POLL_S):
            break
    while keeper.take():
        pass  # what the engine has offered last
    return 0


if __name__ == "__main__":
    sys.exit(main())
