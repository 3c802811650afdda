"""The start of an engine as its readers see it: operators, probes and refused requests.

`client` records the phases of each epoch here. `/startupz`, every 503 of a start and the lines for
an operator show the current phase, its progress and its duration.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TextIO

from msgspec import Struct

from tlt_server.errors import EngineFailed
from tlt_server.frontend.http.logs import lasting
from tlt_server.speculation.drafters import weights_directory
from tlt_server.wire.events import CHECKED, EngineInfo, Phase, PhaseProgress

if TYPE_CHECKING:  # the reading process needs no settings
    from tlt_server.config import ResolvedConfig

LAUNCHING = PhaseProgress("launch", 0, 0)  # until the engine process says what it does
DOING = {
    "launch": "launching the engine",
    "import libraries": "importing libraries",
    "choose device": "choosing the device",
    CHECKED: "checking the files of the model",
    "load kernels": "loading kernels",
    "compile kernels": "compiling kernels, once per machine",
    "load model": "loading weights",
    "allocate KV": "allocating KV pages",
    "prepare runner": "preparing the runner",
    "capture graphs": "capturing graphs",
    "warm up": "warming up",
    "measure steps": "measuring the time of steps",
}


class UnderWay(Struct, frozen=True):
    """The current phase of a start."""

    phase: Annotated[str, "what the engine does now"]
    done: Annotated[int, "steps of it that are done"]
    of: Annotated[int, "all of its steps; 0: it has none that are counted"]
    seconds: Annotated[float, "time since the phase began"]

    def __str__(self) -> str:
        counted = f" ({self.done} of {self.of})" if self.of else ""
        return f"{self.phase}{counted}, for {self.seconds:.0f} s so far"


class StartState:
    """The phases of the start of the newest epoch."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.checked = asyncio.Event()  # an engine has found device and files usable
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self.over = False  # the engine is ready, or gone
        self.phases: list[Phase] = []  # those that have ended
        self._progress, self._since_s = LAUNCHING, self._clock()

    def take(self, event: Phase | PhaseProgress) -> None:
        if isinstance(event, PhaseProgress):
            if event.name != self._progress.name:
                self._since_s = self._clock()
            self._progress = event
            return
        self.phases.append(event)
        if event.name == CHECKED:
            self.checked.set()

    def ready(self) -> None:
        self.over = True
        self.checked.set()

    @property
    def under_way(self) -> UnderWay | None:
        """Return the current phase; None once the engine is ready, or gone."""
        if self.over:
            return None
        name, done, of = self._progress.name, self._progress.done, self._progress.of
        return UnderWay(DOING.get(name, name), done, of, self._clock() - self._since_s)

    @property
    def now(self) -> str:
        """Return the end of a message, empty if no phase is running."""
        return f"; now {doing}" if (doing := self.under_way) else ""


async def checked(
    event: asyncio.Event, supervised: asyncio.Task[EngineFailed], stop: asyncio.Event
) -> None:
    """Wait until the engine has accepted device and files (`event`), so that no port is open
    before. `StartupError` gives the reason if they are unusable.
    """
    waits = [asyncio.create_task(each.wait()) for each in (event, stop)]
    await asyncio.wait({*waits, supervised}, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if supervised.done():
        supervised.result()


EVERY_S = 10.0
REWRITE = "\r\x1b[K"  # go to the line's start and clear it


class ProgressLines:
    """Lines for an operator while the server starts: one per phase, and one for the current phase.

    A terminal shows the current phase in one line that is overwritten; elsewhere it is shown when
    its first step begins and every ten seconds.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._clock, self._said_s = lasting(stream or sys.stderr), clock, clock()
        self._begun = ""  # the last phase with steps that was shown
        self._unfinished = False  # the cursor is at the end of a line to be written over

    def phase(self, phase: Phase) -> None:
        self._say(f"  {phase.name:<28} {phase.seconds:8.2f} s  {phase.detail}".rstrip())

    def under_way(self, phase: UnderWay) -> None:
        if self._stream.isatty():
            print(f"{REWRITE}  {phase} ...", end="", file=self._stream, flush=True)
            self._unfinished = True
        elif self._clock() - self._said_s >= EVERY_S or (phase.of and phase.phase != self._begun):
            self._begun = phase.phase
            self._say(f"  {phase} ...")

    def listening(
        self, url: str, grpc_address: str = "", probe_url: str = "", link_address: str = ""
    ) -> None:
        if probe_url:
            self._say(f"tlt: listening on {probe_url} for probes")
        if grpc_address:
            self._say(f"tlt: listening on {grpc_address} for gRPC")
        if link_address:
            self._say(f"tlt: listening on {link_address} for a gateway")
        self._say(f"tlt: listening on {url}; the engine is starting")

    def ready(self, url: str, config: ResolvedConfig, info: EngineInfo) -> None:
        full_length = info.pages * info.page_size // info.max_model_len
        in_fp8 = ", FP8 weights" * (info.fingerprint.quantization == "fp8")
        self._say(
            f"tlt: ready at {url} | model {config.served_model_name} | "
            f"weights {info.weight_version} | {info.pages} pages of {info.page_size} | "
            f"up to {info.max_running} sequences ({full_length} at full length) | "
            f"drafter {info.drafter or 'none'} | policy {info.policy} | "
            f"numerics {info.numerics.partition(':')[0]} | "
            f"{info.gpu or info.device}, {info.dtype}{in_fp8}, attention {info.attention}"
        )
        if config.drafter_training != "off":
            self._say(
                f"tlt: drafter_training {config.drafter_training} keeps finished sequences, "
                f"prompts included, up to {config.drafter_buffer_tokens} tokens, "
                f"{'below state_dir' if config.state_dir else 'in memory only (no state_dir)'}; "
                f"{_trained(config)}. A request with train false is not kept"
            )

    def lost(self, reason: str) -> None:
        self._say(f"tlt: nothing is generated: {reason}")

    def died(self, reason: str, restart_in_s: float, waiting: int) -> None:
        when = f"in {restart_in_s:g} s" if restart_in_s else "now"
        self._say(
            f"tlt: {reason} | restarting {when} | {waiting} sequences wait to resume, the others "
            "ended with a retryable error"
        )

    def back(self, info: EngineInfo, after_s: float, waiting: int) -> None:
        self._say(
            f"tlt: the engine is back after {after_s:.1f} s | weights {info.weight_version} | "
            f"{waiting} sequences resume"
        )

    def gave_up(self, reason: str) -> None:
        self._say(f"tlt: {reason}; the server stops with status 1")

    def draining(self, open_sequences: int, timeout_s: float) -> None:
        self._say(
            f"tlt: draining {open_sequences} sequences (up to {timeout_s:g} s); send the signal "
            "again to stop at once"
        )

    def _say(self, line: str) -> None:
        print(f"{REWRITE if self._unfinished else ''}{line}", file=self._stream, flush=True)
        self._unfinished, self._said_s = False, self._clock()


def _trained(config: ResolvedConfig) -> str:
    if weights_directory(config.drafter) is None:
        return "nothing is trained, as --drafter names no network"
    if not config.drafter_feature_mb:
        return "nothing is trained, as drafter_feature_mb is 0"
    when = "while the engine is idle" if config.drafter_training == "idle" else "all the time"
    return f"the drafter is trained on them {when}"
