"""The engine over all its epochs: submissions and commands go out, outputs and answers come in.

`supervisor` reports when an epoch ends (`died`), and passes on every event (`take`). `replica` has
the engine's state, `sequences` and `answers` keep the open ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import structlog

from tlt_server.errors import Conflict, EngineFailed, Unavailable, from_code
from tlt_server.frontend.http.access import CURRENT
from tlt_server.frontend.link.admission import Admission, Demand
from tlt_server.frontend.link.answers import Changes
from tlt_server.frontend.link.link import Death
from tlt_server.frontend.link.replica import Replicas
from tlt_server.frontend.link.sequences import OpenSequences
from tlt_server.frontend.link.standing import PauseState, PolicyState, WantedVersions
from tlt_server.frontend.link.submission import Submission
from tlt_server.metrics import Metrics
from tlt_server.metrics.weights import QUESTIONS
from tlt_server.process.faults import Containment
from tlt_server.samples.activity import Activity
from tlt_server.wire.commands import (
    ControlCommand,
    Pause,
    Recompute,
    SetPolicy,
    Sleep,
    WeightCommand,
)
from tlt_server.wire.events import (
    ControlReport,
    EngineInfo,
    Event,
    Outputs,
    Phase,
    PhaseProgress,
    Ready,
    WeightReport,
)
from tlt_server.wire.records import GenerateRequest

log = structlog.get_logger()


class Relay(Protocol):
    """The way to a gateway, which commands this engine from another host."""

    gateway: str  # for people

    def took(self, event: Event) -> None:
        """Take in an event that was applied."""

    def died(self, death: Death, restart_in_s: float | None, start_s: float) -> None:
        """Take in the engine's death, before what it leaves is ended."""


class EngineClient:
    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        activity: Activity | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """`activity`: is told whether there is work, for the trainer."""
        self.admission, self._metrics = admission, metrics
        self.activity = activity or Activity()
        metrics.sequences.open_tokens.set_function(lambda: admission.tokens)
        metrics.sequences.forecast_pages.set_function(lambda: admission.pages)
        metrics.sequences.forecast_wait_s.set_function(admission.wait_s)
        self.replicas = replicas or Replicas()
        self.replica = self.replicas.whole
        self.fleet: Any = None  # `FleetOperations` of a gateway
        self._send = self.replica.send
        self.faults = Containment(log=self._contained)
        self.sequences = OpenSequences(
            admission,
            metrics,
            self.replicas,
            lambda count: self.activity.set("sequences", count),
            self.faults,
        )
        self.replica.queue = self.sequences.where.queue(self.replica)
        self._weight_answers = self.replica.weight_answers
        self._control_answers = self.replica.control_answers
        self.adopting = asyncio.Lock()  # held while a drafter of its own trainer is being pushed
        self._unanswered = False  # weight commands were open at a death; False again when ready
        self._command_ids = itertools.count(1)
        self._started = asyncio.Event()
        self.changes = Changes()
        self.versions = WantedVersions()
        self.pauses = PauseState(self.command_id, self._control, self.changes.tell)
        self.policies = PolicyState(self.command_id, self._send)
        self.draining = False
        self.relay: Relay | None = None  # to the gateway that commands this engine

    # the engine's epochs

    @property
    def info(self) -> EngineInfo | None:
        """The report of the last epoch that was ready, with the weights that are live now."""
        return self.replica.info

    async def ready(self) -> EngineInfo:
        """Wait until the first epoch is ready."""
        await self._started.wait()
        assert self.info is not None
        return self.info

    def take(self, event: Event) -> None:
        """Apply an event of the current epoch. A fault in its handling is contained, since it is
        not the engine's; only a `Ready` that cannot be applied ends the epoch.
        """
        match event:
            case Outputs():
                with self.faults.containing("the figures of a step"):
                    self._count(event)
                self.sequences.dispatch(event.outputs)
            case Phase() | PhaseProgress():
                self.replica.start.take(event)
            case Ready(info):
                self._begin(info)
            case WeightReport():
                with self.faults.containing("a weight report"):
                    self._weights_reported(event)
                self._weight_answers.settle(event)
            case ControlReport():
                with self.faults.containing("a control report"):
                    self._controlled(event)
                self._control_answers.settle(event)
        if self.relay is not None:
            with self.faults.containing("an event for a gateway"):
                self.relay.took(event)
        if not isinstance(event, Outputs):
            self.changes.tell()

    def _contained(self, what: str, trace: str) -> None:
        log.error("contained_fault", what=what, trace=trace)
        self._metrics.engine.contained_faults.inc()

    def _controlled(self, report: ControlReport) -> None:
        self.pauses.answered(report)
        if self.policies.answered(report):
            return
        self.activity.sleeps(bool(self.pauses.asleep))
        if report.error is not None and report.id not in self._control_answers:
            # the client has gone, or a new epoch got a command that was standing
            log.warning("control_failed", code=report.error[0], message=report.error[1])

    def blame(self, death: Death, now_s: float) -> str:
        """Return the key whose requests alone can have caused this death, which may have to rest
        now; empty if unknown.
        """
        owner = self.sequences.alone(death.started)
        self.admission.rests.died(owner, now_s)
        return owner

    def died(self, death: Death, restart_in_s: float | None, start_s: float) -> int:
        """End everything open with a typed error, except sequences that can resume, and return
        their number. `restart_in_s` and `start_s`: see `Replica.died`.
        """
        reason = death.error.message
        if self.relay is not None:
            with self.faults.containing("an engine's death for a gateway"):
                self.relay.died(death, restart_in_s, start_s)
        self._unanswered |= bool(self._weight_answers)
        self.replica.died(reason, restart_in_s, start_s)
        self.activity.set("engine", 1)  # it starts again, and measures its steps
        self.pauses.died()
        with self.faults.containing("the figures of an engine that is gone"):
            self._metrics.engine_gone()
        self.policies.died(reason)
        resumable = self.sequences.died(self.replica, death.started, EngineFailed(reason))
        self.changes.tell()
        return resumable

    def _begin(self, info: EngineInfo) -> None:
        """Send the ready epoch the settings made while serving, then the interrupted sequences."""
        self.admission.engine = info
        self.replica.ready(info)
        with self.faults.containing("the figures of an engine that is ready"):
            self._metrics.engine_ready(info)
        self.versions.begin(info, unanswered=self._unanswered)
        self._unanswered = False
        self.policies.begin(info.prepared)
        for command in self.pauses.standing():
            self._send(command)
        if not self.versions.lost:
            self.sequences.resume()
        self.activity.set("engine", 0)
        self._started.set()

    def _count(self, message: Outputs) -> None:
        self._metrics.engine.took(message)
        for seconds, tokens, sequences in message.gaps:
            self._metrics.sequences.inter_token_s.observe_many(seconds / tokens, sequences)
        self.replica.stepped(message)
        if message.cycle is not None:
            waiting = message.gauges.get("waiting", 0.0)
            self.admission.stepped(self.replicas.together(message.cycle), waiting)

    # the end of the server

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running sequences. When time runs out, return False; the
        rest then ends with a typed error.
        """
        self._stop_taking()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.sequences.idle.wait(), timeout_s)
        return self.sequences.idle.is_set()

    def close(self) -> None:
        """Refuse new requests, and end the open ones with a typed error."""
        self._stop_taking()
        self.sequences.end_all(
            Unavailable("the server is shutting down; send the request to another replica or later")
        )

    def _stop_taking(self) -> None:
        """Refuse new requests, and end every wait for a push, a join or a pause, since that may
        take longer than the server has.
        """
        self.draining = True
        self.changes.tell()
        reason = (
            "the server is shutting down and does not wait for the end of this, so it may be done "
            "or not"
        )
        self._weight_answers.fail(  # not a 503, after which clients send it again
            lambda: EngineFailed(f"{reason}; once it is back GET /weights says what is live")
        )
        refused = f"{reason}; ask again once it is back, or ask another replica"
        for answers in (self._control_answers, self.policies.answers):
            answers.fail(lambda: Unavailable(refused, retry_after_s=5))

    # sequences

    def submit(
        self,
        requests: Sequence[GenerateRequest],
        *,
        deadline_s: float | None = None,
        resumes: bool = False,
        accepted: bool = False,
    ) -> Submission:
        """Submit a batch, all of it or nothing. `Unavailable` if nothing can be generated now;
        unless it was `accepted` before, also for a pause or sleep, or an error of `Admission`.

        When the engine dies, open sequences end with `engine_failed`, or with `resumes` the next
        epoch continues them, by the same ids. A request that may have crashed the engine ends with
        `poisoned`.
        """
        self.check_serving()
        if not accepted:
            self.pauses.check()
        return self.sequences.submit(
            requests,
            deadline_s=deadline_s,
            resumes=resumes or self.replicas.resume,
            accepted=accepted,
        )

    @property
    def open_ids(self) -> list[str]:
        """Return the ids of all sequences that have not ended."""
        return self.sequences.ids

    def __len__(self) -> int:
        return len(self.sequences)

    def abort(self, ids: Sequence[str], finish_reason: str = "abort") -> int:
        """Ask the engine to end these; their last outputs carry `finish_reason`. Return how many of
        them are open.
        """
        return self.sequences.abort(ids, finish_reason)

    # whether it takes requests

    def check_available(self) -> None:
        """Raise `Unavailable` if nothing can be generated now."""
        self.check_serving()
        self.pauses.check()

    def check_serving(self) -> None:
        """Raise `Unavailable` if nothing can be generated now, for a reason other than a pause or a
        sleep.
        """
        self.check_running()
        self.versions.check()

    def check_running(self) -> None:
        """Raise `Unavailable` if there is no engine to ask."""
        self.check_taking()
        self.replica.check_running()

    def check_taking(self) -> None:
        """Raise `Unavailable` if the server is about to stop."""
        if self.draining:
            raise Unavailable(
                "the server is draining before it stops; send the request to another replica",
                retry_after_s=5,
            )

    def check_free(self) -> None:
        """Raise `Conflict` while a gateway commands the engine."""
        if self.relay is not None:
            raise Conflict(
                f"the engine is commanded by {self.relay.gateway}, so that all its servers agree; "
                "send this to the gateway"
            )

    def check_room(self, demand: Demand) -> None:
        """Raise what `submit` would raise for this demand."""
        self.check_available()
        self.admission.admit(demand)

    # commands

    def command_id(self) -> str:
        return f"c{next(self._command_ids)}"

    async def set_policy(self, policy: SetPolicy, patience_s: float = 0.0) -> None:
        """Set the policy, see `PolicyState`; without patience if sleeping memory prevents its
        preparation.
        """
        await self.policies.ask(policy, 0.0 if self.pauses.asleep else patience_s)

    def recompute(self, wanted: Recompute) -> None:
        """Ask the engine to recompute the states of these texts, except those that do not fit
        it.
        """
        if self.info is not None:
            limits = self.info.vocab_size, self.info.max_model_len
            self._send(Recompute([text for text in wanted.texts if readable(text, *limits)]))

    async def weights(self, command: WeightCommand) -> WeightReport:
        """Return the engine's answer. The command continues even if the caller leaves."""
        self.check_running()
        with self.activity.during("weights"):
            asked_s = time.monotonic()
            report = await self._weight_answers.ask(command)
        if report.result not in QUESTIONS:
            CURRENT.get().part(
                "push",
                asked_s,
                time.monotonic(),
                tlt__role=report.role,
                tlt__result=report.result,
                tlt__version=report.version,
                **{f"tlt__{phase}_seconds": taken for phase, taken in report.phases.items()},
            )
        if report.version:  # for what is still logged of the request, such as its audit line
            structlog.contextvars.bind_contextvars(version=report.version)
        return report

    def _weights_reported(self, report: WeightReport) -> None:
        self.replica.reported(report)
        with self.faults.containing("the figures of a push"):
            self._metrics.weights.reported(report)
        waiting = bool(self.versions.lost)
        self.versions.reported(report)
        if waiting and not self.versions.lost:
            self.sequences.resume()

    async def _control(self, command: ControlCommand) -> None:
        if isinstance(command, Pause | Sleep) and command.in_flight == "abort":
            self.abort(self.sequences.held_ids)
        self.check_running()
        report = await self._control_answers.ask(command)
        if report.error is not None:
            raise from_code(*report.error)


def readable(text: bytes, vocab_size: int, longest: int) -> bool:
    """Return True if these bytes are int32 tokens of the model, in a sequence of allowed length."""
    if len(text) % 4 or len(text) > 4 * longest:
        return False
    token_T = np.frombuffer(text, np.dtype("<i4"))
    return bool(0 <= token_T.min() and token_T.max() < vocab_size)
