"""The start of an engine in the words of its readers: operators, probes and refused requests.

`client` notes the phases of each epoch here; `/startupz`, every 503 of a start and the lines of
`progress` say which one is under way, how far it is and how long it has taken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

from msgspec import Struct

from tlt_server.errors import EngineFailed
from tlt_server.wire.events import CHECKED, Phase, PhaseProgress

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
    """The phase of a start that is under way."""

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
        """None once the engine is ready, or gone."""
        if self.over:
            return None
        name, done, of = self._progress.name, self._progress.done, self._progress.of
        return UnderWay(DOING.get(name, name), done, of, self._clock() - self._since_s)

    @property
    def now(self) -> str:
        """Return the end of a message, empty when nothing is under way."""
        return f"; now {doing}" if (doing := self.under_way) else ""


async def checked(
    event: asyncio.Event, supervised: asyncio.Task[EngineFailed], stop: asyncio.Event
) -> None:
    """Wait until the engine has found device and files usable (`event`), so that no port is open
    before. `StartupError` says why they are not.
    """
    waits = [asyncio.create_task(each.wait()) for each in (event, stop)]
    await asyncio.wait({*waits, supervised}, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if supervised.done():
        supervised.result()
