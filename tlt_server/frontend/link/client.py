"""What the frontend sees of the engine, whichever life of it runs: submissions out, each output to
the one that waits for it.

`supervisor` tells it when a life begins (`connect`) and ends (`died`), and hands it every event
(`take`). Invariant: every submitted sequence sees exactly one output with a `finish_reason`,
whatever happens to the engine, the client or the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from tlt_server.errors import (
    DeadlineExceeded,
    EngineFailed,
    Poisoned,
    TltError,
    Unavailable,
    from_code,
)
from tlt_server.frontend.link.admission import Admission, Demand
from tlt_server.frontend.link.link import Death, EngineLink
from tlt_server.frontend.link.pause import PauseState
from tlt_server.frontend.link.submission import Resume, Route, Submission
from tlt_server.frontend.link.suspects import KEPT_S, Suspects
from tlt_server.frontend.link.versions import Versions
from tlt_server.metrics import Metrics
from tlt_server.records import (
    Abort,
    Command,
    ControlCommand,
    ControlReport,
    Cycle,
    EngineInfo,
    Event,
    GenerateRequest,
    Outputs,
    Pause,
    Phase,
    Ready,
    SetPolicy,
    Sleep,
    StepOutput,
    Submit,
    WeightCommand,
    WeightReport,
)

log = structlog.get_logger()
Report = TypeVar("Report")


class EngineClient:
    def __init__(self, admission: Admission, metrics: Metrics) -> None:
        self.admission, self._metrics = admission, metrics
        metrics.open_tokens.set_function(lambda: admission.tokens)
        metrics.forecast_pages.set_function(lambda: admission.pages)
        metrics.forecast_wait_s.set_function(admission.wait_s)
        self._suspects, self.versions = Suspects(), Versions()
        self._link: EngineLink | None = None
        self._routes: dict[str, Route] = {}  # in order of arrival
        self._queue: deque[tuple[list[GenerateRequest], bool]] = (
            deque()
        )  # batches for the engine; True: one request, and on trial
        self._on_trial = ""  # id; nothing is given before it is through with that
        self._trial_tokens = 0  # when it has more of them it is through
        self._answers: dict[str, asyncio.Future[WeightReport]] = {}  # of weight commands, by id
        self._done: dict[str, asyncio.Future[ControlReport]] = {}  # of control commands, likewise
        self._unanswered = (
            False  # weight commands were open when an engine died, and no life has been ready since
        )
        self._command_ids = itertools.count(1)
        self._started = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.info: EngineInfo | None = None  # of the last life that was ready
        self.pauses = PauseState(self.command_id, self._control)
        self.policy: SetPolicy | None = None  # None = what the engine was started with
        self.last_cycle: Cycle | None = None
        self.gauges: Mapping[str, float] = {}  # the engine's last
        self.phases: list[Phase] = []
        self.failure = ""  # why there is no engine, from a death until the next life is ready
        self._again_s = 0.0  # in which it may be
        self.draining = False

    # the engine's lives

    async def ready(self) -> EngineInfo:
        """Wait for the first life to be ready."""
        await self._started.wait()
        assert self.info is not None
        return self.info

    def connect(self, link: EngineLink) -> None:
        """A life begins; until it is ready nothing is submitted to it."""
        self._link, self.phases = link, []

    def take(self, event: Event) -> None:
        match event:
            case Outputs():
                self._dispatch(event)
            case Phase():
                self.phases.append(event)
            case Ready(info):
                self._begin(info)
            case WeightReport():
                self._answered(event)
            case ControlReport(id, error):
                self.pauses.answered(event)
                if (
                    error is not None and id not in self._done
                ):  # nobody waits: the client has gone, or it is a new life that was told
                    log.warning("control_failed", code=error[0], message=error[1])
                _settle(self._done, id, event)

    def died(self, death: Death, restart_in_s: float | None, start_s: float) -> int:
        """Everything open ends with a typed error, but for what can resume: how much that is.
        `restart_in_s`: None for never; `start_s`: that a start takes from there.
        """
        self._link = None
        self.pauses.died()
        self.failure = f"the engine is gone and {'will not be' if restart_in_s is None else 'is being'} restarted: {death.error.message}"
        self._again_s = (restart_in_s or 0.0) + start_s
        self._metrics.engine_gone()
        running = [self._routes[id] for id in death.begun if id in self._routes]
        tried = next(
            (
                route.request
                for route in running
                if len(running) == 1 or route.request.id == self._on_trial
            ),
            None,
        )
        self._suspects.crashed(
            [(route.request, route.tokens) for route in running], tried, time.monotonic()
        )
        self._queue.clear()
        self._on_trial = ""
        self._unanswered |= bool(self._answers)
        for answers in (self._answers, self._done):
            _fail(
                answers,
                lambda: EngineFailed(
                    f"{death.error.message}; GET /weights says what is live once the engine is back"
                ),
            )
        for id, route in list(self._routes.items()):
            if route.submission.resume is None:
                self._end(id, EngineFailed(death.error.message))
            elif route.ending:
                self._finish(id, route.ending)
            route.held = True
        return len(self._routes)

    def _begin(self, info: EngineInfo) -> None:
        """The life that has connected is ready: it learns what was set while serving, then what was
        cut off.
        """
        self.info = self.admission.engine = info
        self.failure = ""
        self._metrics.engine_ready(info)
        self.versions.begin(info, unanswered=self._unanswered)
        self._unanswered = False
        if self.policy is not None:
            self._send(self.policy)
        for command in self.pauses.standing():
            self._send(command)
        if not self.versions.lost:
            self._resume()
        self._started.set()

    def _resume(self) -> None:
        """Submit again what was cut off: that is all that is open, as nothing new is taken before.
        What ran when the engine died goes first and one by one, each when the one before has gone a
        step: a killer is then alone with its deed.
        """
        free, suspect, refused = self._suspects.sort(
            [route.request for route in self._routes.values()], time.monotonic()
        )
        self._refuse(refused)
        self._queue += [([rest], True) for request in suspect for rest in self._rest(request.id)]
        batches: dict[Submission, list[GenerateRequest]] = {}
        for request in free:
            batches.setdefault(self._routes[request.id].submission, []).extend(
                self._rest(request.id)
            )
        self._queue += [(batch, False) for batch in batches.values()]
        self._advance()

    def _rest(self, id: str) -> list[GenerateRequest]:
        """What is left of a sequence that was cut off; nothing, when it has to end."""
        resume = self._routes[id].submission.resume
        assert resume is not None
        try:
            return [resume(id)]
        except TltError as error:
            self._end(id, error)
            return []

    def _refuse(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            log.warning("poisoned", id=request.id)
            self._end(
                request.id,
                Poisoned(
                    "was running at two crashes of the engine and got no further in between, so it is not run again; leave it out, or change "
                    f"its prompt or sampling, or wait {KEPT_S / 60:g} minutes"
                ),
            )

    def _advance(self) -> None:
        """Give the engine what is next, up to a trial that is not over."""
        while self._queue and not self._on_trial:
            batch, trial = self._queue.popleft()
            left = [request for request in batch if request.id in self._routes]
            if left:
                self._on_trial = left[0].id if trial else ""
                self._trial_tokens = self._suspects.trial(left[0]) if trial else 0
                for request in left:
                    self._routes[request.id].held = False
                self._send(Submit(left))

    def _tried(self, id: str, tokens: float = math.inf) -> None:
        """It has so many tokens, or has ended."""
        if id == self._on_trial and tokens > self._trial_tokens:
            self._on_trial = ""
            self._advance()

    def close(self) -> None:
        """Nothing is taken any more, and what is open ends with a typed error."""
        self._stop_taking()
        for id in list(self._routes):
            self._end(
                id,
                Unavailable(
                    "the server is shutting down; send the request to another replica or later"
                ),
            )

    def _stop_taking(self) -> None:
        """Who waits for a push, a join or a pause is told now: what it waits for may take longer
        than there is.
        """
        self.draining = True
        told = "the server is shutting down and does not wait for the end of this, so it may be done or not"
        _fail(
            self._answers,
            lambda: EngineFailed(f"{told}; once it is back GET /weights says what is live"),
        )  # no 503: that is sent again
        _fail(
            self._done,
            lambda: Unavailable(
                f"{told}; ask again once it is back, or ask another replica", retry_after_s=5
            ),
        )

    def _end(self, id: str, error: TltError) -> None:
        self._finish(id, "error", (error.code, error.message))

    def _finish(self, id: str, finish_reason: str, error: tuple[str, str] | None = None) -> None:
        self._route(
            StepOutput(id=id, token_ids=[], logprobs=[], finish_reason=finish_reason, error=error)
        )

    # sequences

    def submit(
        self,
        requests: Sequence[GenerateRequest],
        *,
        deadline_s: float | None = None,
        resume: Resume | None = None,
        accepted: bool = False,
    ) -> Submission:
        """Hand over a batch, all of it or nothing. `Unavailable` or (unless it was `accepted`
        before) an error of `Admission` when it cannot be taken.

        When the engine dies, `resume(id)` is asked for the rest of each sequence that is open,
        which the next life is given; its id stays. Without `resume` they end with `engine_failed`.
        A request that may have killed the engine ends with `poisoned`.
        """
        self.check_available()
        if not accepted:
            self.admission.admit(Demand.of(requests))
        submission = Submission([request.id for request in requests], self._abandon, resume)
        self.admission.open(requests)
        self._routes.update(
            (request.id, Route(submission, request, held=True)) for request in requests
        )
        self._count()
        free, suspect, refused = self._suspects.sort(requests, time.monotonic())
        self._refuse(refused)
        self._queue.append((free, False))
        self._queue += [([request], True) for request in suspect]
        self._advance()
        if submission.open and deadline_s is not None:
            submission.expire_at(deadline_s, lambda: self._expire(submission))
        return submission

    def check_available(self) -> None:
        """`Unavailable` when nothing can be generated now."""
        self.check_serving()
        self.pauses.check()

    def check_serving(self) -> None:
        """`Unavailable` when nothing can be generated now, and nobody asked for that by a pause or
        sleep.
        """
        self.check_running()
        self.versions.check()

    def check_running(self) -> None:
        """`Unavailable` when there is no engine to ask."""
        if self.draining:
            raise Unavailable(
                "the server is draining before it stops; send the request to another replica",
                retry_after_s=5,
            )
        self.check_alive()
        if self.info is None:
            raise Unavailable(
                f"the engine is starting ({len(self.phases)} phases done); poll /readyz",
                retry_after_s=2,
            )

    def check_alive(self) -> None:
        """`Unavailable` while the engine is gone; one that starts for the first time is not."""
        if self.failure:
            raise Unavailable(self.failure, retry_after_s=self._again_s)

    def check_room(self, demand: Demand) -> None:
        """As `submit` would raise."""
        self.check_available()
        self.admission.admit(demand)

    @property
    def open_ids(self) -> list[str]:
        """Of every sequence that has not ended."""
        return list(self._routes)

    def abort(self, ids: Sequence[str], finish_reason: str = "abort") -> None:
        """Ask the engine to end these; their last outputs carry `finish_reason`."""
        live = [id for id in ids if id in self._routes]
        for id in live:
            if self._routes[id].held:
                self._finish(id, finish_reason)
            else:
                self._routes[id].ending = finish_reason
        if live:
            self._send(Abort(ids=live, finish_reason=finish_reason))

    def set_policy(self, policy: SetPolicy) -> None:
        """Replace the policy before the engine's next step; commands keep their order, so what is
        submitted later runs under it.
        """
        self._send(policy)
        self.policy = policy

    def command_id(self) -> str:
        return f"c{next(self._command_ids)}"

    async def weights(self, command: WeightCommand) -> WeightReport:
        """The engine's answer. A caller that goes away does not stop what it asked for."""
        report = await self._ask(command, self._answers)
        if report.version:
            structlog.contextvars.bind_contextvars(
                version=report.version
            )  # in what is still logged of the request, its audit line
        return report

    async def _control(self, command: ControlCommand) -> None:
        if isinstance(command, Pause | Sleep) and command.in_flight == "abort":
            self.abort(
                [id for id, route in self._routes.items() if route.held]
            )  # which the engine does not know
        report = await self._ask(command, self._done)
        if report.error is not None:
            raise from_code(*report.error)

    async def _ask(
        self, command: WeightCommand | ControlCommand, answers: dict[str, asyncio.Future[Report]]
    ) -> Report:
        self.check_running()
        answer = answers[command.id] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(command):
                raise Unavailable("the engine does not take commands; poll /livez", retry_after_s=2)
            return await answer
        finally:
            del answers[command.id]

    def _answered(self, report: WeightReport) -> None:
        if self.info is not None:
            self.info = msgspec.structs.replace(
                self.info, weight_version=report.state.target, drafter_version=report.state.drafter
            )
        self._metrics.weights_reported(report)
        waiting = bool(self.versions.lost)
        self.versions.reported(report)
        if waiting and not self.versions.lost:
            self._resume()
        _settle(self._answers, report.id, report)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for the sequences that run; False when time ran out (the rest
        then ends with a typed error).
        """
        self._stop_taking()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    def __len__(self) -> int:
        return len(self._routes)

    def _dispatch(self, message: Outputs) -> None:
        self._metrics.engine_outputs(message)
        self.gauges = message.gauges
        if message.cycle is not None:
            self.last_cycle = message.cycle
            self.admission.stepped(message.cycle, message.gauges.get("waiting", 0.0))
        for output in message.outputs:
            self._route(output)

    def _route(self, output: StepOutput) -> None:
        route = self._routes.get(output.id)
        if route is None:
            return  # ended here before the engine knew: aborted, expired, or past its stop string
        route.tokens += len(output.token_ids)
        self.admission.take(output)
        if output.finish_reason is not None:
            del self._routes[output.id]
            self._count()
            if output.finish_reason in ("stop", "length"):
                self._suspects.completed(route.request)
        route.submission.put(output)
        self._tried(output.id, math.inf if output.finish_reason is not None else route.tokens)

    def _expire(self, submission: Submission) -> None:
        ids = list(submission.open)
        self._send(Abort(ids=ids))
        for id in ids:
            self._end(
                id,
                DeadlineExceeded(
                    "the deadline (timeout_s) passed before the sequence ended; ask for fewer tokens or more time"
                ),
            )

    def _abandon(self, submission: Submission) -> None:
        ids = list(submission.open)
        if ids:
            self._send(Abort(ids=ids))
            for id in ids:
                if self._routes.pop(id, None) is not None:
                    self.admission.close(id)
                self._tried(id)
            submission.open.clear()
            self._metrics.sequences.labels("abandoned").inc(len(ids))
            self._count()

    def _count(self) -> None:
        self._metrics.open_sequences.set(len(self._routes))
        if self._routes:
            self._idle.clear()
        else:
            self._idle.set()

    def _send(self, command: Command) -> bool:
        """Whether there is an engine that may take it."""
        return self._link is not None and self._link.send(command)


def _fail(answers: Mapping[str, asyncio.Future[Any]], error: Callable[[], TltError]) -> None:
    for answer in answers.values():
        if not answer.done():
            answer.set_exception(error())


def _settle(answers: Mapping[str, asyncio.Future[Report]], id: str, report: Report) -> None:
    """Give a report to whoever waits for it; nobody does when the client has gone."""
    answer = answers.get(id)
    if answer is not None and not answer.done():
        answer.set_result(report)
