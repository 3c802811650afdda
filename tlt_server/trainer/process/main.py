"""The trainer process: reads finished sequences from the ring, keeps them, and trains the drafter
on them when its mode allows (`schedule.py`).

Its settings are one line of JSON on standard input, followed by messages of `training.py`; its own
messages go to standard output. One thread does everything: between two segments of training it
reads the rings and checks whether the engine has work. It never touches the engine: if it is killed
or hangs, sequences are dropped and counted, and the next process continues with the segment files
and the checkpoints.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # The parent decides: on Ctrl-C it drains. Imports take a second or two.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from tlt_server.errors import StartupError, TltError
from tlt_server.process.garbage import loading
from tlt_server.process.machine import mps_enabled
from tlt_server.registry import load_object
from tlt_server.samples.activity import ActivityReader
from tlt_server.samples.hidden_states import decode_captured
from tlt_server.samples.identity import identity_of, vocabulary_of
from tlt_server.samples.inbox import DIRECTORY, Inbox
from tlt_server.samples.ring import RingConsumer
from tlt_server.samples.sample import Sample, decode_sample
from tlt_server.samples.segments import SegmentHeader
from tlt_server.trainer.process.spot import SpotTrainer, Work
from tlt_server.trainer.process.states import WORKING
from tlt_server.trainer.recording.buffer import BufferBounds, SampleBuffer
from tlt_server.trainer.recording.state_store import StateStore
from tlt_server.wire.events import BufferReport
from tlt_server.wire.training import (
    FromTrainer,
    ToTrainer,
    TrainerSettings,
    line_of,
    read_to_trainer,
)

NICENESS = 10  # after frontend and engine
POLL_S = 0.05
REPORT_S = 1.0
BEAT_S = 10.0  # a report comes at least this often, or the frontend takes the process for hung
VERSIONS = 8  # told apart in a report
MAX_REPORT = 2**20  # bytes of a report's line
BATCH = 256  # sequences taken between two looks at the parent


class Keeper:
    """Moves sequences from the ring to the buffer and reports on the buffer."""

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
        self.on_sample: Callable[[Sample], None] = lambda sample: None
        self._ring, self._clock = RingConsumer(Path(settings.ring)), clock
        self._feature_ring = (
            RingConsumer(Path(settings.feature_ring)) if settings.feature_ring else None
        )
        self._inbox = Inbox(directory / DIRECTORY) if directory else None
        self._reported: BufferReport | None = None
        self._report_s = self._beat_s = clock()

    def take(self) -> int:
        """Read the rings, at most a batch from each, and one file of other servers. Return the
        larger batch's size.
        """
        if self._inbox is not None:
            self.buffer.take_in(self._inbox)
        taken = self._drain(self._ring, self._keep)
        if self._feature_ring is None:
            return taken
        captured = self._drain(
            self._feature_ring, lambda content: self.states.add(decode_captured(content))
        )
        return max(taken, captured)

    def _keep(self, content: bytes) -> None:
        sample = decode_sample(content)
        if self.buffer.add(sample):
            self.on_sample(sample)

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
        """Return the report; None if nothing has changed, or too little time has passed."""
        now_s = self._clock()
        if self._reported is not None and now_s < self._report_s:
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
        self._report_s = now_s + REPORT_S
        if state == self._reported and now_s < self._beat_s:
            return None
        self._reported, self._beat_s = state, now_s + BEAT_S
        return msgspec.structs.replace(state, refusals=refusals.take())


def _newest(tokens_by_version: dict[str, int]) -> dict[str, int]:
    """Return the tokens of the newest versions, with the sum of the others as `older`."""
    entries = [*tokens_by_version.items()]
    older = sum(tokens for _, tokens in entries[:-VERSIONS])
    return ({"older": older} if older else {}) | dict(entries[-VERSIONS:])


class FrontendPipes:
    """The two pipes to the frontend."""

    def __init__(self) -> None:
        self._input, self._output = sys.stdin.fileno(), sys.stdout.buffer
        self._part = b""

    def settings(self) -> TrainerSettings:
        """Wait for the first line and parse the settings. `ValueError` if it has none."""
        while b"\n" not in self._part:
            data = os.read(self._input, MAX_REPORT)
            if not data:
                break
            self._part += data
        os.set_blocking(self._input, False)
        line, _, self._part = self._part.partition(b"\n")
        return msgspec.json.decode(line, type=TrainerSettings)

    def messages(self) -> list[ToTrainer]:
        """Return the messages since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._part += os.read(self._input, MAX_REPORT)
        *lines, self._part = self._part.split(b"\n")
        return [read_to_trainer(line) for line in lines]

    def send(self, message: FromTrainer) -> None:
        self._output.write(line_of(message))
        self._output.flush()


class Trained:
    """The training part of the process, if there is a drafter to train."""

    def __init__(self, settings: TrainerSettings, keeper: Keeper, channel: FrontendPipes) -> None:
        def work(device: str) -> Work:
            kind, _, index = device.partition(":")
            if index:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible(int(index), os.environ)
            if settings.shares and kind == "cuda" and not mps_enabled():
                raise StartupError(
                    "MPS is on for the engine but not for this process; start its control daemon "
                    "and the server again, or use drafter_training idle"
                )
            with loading():  # torch takes seconds, and only training needs it
                make_work = load_object("tlt_server.trainer.process.work:make_work")
            made: Work = make_work(settings, kind, keeper.buffer, keeper.states)
            return made

        self._activity = ActivityReader(Path(settings.activity))
        self._channel = channel
        self.spot = SpotTrainer(work, channel.send)
        keeper.on_sample = self.spot.took

    def advance(self) -> bool:
        """Handle messages, run a segment if one may run, and report. Return False if nothing was
        done.
        """
        activity = self._activity
        for message in self._channel.messages():
            self.spot.take(message)
        did = self.spot.advance(busy=activity.busy, busy_ms=activity.age_ms, asleep=activity.asleep)
        activity.runs = self.spot.state in WORKING
        if (report := self.spot.report()) is not None:
            self._channel.send(report)
        return did


def visible(index: int, environment: Mapping[str, str]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that leaves only the GPU with this number among the
    visible ones. CUDA reads it when torch first uses a GPU.
    """
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    return str(index) if seen is None else seen.split(",")[index].strip()


def main() -> int:
    os.nice(NICENESS)
    channel = FrontendPipes()
    try:
        settings = channel.settings()
        keeper = Keeper(settings)
        trained = Trained(settings, keeper, channel) if settings.activity else None
    except (TltError, StartupError, ValueError) as error:
        print(f"tlt: the trainer cannot start: {error}", file=sys.stderr)
        return 2
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    while os.getppid() == settings.parent and not stop.is_set():
        busy = keeper.take() == BATCH
        if (report := keeper.report()) is not None:
            channel.send(report)
        if trained is not None and trained.advance():
            continue
        if not busy and stop.wait(POLL_S):
            break
    while keeper.take():
        pass  # the last sequences of the engine
    return 0


if __name__ == "__main__":
    sys.exit(main())
