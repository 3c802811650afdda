"""The open sequences: the receiver of each one's outputs, and the order in which the engine gets
them.

Invariant: every sequence gets exactly one output with a `finish_reason`, even if the engine dies,
the client leaves or time runs out. `EngineClient` owns this and reports deaths and epochs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from tlt_server.errors import DeadlineExceeded, Poisoned, TltError
from tlt_server.frontend.link.admission import Admission, Demand
from tlt_server.frontend.link.submission import Chores, EngineQueue, Route, Submission
from tlt_server.frontend.link.suspects import KEPT_S, Suspects
from tlt_server.metrics import Metrics
from tlt_server.process.faults import Containment
from tlt_server.wire.commands import Abort, Command, Submit
from tlt_server.wire.records import GenerateRequest, StepOutput, last_output

log = structlog.get_logger()


class OpenSequences:
    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        send: Callable[[Command], bool],
        counted: Callable[[int], None] = lambda count: None,
        faults: Containment | None = None,
    ) -> None:
        """`counted`: is told how many are open."""
        self._admission, self._metrics, self._send = admission, metrics, send
        self._counted, self._faults = counted, faults or Containment()
        self._suspects, self._chores = Suspects(), Chores()
        self._routes: dict[str, Route] = {}  # in order of arrival
        self._left: dict[str, Route] = {}  # ended here before the engine said that it ended them
        self._queue = EngineQueue(self._routes, self._hand_over, self._suspects.trial)
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._routes)

    @property
    def ids(self) -> list[str]:
        return list(self._routes)

    @property
    def held_ids(self) -> list[str]:
        """Ids of the sequences waiting here, unknown to the engine."""
        return [id for id, route in self._routes.items() if route.held]

    def submit(
        self,
        requests: Sequence[GenerateRequest],
        *,
        deadline_s: float | None,
        resumes: bool,
        accepted: bool,
    ) -> Submission:
        """Admit a batch and submit it, all or (with an error of `Admission`) nothing. `accepted`:
        it was admitted before.
        """
        if not accepted:
            self._admission.admit(Demand.of(requests))
        submission = Submission(
            [request.id for request in requests], self._abandon, resumes=resumes
        )
        self._admission.open(requests)
        accepted_s = time.monotonic()
        self._routes.update(
            (request.id, Route(submission, request, accepted_s, held=True)) for request in requests
        )
        self._count()
        tried: list[GenerateRequest] = []

        def hand_over(few: list[GenerateRequest]) -> None:
            free, suspect = self._sort(few)
            self._queue.add(free)
            tried.extend(suspect)

        self._chores.add(requests, hand_over, lambda: self._queue.add_trials(tried))
        if submission.open and deadline_s is not None:
            submission.expire_at(deadline_s, lambda: self.expire(submission))
        return submission

    def dispatch(self, outputs: Iterable[StepOutput]) -> None:
        """Pass on the outputs of an event."""
        now_s = time.monotonic()
        for output in outputs:
            route = self._routes.get(output.id)
            if route is None:
                if output.finish_reason is not None:
                    self._left.pop(output.id, None)
                    self._close([output.id])
                continue
            if output.token_ids:
                if not route.stepped:
                    with self._faults.containing("the latency of an engine's first token"):
                        self._first(route, output, now_s)
                route.last_s = now_s
            self._give(route, output)

    def _first(self, route: Route, output: StepOutput, now_s: float) -> None:
        """Observe how long a sequence waited for the first tokens of an engine, which knows of the
        later ones.
        """
        figures = self._metrics.sequences
        if route.last_s:
            figures.inter_token_s.observe((now_s - route.last_s) / len(output.token_ids))
        elif not route.request.generated:  # else it continues what an earlier server began
            figures.queued_s.observe(output.queued_s)
            figures.first_token_s.observe(now_s - route.accepted_s)

    def abort(self, ids: Iterable[str], finish_reason: str) -> int:
        """Ask the engine to end these; their last outputs carry `finish_reason`. Return how many
        of them are open.
        """
        live = [id for id in dict.fromkeys(ids) if id in self._routes]
        for id in live:
            self._routes[id].ending = finish_reason

        def end(few: list[str]) -> None:
            for id in few:
                if id in self._routes and self._routes[id].held:
                    self._finish(id, finish_reason)
            self._send(Abort(ids=few, finish_reason=finish_reason))

        self._chores.add(live, end)
        return len(live)

    def end_all(self, error: TltError) -> None:
        for id in self.ids:
            self._end(id, error)

    def alone(self, started: Iterable[str]) -> str:
        """Return the only key of the running requests, or the key of the request on trial if this
        engine had taken each other request past its first step; else empty.
        """
        ran = self._ran(started)
        owners = {route.request.owner for route in ran}
        tried = {route.request.owner for route in ran if route.request.id == self._queue.on_trial}
        if tried and all(route.stepped for route in ran if route.request.owner not in tried):
            owners = tried
        return owners.pop() if len(owners) == 1 else ""

    def _ran(self, started: Iterable[str]) -> list[Route]:
        """Return the routes that had not ended in the engine; their client may have left."""
        known = self._left | self._routes
        return [known[id] for id in started if id in known]

    def died(self, started: Iterable[str], error: TltError) -> int:
        """End sequences that cannot resume, hold the rest until `resume`, and return their number.
        `started`: ids of the sequences that ran when the engine died.
        """
        ran = self._ran(started)
        left, self._left = [*self._left], {}
        tried = next(
            (
                route.request
                for route in ran
                if (len(ran) == 1 or route.request.id == self._queue.on_trial)
                and all(other.stepped for other in ran if other is not route)
            ),
            None,
        )
        self._suspects.crashed(
            [(route.request, route.tokens) for route in ran], tried, time.monotonic()
        )
        self._queue.clear()
        self._chores.add(left, self._close)
        for route in self._routes.values():
            route.held = True

        def end(few: list[str]) -> None:
            for id in few:
                route = self._routes.get(id)
                if route is not None and not route.submission.resumes:
                    self._end(id, error)
                elif route is not None and route.ending:
                    self._finish(id, route.ending)

        self._chores.add(self.ids, end, self._queue.clear)
        return sum(route.submission.resumes for route in self._routes.values())

    def resume(self) -> None:
        """Submit all open sequences again; no new ones were accepted meanwhile. Those that ran when
        the engine died go first and one at a time, each after the previous one has completed a
        step, so the request that crashes the engine is identified.
        """
        tried: list[GenerateRequest] = []
        others: list[GenerateRequest] = []

        def sort(few: list[str]) -> None:
            free, suspect = self._sort(
                [self._routes[id].request for id in few if id in self._routes]
            )
            self._metrics.rollouts.resumed.inc(len(free) + len(suspect))
            tried.extend(suspect)
            others.extend(free)

        def end() -> None:
            self._queue.add_trials(tried)
            self._queue.add(others)

        self._chores.add(self.ids, sort, end)

    def expire(self, submission: Submission) -> None:
        error = DeadlineExceeded(
            "the deadline (timeout_s) passed before the sequence ended; ask for fewer tokens or "
            "more time"
        )

        def end(few: list[str]) -> None:
            live = [id for id in few if id in self._routes]
            if live:
                self._send(Abort(ids=live))
            for id in live:
                self._end(id, error)

        self._chores.add([*submission.open], end)

    def _sort(
        self, requests: list[GenerateRequest]
    ) -> tuple[list[GenerateRequest], list[GenerateRequest]]:
        """Refuse requests that crash the engine; return those that do not, and those that may."""
        free, suspect, refused = self._suspects.sort(requests, time.monotonic())
        self._refuse(refused)
        return free, suspect

    def _refuse(self, requests: Iterable[GenerateRequest]) -> None:
        for request in requests:
            log.warning("poisoned", id=request.id)
            self._end(
                request.id,
                Poisoned(
                    "was running at two crashes of the engine and got no further in between, so it "
                    "is not run again; leave it out, or change its prompt, sampling or structure, "
                    f"or wait {KEPT_S / 60:g} minutes"
                ),
            )

    def _hand_over(self, routes: list[Route]) -> None:
        """Send these to the engine; if that fails, only these end."""
        try:
            sent = self._send(Submit([route.rest() for route in routes]))
        except Exception as error:
            failed = self._faults.contain(error, f"the batch of {routes[0].request.id}")
            for route in routes:
                self._end(route.request.id, failed)
        else:
            for route in routes:
                route.held, route.stepped = not sent, False

    def _end(self, id: str, error: TltError) -> None:
        self._finish(id, "error", (error.code, error.message))

    def _finish(self, id: str, finish_reason: str, error: tuple[str, str] | None = None) -> None:
        if id in self._routes:
            self._leave(self._routes[id])
            self._give(self._routes[id], last_output(id, finish_reason, error))

    def _give(self, route: Route, output: StepOutput) -> None:
        try:
            self._take(output, route)
        except Exception as error:
            failed = self._faults.contain(error, f"an output of {output.id}")
            if output.finish_reason is None:
                self._leave(route)
                self._send(Abort([output.id]))
            output = last_output(output.id, "error", (failed.code, failed.message))
            self._drop(output.id)
        route.submission.put(output)
        self._queue.reached(
            output.id, math.inf if output.finish_reason is not None else route.tokens
        )

    def _take(self, output: StepOutput, route: Route) -> None:
        route.take(output)
        try:
            self._admission.take(output, closes=output.id not in self._left)
        except Exception as error:
            self._faults.contain(error, "the figures of open sequences")
        if output.finish_reason is not None:
            self._drop(output.id)
            if output.finish_reason in ("stop", "length"):
                self._suspects.completed(route.request)

    def _leave(self, route: Route) -> None:
        """Remember a sequence that ends here; it counts until the engine, if it has it, ends it."""
        if not route.held:
            self._left[route.request.id] = route

    def _close(self, ids: Iterable[str]) -> None:
        for id in ids:
            if id not in self._left:
                self._admission.close(id)

    def _drop(self, id: str) -> None:
        """Forget a sequence, unless that was done."""
        if self._routes.pop(id, None) is not None:
            self._close([id])
            self._count()

    def _abandon(self, submission: Submission) -> None:
        ids = list(submission.open)
        submission.open.clear()
        if not ids:
            return
        self._send(Abort(ids=ids))
        self._metrics.sequences.ended.labels("abandoned").inc(len(ids))

        def drop(few: list[str]) -> None:
            for id in few:
                if (route := self._routes.pop(id, None)) is not None:
                    self._leave(route)
                    self._close([id])
                self._queue.reached(id)

        self._chores.add(ids, drop, self._count)

    def _count(self) -> None:
        with self._faults.containing("the number of open sequences"):
            self._metrics.sequences.open.set(len(self._routes))
            self._counted(len(self._routes))
        if self._routes:
            self.idle.clear()
        else:
            self.idle.set()
