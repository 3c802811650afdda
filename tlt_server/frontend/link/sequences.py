"""The open sequences: the receiver of each one's outputs, and the order in which engines get them.

Invariant: every sequence gets exactly one output with a `finish_reason`, even if its engine dies,
it moves to another, the client leaves or time runs out. `EngineClient` owns this and reports deaths
and epochs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
import structlog

from tlt_server.errors import DeadlineExceeded, TltError
from tlt_server.frontend.link.admission import Admission, Demand
from tlt_server.frontend.link.distribution import Distribution
from tlt_server.frontend.link.replica import Replica, Replicas
from tlt_server.frontend.link.submission import HOP, Chores, Route, Submission
from tlt_server.metrics import Metrics
from tlt_server.process.faults import Containment
from tlt_server.wire.kept import OTHERS
from tlt_server.wire.records import GenerateRequest, StepOutput, last_output

log = structlog.get_logger()


class OpenSequences:
    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        replicas: Replicas,
        counted: Callable[[int], None] = lambda count: None,
        faults: Containment | None = None,
    ) -> None:
        """`counted`: is told how many are open."""
        self._admission, self._metrics, self._replicas = admission, metrics, replicas
        self._counted = counted
        self.routes: dict[str, Route] = {}  # in order of arrival
        self._faults = faults or Containment()
        self.where = Distribution(self.routes, replicas, self._faults, self._end)
        self._chores = Chores()
        # Ended here before their engines said that they ended them, by `sent_as`.
        self._left: dict[str, Route] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self.routes)

    @property
    def ids(self) -> list[str]:
        return list(self.routes)

    @property
    def held_ids(self) -> list[str]:
        """Ids of the sequences waiting here, unknown to any engine."""
        return [id for id, route in self.routes.items() if route.held]

    def at(self, replica: Replica) -> list[Route]:
        """Return the open sequences that a replica has, or will get."""
        return [route for route in self.routes.values() if route.replica is replica]

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
        for request in requests:
            route = Route(submission, request, accepted_s=accepted_s, held=True)
            self.routes[request.id] = route
        self._count()
        tried: list[GenerateRequest] = []

        def hand_over(few: list[GenerateRequest]) -> None:
            free, suspect = self.where.sort(few)
            self.where.place(free)
            tried.extend(suspect)

        self._chores.add(requests, hand_over, lambda: self.where.try_out(tried))
        if submission.open and deadline_s is not None:
            submission.expire_at(deadline_s, lambda: self.expire(submission))
        return submission

    def dispatch(self, outputs: Iterable[StepOutput]) -> None:
        """Pass on the outputs of an event."""
        now_s = time.monotonic()
        for output in outputs:
            route = self.routes.get(output.id)
            if route is None or route.hops:
                route = self._moved(output.id)
                if route is None:
                    if output.finish_reason is not None:
                        self._close([self._left.pop(output.id, None)])
                    continue
                output = msgspec.structs.replace(output, id=route.request.id)
            if output.token_ids:
                if not route.stepped:
                    with self._faults.containing("the latency of an engine's first token"):
                        self._first(route, output, now_s)
                route.last_s = now_s
            self._give(route, output)

    def _moved(self, id: str) -> Route | None:
        """Return the open sequence of this id, if it came by a move and has not moved on since."""
        route = self.routes.get(id.partition(HOP)[0])
        return route if route is not None and route.sent_as == id else None

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
        live = [id for id in dict.fromkeys(ids) if id in self.routes]
        for id in live:
            self.routes[id].ending = finish_reason

        def end(few: list[str]) -> None:
            ended = [self.routes[id] for id in few if id in self.routes]
            for route in ended:
                if route.held:
                    self._finish(route.request.id, finish_reason)
            self.where.abort(ended, finish_reason)

        self._chores.add(live, end)
        return len(live)

    def end_all(self, error: TltError) -> None:
        for id in self.ids:
            self._end(id, error)

    def alone(self, started: Collection[str]) -> str:
        """Return the only key of the running requests, or the key of the request on trial if this
        engine had taken each other request past its first step; else empty.
        """
        ran = self._ran(started)
        if OTHERS in started:
            return ""
        owners = {route.request.owner for route in ran}
        tried = {route.request.owner for route in ran if route.on_trial}
        if tried and all(route.stepped for route in ran if route.request.owner not in tried):
            owners = tried
        return owners.pop() if len(owners) == 1 else ""

    def _ran(self, started: Iterable[str]) -> list[Route]:
        """Return the routes that had not ended in the engine; their client may have left."""
        known = self._left | {route.sent_as: route for route in self.routes.values()}
        return [known[id] for id in started if id in known]

    def died(self, replica: Replica, started: Collection[str], error: TltError) -> int:
        """End the replica's sequences that cannot resume, hold the rest until `resume`, and return
        their number. `started`: ids of the sequences that ran when its engine died.
        """
        ran = self._ran(started)
        tried = next(
            (
                route.request
                for route in ran
                if OTHERS not in started
                and (len(ran) == 1 or route.on_trial)
                and all(other.stepped for other in ran if other is not route)
            ),
            None,
        )
        self.where.suspects.crashed(
            [(route.request, route.tokens) for route in ran], tried, time.monotonic()
        )
        for route in ran:
            route.crashed = True
        return self._let_go(replica, error)

    def _let_go(self, replica: Replica, error: TltError) -> int:
        """Take every sequence from a replica that is gone, and return how many resume."""
        left = [route for route in self._left.values() if route.replica is replica]
        for route in left:
            del self._left[route.sent_as]
        self._chores.add(left, self._close)
        replica.queue.clear()
        mine = self.at(replica)
        for route in mine:
            route.hops += self._replicas.resume and not route.held  # its link may still be read
            route.held, route.replica = True, None

        def end(few: list[Route]) -> None:
            for route in few:
                if not route.submission.resumes:
                    self._end(route.request.id, error)
                elif route.ending:
                    self._finish(route.request.id, route.ending)

        self._chores.add(mine, end)
        return sum(route.submission.resumes for route in mine)

    def resume(self) -> None:
        """Place all sequences that wait for a replica. Those that ran when an engine died go first
        and one at a time, each after the previous one has completed a step, so the request that
        crashes engines is identified.
        """
        tried: list[GenerateRequest] = []
        others: list[GenerateRequest] = []

        def sort(few: list[str]) -> None:
            routes = [self.routes[id] for id in few if id in self.routes]
            free, suspect = self.where.sort(
                [each.request for each in routes if each.replica is None]
            )
            self._metrics.rollouts.resumed.inc(len(free) + len(suspect))
            tried.extend(suspect)
            others.extend(free)

        def end() -> None:
            self.where.try_out(tried)
            self.where.place(others)

        self._chores.add(self.ids, sort, end)

    def expire(self, submission: Submission) -> None:
        error = DeadlineExceeded(
            "the deadline (timeout_s) passed before the sequence ended; ask for fewer tokens or "
            "more time"
        )

        def end(few: list[str]) -> None:
            live = [self.routes[id] for id in few if id in self.routes]
            self.where.abort(live)
            for route in live:
                self._end(route.request.id, error)

        self._chores.add([*submission.open], end)

    def _end(self, id: str, error: TltError) -> None:
        self._finish(id, "error", (error.code, error.message))

    def _finish(self, id: str, finish_reason: str, error: tuple[str, str] | None = None) -> None:
        if id in self.routes:
            self._leave(self.routes[id])
            self._give(self.routes[id], last_output(id, finish_reason, error))

    def _give(self, route: Route, output: StepOutput) -> None:
        try:
            self._take(output, route)
        except Exception as error:
            failed = self._faults.contain(error, f"an output of {output.id}")
            if output.finish_reason is None:
                self._leave(route)
                self.where.abort([route])
            output = last_output(output.id, "error", (failed.code, failed.message))
            self._drop(output.id)
        route.submission.put(output)
        if route.replica is not None:
            route.replica.queue.reached(
                output.id, math.inf if output.finish_reason is not None else route.tokens
            )

    def _take(self, output: StepOutput, route: Route) -> None:
        route.take(output)
        if output.token_ids:
            self._replicas.took(output.id, len(output.token_ids))
        try:
            self._admission.take(output, closes=route.sent_as not in self._left)
        except Exception as error:
            self._faults.contain(error, "the figures of open sequences")
        if output.finish_reason is not None:
            self._drop(output.id)
            if output.finish_reason in ("stop", "length"):
                self.where.suspects.completed(route.request)

    def _leave(self, route: Route) -> None:
        """Remember a sequence that ends here; it counts until the engine, if it has it, ends it."""
        if not route.held:
            self._left[route.sent_as] = route

    def _close(self, routes: Iterable[Route | None]) -> None:
        for route in routes:
            if route is not None and route.sent_as not in self._left:
                self._admission.close(route.request.id)

    def _drop(self, id: str) -> None:
        """Forget a sequence, unless that was done."""
        if (route := self.routes.pop(id, None)) is not None:
            self._replicas.ended(id)
            self._close([route])
            self._count()

    def _abandon(self, submission: Submission) -> None:
        ids = list(submission.open)
        submission.open.clear()
        if not ids:
            return
        self.where.abort(self.routes[id] for id in ids if id in self.routes)
        self._metrics.sequences.ended.labels("abandoned").inc(len(ids))

        def drop(few: list[str]) -> None:
            for id in few:
                if (route := self.routes.pop(id, None)) is not None:
                    self._replicas.ended(id)
                    self._leave(route)
                    self._close([route])
                    if route.replica is not None:
                        route.replica.queue.reached(id)

        self._chores.add(ids, drop, self._count)

    def _count(self) -> None:
        with self._faults.containing("the number of open sequences"):
            self._metrics.sequences.open.set(len(self.routes))
            self._counted(len(self.routes))
        if self.routes:
            self.idle.clear()
        else:
            self.idle.set()
