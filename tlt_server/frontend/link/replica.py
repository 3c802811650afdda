"""One engine over its epochs: the way to it, whether it can be asked, and its last reports; and the
table of them, which has one in a server and n in a fleet.

`supervisor` or `remote` begins and ends its epochs, `client` hands over its events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Protocol

import msgspec

from tlt_server.errors import EngineFailed, Unavailable
from tlt_server.frontend.link.answers import Answers
from tlt_server.frontend.link.starting import StartState
from tlt_server.frontend.link.submission import EngineQueue
from tlt_server.wire.commands import Command
from tlt_server.wire.events import ControlReport, EngineInfo, Outputs, WeightReport
from tlt_server.wire.records import Cycle, GenerateRequest, Switch

SWITCHES = 32  # the last ones that are kept
DRAFTED = 128  # the last steps that verified drafts and are kept


class Link(Protocol):
    """The way to an engine."""

    def send(self, command: Command) -> bool:
        """Send a command. Return False if there is no engine to take it."""
        ...


class Replica:
    queue: EngineQueue  # the batches that it gets next

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.url = ""  # its own HTTP server, if it is on another host
        self.start = StartState()
        self.info: EngineInfo | None = None  # report of the last epoch that was ready
        self.gauges: Mapping[str, float] = {}  # the last that the engine sent
        self.last_cycle: Cycle | None = None
        self.drafted: deque[Cycle] = deque(maxlen=DRAFTED)
        self.switches: deque[Switch] = deque(maxlen=SWITCHES)
        self.failure = ""  # why there is no engine, from a death until the next epoch is ready
        self.runs = False  # its engine is ready
        self._over = False  # there will be none any more
        self._again_s = 0.0  # time in which there may be one again
        self._link: Link | None = None
        self.weight_answers = Answers[WeightReport](self.send)
        self.control_answers = Answers[ControlReport](self.send)

    def connect(self, link: Link) -> None:
        """Begin an epoch. Nothing is submitted to it until it is ready."""
        self._link = link
        self.start.begin()

    def ready(self, info: EngineInfo) -> None:
        self.info, self.failure, self.runs = info, "", True
        self.start.ready()

    def died(self, reason: str, restart_in_s: float | None, start_s: float) -> None:
        """End an epoch. `restart_in_s`: None for never; `start_s`: how long a start then takes."""
        self._link, self.start.over, self.runs = None, True, False
        restart = "will not be" if restart_in_s is None else "is being"
        self.failure = f"the engine is gone and {restart} restarted: {reason}"
        self._over = restart_in_s is None
        self._again_s = (restart_in_s or 0.0) + start_s
        self.weight_answers.fail(
            lambda: EngineFailed(
                f"{reason}; GET /weights says what is live once the engine is back"
            )
        )
        self.control_answers.fail(
            lambda: EngineFailed(f"{reason}; ask again once the engine is back")
        )

    def send(self, command: Command) -> bool:
        """Send a command. Return False if there is no engine to take it."""
        return self._link is not None and self._link.send(command)

    def stepped(self, message: Outputs) -> None:
        """Take in the figures of a step."""
        self.gauges = message.gauges
        self.switches.extend(message.switches)
        if message.cycle is not None:
            self.last_cycle = message.cycle
            if message.cycle.drafted:
                self.drafted.append(message.cycle)

    def reported(self, report: WeightReport) -> None:
        """Take in which versions are live now."""
        if self.info is not None:
            self.info = msgspec.structs.replace(
                self.info,
                weight_version=report.state.target,
                drafter_version=report.state.drafter,
                drafter_quantization=report.state.drafter_quantization,
                adapters=report.state.adapters,
            )

    def check_running(self) -> None:
        """`Unavailable` when there is no engine to ask."""
        now = self.start.now
        if self.failure:
            raise Unavailable(self.failure + now, retry_after_s=self._again_s)
        if self.info is None:
            raise Unavailable(f"the engine is starting{now}; poll /readyz", retry_after_s=2)

    def check_alive(self) -> None:
        """Raise `Unavailable` if the engine is gone and will not be restarted."""
        if self._over:
            raise Unavailable(self.failure, retry_after_s=self._again_s)


class Replicas:
    """The one replica of a server, where every sequence runs. A fleet has more."""

    resume = False  # sequences of a lost replica continue at another one

    def __init__(self, replica: Replica | None = None) -> None:
        self.whole = replica or Replica()

    def __iter__(self) -> Iterator[Replica]:
        yield self.whole

    @property
    def count(self) -> int:
        """The number of engines that orders go to."""
        return 1

    def place(
        self, request: GenerateRequest, tokens: int = 0, at: Replica | None = None
    ) -> Replica | None:
        """Return where to run a sequence that has `tokens` tokens of output, or `at` if that can
        run it; None: nowhere at present.
        """
        return self.whole if self.whole.runs else None

    def took(self, id: str, tokens: int) -> None:
        """Count further tokens of a placed sequence."""

    def ended(self, id: str) -> None:
        """Forget a sequence that was placed."""

    def together(self, cycle: Cycle) -> Cycle:
        """Return a step of all engines, if their steps are like this one."""
        return cycle
